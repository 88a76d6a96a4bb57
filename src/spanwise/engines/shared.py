"""Helpers of several engines: `RunRecord`, the folder of a run that a trainer drives, and checks of recipes and options."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml
from jaxtyping import Float
from torch import Tensor
from transformers import PretrainedConfig

from spanwise.credit.spread import completed
from spanwise.disk import whole_folder
from spanwise.errors import DataError, refuse
from spanwise.layout import Layout
from spanwise.modes import MODES
from spanwise.rollouts import Rollouts
from spanwise.rollouts.folder import RunFolder, check_free, hidden, is_run, metrics_until, sole_writer
from spanwise.scheme import SCRIPT, Scheme
from spanwise.step import StepResult

#: The files that a run writes; all other files in the folder belong to the trainer or the user, and stay.
WRITES = ("recipe.yaml", "metrics.jsonl", "rollouts", "tokenizer", "summary.json", "report.html")
#: The packages that the report needs.
_REPORT = ("cyclopts", "rich", "pydantic", "jinja2", "altair", "vl_convert", "scipy")
#: Fields of a scheme and its layout that a recipe writes under another name.
_UNWRITTEN = {"blocks", "recorded", "modes"}
#: The fields of a recipe that a resumed run may not change: those of its scheme, layout and modes.
RULE = (
    *(field.name for part in (Scheme, Layout) for field in fields(part) if field.name not in _UNWRITTEN),
    *(name for name, mode in MODES.items() if mode.in_scheme),
)
#: The fields that define the credit; the trainer's own configuration decides everything else.
_CREDIT = {*RULE, *MODES, "calibration", "baseline", "verifier"}


def idle_fields(path: str | Path, *, engine: str) -> str:
    """Return a warning that lists the recipe fields which nothing reads; empty if there are none."""
    written = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    idle = {*written} - _CREDIT
    for name, mode in MODES.items():
        idle |= {f"{name}.{field}" for field in written.get(name) or {} if mode.elsewhere and field not in mode.elsewhere}
    if not idle:
        return ""
    return (
        f"The recipe also sets {', '.join(sorted(idle))}, which {engine}'s own configuration decides; nothing reads it here."
    )


def fixed_faults(fixed: Mapping[str, tuple[Any, str]], setting: Callable[[str], Any]) -> dict[str, bool]:
    """Return a sentence for each option of an engine that is not at its fixed value, and whether the sentence applies."""
    set_to = {name: setting(name) for name in fixed}
    return {
        f"{name} is {set_to[name]}: {why}. Leave it at {usual}.": set_to[name] not in (None, usual)
        for name, (usual, why) in fixed.items()
    }


def model_size(path: str | None) -> int | None:
    """Return how many token ids a model folder can sample, often more than its tokenizer has; None if unknown."""
    try:
        written, _ = PretrainedConfig.get_config_dict(path) if path else ({}, {})
    except (OSError, ValueError):
        return None
    return {**written, **(written.get("text_config") or {})}.get("vocab_size")


def check_keeping(keep_rollouts: Any, report: Any) -> None:
    """Refuse wrong settings for rollouts and report before training starts."""
    lack = [name for name in _REPORT if report and find_spec(name) is None]
    refuse(
        {
            f"keep_rollouts is {keep_rollouts!r}; write the rollouts of every k-th batch with k = 1, 2, ..., or 0 for none.": (
                isinstance(keep_rollouts, bool) or not isinstance(keep_rollouts, int) or keep_rollouts < 0
            ),
            f"report is {report!r}; it is true or false.": not isinstance(report, bool),
            f"report=True draws report.html, and {', '.join(lack)} {'is' if len(lack) == 1 else 'are'} not installed: "
            "pip install 'spanwise[cli,report]'. Or leave report out: `spanwise report FOLDER` makes it later.": lack,
        }
    )


def reward_means(worth_nm: Float[Tensor, "n m"], names: Sequence[str]) -> dict[str, float]:
    """Return the mean of each reward as trainers log it, without NaN."""
    return {f"rewards/{name}/mean": mean for name, mean in zip(names, worth_nm.nanmean(dim=0).tolist(), strict=True)}


def prompt_texts(tokenizer: Any, uids: Iterable[Any], prompts: Iterable[Sequence[int]]) -> dict[Any, str]:
    """Return the prompt text of each group, from the group's first row."""
    first: dict[Any, Sequence[int]] = {}
    for uid, ids in zip(uids, prompts, strict=True):
        first.setdefault(uid, ids)
    return {uid: tokenizer.decode(list(ids), skip_special_tokens=False) for uid, ids in first.items()}


