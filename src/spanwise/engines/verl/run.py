"""`VerlRun` credits the batches of a verl trainer by a recipe and writes its run folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from spanwise.disk import write_text
from spanwise.engines.checkpoints import restore_estimator
from spanwise.engines.shared import RunRecord, model_size, prompt_texts
from spanwise.engines.verl.carry import Rows, Shares, credited, loss_factor
from spanwise.engines.verl.plugin import say
from spanwise.errors import AlignmentError
from spanwise.modes.parts import RowPart, token_logp, with_token
from spanwise.pipeline import Reading
from spanwise.rollouts import Rollouts
from spanwise.scheme import Scheme
from spanwise.segment import Vocabulary, find_blocks
from spanwise.step import Step, StepResult

#: verl's names for the `Batch` fields per token: its critic's values, the old policy's log-probabilities, and ids.
TOKENS = {"value_nt": "values", "logp_nt": "old_log_probs", "ids_nt": "responses"}
#: verl's name for the option of the run folder.
OPTION = "+algorithm.spanwise.folder"
#: The file of a checkpoint that holds a method's memory of earlier batches.
MEMORY = "spanwise_memory.json"
#: The report's name of each update metric -> verl's name.
_UPDATE = {
    "loss": "actor/loss",
    "entropy": "actor/entropy",
    "grad_norm": "actor/grad_norm",
    "learning_rate": "actor/lr",
    "completions/mean_length": "response_length/mean",
    "completions/clipped_ratio": "response_length/clip_ratio",
}


class Sampled(NamedTuple):
    """The prompt, the ids before each response, the responses and the gold answers (or None) of all rows, also of padding."""

    uids: Sequence[Any]
    prompts: Sequence[Sequence[int]]
    ids_nt: Tensor
    answers: Sequence[Any]


class VerlRun:
    """Credits the batches of a verl trainer by a recipe, and writes its run folder."""

    def __init__(self, config: Any, scheme: Scheme, *, value_lam: float, parts: Mapping[str, RowPart]) -> None:
        actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
        self.config, self.scheme, self.value_lam, self.parts = config, scheme, value_lam, parts
        loss_settings = {"mode": actor.loss_agg_mode, "horizon": actor.get("loss_scale_factor")}
        self.reduction: dict[str, Any] = {**loss_settings, "mini_batch": actor.ppo_mini_batch_size * rollout.n}
        needed = scheme.needs | ({"logp_nt"} if parts else set())
        self.tokens = {name: field for name, field in TOKENS.items() if name in needed}
        self.step, self.record = Step(scheme), RunRecord.of(config.algorithm.spanwise, option=OPTION)
        self.result: StepResult | None = None
        self.targets: dict[str, Tensor] = {}  # by mode; the trainer writes them into the old log-probabilities
        self._vocabulary: Vocabulary | None = None

    def credit(self, rows: Rows, number: int, uids: Sequence[Any], mask_nt: Tensor) -> tuple[Tensor, Tensor]:
        """Return the advantages of a batch, scaled for verl's loss, and the critic's targets."""
        real, mode_fields, metrics = rows.real, {}, {}
        for name, part in self.parts.items():
            mode_fields |= part.fields(token_logp(rows.tokens["logp_nt"], rows.places[name])[real], number)
        adv_nt, return_nt, result = credited(rows, uids, mask_nt, self.step, value_lam=self.value_lam, more=mode_fields)
        for sentence in result.warnings:
            say(sentence)
        reading = result.own.reading
        adv_nt = adv_nt * self._loss_factor(rows, mask_nt, reading)
        return_nt = adv_nt if return_nt is None else return_nt
        for name, part in self.parts.items():
            weight_n, self.targets[name], mode_metrics = part.lesson(reading, self.scheme, number, rows=len(mask_nt))
            adv_nt[real] = with_token(adv_nt[real], rows.places[name][real], weight_n)
            metrics |= mode_metrics
        self.result = replace(result, metrics={**result.metrics, **metrics})
        return adv_nt, return_nt

    @property
    def takes_shares(self) -> bool:
        """Whether advantages of some rows can be computed without the tokens of the others; a run folder keeps all of them."""
        correction = self.config.algorithm.get("rollout_correction") or {}
        by_token = self.tokens or self.parts or "mask_nt" in self.scheme.needs
        return not (by_token or self.record or correction.get("rollout_is_batch_normalize"))

    def credit_rows(self, rows: Rows, uids: Sequence[Any]) -> Shares:
        """Compute the credit of a batch before its tokens are fetched; `credit_share` gives the advantages of some of its rows."""
        shares = Shares.of(rows, uids, self.step)
        for sentence in shares.batch.warnings:
            say(sentence)
        return shares

    def credit_share(self, shares: Shares, share: range, uids: Sequence[Any], mask_nt: Tensor) -> tuple[Tensor, Tensor]:
        """Return the advantages of a share of a batch, scaled for verl's loss, and the same as the critic's targets."""
        adv_nt = shares.advantages(share, mask_nt, self.scheme)
        adv_nt = adv_nt * self._loss_factor(shares.rows, mask_nt, shares.carried.reading)
        return adv_nt, adv_nt

    def _loss_factor(self, rows: Rows, mask_nt: Tensor, reading: Reading) -> Tensor:
        """Compute the factor on the advantages of some rows or all; V0 gives all."""
        # V0's loss divides by the tokens that rejection left, V1's by all sampled tokens.
        tokens = int((mask_nt if rows.session is None else reading.length_nk).sum())
        return loss_factor(mask_nt, rollouts=rows.rollouts, tokens=tokens, rows=len(rows.packed), **self.reduction)

    def save_memory(self, step: int) -> None:
        """Write the state of a method that remembers earlier batches into the checkpoint of a step."""
        if self.scheme.entry.stateful:
            estimator: Any = self.scheme.entry.estimator
            folder = Path(self.config.trainer.default_local_dir) / f"global_step_{step}"
            write_text(folder / MEMORY, json.dumps(estimator.state_dict()))

    def load_memory(self, step: int) -> None:
        """Load the state of a method that remembers earlier batches from the checkpoint that verl has just read."""
        if step == 0 or not self.scheme.entry.stateful:
            return
        trainer = self.config.trainer
        by_path = trainer.resume_mode == "resume_path"
        checkpoint = Path(trainer.resume_from_path if by_path else f"{trainer.default_local_dir}/global_step_{step}")
        file = checkpoint / MEMORY
        state = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
        restore_estimator(self.scheme, state, checkpoint)

    @contextmanager
    def training(self, trainer: Any, *, done: int | None = None) -> Iterator[None]:
        """Train inside the block; given the `done` steps of a checkpoint, first refuse a folder with another run."""
        if self.record is None:
            yield
            return
        with self.record.running():
            if done is not None:
                self.record.check(self._recipe(trainer), step=done * _updates(trainer))
            yield

    def keep(self, trainer: Any, rows: Rows, sampled: Callable[[], Sampled]) -> None:
        """Write the batch that was credited last to the run folder."""
        if self.record is None or self.result is None:
            return
        result, tokenizer = self.result, trainer.tokenizer
        number = (trainer.global_steps - 1) * _updates(trainer) + getattr(trainer, "local_trigger_step", 0) + 1

        def rollouts() -> Rollouts:
            batch, read_rows = sampled(), result.own
            ids_nt = read_rows.take(batch.ids_nt[rows.real])
            if self._vocabulary is None:
                self._vocabulary = vocabulary_of(self.config, tokenizer)
            # Reward workers send the places of blocks but no text, so the texts are read once more.
            spans, text = find_blocks(
                ids_nt, read_rows.spans.block_nt >= 0, layout=self.scheme.layout, vocabulary=self._vocabulary
            )
            differs_n = (spans.block_nt != read_rows.spans.block_nt).any(dim=1)
            if differs_n.any():
                raise AlignmentError(
                    f"Row {int(differs_n.int().argmax())}: the reward worker found other blocks than the trainer finds in the same "
                    f"tokens. Give both the same tokenizer (actor_rollout_ref.model.path) and the same recipe files."
                )
            read_batch = replace(
                read_rows, batch=replace(read_rows.batch, ids_nt=ids_nt), reading=replace(read_rows.reading, text=text)
            )
            real = sorted(rows.real, key=lambda n: 0 if rows.step is None else rows.step[n])  # the first row of each rollout
            texts = prompt_texts(tokenizer, [batch.uids[n] for n in real], [batch.prompts[n] for n in real])
            return self.step.rollouts(
                replace(result, own=read_batch),
                number=number,
                prompts=read_rows.repeat([texts[batch.uids[n]] for n in rows.real]),
                columns={"answer": read_rows.repeat([batch.answers[n] for n in rows.real])},
            )

        options: dict[str, Any] = {"recipe": self._recipe(trainer), "tokenizer": tokenizer, "rollouts": rollouts}
        self.record.add_batch(number, result, self.scheme, **options)

    def add_update(self, logged: Mapping[str, Any]) -> None:
        """Add what verl logs about an update to the run folder."""
        if self.record is not None:
            self.record.add_update(logged, _UPDATE)

    def _recipe(self, trainer: Any) -> dict[str, Any]:
        """Build the `recipe.yaml` of the run from the scheme and verl's configuration."""
        assert self.record is not None, "there is a folder"
        rollout, data = self.config.actor_rollout_ref.rollout, self.config.data
        return self.record.recipe(
            self.scheme,
            model=self.config.actor_rollout_ref.model.path,
            steps=trainer.total_training_steps * _updates(trainer),
            prompts=data.train_batch_size // _updates(trainer),
            group_size=max(2, rollout.n),
            temperature=float(rollout.temperature),
            seed=data.get("seed"),
        )


def vocabulary_of(config: Any, tokenizer: Any) -> Vocabulary:
    """Return the vocabulary of the policy's tokenizer."""
    return Vocabulary.from_tokenizer(tokenizer, size=model_size(config.actor_rollout_ref.model.get("path")))


def _updates(trainer: Any) -> int:
    """Return how many batches a step of verl has: several if trainer and rollouts use separate GPUs."""
    return getattr(trainer, "parameter_sync_step", 1)
