"""Read rubrics, which are lists of weighted criteria, from a file, recipe or dataset."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spanwise.disk import read_yaml
from spanwise.errors import DataError, RecipeError, refuse, unknown
from spanwise.layout import Layout
from spanwise.objective import Objective, is_number
from spanwise.score.custom import takes
from spanwise.score.reward import built_in

#: The keys that datasets use for each field of a criterion, and the field's default.
_FIELDS: tuple[tuple[tuple[str, ...], Any], ...] = (
    (("text", "criterion", "description"), None),
    (("weight", "points"), 1.0),
    (("part",), None),
    (("name", "title"), ""),
)
_EXAMPLE = "[{text: 'It names a figure.', weight: 1, part: plan}]"


@dataclass(frozen=True)
class Criterion:
    """One sentence of a rubric, with its weight. It should be false if the weight is negative."""

    text: str
    weight: float = 1.0
    part: str | None = None
    name: str = ""


def is_column(criteria: Any) -> bool:
    """Return whether an objective's `criteria` names a column of the dataset."""
    return isinstance(criteria, str) and Path(criteria).suffix not in (".yaml", ".yml", ".json")


def criteria_of(cell: Any, where: str, blocks: Collection[str]) -> list[Criterion]:
    """Read a prompt's rubric from a cell of the dataset. None and an empty cell hold no criteria."""
    if isinstance(cell, str):
        try:
            cell = json.loads(cell or "[]")
        except ValueError as error:
            raise DataError(f"The rubric {where} is invalid JSON: {error}. Write a list of criteria: {_EXAMPLE}.") from error
    criteria = _read([] if cell is None else cell, where, DataError)
    for position, criterion in enumerate(criteria, start=1):
        if criterion.part is not None and criterion.part not in blocks:
            unknown_message = unknown("block", criterion.part, blocks)
            raise DataError(f"Criterion {position} of the rubric {where} has part: {criterion.part}. {unknown_message}")
    return criteria


def _read(rubric: Any, where: str, error_type: type[DataError] | type[RecipeError]) -> list[Criterion]:
    """Read the criteria of a rubric. Raise `error_type` if one is invalid."""
    rubric_list = rubric.tolist() if hasattr(rubric, "tolist") else rubric  # Parquet files may give NumPy arrays
    if not isinstance(rubric_list, (list, tuple)):
        raise error_type(f"The rubric {where} is {rubric!r:.80}. Write a list of criteria: {_EXAMPLE}.")
    criteria = []
    for position, entry in enumerate(rubric_list, start=1):
        entry_fields = entry if isinstance(entry, Mapping) else {"text": entry}
        text, weight, part, name = (
            next((entry_fields[k] for k in keys if entry_fields.get(k) is not None), default) for keys, default in _FIELDS
        )
        criterion_label = f"Criterion {position} of the rubric {where}"
        possible_faults = {
            f"{criterion_label} is {entry!r:.80}. Write {_EXAMPLE[1:-1]}.": not isinstance(entry, str | Mapping),
            f"{criterion_label} has no text. Write {_EXAMPLE[1:-1]}.": not isinstance(text, str) or not text.strip(),
            f"{criterion_label} has the weight {weight!r}. Write a finite number.": not is_number(weight),
        }
        refuse(possible_faults, error_type)
        criteria.append(Criterion(text, float(weight), None if part is None else str(part), str(name)))
    return criteria


def with_criteria(objective: Objective, layout: Layout) -> list[Objective]:
    """Split an objective with a rubric into one per criterion. A column gives one per paid block."""
    rubric = objective.criteria
    if rubric is None:
        return [objective]
    _check_reads(objective, "criteria" if is_column(rubric) else "criterion")
    if is_column(rubric):
        objective = replace(objective, criteria=None, options={"criteria": rubric, **objective.options})
        if objective.each is not None:
            return [objective]
        paid_block_names = dict.fromkeys(name for pattern in objective.pays for name in layout.matching(pattern))
        block_options = {block: {**objective.options, "block": block} for block in paid_block_names}
        return [
            replace(objective, name=f"{objective.name}.{block}", pays=(block,), options=one_block_options)
            for block, one_block_options in block_options.items()
        ]
    rubric_label = f"'{rubric}'" if isinstance(rubric, str) else f"of objective '{objective.name}'"
    if isinstance(rubric, str):
        rubric = read_yaml(rubric, f"The rubric {rubric_label}", f"Write a list of criteria: {_EXAMPLE}.")
    criteria = _read(rubric, rubric_label, RecipeError)
    refuse({f"The rubric {rubric_label} has no criteria. Write a list of them: {_EXAMPLE}.": not criteria})
    _check_criteria(criteria, rubric_label, objective, layout)
    return [
        replace(
            objective,
            criteria=None,
            name=f"{objective.name}.{criterion.name or position}",
            pays=criterion.part or objective.pays,
            weight=objective.weight * criterion.weight,
            options={**objective.options, "criterion": criterion.text},
        )
        for position, criterion in enumerate(criteria, start=1)
    ]


def _check_reads(objective: Objective, option: str) -> None:
    """Refuse criteria if the reward reads none, or if the objective's options already contain criteria."""
    built_in_reward = built_in(objective)
    if not (takes(objective, option) if built_in_reward is None else option in built_in_reward.options):
        raise RecipeError(
            f"Objective '{objective.name}' has criteria, but its reward does not read them. Use the reward judge, or a function "
            f"with a parameter '{option}'."
        )
    if option in objective.options:
        raise RecipeError(f"Objective '{objective.name}' has both criteria and the option '{option}'. Remove one of them.")


def _check_criteria(criteria: Collection[Criterion], where: str, objective: Objective, layout: Layout) -> None:
    """Refuse two criteria with the same name. Refuse a `part` that is missing or unknown."""
    for name, count in Counter(criterion.name for criterion in criteria if criterion.name).items():
        refuse({f"The rubric {where} has two criteria called '{name}'. Give one of them another name.": count > 1})
    has_each = objective.each is not None
    pays_nothing = not objective.pays and not has_each
    for position, criterion in enumerate(criteria, start=1):
        subject = f"Criterion '{criterion.name or position}' of the rubric {where}"
        part = criterion.part
        faults = {f"{subject} rewards no block. Set the criterion's 'part', or the objective's 'pays'.": pays_nothing}
        if part is not None:
            unknown_message = unknown("block", part, layout.names)
            faults = {
                f"{subject} has part: {part}. {unknown_message}": "*" not in part and part not in layout.names,
                f"{subject} is about block '{part}' alone, but 'each' scores several blocks. Remove 'part' or 'each'.": has_each,
            }
        refuse(faults)
