"""`RunRecord`: the folder that `spanwise train` leaves behind, for a training that another script or trainer drives."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml
from jaxtyping import Float
from torch import Tensor

from spanwise.batch import Steps
from spanwise.credit.assign import completed
from spanwise.disk import whole_folder
from spanwise.errors import DataError, RecipeError
from spanwise.modes import MODES
from spanwise.pipeline import Reading
from spanwise.rollouts import Rollouts
from spanwise.rollouts.folder import RunFolder, check_free, is_run, metrics_until, sole_writer
from spanwise.scheme import SCRIPT, Scheme

#: All that is written; everything else in the folder is the trainer's or the user's, and stays.
WRITES = ("recipe.yaml", "metrics.jsonl", "rollouts", "tokenizer", "summary.json", "report.html")
#: What the report is made with, and the extras that bring it.
_REPORT = ("cyclopts", "rich", "pydantic", "jinja2", "altair", "vl_convert", "scipy")
#: What of the recipe a run may not change while it goes on.
_RULE = ("method", "layout", "prefilled", "segmenter", "objectives", "per", "options", "values", *MODES)


def check_keeping(keep_rollouts: Any, report: Any) -> None:
    """Refuse what cannot be kept, before anything is trained.

    Example:
        >>> check_keeping(-1, False)
        Traceback (most recent call last):
        spanwise.errors.RecipeError: keep_rollouts is -1; write the rollouts of every k-th batch with k = 1, 2, ..., or 0 for none.
    """
    if isinstance(keep_rollouts, bool) or not isinstance(keep_rollouts, int) or keep_rollouts < 0:
        raise RecipeError(
            f"keep_rollouts is {keep_rollouts!r}; write the rollouts of every k-th batch with k = 1, 2, ..., or 0 for none."
        )
    if not isinstance(report, bool):
        raise RecipeError(f"report is {report!r}; it is true or false.")
    lack = [name for name in _REPORT if report and find_spec(name) is None]
    if lack:
        raise RecipeError(
            f"report=True draws report.html, and {', '.join(lack)} {'is' if len(lack) == 1 else 'are'} not installed: "
            "pip install 'spanwise[cli,report]'. Or leave report out: `spanwise report FOLDER` makes it later, on any machine."
        )


def check_folder(folder: str | None, keep_rollouts: Any, report: Any, *, option: str) -> None:
    """Refuse to keep what has no place, and a place that nothing is asked for: see `check_keeping`.

    Example:
        >>> check_folder(None, 5, False, option="spanwise.folder")
        Traceback (most recent call last):
        spanwise.errors.RecipeError: keep_rollouts and report need a folder; add spanwise.folder=runs/NAME.
    """
    check_keeping(keep_rollouts, report)
    if folder is None and (keep_rollouts or report):
        raise RecipeError(f"keep_rollouts and report need a folder; add {option}=runs/NAME.")


def own_recipe(scheme: Scheme, **settings: Any) -> dict[str, Any]:
    """What can be written of a run that no recipe drives: its rule of credit, and the settings that are known.

    Example:
        >>> from spanwise import Layout
        >>> made = own_recipe(Scheme.preset("bae", Layout({"a": ["answer"], "b": ["confidence"]})), steps=3, model=None)
        >>> made["task"], made["method"], made["steps"], "model" in made
        ('own', 'bae', 3, False)
    """
    return {"task": SCRIPT, **scheme.plain(), **{name: value for name, value in settings.items() if value is not None}}


def reward_means(worth_nm: Float[Tensor, "n m"], names: Sequence[str]) -> dict[str, float]:
    """The mean of each reward as trainers log it; `credit.assign.completed` has what stands for one that was left out.

    >>> import torch
    >>> reward_means(torch.tensor([[1.0, -0.5], [0.0, torch.nan]]), ("correct", "brier"))
    {'rewards/correct/mean': 0.5, 'rewards/brier/mean': -0.5}
    """
    return {f"rewards/{name}/mean": mean for name, mean in zip(names, worth_nm.nanmean(dim=0).tolist(), strict=True)}


class RunRecord:
    """Writes the folder of a run: `recipe.yaml`, `metrics.jsonl`, `rollouts/`, `tokenizer/`, `summary.json`, `report.html`.

    Edge cases:
        Of several processes one writes. The report is made by a process of its own, the command `spanwise report`: what it costs
        and whatever goes wrong in it stays out of the training, and a run that could not draw one has all its data.
    """

    def __init__(self, folder: str | Path, *, keep_rollouts: int, report: bool, output: str) -> None:
        check_keeping(keep_rollouts, report)
        self.folder, self.keep, self.report, self.output = RunFolder(folder, writes=WRITES), keep_rollouts, report, output
        self.step = 0
        self.seconds = self.own_seconds = 0.0
        self._begun = False
        self._line: dict[str, Any] = {}
        self._recipe: dict[str, Any] = {}

    def wants(self, step: int) -> bool:
        """Whether the rollouts of a batch, counted from 1, are written."""
        return self.keep > 0 and step % self.keep == 0

    def check(self, recipe: Mapping[str, Any], *, step: int) -> None:
        """Refuse a folder that holds something else; it is only looked at."""
        place = self.folder.path
        if not is_run(place):
            check_free(place, writes=WRITES)
        elif not step:
            raise DataError(
                f"'{place}' holds a run already, and this one starts from its first step. Give another {self.output}, move that "
                "run away, or go on with it from a checkpoint."
            )
        else:
            written = yaml.safe_load((place / "recipe.yaml").read_text(encoding="utf-8")) or {}
            other = [name for name in _RULE if written.get(name) != _plain(recipe.get(name))]
            if other:
                raise DataError(
                    f"The run in '{place}' was trained with another {', '.join(other)}, so it cannot go on in the same folder. "
                    f"Give another {self.output}."
                )

    def begin_with(self, recipe: Callable[[], Mapping[str, Any]], *, step: int, tokenizer: Any) -> None:
        """Check and begin with the first batch, where a trainer says nothing before it; nothing after that."""
        if not self._begun:
            known = recipe()
            self.check(known, step=step)
            self.begin(known, step=step, tokenizer=tokenizer)

    def begin(self, recipe: Mapping[str, Any], *, step: int, tokenizer: Any = None) -> None:
        """Begin the run, or go on with it from a step."""
        place = self.folder.path
        self.step, self._recipe = step, _plain(recipe)
        if is_run(place):
            self.folder.go_on(self._recipe, step=step, history=list(metrics_until(place, step)))
        else:
            self.folder.begin(self._recipe)
        if tokenizer is not None:
            with whole_folder(place / "tokenizer"):
                tokenizer.save_pretrained(str(place / "tokenizer"))
        self._begun = True

    def add_batch(self, step: int, reading: Reading, shown: Mapping[str, Any], scheme: Scheme) -> None:
        """What a trainer of rows on one driver knows of a batch: its metrics, and the mean of each reward."""
        self.add(step, {**shown, **reward_means(completed(reading.scores, scheme.objectives), scheme.names)})

    def add(self, step: int, values: Mapping[str, Any]) -> None:
        """What is known of a batch; whatever comes later of the same batch joins its line."""
        if self._line and self._line["step"] != step:
            self.flush()
        self._line |= {"step": step, **{k: v for k, v in values.items() if isinstance(v, int | float) and v == v}}

    def add_update(self, told: Mapping[str, Any], names: Mapping[str, str]) -> None:
        """What the trainer says of the update that a batch went into; `names`: what reports read -> what the trainer says."""
        if self._line:
            self.add(self._line["step"], {own: told[theirs] for own, theirs in names.items() if theirs in told})

    def flush(self) -> None:
        """Write the line of metrics that is complete."""
        if self._line and self._begun:
            self.own_seconds += self._line.get("spanwise/seconds") or 0.0
            self.step = max(self.step, self._line["step"])
            self.folder.add_metrics(self._line)
        self._line = {}

    def write_batch(self, rollouts: Rollouts, steps: Steps | None) -> None:
        """Write the rollouts of a batch whose rows may be turns of one rollout, which has one vote."""
        rollout_n = None if steps is None else steps.trajectory_s
        self.folder.write_rollouts([rollouts.recorded(step=rollouts.step, rollout_n=rollout_n)], step=rollouts.step)

    @contextmanager
    def running(self, *, main: bool = True) -> Iterator[None]:
        """Train inside: nobody else writes into the folder, and whatever ends the training, what it left is complete."""
        if not main:
            yield
            return
        started, ended = time.perf_counter(), False
        with sole_writer(self.folder.path):
            try:
                yield
                ended = True
            finally:
                if self._begun:
                    self._end(time.perf_counter() - started, ended=ended)

    def _end(self, seconds: float, *, ended: bool) -> None:
        self.flush()
        if ended:
            told = {name: self._recipe.get(name) for name in ("method", "task", "seed")}
            share = self.own_seconds / self.seconds if self.seconds else None
            known = {"spanwise_seconds": self.own_seconds, "spanwise_share": share}
            self.folder.write_summary({**told, "steps": self.step, "seconds": seconds, **known})
        if self.report:
            make_report(self.folder.path)
        self._begun = False


def make_report(folder: Path) -> bool:
    """Make the report of a run folder as `spanwise report` does, in a process of its own; a failure is a warning."""
    command = [sys.executable, "-m", "spanwise.commands.report", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        why = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        warnings.warn(
            f"report.html of '{folder}' could not be made: {why} All data is there; try again with: spanwise report {folder}",
            UserWarning,
            stacklevel=2,
        )
    return not done.returncode


def _plain(value: Any) -> Any:
    """The same as a file has it again: tuples are lists."""
    return json.loads(json.dumps(value))
