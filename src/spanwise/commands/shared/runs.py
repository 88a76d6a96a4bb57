"""The runs of a comparison: what each arm and seed trains, where, and whether that is done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spanwise.commands.shared.folder import read_fields
from spanwise.credit import METHODS
from spanwise.errors import DataError, RecipeError, unknown
from spanwise.objective import BASELINES
from spanwise.recipe import EMBEDDED, HUB, Recipe, load
from spanwise.rollouts.folder import is_filled

COMMON = {"eval_every": 20, "eval_samples": 16, "keep_rollouts": 20, "report": False}
#: What says from where a run starts and how it is evaluated: arms that differ in it have no figures to compare.
_SAME = (
    "task", "model", "dataset", "split", "question_column", "prompt_column", "instruction", "answer_column", "start", "start_seed",
    "start_steps", "temperature", "eval_prompts", "eval_samples",
)  # fmt: skip
#: What a run has at its end only.
_ENDED = ("summary.json", "evaluation.parquet")
#: What is watched and kept of a run, and where; it moves no weight, so that a run may go on with other values.
_WATCHED = ("output", "eval_every", "save_every", "keep_rollouts", "report", "report_to", "threads")
#: The fields that a run's own recipe.yaml has filled in from the preset (`recipe.resolved`).
_FILLED = ("layout", "prefilled", "segmenter", "objectives", "calibration", "baseline", "per", "options")


@dataclass(frozen=True)
class ArmRun:
    """One arm with one seed: what it trains and where."""

    arm: str
    seed: int
    recipe: Recipe

    @property
    def folder(self) -> Path:
        """Of the run."""
        return Path(self.recipe.output or "")

    @property
    def file(self) -> Path:
        """The recipe as it was asked for, beside the folder."""
        return self.folder.with_name(f"{self.folder.name}.yaml")

    def asked(self) -> dict[str, Any]:
        """What `file` holds."""
        return self.recipe.model_dump(mode="json")

    def finished(self) -> bool:
        """Whether the run ended under this recipe; a DataError if the folder holds a run of another one, or of an unknown one."""
        if not any(is_filled(self.folder / name) for name in ("metrics.jsonl", *_ENDED)):
            return False
        if not self.file.is_file():
            raise DataError(
                f"'{self.folder}' holds a run, and '{self.file}' is not there to say which: give another --output, or delete "
                f"'{self.folder}'."
            )
        asked, resolved = self.asked(), self.folder / "recipe.yaml"
        changes = changed(self.file, asked, but=("output",)) or changed(resolved, asked, but=("output", *_FILLED))
        if changes:
            raise DataError(
                f"'{self.folder}' holds a run of another recipe ({', '.join(changes[:3])}). Give another --output, or delete "
                f"'{self.folder}' and '{self.file}'."
            )
        return all(is_filled(self.folder / name) for name in _ENDED)


def changed(file: Path, asked: Mapping[str, Any], *, but: Sequence[str] = _WATCHED) -> list[str]:
    """What a recipe file says otherwise than it is asked for now, but for some fields; nothing if the file is not there."""
    if not file.is_file():
        return []
    found = read_fields(file)
    found = {**defaults(found), **found}
    names = [name for name in asked if name not in but and found.get(name) != asked[name]]
    said = [f"{name} was {found.get(name)!r} and is {asked[name]!r} now" for name in names]
    return [text if len(text) < 100 else f"{name} was another" for name, text in zip(names, said, strict=True)]


def defaults(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """What `load` fills in where a recipe of the same task says nothing."""
    plain = {name: field.get_default(call_default_factory=True) for name, field in Recipe.model_fields.items()}
    return plain if recipe.get("task", EMBEDDED[0]) in EMBEDDED else {**plain, **HUB}


def arm_fields(name: str) -> dict[str, Any]:
    """The recipe fields an arm stands for: a baseline (of `bae`), a method, or a recipe file.

    >>> arm_fields("blended"), arm_fields("rlcr")
    ({'method': 'bae', 'baseline': 'blended'}, {'method': 'rlcr'})
    """
    if name in BASELINES:
        return {"method": "bae", "baseline": name}
    METHODS.load_plugins()
    if name in METHODS:
        return {"method": name}
    if name.endswith((".yaml", ".yml")):
        return load(name).model_dump(exclude_unset=True, mode="json")
    raise RecipeError(unknown("arm (a baseline, a method or a recipe file)", name, [*BASELINES, *METHODS]))


def planned(
    arms: Sequence[str],
    seeds: Sequence[int],
    choices: Mapping[str, Any],
    output: str,
    *,
    shared: str | Path | None = None,
) -> list[ArmRun]:
    """Every run of a comparison, seed by seed, so that an early look has whole pairs.

    What an arm says wins over the `shared` recipe file, and `choices` win over both.
    """
    for field, option in (("seed", "seeds"), ("output", "output")):
        if field in choices:
            raise RecipeError(f"Every run of a comparison has its own {field}; give --{option} in place of --set {field}.")
    names = [Path(arm).stem if arm.endswith((".yaml", ".yml")) else arm for arm in arms]
    for kind, listed in (("arm", names), ("seed", seeds)):
        if not listed or len(set(listed)) < len(listed):
            raise RecipeError(f"Give each {kind} once, and at least one; got {', '.join(map(str, listed)) or 'none'}.")
    fields = {name: arm_fields(arm) for name, arm in zip(names, arms, strict=True)}
    for name, own in fields.items():
        for field in ("method", "baseline"):
            if field in own and choices.get(field, own[field]) != own[field]:
                raise RecipeError(
                    f"Arm '{name}' has the {field} {own[field]}, and --set {field}={choices[field]} would make it another arm; "
                    f"leave that out, or give it as an arm."
                )
    written = set() if shared is None else load(shared).model_fields_set
    common = {field: value for field, value in COMMON.items() if field not in written}

    def recipe(name: str, seed: int) -> Recipe:
        place = str(Path(output) / f"{name}-{seed}")
        return load(shared, {**common, **fields[name], **choices, "seed": seed, "output": place})

    runs = [ArmRun(name, seed, recipe(name, seed)) for seed in seeds for name in names]
    first = runs[0]
    for run in runs[: len(names)]:
        for field in _SAME:
            value, other = getattr(first.recipe, field), getattr(run.recipe, field)
            if value != other:
                raise RecipeError(
                    f"Arm '{first.arm}' has the {field} {value} and arm '{run.arm}' {other}, so that their figures cannot be "
                    f"compared; give all arms one, as with --set {field}={value}."
                )
    return runs
