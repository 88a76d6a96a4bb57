"""`laser.json` of a run: the reference that its self-rewarding scores are counted from, as training measured it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from spanwise.commands.shared.files import read_json
from spanwise.commands.shared.task import run_above
from spanwise.disk import write_text
from spanwise.errors import DataError
from spanwise.laser import Laser
from spanwise.recipe import Recipe

FILE = "laser.json"


def write_laser(folder: str | Path, measured: Mapping[str, Any]) -> None:
    """Write `laser.json` into a run folder.

    Args:
        folder: of the run.
        measured: `token` and its `id`, the `reference`, its `std` over so many `completions`, the `temperature`.
    """
    write_text(Path(folder) / FILE, json.dumps(dict(measured), indent=1) + "\n")


def laser_of(folder: str | Path, recipe: Recipe) -> Laser | None:
    """How scores of a model are read: what the recipe says, with the reference that the run has measured where it names none.

    Args:
        folder: of a run, or of a model or a checkpoint that lies in one.
        recipe: of the run.

    Returns:
        With its reference; None where the recipe has no `laser`.

    Raises:
        DataError: neither recipe nor run says the reference, or the run has measured that of another token.
        RecipeError: a reference from which no answer could be called right.
    """
    if recipe.laser is None:
        return None
    laser, place = recipe.laser, Path(folder)
    file = next((found for run in (place, *run_above(place)) if (found := run / FILE).is_file()), None)
    if file is None:
        if laser.reference is None:
            raise DataError(
                f"No score can be read of the model in '{folder}': its recipe has laser without a reference, and there is no "
                f"{FILE} of a run that has measured one. Set laser.reference in the recipe, or leave laser out."
            )
        return laser
    measured = read_json(file)
    missing = [name for name in ("token", "id", "reference") if name not in measured]
    if missing or not isinstance(measured["reference"], int | float):
        raise DataError(
            f"'{file}' is not what a run measures: it has no {' and no '.join(missing) or 'number as reference'}."
        )
    if laser.token not in (measured["token"], measured["id"]):
        raise DataError(
            f"The recipe reads the score off the token '{laser.token}', and '{file}' says that the run was trained with "
            f"'{measured['token']}' (id {measured['id']}); use the token that was trained."
        )
    return laser if laser.reference is not None else replace(laser, reference=float(measured["reference"]))
