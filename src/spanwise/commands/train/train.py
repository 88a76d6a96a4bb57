"""`spanwise train`: train a model by a recipe. A `Recorder` writes metrics and rollouts into the run's folder."""

import os
import re
import time
import warnings
from collections.abc import Mapping, Sequence
from math import gcd, isnan
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from rich.console import Console
from transformers import AutoProcessor, AutoTokenizer, PrinterCallback, ProcessorMixin, ProgressCallback, TrainerCallback
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK, get_available_reporting_integrations

from spanwise.commands.eval.evaluate import evaluate
from spanwise.commands.shared.display import figure_table, pull_note
from spanwise.commands.shared.fitted import say
from spanwise.commands.shared.progress import Live
from spanwise.commands.shared.samples import Samples, unmeasured
from spanwise.commands.shared.task import make_task
from spanwise.commands.train.place import history_of, run_folder, task_name
from spanwise.credit import method
from spanwise.disk import whole_folder, write_text
from spanwise.engines.trl import SpanGRPOConfig, SpanGRPOTrainer
from spanwise.engines.trl.keeping import BatchCallback, steps_per_batch
from spanwise.errors import DataError, RecipeError, check_known, first_line
from spanwise.explain.alarms import CAUSES, SHOWN_BY, alarms
from spanwise.measure import ece
from spanwise.modes.critic.config import CRITIC
from spanwise.modes.critic.critic import megabytes
from spanwise.objective import HIDDEN, hidden_names
from spanwise.recipe import EMBEDDED, Recipe, answer_layout, resolved, scheme_of
from spanwise.report.train import unmeasured_sentences
from spanwise.rollouts import Rollouts
from spanwise.rollouts.folder import ONE_PROMPT, RunFolder, metrics_until
from spanwise.tasks import Task, task_shape
from spanwise.types import Scores, join_rows

#: Maps each TRL option that the run sets itself to the recipe field that users set instead.
_OWN_FIELD = {
    "max_steps": "steps", "save_steps": "save_every", "logging_steps": "steps (the log has a line per generation batch)",
    "output_dir": "output", "num_generations": "group_size", "epsilon": "clip", "entropy_coef": "entropy",
    "use_adaptive_entropy": "entropy_target", "generation_batch_size": "prompts", "per_device_train_batch_size": "micro_batch",
    "steps_per_generation": "mini_batches", "gradient_accumulation_steps": "mini_batches",
    **{name: name for name in (
        "temperature", "max_completion_length", "learning_rate", "warmup_steps", "entropy_target", "seed", "keep_rollouts",
        "report", "report_to",
    )},
}  # fmt: skip