class RunRecord:
    """Writes the folder of a run: `recipe.yaml`, `metrics.jsonl`, `rollouts/`, `tokenizer/`, `summary.json`, `report.html`."""

    def __init__(self, folder: str | Path, *, keep_rollouts: int, report: bool, option: str) -> None:
        self.folder, self.keep, self.report, self.option = RunFolder(folder, writes=WRITES), keep_rollouts, report, option
        self.step = 0
        self.seconds = self.own_seconds = 0.0
        self._line: dict[str, Any] = {}
        self._recipe: Mapping[str, Any] | None = None

    @staticmethod
    def of(section: Mapping[str, Any], *, option: str) -> RunRecord | None:
        """Build the record that the trainer's configuration asks for; None if it names no folder."""
        folder, keep, report = section.get("folder"), section.get("keep_rollouts", 0), section.get("report", False)
        check_keeping(keep, report)
        refuse({f"keep_rollouts and report need a folder; add {option}=runs/NAME.": folder is None and (keep or report)})
        return None if folder is None else RunRecord(str(folder), keep_rollouts=keep, report=report, option=option)

    def recipe(self, scheme: Scheme, **settings: Any) -> dict[str, Any]:
        """Build the `recipe.yaml` of a run that has no recipe, from its scheme and the settings that are set."""
        set_values = {name: value for name, value in settings.items() if value is not None}
        recipe = {"task": SCRIPT, **scheme.plain(), **set_values, "keep_rollouts": self.keep, "report": self.report}
        return json.loads(json.dumps(recipe))  # as read back from a file: tuples become lists

    def check(self, recipe: Mapping[str, Any], *, step: int) -> None:
        """Refuse a folder that holds something else; write nothing."""
        place = self.folder.path
        if not is_run(place):
            return check_free(place, writes=WRITES)
        if not step:
            raise DataError(
                f"'{place}' holds a run already, and this one starts from its first step. Give another {self.option}, move that "
                "run away, or go on with it from a checkpoint."
            )
        written = yaml.safe_load((place / "recipe.yaml").read_text(encoding="utf-8")) or {}
        other = [name for name in RULE if hidden({name: written.get(name)}) != hidden({name: recipe.get(name)})]
        if other:
            raise DataError(
                f"The run in '{place}' was trained with another {', '.join(other)}, so it cannot go on in the same folder. "
                f"Give another {self.option}."
            )
        return None

    def begin(self, recipe: Mapping[str, Any], *, step: int, tokenizer: Any) -> None:
        """Start the run folder, or continue it from a step."""
        place = self.folder.path
        self.step, self._recipe = step, recipe
        self.folder.begin(recipe, step=step, history=metrics_until(place, step))
        with whole_folder(place / "tokenizer"):
            tokenizer.save_pretrained(str(place / "tokenizer"))

    def add_batch(
        self,
        step: int,
        result: StepResult,
        scheme: Scheme,
        *,
        recipe: Mapping[str, Any],
        tokenizer: Any,
        rollouts: Callable[[], Rollouts],
    ) -> None:
        """Write the metrics of a batch, and the rollouts of every k-th batch; the first batch begins the run."""
        if self._recipe is None:
            self.check(recipe, step=step - 1)
            self.begin(recipe, step=step - 1, tokenizer=tokenizer)
        scores, steps = result.own.reading.scores, result.own.batch.steps
        self.add(step, {**result.metrics, **reward_means(completed(scores, scheme.objectives), scheme.names)})
        if self.keep and step % self.keep == 0:
            rollout_n = None if steps is None else steps.trajectory_s
            self.folder.write_rollouts([rollouts().recorded(step=step, rollout_n=rollout_n)], step=step)

    def add(self, step: int, values: Mapping[str, Any]) -> None:
        """Add metrics of a batch to its line in `metrics.jsonl`."""
        if self._line and self._line["step"] != step:
            self.flush()
        self._line |= {"step": step, **{k: v for k, v in values.items() if isinstance(v, int | float) and v == v}}

    def add_update(self, logged: Mapping[str, Any], names: Mapping[str, str]) -> None:
        """Add what the trainer logs about the update of the last batch; `names` maps report names to trainer names."""
        if self._line:
            self.add(self._line["step"], {name: logged[theirs] for name, theirs in names.items() if theirs in logged})

    def flush(self) -> None:
        """Write the finished line of metrics."""
        if self._line and self._recipe is not None:
            self.own_seconds += self._line.get("spanwise/seconds") or 0.0
            self.step = max(self.step, self._line["step"])
            self.folder.add_metrics(self._line)
        self._line = {}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Hold the folder's lock during training, and finish its files however training ends."""
        started, ended = time.perf_counter(), False
        with sole_writer(self.folder.path):
            try:
                yield
                ended = True
            finally:
                self.flush()
                if self._recipe is not None and ended:
                    about = {name: self._recipe.get(name) for name in ("method", "task", "seed")}
                    share = self.own_seconds / self.seconds if self.seconds else None
                    overhead = {"spanwise_seconds": self.own_seconds, "spanwise_share": share}
                    seconds = time.perf_counter() - started
                    self.folder.write_summary({**about, "steps": self.step, "seconds": seconds, **overhead})
                if self._recipe is not None and self.report:
                    _make_report(self.folder.path)
                self._recipe = None


def _make_report(folder: Path) -> None:
    """Make the report in a separate process, so that its cost and errors stay out of the training; warn if it fails."""
    command = [sys.executable, "-m", "spanwise.cli", "report", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        why = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1].removeprefix("Error: ")
        warnings.warn(
            f"report.html of '{folder}' could not be made: {why} All data is there; try again with: spanwise report {folder}",
            UserWarning,
            stacklevel=2,
        )
