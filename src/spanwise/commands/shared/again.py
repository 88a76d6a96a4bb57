"""The command that each report prints: it makes what the report shows once more, in a folder beside it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from spanwise.commands.shared.runs import COMMON, defaults, planned
from spanwise.errors import SpanwiseError
from spanwise.recipe import load

#: Most completions in a token view, if nothing else is asked for.
MOST = 500


def train_command(folder: Path) -> str:
    """Train once more; the recipe of a run folder is written out, so it says everything.

    >>> train_command(Path("runs/train"))
    'spanwise train runs/train/recipe.yaml --output runs/train-again'
    """
    return _joined("train", folder / "recipe.yaml", folder=folder)


def compare_command(folder: Path, summary: Mapping[str, Any]) -> str:
    """Compare once more: the shared fields of the recipe as far as no default gives them, and the arms.

    An arm whose name alone does not stand for what was trained is the recipe file left in the folder.
    """
    recipe, seeds = summary.get("recipe", {}), summary["seeds"]
    changed = _changed(recipe, {**defaults(recipe), **COMMON})
    arms = {arm: _arm(folder, arm, seeds[0], changed) for arm in summary["arms"]}
    parts = ["--arms", ",".join(arms.values()), "--seeds", ",".join(map(str, seeds))]
    reference = summary.get("reference")
    if reference is not None:  # a recipe file becomes an arm of its own name
        parts += ["--reference", Path(arms[reference]).stem if arms[reference] != reference else reference]
    return _joined("compare", *parts, *assignments(changed), folder=folder)


def fidelity_command(folder: Path, found: Mapping[str, Any]) -> str:
    """Measure fidelity once more."""
    source, options = Path(found["source"]), found.get("options") or {}
    flags = [part for name, value in options.items() for part in _flag(name, value)]
    calls = [(source, _beyond(source, found["recipe"]))]
    if source.name == "model" and (source.with_name("recipe.yaml")).is_file():  # of a run, whose recipe then speaks
        calls.append((source.parent, _beyond(source.parent, found["recipe"])))
    place, fields = min(calls, key=lambda call: len(call[1]))
    return _joined("fidelity", place, *flags, *fields, folder=folder)


def credit_command(folder: Path, source: str, options: Mapping[str, Any]) -> str:
    """Credit the same rollouts once more.

    Example:
        >>> credit_command(Path("runs/credit"), "1.jsonl", {"methods": ["bae"], "reward": {"correct": "acc"}})
        'spanwise credit 1.jsonl --methods bae --reward correct=acc --output runs/credit-again'
    """
    rows = options.get("rows")
    parts = [*_flag("recipe", options.get("recipe")), *_flag("methods", ",".join(options.get("methods") or ()) or None)]
    parts += [*_flag("tokenizer", options.get("tokenizer")), *_flag("rows", None if rows == MOST else rows)]
    if options.get("columns"):
        parts += ["--columns", ",".join(f"{role}={column}" for role, column in options["columns"].items())]
    for objective, column in (options.get("reward") or {}).items():
        parts += ["--reward", f"{objective}={column}"]
    return _joined("credit", source, *parts, *assignments(options.get("overrides") or {}), folder=folder)


def assignments(fields: Mapping[str, Any]) -> list[str]:
    """Recipe fields as the command line takes them.

    >>> assignments({"entropy": 1e-05, "layout": {"a": ["x", "y"]}, "prefilled": None})
    ['--set', 'entropy=1.0e-05', '--set', 'layout={a: [x, y]}', '--set', 'prefilled=null']
    """
    return [part for name, value in fields.items() for part in ("--set", f"{name}={_yaml(value)}")]


def _changed(recipe: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in recipe.items() if name in base and value != base[name]}


def _beyond(place: Path, recipe: Mapping[str, Any]) -> list[str]:
    """The fields that the recipe beside a checkpoint, or without one the defaults, do not give."""
    file = place / "recipe.yaml"
    try:
        base = load(file).model_dump(mode="json") if file.is_file() else defaults(recipe)
    except SpanwiseError:
        return assignments(recipe)  # what lies there now cannot be read, so every field has to be said
    return assignments(_changed(recipe, base))


def _arm(folder: Path, arm: str, seed: int, changed: Mapping[str, Any]) -> str:
    """The name of an arm if it stands for what was trained, else the file that says it."""
    file = folder / f"{arm}-{seed}.yaml"
    if not file.is_file():
        return arm
    try:
        asked = planned([arm], [seed], changed, str(folder))[0].asked()
    except SpanwiseError:
        return str(file)
    written = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    return arm if {**written, "output": ""} == {**asked, "output": ""} else str(file)


def _flag(name: str, value: Any) -> list[str]:
    option = f"--{name.replace('_', '-')}"
    return [] if value is None or value is False else [option] if value is True else [option, str(value)]


def _yaml(value: Any) -> str:
    """A value in one line that `--set` reads back as the same."""
    return yaml.safe_dump([value], default_flow_style=True, sort_keys=False, allow_unicode=True, width=2**31).strip()[1:-1]


def _joined(command: str, *parts: Any, folder: Path) -> str:
    beside = f"{folder}-again" if folder.name else "again"
    return shlex.join(["spanwise", command, *map(str, parts), "--output", beside])