def train(
    recipe: Recipe,
    *,
    console: Console | None = None,
    resume: str | None = None,
    overwrite: bool = False,
    title: str = "train",
    callbacks: Sequence[TrainerCallback] = (),
) -> dict[str, Any]:
    """Train as the recipe says, and write the run's folder. Return the content of `summary.json`."""
    console = console or Console()
    if secret_names := hidden_names({"trainer": recipe.trainer, "objectives": recipe.objectives}):
        secret_note = f"Secrets are not saved, so the recipe holds {HIDDEN} in place of {' and '.join(secret_names)}."
        if [name for name in secret_names if not name.startswith("trainer.")]:
            raise RecipeError(f"{secret_note} Rewards need the real secrets. Write the secrets into 'objectives'.")
        say(
            console, f"{secret_note} Training starts without secrets. If TRL needs a secret, set it in 'trainer', or log in."
        )
        recipe = recipe.model_copy(update={"trainer": _drop_hidden(recipe.trainer)})
    torch.set_num_threads(recipe.threads)
    start_time = time.perf_counter()
    check_recipe(recipe)
    task_layout, max_length = task_shape(recipe)
    # Build the scheme before the warm start, so that a bad recipe is refused early.
    scheme = scheme_of(recipe, answer_layout(recipe, task_layout), max_length)
    with run_folder(recipe, resume=resume, overwrite=overwrite, console=console) as (run_path, checkpoint):
        recipe = recipe.model_copy(update={"output": str(run_path)})
        folder = RunFolder(run_path)
        task = make_task(recipe, console)
        trainer_args = trainer_config(recipe, task)
        resolved_recipe = resolved(recipe, scheme)
        updates_per_batch = int(trainer_args.logging_steps)  # optimizer steps per generation batch
        resumed_step, earlier_metrics = None, []
        if checkpoint is not None:
            resumed_step, earlier_metrics = history_of(checkpoint, resolved_recipe, per_batch=updates_per_batch)
        recorder = Recorder(recipe, task, folder, console, title, earlier_metrics, per_batch=updates_per_batch)
        trainer = recorder.trainer = SpanGRPOTrainer(
            model=task.model,
            args=trainer_args,
            train_dataset=task.train,
            processing_class=AutoTokenizer.from_pretrained(task.model, padding_side="left", trust_remote_code=False),
            scheme=scheme,
            critic=recipe.modes.get("critic"),
            callbacks=[recorder, *callbacks],
        )
        trainer.settings = resolved_recipe
        for callback_class in (PrinterCallback, ProgressCallback) if trainer_args.log_metrics == "few" else ():
            trainer.remove_callback(callback_class)  # the recorder shows the progress in place of TRL's callbacks
        is_main_process = trainer.accelerator.is_main_process
        critic = trainer.critic
        if is_main_process:
            folder.begin(resolved_recipe, step=resumed_step, history=earlier_metrics)
            if critic is not None:
                policy = trainer.accelerator.unwrap_model(trainer.model)
                critic_mb, policy_mb = megabytes(critic.model), megabytes(policy)
                note = f"Weights, gradients and optimizer take {critic_mb:.3g} MB (critic) and {policy_mb:.3g} MB (policy)."
                say(console, note)
            say(console, *filter(None, [pull_note(scheme, group_size=recipe.group_size)]))
        try:
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        finally:
            recorder.live.stop()
        with whole_folder(run_path / "model"):
            trainer.save_model(str(run_path / "model"))
            if is_main_process and hasattr(trainer.accelerator.unwrap_model(trainer.model).config, "vision_config"):
                _save_processor(task.model, trainer.processing_class, run_path / "model", console)
        if is_main_process and critic is not None:
            with whole_folder(run_path / CRITIC):
                critic.save(run_path / CRITIC, trainer.processing_class, state=False)
        run_summary = recorder.summary(seconds=time.perf_counter() - start_time)
        if is_main_process:
            folder.write_summary(run_summary)  # written last, because summary.json marks the run as complete
            _show(run_summary, console, title=f"{title}: {run_path}", absent=recorder.absent)
            if recipe.report:
                # Imported only here, because the report's packages take a second to load.
                from spanwise.commands.report.report import report_folder

                say(console, f"Report: {report_folder(run_path)}")
    return run_summary


def _save_processor(source: str, tokenizer: Any, folder: Path, console: Console) -> None:
    """Save the processor of a model that also reads images, because transformers needs it to load such a model."""
    try:
        processor: Any = AutoProcessor.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # the model lacks files of its processor, or a package is missing
        say(console, f"The image processor of '{source}' is not saved ({first_line(error)}). Copy its files to '{folder}'.")
        return
    if isinstance(processor, ProcessorMixin):  # without a processor class for the model, transformers returns a tokenizer
        processor.tokenizer = tokenizer
        processor.save_pretrained(folder)


def _drop_hidden(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _drop_hidden(field_value) for name, field_value in value.items() if field_value != HIDDEN}
    return value


def _show(summary: Mapping[str, Any], console: Console, *, title: str, absent: Mapping[str, str]) -> None:
    """Print the figures of held-out prompts at start and end, and the time of the run."""
    figure_columns = {"start": summary["start"], "end": summary["final"]}
    if summary["intervals"]:
        figure_columns["95 %"] = {
            name: "unknown" if low == high else f"{low:.3f} to {high:.3f}"  # equal values at all prompts give no interval
            for name, (low, high) in summary["intervals"].items()
        }
    say(console, *figure_table(title, figure_columns, absent=absent), *unmeasured_sentences(absent))
    if not summary["tokens_per_second"]:
        console.print("No step was left to train.")
        return
    console.print(
        f"The run took {summary['seconds']:.0f} s. It trained on {summary['tokens_per_second']:.0f} tokens per second. "
        f"Finding blocks, scoring and credit took {summary['spanwise_share']:.2%} of the training time."
    )


