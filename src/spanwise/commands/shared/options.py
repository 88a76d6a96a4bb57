"""Command-line options that several commands share, and how they are parsed."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import yaml
from cyclopts import Parameter, Token

from spanwise.errors import RecipeError, SpanwiseError, first_line


def _whole_number(type_: type, tokens: Sequence[Token]) -> int:
    """Parse an option's value as a whole number. Refuse 1.5, which Cyclopts itself would round."""
    try:
        return int(tokens[0].value)
    except ValueError:
        raise SpanwiseError(f"{tokens[0].keyword} is '{tokens[0].value}', but it must be a whole number.") from None


#: An option that takes a whole number.
Whole = Annotated[int, Parameter(converter=_whole_number)]
Flag = Annotated[bool, Parameter(negative="")]
#: The option `--set`, which sets recipe fields.
Fields = Annotated[list[str] | None, Parameter(name="--set")]


def recipe_fields(pairs: Sequence[str] | None, **options: Any) -> dict[str, Any]:
    """Parse the `field=value` pairs of `--set`, and add the fields that given options set. Refuse a field that is set twice."""
    field_values = {name: value for name, value in options.items() if value is not None}
    for field_pair in pairs or []:
        field_name, value_text = key_value(
            field_pair, "--set", "field=value, such as --set entropy=0.05, or \"field=''\" for an empty text"
        )
        field_name = field_name.replace("-", "_")
        if field_name in field_values:
            raise RecipeError(f"--set {field_pair}: another option of the command sets {field_name}, too. Keep one of them.")
        try:
            field_values[field_name] = yaml.safe_load(value_text)
        except yaml.YAMLError as error:
            raise RecipeError(
                f"The value of --set {field_pair} is no YAML: {first_line(error)}. Close its brackets, or put it in quotes."
            ) from error
    return field_values


def column_roles(arguments: Sequence[str] | None) -> dict[str, str]:
    """Parse the `role=column` pairs of `--columns` (roles: prompt, answer, ...) into a mapping. Commas may join pairs."""
    role_entries = [entry for argument in arguments or [] for entry in argument.split(",") if entry.strip()]
    column_format = "role=column, such as completion=output,answer=gold"
    return _map_names("--columns", [key_value(entry, "--columns", column_format) for entry in role_entries])


def _map_names(option: str, pairs: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Return the `name=column` pairs of an option as a mapping. Refuse a name that occurs twice."""
    pair_names = [name for name, _ in pairs]
    repeated_name = next((name for name in pair_names if pair_names.count(name) > 1), None)
    if repeated_name is not None:
        raise RecipeError(f"{option} names the column of {repeated_name} more than once; give it once.")
    return dict(pairs)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class CreditOptions:
    """Options for reading and crediting a rollout file.

    Attributes:
        recipe: YAML file with layout and objectives; default: the run's own, else the layout of the confidence task, or a
            block for each tag of a file with other tags.
        methods: separated by commas: a preset, a preset with a baseline (bae:group), recipe for the recipe's own, or recorded for
            the trainer's numbers (advantage, score, reward); default: grpo, rlcr, bae, the recipe's own, and the numbers of another
            trainer; `spanwise why` on a spanwise run: its own method.
        tokenizer: folder of the tokenizer that the completions were sampled with; default: the run's own. Without a tokenizer
            credit is per word.
        columns: role=column for a table with other column names, as in prompt=input,completion=output,answer=gold; roles
            are prompt, completion or completions (a list in each cell), answer, group and step. May be repeated.
        reward: objective=column: take the reward from this column of the file, as in correct=my_reward; objective=text computes
            it from the text. May be repeated. Default: the column of the same name; for correct also acc, accuracy,
            accuracy_reward, is_correct, score or reward, if these hold only 0 and 1.
        pay: block=reward, as in draft=passed: the block is paid by this column of the file or reward, in place of the recipe's
            objectives. May be repeated or joined by commas. Blocks are those of the layout, else the tags of the completions;
            without tags one name stands for the whole completion.
        set_: any recipe field, as field=value (spanwise train --help lists them); may be repeated.
    """

    recipe: Path | None = None
    methods: str | None = None
    tokenizer: Path | None = None
    columns: list[str] | None = None
    reward: list[str] | None = None
    pay: list[str] | None = None
    set_: Fields = None

    def parsed(self) -> dict[str, Any]:
        """Return the options as the keyword arguments of `credit_rollouts`."""
        reward_syntax = "objective=column, such as correct=accuracy_reward"
        return {
            "recipe": self.recipe,
            "methods": listed(self.methods or ""),
            "tokenizer": self.tokenizer,
            "columns": column_roles(self.columns),
            "reward": _map_names("--reward", [key_value(entry, "--reward", reward_syntax) for entry in self.reward or []]),
            "pay": [entry for piece in self.pay or [] for entry in listed(piece)],
            "overrides": recipe_fields(self.set_),
        }


#: The credit options if the user gives none on the command line.
AS_USUAL = CreditOptions()


def listed(names: str) -> list[str]:
    """Split names at commas."""
    return [name.strip() for name in names.split(",") if name.strip()]


def seed_numbers(seeds: str) -> list[int]:
    """Parse the value of `--seeds` into numbers."""
    try:
        return [int(seed) for seed in seeds.split(",")]
    except ValueError:
        raise RecipeError(f"--seeds takes whole numbers separated by commas, such as 0,1,2; got '{seeds}'.") from None


def check_sizes(**sizes: int | None) -> None:
    """Refuse a given option whose value is below 1."""
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise RecipeError(f"--{name.replace('_', '-')} is {size}; set it to 1 or more.")


def key_value(entry: str, option: str, shape: str) -> tuple[str, str]:
    """Split `key=value` at the first equals sign; refuse an entry without a value."""
    key, equals_sign, value = entry.partition("=")
    if not equals_sign or not value:
        raise RecipeError(f"{option} takes {shape}; got '{entry}'.")
    return key.strip(), value.strip()
