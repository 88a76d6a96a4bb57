"""Helpers of several engines, such as `RunRecord`, which writes a run folder."""

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

import torch
import yaml
from jaxtyping import Bool, Float, Int, Num
from torch import Tensor
from transformers import PretrainedConfig

from spanwise.disk import whole_folder
from spanwise.engines.changes import as_list_or_text, changed_names, lasting
from spanwise.errors import DataError, refuse
from spanwise.layout import Layout
from spanwise.modes import MODES
from spanwise.rollouts import Rollouts
from spanwise.rollouts.folder import RunFolder, check_free, hidden, is_run, metrics_until, sole_writer
from spanwise.scheme import SCRIPT, Scheme
from spanwise.step import Ranks, StepResult

#: The files that a run writes. Other files in the folder stay.
WRITES = ("recipe.yaml", "metrics.jsonl", "rollouts", "tokenizer", "summary.json", "report.html")
#: The loss types under which ms-swift and Unsloth average the KL per completion.
KL_LOSS_TYPES = ("grpo", "sapo")
#: The packages that `spanwise report` needs to draw report.html.
_REPORT = ("cyclopts", "rich", "pydantic", "jinja2", "altair", "vl_convert", "scipy")
#: Fields of `Scheme` and `Layout` that no recipe file has.
_UNWRITTEN = {"blocks", "recorded", "modes"}
#: The fields of a recipe file that decide the credit. A resumed run must not change them.
RULE = (
    *(field.name for part in (Scheme, Layout) for field in fields(part) if field.name not in _UNWRITTEN),
    *(name for name, mode in MODES.items() if mode.in_scheme),
)


def say(*sentences: str) -> None:
    """Issue each sentence that is not empty as a warning."""
    for sentence in filter(None, sentences):
        warnings.warn(sentence, UserWarning, stacklevel=3)


def kl_fault(beta: float, loss_type: str, *, engine: str) -> dict[str, bool]:
    """Map an error message to True if `engine` does not average the loss's KL term over each completion's tokens."""
    error_sentence = (
        f"beta is {beta}, so the loss has a KL term. spanwise needs the mean of the KL over the tokens of each completion. "
        f"With loss_type '{loss_type}', {engine} averages the KL in another way. Set loss_type to "
        f"{' or '.join(KL_LOSS_TYPES)}, or beta to 0."
    )
    return {error_sentence: bool(beta) and loss_type not in KL_LOSS_TYPES}


def fold_factor(
    mask_bt: Num[Tensor, "b t"] | Bool[Tensor, "b t"],
    *,
    loss_type: str,
    max_completion_length: int,
    num_items: Float[Tensor, ""] | Int[Tensor, ""] | float,
    processes: int = 1,
    steps_per_generation: int = 1,
) -> Float[Tensor, "b 1"]:
    """Return the factors on advantages that undo the normaliser of TRL's loss."""
    # In TRL's loss, each row is divided by `row_count` and by one more number, which `fold_factor` returns.
    row_count = mask_bt.shape[0]
    token_count_b1 = mask_bt.sum(dim=1, keepdim=True).clamp(min=1).to(torch.float32)
    ones_b1 = torch.ones_like(token_count_b1)
    if loss_type in ("grpo", "sapo"):
        return token_count_b1
    if loss_type == "bnpo":
        return ones_b1 * mask_bt.sum().clamp(min=1) / row_count
    if loss_type == "dr_grpo":
        return ones_b1 * max_completion_length
    if loss_type in ("dapo", "cispo", "vespo"):
        return ones_b1 * torch.as_tensor(num_items).clamp(min=1) / (processes * steps_per_generation * row_count)
    return ones_b1


def model_vocabulary_size(path: str | None) -> int | None:
    """Return the vocabulary size in a model's config, or None."""
    try:
        model_config = PretrainedConfig.get_config_dict(path)[0] if path else {}
    except (OSError, ValueError):
        return None
    return {**model_config, **(model_config.get("text_config") or {})}.get("vocab_size")


def columns_of(rows: Sequence[Mapping[str, Any]], *, flat: bool = True) -> dict[str, list[Any]]:
    """Turn rows into columns, with None for missing values. If `flat`, what a mapping holds gets columns with dotted names, too."""
    rows = [_flat(row) for row in rows] if flat else rows
    return {name: [row.get(name) for row in rows] for name in dict.fromkeys(name for row in rows for name in row)}


