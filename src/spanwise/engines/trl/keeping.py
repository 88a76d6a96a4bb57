"""Write the credit of a TRL run into TRL's table of completions and a run folder."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any

from accelerate.utils import gather_object
from jaxtyping import Bool
from torch import Tensor
from transformers import TrainerCallback
from trl.trainer.grpo_config import GRPOConfig

from spanwise.engines.shared import RunRecord
from spanwise.errors import RecipeError
from spanwise.rollouts import Rollouts
from spanwise.rollouts.folder import RunFolder
from spanwise.scheme import Scheme
from spanwise.types import Credit

_CONSOLE_METRICS = re.compile(
    r"(eval_)?(loss|reward|rewards/.*/mean|entropy|kl|completions/(mean_length|clipped_ratio)|credit/malformed)"
    r"|grad_norm|learning_rate|epoch|train_.*|eval_(runtime|.*_per_second)"
)


def few_in(callback_class: Any) -> TrainerCallback:
    """Build a console callback that prints only a few of the metrics."""

    class Few(callback_class):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            shown_metrics = {name: value for name, value in (logs or {}).items() if _CONSOLE_METRICS.fullmatch(name)}
            super().on_log(args, state, control, logs=shown_metrics, **kwargs)

    return Few()


def log_credit(logs: Mapping[str, Any], credit: Credit, present_nk: Bool[Tensor, "n k"], scheme: Scheme) -> str:
    """Write each completion's credit into TRL's table of completions: the sum, and the credit of each block."""
    missing_columns = [name for name in ("advantages", "extra") if name not in logs]
    if missing_columns:
        return (
            f"This TRL version's table of completions (log_completions) lacks {' and '.join(map(repr, missing_columns))}, so "
            "it cannot show the credit of blocks. Training is not affected. To save this credit, set keep_rollouts=10."
        )
    advantage_column = logs["advantages"]
    for _ in range(min(len(advantage_column), len(present_nk))):
        advantage_column.pop()
    advantage_column.extend((credit.block_nk.sum(dim=1) + credit.stop_n).tolist())
    for k, name in enumerate(scheme.layout.names):
        credit_presence_pairs = zip(credit.block_nk[:, k].tolist(), present_nk[:, k].tolist(), strict=True)
        logs["extra"][f"credit/{name}"].extend(value if is_present else None for value, is_present in credit_presence_pairs)
    logs["extra"]["credit/stop"].extend(credit.stop_n.tolist())
    return ""


def steps_per_batch(args: GRPOConfig) -> int:
    """Return the number of optimizer steps per generation batch. Refuse a batch that does not fill whole steps."""
    pass_count, micro_batch_count = args.num_iterations, args.steps_per_generation or 1
    if pass_count < 1 or (micro_batch_count * pass_count) % args.gradient_accumulation_steps:
        raise RecipeError(
            f"steps_per_generation ({micro_batch_count}) times num_iterations ({pass_count}) must be a positive multiple of "
            f"gradient_accumulation_steps ({args.gradient_accumulation_steps}), so that a generation batch fills whole "
            "optimizer steps."
        )
    return micro_batch_count * pass_count // args.gradient_accumulation_steps


class BatchCallback(TrainerCallback):
    """Writes the rollouts of every k-th generation batch."""

    trainer: Any

    def __init__(self, folder: RunFolder, *, per_batch: int, keep_rollouts: int) -> None:
        self.folder, self.per_batch, self.keep_rollouts = folder, per_batch, keep_rollouts
        self.step_seconds = self._started = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start to measure the time of an optimizer step."""
        self._started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add up the time of optimizer steps. After the last step of a generation batch, write its rollouts."""
        self.step_seconds += time.perf_counter() - self._started
        if state.global_step % self.per_batch:
            return
        batch_number = state.global_step // self.per_batch
        trained_rollouts = self.trainer._trained_rollouts
        self.batch_ended(batch_number, trained_rollouts)
        if trained_rollouts is not None and self.keep_rollouts and batch_number % self.keep_rollouts == 0:
            rollouts_of_ranks = gather_object([trained_rollouts.recorded(step=batch_number)])
            if state.is_world_process_zero:
                self.folder.write_rollouts(rollouts_of_ranks, step=batch_number)

    def batch_ended(self, step: int, rollouts: Rollouts | None) -> None:
        """Called in every process after the last step of a generation batch, for subclasses to override."""


class Keeping(BatchCallback):
    """Writes the run folder of a `SpanGRPOTrainer` into its `output_dir`. Each generation batch gets a line of metrics."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        args = trainer.args
        self.record = RunRecord(args.output_dir, keep_rollouts=args.keep_rollouts, report=args.report, option="output_dir")
        super().__init__(self.record.folder, per_batch=steps_per_batch(args), keep_rollouts=args.keep_rollouts)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin or continue the run folder. First, every process refuses a folder that holds another run."""
        first_batch_number = state.global_step // self.per_batch
        group_size = args.num_generations or 1
        recipe = self.record.recipe(
            self.trainer.scheme,
            model=str(getattr(getattr(self.trainer.model, "config", None), "_name_or_path", "")) or None,
            steps=-(-state.max_steps // self.per_batch),
            prompts=max(1, (args.generation_batch_size or group_size) // group_size),
            group_size=group_size,
            learning_rate=args.learning_rate if 0 < args.learning_rate <= 1 else None,
            temperature=args.temperature,
            max_completion_length=args.max_completion_length,
            seed=args.seed,
        )
        self.record.check(recipe, step=state.global_step)
        self.trainer.accelerator.wait_for_everyone()  # no process writes before all have checked the folder
        if state.is_world_process_zero:
            self.record.begin(recipe, step=first_batch_number, tokenizer=self.trainer.processing_class)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the metrics of the previous generation batch before a new one begins."""
        if state.global_step % self.per_batch == 0:
            self.record.flush()
        super().on_step_begin(args, state, control, **kwargs)

    def batch_ended(self, step: int, rollouts: Rollouts | None) -> None:
        """Record the metrics of a generation batch after its last optimizer step."""
        self.record.seconds = self.step_seconds
        if self.trainer.accelerator.is_main_process:
            self.record.add(step, self.trainer.last_metrics)

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        """Add TRL's metrics to metrics.jsonl. TRL may log means over many batches, so skip the names of `last_metrics`."""
        if state.is_world_process_zero and logs and "loss" in logs:
            trl_metrics = {name: value for name, value in logs.items() if name not in self.trainer.last_metrics}
            self.record.add(-(-state.global_step // self.per_batch), trl_metrics)
