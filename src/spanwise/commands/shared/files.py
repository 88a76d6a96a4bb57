"""The files that reports are made of: readers whose errors name the file, and the writer of `fidelity.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from spanwise.disk import write_text
from spanwise.errors import DataError
from spanwise.measure import BASELINES, Fidelity, Rerolls
from spanwise.measure.fixed_point import fixed_point
from spanwise.measure.fixed_point_simulated import simulated_fixed_point
from spanwise.measure.proper_score import ScoreName
from spanwise.report import difference_rows, fidelity_rows

FIDELITY = "fidelity.json"


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read a file with a JSON object in each line.

    Raises:
        DataError: a line that is not one.
    """
    lines = []
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        try:
            if line.strip():
                lines.append(dict(json.loads(line)))
        except (ValueError, TypeError) as error:
            raise DataError(f"Line {number} of '{path}' is not a JSON object: {error}.") from error
    return lines


def read_recipe(folder: Path) -> dict[str, Any]:
    """Read `recipe.yaml` of a folder; a DataError if it cannot be read."""
    return read_yaml(folder / "recipe.yaml")


def read_yaml(file: Path) -> dict[str, Any]:
    """Read a YAML file of fields; a DataError if it cannot be read."""
    try:
        recipe = yaml.safe_load(read_text(file))
    except yaml.YAMLError as error:
        raise DataError(f"'{file}' is not YAML: {str(error).splitlines()[0]}.") from error
    return recipe if isinstance(recipe, dict) else {}


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; a DataError if it cannot be read."""
    try:
        return dict(json.loads(read_text(path)))
    except (ValueError, TypeError) as error:
        raise DataError(f"'{path}' is not a JSON object: {error}.") from error


def read_text(path: Path) -> str:
    """Read a text file; a DataError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"'{path}' cannot be read: {error}.") from error


def write_fidelity(
    folder: str | Path,
    *,
    source: str,
    recipe: Mapping[str, Any],
    found: Fidelity | None = None,
    rolled: Rerolls | None = None,
    points: Sequence[Mapping[str, Any]] = (),
    tokens: Sequence[Mapping[str, Any]] = (),
    counts: Mapping[str, int | float] | None = None,
    options: Mapping[str, Any] | None = None,
) -> None:
    """Write `fidelity.json`, all that the report of a fidelity measurement shows.

    Args:
        folder: made if it does not exist.
        source: the checkpoint.
        recipe: of the run.
        found, rolled: as `run.fidelity.fidelity_folder` gives them; None where no confidence is stated.
        points: as `fixed_point_rows` gives them.
        tokens: see `report.fidelity_report`.
        counts: of completions and prompts, where there is no `rolled`.
        options: of `spanwise fidelity`, as they were given; the report prints them.

    Raises:
        DataError: the folder cannot be written.
    """
    counts, figures, differences = dict(counts or {}), [], []
    if found is not None and rolled is not None:
        counts = {
            "completions": rolled.prefix_xs.numel(), "prompts": len(rolled.prefix_xs), "rerolls": rolled.again_dm.numel(),
            "prefixes": len(rolled.again_dm), "share": found.share,
        }  # fmt: skip
        figures = fidelity_rows(found)
        differences = difference_rows(found) if {"blended", "outcome"} <= set(found.baselines) else []
    data = {
        "source": source,
        "recipe": dict(recipe),
        "counts": counts,
        "figures": figures,
        "differences": differences,
        "points": [dict(row) for row in points],
        "tokens": [dict(row) for row in tokens],
        "options": dict(options or {}),
    }
    write_text(Path(folder) / FIDELITY, json.dumps(without_nan(data), indent=1) + "\n")


def fixed_point_rows(
    *,
    group_sizes: Sequence[int] = (4, 8, 16, 32, 64),
    probabilities: Sequence[float] = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 0.95),
    rule: ScoreName = "brier",
    batches: int = 100,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """The q* test in rows: exact for all baselines but blended, which is simulated in batches of 512 completions."""
    p_b, rows = torch.tensor(probabilities, dtype=torch.float64), []
    for size in group_sizes:
        exact = {name: options for name, options in BASELINES.items() if options["baseline"] != "blended"}
        for name, options in exact.items():
            point_b = fixed_point(p_b, group_size=size, **options)
            rows += [
                {"baseline": name, "group_size": size, "p": p, "q": q, "error": None}
                for p, q in zip(probabilities, point_b.tolist(), strict=True)
            ]
        copies = max(1, 512 // (size * len(p_b)))
        found = simulated_fixed_point(
            p_b[:, None], group_size=size, baseline="blended", rule=rule, copies=copies, batches=batches, seed=seed
        )
        columns = zip(probabilities, found.point_bz[:, 0].tolist(), found.error_bz[:, 0].tolist(), strict=True)
        rows += [{"baseline": "blended", "group_size": size, "p": p, "q": q, "error": error} for p, q, error in columns]
    return rows


def without_nan(value: Any) -> Any:
    """The same with null for NaN, which JSON does not know."""
    if isinstance(value, dict):
        return {key: without_nan(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(entry) for entry in value]
    return None if isinstance(value, float) and value != value else value
