"""`Recorder`: what a training run leaves behind while it goes on: progress, metrics, rollouts, evaluations, the summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from accelerate.utils import gather_object
from rich.console import Console

from spanwise.commands.eval.evaluate import evaluate
from spanwise.commands.shared.display import Live
from spanwise.commands.shared.fitted import say
from spanwise.commands.shared.samples import Samples, unmeasured
from spanwise.disk import write_text
from spanwise.engines.trl.keeping import BatchCallback
from spanwise.explain import CAUSES, SHOWN_BY, alarms
from spanwise.measure import ece
from spanwise.recipe import Recipe
from spanwise.rollouts import Rollouts
from spanwise.rollouts.folder import RunFolder, metrics_until
from spanwise.tasks import Task
from spanwise.types import Scores

#: What `summary.json` keeps of a generation batch.
_BATCH = ("step", "malformed", "accuracy", "ece")


class Recorder(BatchCallback):
    """Follows a run: progress line, metrics, rollouts, evaluations."""

    def __init__(
        self,
        recipe: Recipe,
        task: Task,
        folder: RunFolder,
        console: Console,
        title: str,
        history: Sequence[Mapping[str, Any]] = (),
        *,
        per_batch: int,
    ) -> None:
        super().__init__(folder, per_batch=per_batch, keep_rollouts=recipe.keep_rollouts)
        self.recipe, self.task = recipe, task
        self.console, self.live = console, Live(console, title, recipe.steps)
        self.evaluations = [{"step": line["step"], **line["evaluation"]} for line in history if "evaluation" in line]
        self.spanwise_seconds = 0.0
        self.tokens = 0
        self._scores: Scores | None = None
        self._of_modes: set[str] = set()
        self._warned: set[str] = set()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure where the run starts from, unless the run that it resumes did."""
        if not self.evaluations:
            self._evaluate(state.global_step // self.per_batch)

    def batch_ended(self, step: int, rollouts: Rollouts | None) -> None:
        """Leave the files of modes behind, each once it is there; remember the scores of the batch, and count its tokens."""
        if self.trainer.accelerator.is_main_process:
            files = {name: text for part in self.trainer.parts.values() for name, text in part.files.items()}
            for name in files.keys() - self._of_modes:
                write_text(self.folder.path / name, files[name])
            self._of_modes |= files.keys()
        if rollouts is not None:
            everyone = gather_object([(rollouts.reading.scores, int((rollouts.batch.mask_nt != 0).sum()))])
            self._scores = Scores.joined([scores for scores, _ in everyone])
            self.tokens += sum(tokens for _, tokens in everyone)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Write the metrics of a step, show them, evaluate when it is time."""
        del state.log_history[:-1]  # metrics.jsonl has them, and a run of weeks has many
        if not state.is_world_process_zero or not logs or "loss" not in logs:
            return
        step = state.global_step // self.per_batch
        self.spanwise_seconds += logs.get("spanwise/seconds") or 0.0
        values = self._batch_figures(logs)
        line = {"step": step, **values, **{k: v for k, v in logs.items() if isinstance(v, (int, float))}}
        self.folder.add_metrics(line)
        speed = self.tokens / max(self.step_seconds, 1e-9)
        rewards = {k.split("/")[1]: v for k, v in logs.items() if k.startswith("rewards/") and k.endswith("/mean")}
        self.live.step(step, {**rewards, **values, "tokens/s": float(round(speed))})
        if step < self.recipe.steps and self.recipe.eval_every and step % self.recipe.eval_every == 0:
            self._evaluate(step)

    def summary(self, *, seconds: float) -> dict[str, Any]:
        """Evaluate the final model and put the run into one dictionary.

        Of a resumed run, the seconds and speeds are those since it was resumed; where it does not know its first evaluation, the
        figures of `start` are None.
        """
        samples, steps = self._measure(self.recipe.eval_samples), self.recipe.steps
        final = samples.figures()
        lines = metrics_until(self.folder.path, steps)  # of the main process, which alone writes the summary
        batches = [
            {k: v for k, v in line.items() if k in _BATCH or (k.startswith("rewards/") and k.endswith("/mean"))}
            for line in lines
            if "evaluation" not in line
        ]
        if self.trainer.accelerator.is_main_process:
            samples.write(self.folder.path)
            self.folder.add_metrics({"step": steps, "final": final})
        first, training = self.evaluations[0], max(self.step_seconds, 1e-9)
        return {
            **{name: getattr(self.recipe, name) for name in ("method", "task", "seed", "steps")},
            "start": {k: v if first["step"] == 0 else None for k, v in first.items() if k != "step"},
            "final": final,
            "curve": [*self.evaluations, {"step": steps, **final}],
            "batches": batches,
            "seconds": seconds,
            "step_seconds": self.step_seconds,
            "spanwise_seconds": self.spanwise_seconds,
            "spanwise_share": self.spanwise_seconds / training,
            "tokens_per_second": self.tokens / training,
        }

    def _batch_figures(self, logs: dict[str, Any]) -> dict[str, Any]:
        """Accuracy, ECE and malformed share of the generation batch just trained on."""
        values: dict[str, Any] = {"malformed": logs.get("credit/malformed"), "accuracy": logs.get("rewards/correct/mean")}
        names = self._scores.names if self._scores else ()
        if self._scores and "correct" in names:
            for name in ("brier", "log_score"):
                if name in names:
                    values["ece"] = _batch_ece(self._scores, names.index("correct"), names.index(name))
        return values

    def _evaluate(self, step: int) -> None:
        """Measure the policy and say what is wrong, each thing once and with its usual cause; the start may be what it is."""
        values = self._measure(2).figures()
        self.evaluations.append({"step": step, **values})
        if not self.trainer.accelerator.is_main_process:
            return
        self.folder.add_metrics({"step": step, "evaluation": values})
        absent = unmeasured(self.task.layout.keys, self.recipe.answer_tags, scored=self.recipe.is_scored)
        wrong = alarms({name: value for name, value in values.items() if name not in absent}).values()
        for why in dict.fromkeys(why for why in wrong if step and why not in self._warned):
            say(self.console, f"Warning: step {step}: {why} ({SHOWN_BY[why]} {values[SHOWN_BY[why]]:.3f}). {CAUSES[why]}")
        self._warned |= set(wrong)

    def _measure(self, samples: int) -> Samples:
        """Evaluate the policy; its scores are read once the trainer knows what they are counted from."""
        trainer = self.trainer
        return evaluate(
            trainer.accelerator.unwrap_model(trainer.model), trainer.processing_class, self.task, self.recipe,
            prompts=self.recipe.eval_prompts, samples=samples,
            scored=next((part.mode for part in trainer.parts.values() if part.mode.readable), None),
        )  # fmt: skip


def _batch_ece(scores: Scores, correct: int, report: int) -> float | None:
    """ECE of a batch, of the confidences that its scorer read."""
    if scores.stated_nm is None:
        return None
    right_n, stated_n = scores.reward_nm[:, correct], scores.stated_nm[:, report]
    known_n = ~(right_n.isnan() | stated_n.isnan())
    return ece(stated_n[known_n], right_n[known_n]) if bool(known_n.any()) else None