def check_recipe(recipe: Recipe) -> None:
    """Refuse a recipe that cannot be trained: an unknown logger or option, a missing critic, or too many processes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warnings appear when training calls `check_steps` again
        for mode in recipe.modes.values():
            mode.check_steps(recipe.steps)
    logger_names = ["none", "all", *INTEGRATION_TO_CALLBACK]
    check_known("logger for report_to", recipe.report_to, logger_names)
    if recipe.report_to not in (*logger_names[:2], *get_available_reporting_integrations()):
        raise RecipeError(
            f"report_to is '{recipe.report_to}', which is not installed; install it, or set report_to to none."
        )
    if "critic" not in recipe.modes and "value_nt" in method(recipe.method).required:
        raise RecipeError(
            f"Method '{recipe.method}' needs a critic, but the recipe has none. Write critic: {{learning_rate: 1.0e-5}}, or "
            "use a method that compares completions, such as 'bae' or 'grpo'."
        )
    for name, value in recipe.trainer.items():
        check_known("trainer option", name, SpanGRPOConfig.__dataclass_fields__)
        if name in _OWN_FIELD:
            raise RecipeError(
                f"trainer: {{{name}: {value}}} is not possible, because the run sets {name} itself. Use the recipe's own field "
                f"instead: {_OWN_FIELD[name]}."
            )
        option_type = str(SpanGRPOConfig.__dataclass_fields__[name].type)
        if isinstance(value, str) and re.search(r"\b(int|float)\b", option_type) and "str" not in option_type:
            raise RecipeError(
                f"trainer: {{{name}: {value}}} is a text, but must be a number. YAML reads 1e-2 as a text; write 1.0e-2."
            )
    process_count = int(os.environ.get("WORLD_SIZE", "1"))
    mini_batch_size = recipe.prompts * recipe.group_size // recipe.mini_batches
    if mini_batch_size % (process_count * (recipe.micro_batch or 1)):
        raise RecipeError(
            f"{process_count} processes with micro-batches of {recipe.micro_batch or 1} cannot share the {mini_batch_size} "
            "completions of a mini-batch equally. Change the number of processes. Or change 'prompts', 'mini_batches' or "
            "'micro_batch' in the recipe."
        )


def trainer_config(recipe: Recipe, task: Task) -> SpanGRPOConfig:
    """Build the TRL configuration of a recipe. Options in `recipe.trainer` win over all others."""
    if len(task.train) < recipe.prompts:  # with too few prompts, TRL trains no step
        raise DataError(
            f"The dataset '{recipe.dataset}' has {len(task.train)} prompts to train on, but a step takes {recipe.prompts}. "
            f"(A fifth of its prompts, at least 1 and at most 512, is kept for evaluation.) "
            f"Add rows, or set --prompts to {len(task.train)}."
        )
    has_no_gpu = not torch.cuda.is_available()
    process_count = int(os.environ.get("WORLD_SIZE", "1"))
    mini_batch_size = recipe.prompts * recipe.group_size // recipe.mini_batches
    rank_batch_size = mini_batch_size // process_count
    default_micro_batch_size = rank_batch_size if recipe.task in EMBEDDED else gcd(rank_batch_size, 4)
    micro_batch_size = recipe.micro_batch or default_micro_batch_size
    accumulation_steps = mini_batch_size // (micro_batch_size * process_count)
    # Old transformers only know the name `gradient_checkpointing`, and a recipe may use it, too.
    has_new_option = "activation_checkpointing" in SpanGRPOConfig.__dataclass_fields__
    checkpointing_name = "gradient" if not has_new_option or "gradient_checkpointing" in recipe.trainer else "activation"
    recipe_options = {
        "output_dir": str(Path(recipe.output or "") / "checkpoints"),
        "per_device_train_batch_size": micro_batch_size,
        "gradient_accumulation_steps": accumulation_steps,
        "steps_per_generation": accumulation_steps * recipe.mini_batches,
        "num_generations": recipe.group_size,
        "max_completion_length": recipe.max_completion_length or task.max_completion_length,
        "learning_rate": recipe.learning_rate,
        "lr_scheduler_type": "constant_with_warmup",
        "epsilon": recipe.clip,
        "entropy_coef": recipe.entropy,
        "use_adaptive_entropy": recipe.entropy_target is not None,
        "entropy_target": recipe.entropy_target or 0.0,
        "entropy_coef_delta": 5e-4,
        "temperature": recipe.temperature,
        "seed": recipe.seed,
        "save_strategy": "steps" if recipe.save_every else "no",
        "use_cpu": has_no_gpu,
        "bf16": not has_no_gpu,
        f"{checkpointing_name}_checkpointing": not has_no_gpu,
        "report_to": recipe.report_to,
        "disable_tqdm": True,
    }
    given_options = {**recipe_options, **recipe.trainer}
    updates_per_batch = steps_per_batch(SpanGRPOConfig(**given_options))
    step_options = {
        "max_steps": recipe.steps * updates_per_batch,
        "warmup_steps": recipe.warmup_steps * updates_per_batch,
        "logging_steps": updates_per_batch,
        "save_steps": recipe.save_every * updates_per_batch or 1,
    }
    return SpanGRPOConfig(**{**step_options, **given_options})


class Recorder(BatchCallback):
    """A trainer callback that shows and writes the progress of a run."""

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
        self.absent = unmeasured(task.layout, recipe.answer_tags, scored=recipe.is_scored)
        resumed_step = history[-1]["step"] if history else 0
        self.console, self.live = console, Live(console, title, recipe.steps, first=resumed_step)
        self.evaluations = [{"step": line["step"], **line["evaluation"]} for line in history if "evaluation" in line]
        self.spanwise_seconds = 0.0
        self.tokens = 0
        self._scores: Scores | None = None
        self._written_files: set[str] = set()
        self._warned: set[str] = set()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Evaluate the policy before training, unless a resumed run already did."""
        if not self.evaluations:
            self._evaluate(state.global_step // self.per_batch)

    def batch_ended(self, step: int, rollouts: Rollouts | None) -> None:
        """Count the tokens and keep the scores of a generation batch. Also write the modes' files."""
        if self.trainer.accelerator.is_main_process:
            text_by_file = {name: text for part in self.trainer.parts.values() for name, text in part.files.items()}
            for name in text_by_file.keys() - self._written_files:
                write_text(self.folder.path / name, text_by_file[name])
            self._written_files |= text_by_file.keys()
        if rollouts is not None:
            rank_token_count = int((rollouts.batch.mask_nt != 0).sum())
            scores_and_counts = gather_object([(rollouts.reading.scores, rank_token_count)])
            self._scores = join_rows([scores for scores, _ in scores_and_counts])
            self.tokens += sum(token_count for _, token_count in scores_and_counts)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Write and show the metrics of a training step. Evaluate the policy every `eval_every` steps."""
        del state.log_history[:-1]  # TRL would keep all log lines in memory; metrics.jsonl has them
        if not logs or "loss" not in logs:
            return
        step = state.global_step // self.per_batch
        if state.is_world_process_zero:
            self._write_step(step, logs)
        # Every process evaluates, because processes that share the model's weights can only sample together.
        if step < self.recipe.steps and self.recipe.eval_every and step % self.recipe.eval_every == 0:
            self._evaluate(step)

    def _write_step(self, step: int, logs: dict[str, Any]) -> None:
        """Write and show the metrics of a training step."""
        self.spanwise_seconds += logs.get("spanwise/seconds") or 0.0
        batch_figures = self._batch_figures(logs)
        logged_numbers = {name: value for name, value in logs.items() if isinstance(value, (int, float))}
        self.folder.add_metrics({"step": step, **batch_figures, **logged_numbers})
        tokens_per_second = self.tokens / max(self.step_seconds, 1e-9)
        mean_rewards = {k.split("/")[1]: v for k, v in logs.items() if k.startswith("rewards/") and k.endswith("/mean")}
        self.live.step(step, {**mean_rewards, **batch_figures, "tokens/s": float(round(tokens_per_second))})

    def summary(self, *, seconds: float) -> dict[str, Any]:
        """Evaluate the final model, and return the content of the run's `summary.json`."""
        final_samples = self._measure(self.recipe.eval_samples)
        step_count = self.trainer.state.global_step // self.per_batch
        final_figures = final_samples.figures()
        final_intervals = _intervals(final_samples)
        curve_figure_names = ("step", "malformed", "accuracy", "ece")
        batch_figures = [
            {k: v for k, v in line.items() if k in curve_figure_names or (k.startswith("rewards/") and k.endswith("/mean"))}
            for line in metrics_until(self.folder.path, step_count)
            if "evaluation" not in line
        ]
        if self.trainer.accelerator.is_main_process:
            final_samples.write(self.folder.path)
            self.folder.add_metrics({"step": step_count, "final": final_figures, **final_intervals})
            self._keep_one_prompt(step_count)
        start_figures = self.evaluations[0]
        training_seconds = max(self.step_seconds, 1e-9)
        return {
            **{name: getattr(self.recipe, name) for name in ("method", "seed")},
            "steps": step_count,
            "task": task_name(self.recipe),
            "start": {k: v if start_figures["step"] == 0 else None for k, v in start_figures.items() if k != "step"},
            "final": final_figures,
            "intervals": final_intervals.get("intervals", {}),
            "curve": [*self.evaluations, {"step": step_count, **final_figures}],
            "batches": batch_figures,
            "seconds": seconds,
            "step_seconds": self.step_seconds,
            "spanwise_seconds": self.spanwise_seconds,
            "spanwise_share": self.spanwise_seconds / training_seconds,
            "tokens_per_second": self.tokens / training_seconds,
        }

    def _batch_figures(self, logs: dict[str, Any]) -> dict[str, Any]:
        """Return accuracy, ECE and the share of malformed completions of the last generation batch."""
        figures: dict[str, Any] = {"malformed": logs.get("credit/malformed"), "accuracy": logs.get("rewards/correct/mean")}
        reward_names = self._scores.names if self._scores else ()
        scoring_rule = next((name for name in ("log_score", "brier") if name in reward_names), None)
        if self._scores and "correct" in reward_names and scoring_rule is not None:
            figures["ece"] = batch_ece(self._scores, reward_names.index("correct"), reward_names.index(scoring_rule))
        return figures

    def _evaluate(self, step: int) -> None:
        """Evaluate the policy. After step 0, warn once about each suspicious figure, and name the usual cause."""
        evaluation_samples = self._measure(2)
        figures = evaluation_samples.figures()
        self.evaluations.append({"step": step, **figures})
        if not self.trainer.accelerator.is_main_process:
            return
        self.folder.add_metrics({"step": step, "evaluation": figures, **_intervals(evaluation_samples)})
        self._keep_one_prompt(step)
        measured_figures = {name: value for name, value in figures.items() if name not in self.absent}
        alarm_sentences = alarms(measured_figures).values()
        for why in dict.fromkeys(why for why in alarm_sentences if step and why not in self._warned):
            say(self.console, f"Warning at step {step}: {why} ({SHOWN_BY[why]} {figures[SHOWN_BY[why]]:.3f}). {CAUSES[why]}")
        self._warned |= set(alarm_sentences)

    def _keep_one_prompt(self, step: int) -> None:
        """Sample and write completions of the first held-out prompt. The report shows them for every evaluation."""
        if self.keep_rollouts and self.trainer.accelerator.num_processes == 1:
            rollouts = self.trainer.sample_rollouts([self.task.evaluation[0]])
            self.folder.write_rollouts([rollouts.recorded(step=step)], step=step, kind=ONE_PROMPT)

    def _measure(self, samples: int) -> Samples:
        """Evaluate the policy. Add self-rewarding scores if the trainer knows their reference log-probability."""
        trainer = self.trainer
        return evaluate(
            trainer.accelerator.unwrap_model(trainer.model), trainer.processing_class, self.task, self.recipe,
            prompts=self.recipe.eval_prompts, samples=samples, state=trainer.state,
            scored=next((part.mode for part in trainer.parts.values() if part.mode.readable), None),
        )  # fmt: skip


def _intervals(samples: Samples) -> dict[str, dict[str, list[float]]]:
    """Return the intervals of the mean rewards as a field of `metrics.jsonl`."""
    intervals = samples.mean_rewards()
    reward_bounds = {name: [interval.low, interval.high] for name, interval in intervals.items() if not isnan(interval.low)}
    return {"intervals": reward_bounds} if reward_bounds else {}


def batch_ece(scores: Scores, correct_index: int, confidence_index: int) -> float | None:
    """Compute the ECE of a batch from its verdicts and stated confidences."""
    if scores.stated_nm is None:
        return None
    verdict_n = scores.reward_nm[:, correct_index]
    confidence_n = scores.stated_nm[:, confidence_index]
    is_known_n = ~(verdict_n.isnan() | confidence_n.isnan())
    return ece(confidence_n[is_known_n], verdict_n[is_known_n]) if bool(is_known_n.any()) else None
