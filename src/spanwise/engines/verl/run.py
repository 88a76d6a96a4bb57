"""`VerlRun`: compute a recipe's credit for verl's batches, and write the run folder."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from spanwise.disk import write_text
from spanwise.engines.checkpoints import restore_estimator
from spanwise.engines.shared import RunRecord, model_vocabulary_size, prompt_texts
from spanwise.engines.verl.carry import ChunkedCredit, Rows, credited, loss_factor
from spanwise.engines.verl.plugin import say
from spanwise.errors import AlignmentError
from spanwise.modes.critic.config import CriticConfig
from spanwise.modes.parts import RowPart, token_logp, with_token
from spanwise.pipeline import Reading
from spanwise.rollouts import Rollouts
from spanwise.scheme import Scheme
from spanwise.segment import Vocabulary, find_blocks
from spanwise.step import Step, StepResult

#: Maps token fields of `Batch` to verl's names for them.
TOKENS = {"value_nt": "values", "logp_nt": "old_log_probs", "ids_nt": "responses"}
OPTION = "+algorithm.spanwise.folder"
#: The file in a checkpoint for a credit method that remembers earlier batches.
MEMORY = "spanwise_memory.json"
#: Maps metric names in spanwise's report to verl's names.
_UPDATE = {
    "loss": "actor/loss",
    "entropy": "actor/entropy",
    "grad_norm": "actor/grad_norm",
    "learning_rate": "actor/lr",
    "completions/mean_length": "response_length/mean",
    "completions/clipped_ratio": "response_length/clip_ratio",
}


class Sampled(NamedTuple):
    """The group ids, prompts, responses and gold answers of all rows, padding included."""

    uids: Sequence[Any]
    prompts: Sequence[Sequence[int]]
    ids_nt: Tensor
    answers: Sequence[Any]


class VerlRun:
    """Computes a recipe's credit for a verl trainer's batches, and writes the run folder."""

    def __init__(self, config: Any, scheme: Scheme, *, critic: CriticConfig, parts: Mapping[str, RowPart]) -> None:
        actor_config = config.actor_rollout_ref.actor
        self.config, self.scheme, self.critic, self.parts = config, scheme, critic, parts
        rows_per_mini_batch = actor_config.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n
        loss_settings = {"mode": actor_config.loss_agg_mode, "horizon": actor_config.get("loss_scale_factor")}
        self.reduction: dict[str, Any] = {**loss_settings, "mini_batch": rows_per_mini_batch}
        needed_fields = scheme.needs | ({"logp_nt"} if parts else set())
        self.tokens = {name: field for name, field in TOKENS.items() if name in needed_fields}
        self.step = Step(scheme)
        self.record = RunRecord.of(config.algorithm.spanwise, option=OPTION)
        self.result: StepResult | None = None
        self.targets: dict[str, Tensor] = {}  # for each mode: the log-probability that its token should get, by row
        self._vocabulary: Vocabulary | None = None
        self._has_noted_errors = False

    def credit(self, rows: Rows, number: int, uids: Sequence[Any], mask_nt: Tensor) -> tuple[Tensor, Tensor]:
        """Compute a batch's advantages and critic targets. Scaling undoes the normaliser of verl's loss."""
        real_indices = rows.real
        mode_fields, all_mode_metrics = {}, {}
        for name, mode_part in self.parts.items():
            mode_fields |= mode_part.fields(token_logp(rows.tokens["logp_nt"], rows.places[name])[real_indices], number)
        adv_nt, return_nt, step_result = credited(
            rows, uids, mask_nt, self.step, value_lam=self.critic.gae_lambda_value, fields=mode_fields
        )
        say(*step_result.warnings)
        reading = step_result.own.reading
        adv_nt = adv_nt * self._loss_factor(rows, mask_nt, reading)
        return_nt = adv_nt if return_nt is None else return_nt
        for name, mode_part in self.parts.items():
            mode_weight_n, target_logp_n, mode_metrics = mode_part.lesson(reading, self.scheme, number, rows=len(mask_nt))
            self.targets[name] = target_logp_n
            adv_nt[real_indices] = with_token(adv_nt[real_indices], rows.places[name][real_indices], mode_weight_n)
            all_mode_metrics |= mode_metrics
        self.result = replace(step_result, metrics={**step_result.metrics, **all_mode_metrics})
        return adv_nt, return_nt

    def note_missing(self, trainer: Any, rows: Rows) -> None:
        """Warn if verl trains without some completions. verl itself only logs the errors of its workers."""
        group_size = self.config.actor_rollout_ref.rollout.n
        rollout_count_by_uid = Counter(uid for uid, _ in {(rows.session or ())[n] for n in rows.real})
        expected_count = self.config.data.train_batch_size // _batches_per_step(trainer) * group_size
        missing_count = expected_count - sum(min(count, group_size) for count in rollout_count_by_uid.values())
        if missing_count > 0:
            self._note_errors(
                f"The batch of step {getattr(trainer, 'global_steps', 1)} lacks {missing_count} of {expected_count} "
                "completions, and verl trains without them. Perhaps their reward or agent loop failed or returned nothing. "
                "Or the dataset's column __rollout_n__ asks for fewer completions."
            )

    def note_replaced(self, metrics: Mapping[str, Any]) -> None:
        """Warn if prompts raised errors, so that verl replaced them. `metrics` are the metrics of a whole step."""
        if replaced_count := int(metrics.get("training/rollout_failure/evicted_samples", 0)):
            self._note_errors(
                f"Up to step {metrics['training/global_step']}, verl replaced {replaced_count} prompts whose reward or agent "
                "loop raised an error."
            )

    def _note_errors(self, sentence: str) -> None:
        if not self._has_noted_errors:
            self._has_noted_errors = True
            say(f"{sentence} For the errors, search verl's log for 'Error in _run_prompt'.")

    @property
    def allows_chunks(self) -> bool:
        """True if advantages can be computed in chunks of rows."""
        correction_config = self.config.algorithm.get("rollout_correction") or {}
        needs_tokens = self.tokens or self.parts or "mask_nt" in self.scheme.needs
        return not (needs_tokens or self.record or correction_config.get("rollout_is_batch_normalize"))

    def credit_chunk(self, batch: ChunkedCredit, chunk: range, uids: Any, mask_nt: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the advantages of some rows, scaled for verl's loss. Return them twice: as advantages and as returns."""
        adv_nt = batch.advantages(chunk, mask_nt, self.scheme)
        adv_nt = adv_nt * self._loss_factor(batch.rows, mask_nt, batch.unpacked.reading)
        return adv_nt, adv_nt

    def _loss_factor(self, rows: Rows, mask_nt: Tensor, reading: Reading) -> Tensor:
        """Return the factors on some rows' advantages that undo the normaliser of verl's loss."""
        token_count = int(mask_nt.sum())  # verl's V0 trainer divides the loss by the tokens that are not rejected.
        if rows.session is not None:  # `session` is set by verl's V1 trainer, which divides the loss by all sampled tokens.
            token_count = int(reading.length_nk.sum())
        return loss_factor(mask_nt, rollouts=rows.rollouts, tokens=token_count, rows=len(rows.packed), **self.reduction)

    def save_memory(self, step: int) -> None:
        """Write the state of a credit method that remembers earlier batches into a checkpoint."""
        if self.scheme.entry.stateful:
            estimator: Any = self.scheme.entry.estimator
            memory_file = Path(self.config.trainer.default_local_dir) / f"global_step_{step}" / MEMORY
            write_text(memory_file, json.dumps(estimator.state_dict()))

    def load_memory(self, step: int) -> None:
        """Load the state of a credit method that remembers earlier batches from a checkpoint."""
        if step == 0 or not self.scheme.entry.stateful:
            return
        section = self.config.trainer
        user_gave_path = section.resume_mode == "resume_path"
        checkpoint = Path(section.resume_from_path if user_gave_path else f"{section.default_local_dir}/global_step_{step}")
        memory_file = checkpoint / MEMORY
        estimator_state = json.loads(memory_file.read_text(encoding="utf-8")) if memory_file.is_file() else None
        restore_estimator(self.scheme, estimator_state, checkpoint)

    @contextmanager
    def training(self, trainer: Any, *, done: int | None = None) -> Iterator[None]:
        """Lock the run folder during training. Refuse a folder of another run, unless `done` (finished steps) is None."""
        self._check_steps(trainer.total_training_steps)
        with nullcontext() if self.record is None else self.record.running():
            if self.record is not None and done is not None:
                self.record.check(self._recipe(trainer), step=done * _batches_per_step(trainer))
            yield

    def _check_steps(self, step_count: int) -> None:
        """Check that a run that trains has enough steps to train its modes, such as LaSeR, and the policy."""
        trainer_config = self.config.trainer
        if trainer_config.get("val_only") and trainer_config.get("val_before_train", True):
            return
        for mode in self.scheme.modes:
            mode.check_steps(step_count)
        if trainer_config.critic_warmup > step_count:
            say(
                f"The policy never trains. trainer.critic_warmup lets it start in step {trainer_config.critic_warmup}, but "
                f"the run has {step_count} steps. Lower trainer.critic_warmup, or train longer."
            )

    def keep(self, trainer: Any, rows: Rows, sampled: Callable[[], Sampled]) -> None:
        """Write the metrics of the last batch to the run folder, and its rollouts if due."""
        if self.record is None or self.result is None:
            return
        step_result = self.result
        tokenizer = trainer.tokenizer
        earlier_batch_count = (trainer.global_steps - 1) * _batches_per_step(trainer)
        batch_number = earlier_batch_count + getattr(trainer, "local_trigger_step", 0) + 1

        def rollouts() -> Rollouts:
            sampled_rows = sampled()
            scored_batch = step_result.own
            ids_nt = scored_batch.take(sampled_rows.ids_nt[rows.real])
            if self._vocabulary is None:
                self._vocabulary = vocabulary_of(self.config, tokenizer)
            # Reward workers do not send the blocks' texts, so find them in the tokens again.
            trainer_spans, block_text = find_blocks(
                ids_nt, scored_batch.spans.block_nt >= 0, layout=self.scheme.layout, vocabulary=self._vocabulary
            )
            row_differs_n = (trainer_spans.block_nt != scored_batch.spans.block_nt).any(dim=1)
            if row_differs_n.any():
                raise AlignmentError(
                    f"Row {int(row_differs_n.int().argmax())}: the reward worker and the trainer found different blocks in "
                    "the same tokens. Give both the same tokenizer (actor_rollout_ref.model.path) and the same recipe files."
                )
            completed_batch = replace(
                scored_batch,
                batch=replace(scored_batch.batch, ids_nt=ids_nt),
                reading=replace(scored_batch.reading, text=block_text),
            )
            # Put each rollout's first row first, because `prompt_texts` reads each prompt from the first row with its id.
            output_numbers = rows.output_number or [0] * len(rows.packed)
            row_order = sorted(rows.real, key=lambda n: output_numbers[n])
            uids, prompt_ids = ([column[n] for n in row_order] for column in (sampled_rows.uids, sampled_rows.prompts))
            prompt_by_uid = prompt_texts(tokenizer, uids, prompt_ids)
            return self.step.rollouts(
                replace(step_result, own=completed_batch),
                number=batch_number,
                prompts=scored_batch.repeat([prompt_by_uid[sampled_rows.uids[n]] for n in rows.real]),
                columns={"answer": scored_batch.repeat([sampled_rows.answers[n] for n in rows.real])},
            )

        recipe = self._recipe(trainer)
        self.record.add_batch(batch_number, step_result, self.scheme, recipe=recipe, tokenizer=tokenizer, rollouts=rollouts)

    def add_update(self, logged: Mapping[str, Any]) -> None:
        """Add verl's metrics of a policy update to the run folder."""
        if self.record is not None:
            self.record.add_update(logged, _UPDATE)

    def _recipe(self, trainer: Any) -> dict[str, Any]:
        """Build the content of the run's `recipe.yaml`."""
        assert self.record is not None, "there is a folder"
        rollout_config = self.config.actor_rollout_ref.rollout
        return self.record.recipe(
            self.scheme,
            model=self.config.actor_rollout_ref.model.path,
            steps=trainer.total_training_steps * _batches_per_step(trainer),
            prompts=self.config.data.train_batch_size // _batches_per_step(trainer),
            group_size=max(2, rollout_config.n),
            temperature=float(rollout_config.temperature),
            seed=self.config.data.get("seed"),
        )


def vocabulary_of(config: Any, tokenizer: Any) -> Vocabulary:
    """Return the vocabulary of the policy's tokenizer."""
    return Vocabulary.from_tokenizer(tokenizer, size=model_vocabulary_size(config.actor_rollout_ref.model.get("path")))


def _batches_per_step(trainer: Any) -> int:
    """Return the number of batches in a step of verl. There are several if rollouts are sampled on separate GPUs."""
    return getattr(trainer, "parameter_sync_step", 1)