def _flat(row: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Add the entries of nested mappings to a row, under dotted names such as `a.b`."""
    flat_columns: dict[str, Any] = {}
    for name, value in row.items():
        flat_columns[f"{prefix}{name}"] = value
        if isinstance(value, Mapping):
            flat_columns |= _flat(value, f"{prefix}{name}.")
    return flat_columns


def check_keeping(keep_rollouts: Any, report: Any) -> None:
    """Refuse unusable values of the options `keep_rollouts` and `report`. Call it before training."""
    missing_packages = [name for name in _REPORT if report and find_spec(name) is None]
    refuse(
        {
            f"keep_rollouts is {keep_rollouts!r}. Set it to 0 to keep no rollouts, or to k (1, 2, ...) to keep those of "
            "every k-th batch.": isinstance(keep_rollouts, bool) or not isinstance(keep_rollouts, int) or keep_rollouts < 0,
            f"report is {report!r}; set it to true or false.": not isinstance(report, bool),
            f"report=True needs packages that are not installed: {', '.join(missing_packages)}. Run pip install "
            "'spanwise[cli,report]'. Or leave report out, and run `spanwise report FOLDER` later.": missing_packages,
        }
    )


def reward_means(reward_nm: Float[Tensor, "n m"], names: Sequence[str]) -> dict[str, float]:
    """Return the mean of each reward, under the names that trainers log."""
    return {f"rewards/{name}/mean": mean for name, mean in zip(names, reward_nm.nanmean(dim=0).tolist(), strict=True)}


def prompt_texts(tokenizer: Any, uids: Iterable[Any], prompts: Iterable[Sequence[int]]) -> dict[Any, str]:
    """Map each prompt id (uid) to the text of the prompt."""
    prompt_ids_by_uid: dict[Any, Sequence[int]] = {}
    for uid, prompt_ids in zip(uids, prompts, strict=True):
        prompt_ids_by_uid.setdefault(uid, prompt_ids)
    return {
        uid: tokenizer.decode(list(token_ids), skip_special_tokens=False) for uid, token_ids in prompt_ids_by_uid.items()
    }


class RunRecord:
    """Writes the metrics, rollouts and report of a run into its folder."""

    def __init__(self, folder: str | Path, *, keep_rollouts: int, report: bool, option: str) -> None:
        self.folder = RunFolder(folder, writes=WRITES)
        self.keep = keep_rollouts
        self.report = report
        self.option = option
        self.step = 0
        self.seconds = self.own_seconds = 0.0
        self._line: dict[str, Any] = {}
        self._recipe: Mapping[str, Any] | None = None

    @staticmethod
    def of(section: Mapping[str, Any], *, option: str) -> RunRecord | None:
        """Build a `RunRecord` from a user's options. Return None without a folder."""
        folder = section.get("folder")
        keep_every = section.get("keep_rollouts", 0)
        report = section.get("report", False)
        check_keeping(keep_every, report)
        refuse(
            {f"keep_rollouts and report need a folder; add {option}=runs/NAME.": folder is None and (keep_every or report)}
        )
        return None if folder is None else RunRecord(str(folder), keep_rollouts=keep_every, report=report, option=option)

    def recipe(self, scheme: Scheme, **settings: Any) -> dict[str, Any]:
        """Build the content of `recipe.yaml`. Settings of None are left out."""
        given_settings = {name: value for name, value in settings.items() if value is not None}
        recipe = {"task": SCRIPT, **scheme.plain(), **given_settings, "keep_rollouts": self.keep, "report": self.report}
        return json.loads(json.dumps(recipe, default=as_list_or_text))  # JSON turns tuples into lists

    def check(self, recipe: Mapping[str, Any], *, step: int | None) -> None:
        """Refuse a folder that holds another run or other files. `step` is None if the trainer numbers no batches."""
        folder_path = self.folder.path
        if not is_run(folder_path):
            check_free(folder_path, writes=WRITES, option=self.option)
            return
        if step is None:
            raise DataError(
                f"'{folder_path}' already holds a run. The new run cannot continue it, because this trainer does not "
                f"say with which batch it starts. Give another {self.option}, or move the old run away."
            )
        if step == 0:
            raise DataError(
                f"'{folder_path}' already holds a run, so a new run cannot start there at step 0. Give another "
                f"{self.option}, move the old run away, or resume the old run from a checkpoint."
            )
        saved_recipe = yaml.safe_load((folder_path / "recipe.yaml").read_text(encoding="utf-8")) or {}
        saved_rule, new_rule = (lasting(hidden({name: x.get(name) for name in RULE})) for x in (saved_recipe, recipe))
        if names := changed_names(saved_rule, new_rule, RULE):
            raise DataError(
                f"The run in '{folder_path}' was trained with another {', '.join(names)}, so you cannot continue "
                f"it in this folder. Give another {self.option}."
            )

    def begin(self, recipe: Mapping[str, Any], *, step: int, tokenizer: Any) -> None:
        """Start the run folder, or continue it from a step."""
        folder_path = self.folder.path
        self.step, self._recipe = step, recipe
        self.folder.begin(recipe, step=step, history=metrics_until(folder_path, step))
        with whole_folder(folder_path / "tokenizer"):
            tokenizer.save_pretrained(str(folder_path / "tokenizer"))

    def add_batch(
        self,
        step: int,
        result: StepResult,
        scheme: Scheme,
        *,
        recipe: Mapping[str, Any],
        tokenizer: Any,
        rollouts: Callable[[], Rollouts],
        ranks: Ranks | None = None,
    ) -> None:
        """Write a batch's metrics, and every `keep` steps also its rollouts. All processes call it; one writes."""
        ranks = ranks or Ranks(0, lambda own: [own])
        is_writer = ranks.rank == 0
        all_rows = result.own.everyone
        if self._recipe is None:
            self.check(recipe, step=step - 1)
            ranks.gather(None)  # no process writes before all have checked the folder
            self._recipe = recipe
            if is_writer:
                self.begin(recipe, step=step - 1, tokenizer=tokenizer)
        if self.keep and step % self.keep == 0:
            rollouts_by_rank = ranks.gather(rollouts().recorded(step=step))
            if is_writer:
                self.folder.write_rollouts(rollouts_by_rank, step=step)
        if is_writer:
            self.add(step, {**result.metrics, **reward_means(all_rows.worth_nm(scheme), scheme.names)})

    def add(self, step: int, values: Mapping[str, Any]) -> None:
        """Add metrics to a step's line of `metrics.jsonl`. The line is written when metrics of the next step arrive."""
        if self._line and self._line["step"] != step:
            self.flush()
        self._line |= {"step": step, **{name: v for name, v in values.items() if isinstance(v, int | float) and v == v}}

    def add_update(self, logged: Mapping[str, Any], names: Mapping[str, str]) -> None:
        """Add the metrics of the last policy update to `metrics.jsonl`. `names` maps spanwise's names to the trainer's."""
        if self._line:
            self.add(self._line["step"], {name: logged[key] for name, key in names.items() if key in logged})

    def flush(self) -> None:
        """Append the metrics collected for a step to `metrics.jsonl`, as one line."""
        if self._line and self._recipe is not None:
            self.own_seconds += self._line.get("spanwise/seconds") or 0.0
            self.step = max(self.step, self._line["step"])
            self.folder.add_metrics(self._line)
        self._line = {}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Lock the run folder during training, and complete its files even if training fails."""
        start_time = time.perf_counter()
        training_has_finished = False
        with sole_writer(self.folder.path, option=self.option):
            try:
                yield
                training_has_finished = True
            finally:
                self.flush()
                if self._recipe is not None and training_has_finished:
                    run_summary = {name: self._recipe.get(name) for name in ("method", "task", "seed")}
                    run_summary |= {"steps": self.step, "seconds": time.perf_counter() - start_time}
                    if self.seconds:  # verl and SkyRL do not measure the time that spanwise takes
                        spanwise_share = self.own_seconds / self.seconds
                        run_summary |= {"spanwise_seconds": self.own_seconds, "spanwise_share": spanwise_share}
                    self.folder.write_summary(run_summary)
                if self._recipe is not None and self.report:
                    _make_report(self.folder.path)
                self._recipe = None


def _make_report(folder: Path) -> None:
    """Make report.html in a separate process, so that errors cannot stop the training. Warn if it fails."""
    report_command = [sys.executable, "-m", "spanwise.cli", "report", str(folder)]
    process = subprocess.run(report_command, capture_output=True, text=True, errors="replace", check=False)
    if process.returncode:
        error_lines = process.stderr.strip().splitlines() or [f"exit status {process.returncode}"]
        failure_reason = error_lines[-1].removeprefix("Error: ").removesuffix(".")
        warnings.warn(
            f"report.html could not be made: {failure_reason}. All data is saved. To try again, run spanwise report {folder}",
            UserWarning,
            stacklevel=2,
        )
