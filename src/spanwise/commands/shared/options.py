"""Options that several commands have, and what is written behind them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import yaml
from cyclopts import Parameter

from spanwise.errors import RecipeError

Flag = Annotated[bool, Parameter(negative="")]
#: `--set`; the command says itself which fields it takes.
Fields = Annotated[list[str] | None, Parameter(name="--set")]


def recipe_fields(pairs: Sequence[str] | None) -> dict[str, Any]:
    """The recipe fields behind `--set`."""
    values: dict[str, Any] = {}
    for pair in pairs or []:
        key, value = key_value(pair, "--set", "field=value, such as --set entropy=0.05")
        values[key.replace("-", "_")] = yaml.safe_load(value)
    return values


def column_roles(given: Sequence[str] | None) -> dict[str, str]:
    """Role -> column behind `--columns`, in one piece or in several."""
    entries = [entry for piece in given or [] for entry in piece.split(",") if entry.strip()]
    pairs = [key_value(entry, "--columns", "role=column, such as completion=output,answer=gold") for entry in entries]
    roles = [role for role, _ in pairs]
    twice = next((role for role in roles if roles.count(role) > 1), None)
    if twice is not None:
        raise RecipeError(f"--columns names the column of {twice} more than once.")
    return dict(pairs)


def read_options(
    recipe: Path | None,
    methods: str | None,
    tokenizer: Path | None,
    columns: Sequence[str] | None,
    reward: Sequence[str] | None,
    set_: Sequence[str] | None,
) -> dict[str, Any]:
    """How a rollout file is read and credited."""
    return {
        "recipe": recipe,
        "methods": listed(methods or ""),
        "tokenizer": tokenizer,
        "columns": column_roles(columns),
        "reward": dict(
            key_value(entry, "--reward", "objective=column, such as correct=accuracy_reward") for entry in reward or []
        ),
        "overrides": recipe_fields(set_),
    }


def listed(names: str) -> list[str]:
    """Names separated by commas."""
    return [name.strip() for name in names.split(",") if name.strip()]


def seed_numbers(seeds: str) -> list[int]:
    """The numbers behind `--seeds`."""
    try:
        return [int(seed) for seed in seeds.split(",")]
    except ValueError:
        raise RecipeError(f"--seeds takes whole numbers separated by commas, such as 0,1,2; got '{seeds}'.") from None


def check_sizes(**sizes: int) -> None:
    """Refuse a size below 1."""
    for name, size in sizes.items():
        if size < 1:
            raise RecipeError(f"--{name.replace('_', '-')} is {size}; at least 1 is needed.")


def key_value(entry: str, option: str, shape: str) -> tuple[str, str]:
    """Both sides of `key=value`."""
    key, equals, value = entry.partition("=")
    if not equals or not value:
        raise RecipeError(f"{option} takes {shape}; got '{entry}'.")
    return key.strip(), value.strip()
