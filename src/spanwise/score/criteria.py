"""Rubrics: lists of criteria, each a text with a weight and the part it is about, from a file, a recipe or a dataset's cell."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spanwise.errors import DataError, RecipeError, unknown
from spanwise.layout import Layout
from spanwise.objective import Objective, is_number
from spanwise.score.custom import takes
from spanwise.score.reward import built_in

#: Our name of a field -> the names that datasets of rubrics have for it.
_NAMES: Mapping[str, tuple[str, ...]] = {
    "text": ("text", "criterion", "description"),
    "weight": ("weight", "points"),
    "part": ("part",),
    "name": ("name", "title"),
}
_EXAMPLE = "[{text: 'It names a figure.', weight: 1, part: plan}]"


@dataclass(frozen=True)
class Criterion:
    """What a part should be like, or should not be like if the weight is negative."""

    text: str
    weight: float = 1.0
    part: str | None = None
    name: str = ""


def is_column(criteria: Any) -> bool:
    """Return whether criteria stand in a column of the dataset, and neither in a file nor in the recipe itself."""
    return isinstance(criteria, str) and Path(criteria).suffix not in (".yaml", ".yml", ".json")


def criteria_of(cell: Any, where: str) -> list[Criterion]:
    """Read the rubric of one prompt; None and an empty cell are a rubric without criteria.

    >>> criteria_of('[{"criterion": "It is short.", "points": -2, "tags": []}]', "of completion 0")
    [Criterion(text='It is short.', weight=-2.0, part=None, name='')]
    """
    if isinstance(cell, str):
        try:
            cell = json.loads(cell or "[]")
        except ValueError as error:
            raise DataError(f"The rubric {where} is no JSON: {error}. Write a list of criteria: {_EXAMPLE}.") from error
    return _read([] if cell is None else cell, where, DataError)


def _read(written: Any, where: str, sort: type[DataError] | type[RecipeError]) -> list[Criterion]:
    entries = written.tolist() if hasattr(written, "tolist") else written  # a cell of Parquet is an array
    if not isinstance(entries, (list, tuple)):
        raise sort(f"The rubric {where} is {written!r:.80}; write a list of criteria: {_EXAMPLE}.")
    criteria = []
    for position, entry in enumerate(entries, start=1):
        fields = {"text": entry} if isinstance(entry, str) else entry
        if not isinstance(fields, Mapping):
            raise sort(f"Criterion {position} of the rubric {where} is {entry!r:.80}; write {_EXAMPLE[1:-1]}.")
        values = {
            name: next((fields[one] for one in names if fields.get(one) is not None), None) for name, names in _NAMES.items()
        }
        if not isinstance(values["text"], str) or not values["text"].strip():
            raise sort(f"Criterion {position} of the rubric {where} has no text; write {_EXAMPLE[1:-1]}.")
        weight = 1.0 if values["weight"] is None else values["weight"]
        if not is_number(weight):
            raise sort(f"Criterion {position} of the rubric {where} has the weight {weight!r}; write a finite number.")
        part = None if values["part"] is None else str(values["part"])
        criteria.append(Criterion(values["text"], float(weight), part, str(values["name"] or "")))
    return criteria


def with_criteria(objective: Objective, layout: Layout) -> list[Objective]:
    """Return an objective for each criterion of a file or list, and for each paid block if the criteria stand in a column."""
    written = objective.criteria
    if written is None:
        return [objective]
    _check_taken(objective, "criteria" if is_column(written) else "criterion")
    if is_column(written):
        reading = replace(objective, criteria=None, options={"criteria": written, **objective.options})
        if objective.each is not None:
            return [reading]
        blocks = dict.fromkeys(name for pattern in objective.pays for name in layout.matching(pattern))
        return [
            replace(reading, name=f"{objective.name}.{name}", pays=(name,), options={**reading.options, "block": name})
            for name in blocks
        ]
    where = f"'{written}'" if isinstance(written, str) else f"of objective '{objective.name}'"
    criteria = _read(_loaded(written, where) if isinstance(written, str) else written, where, RecipeError)
    if not criteria:
        raise RecipeError(f"The rubric {where} has no criteria; write a list of them: {_EXAMPLE}.")
    _check_names(criteria, where, objective, layout)
    return [
        replace(
            objective,
            criteria=None,
            name=f"{objective.name}.{one.name or position}",
            pays=objective.pays if one.part is None else one.part,
            weight=objective.weight * one.weight,
            options={**objective.options, "criterion": one.text},
        )
        for position, one in enumerate(criteria, start=1)
    ]


def _loaded(path: str, where: str) -> Any:
    try:
        import yaml  # no part of the bare install
    except ImportError as error:
        raise RecipeError(
            f"The rubric {where} is YAML, which is read by the package pyyaml: install 'spanwise[cli]'."
        ) from error
    try:
        return yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        fault = getattr(error, "strerror", None) or error
        raise RecipeError(f"The rubric {where} cannot be read: {fault}. Write a list of criteria: {_EXAMPLE}.") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = "" if mark is None else f" in line {mark.line + 1}"
        raise RecipeError(f"The rubric {where} is not valid YAML{place}. Put the texts in quotes: {_EXAMPLE}.") from error


def _check_taken(objective: Objective, option: str) -> None:
    """Refuse criteria for a reward that would not look at them."""
    entry = built_in(objective)
    if not (takes(objective, option) if entry is None else option in entry.options):
        raise RecipeError(
            f"Objective '{objective.name}' has criteria, which its reward would not see: use judge, or a function with a "
            f"parameter '{option}'."
        )
    if option in objective.options:
        raise RecipeError(f"Objective '{objective.name}' has criteria and the option '{option}' too; write one of them.")


def _check_names(criteria: Collection[Criterion], where: str, objective: Objective, layout: Layout) -> None:
    """Refuse two criteria of one name, a part that is not there, and a criterion that pays nothing or is for each block."""
    names = [one.name for one in criteria if one.name]
    doubled = next((name for name in names if names.count(name) > 1), None)
    if doubled is not None:
        raise RecipeError(f"The rubric {where} has two criteria called '{doubled}'; give one of them another name.")
    for position, one in enumerate(criteria, start=1):
        who = f"Criterion '{one.name or position}' of the rubric {where}"
        if one.part is not None and "*" not in one.part and one.part not in layout.names:
            raise RecipeError(f"{who} is about '{one.part}'. {unknown('block', one.part, layout.names)}")
        if one.part is not None and objective.each is not None:
            raise RecipeError(
                f"{who} is about '{one.part}', but its objective is for each '{objective.each}'; leave one of them out."
            )
        if one.part is None and not objective.pays and objective.each is None:
            raise RecipeError(f"{who} names no part, and its objective pays no block; write part: NAME or pays: [NAME].")
