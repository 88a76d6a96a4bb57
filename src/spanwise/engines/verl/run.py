"""`VerlRun`: a recipe in one of verl's trainers: what its batches are credited with, what is remembered, what is kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from spanwise.disk import write_text
from spanwise.engines.checkpoints import restore_estimator
from spanwise.engines.shared import RunRecord, model_size, prompt_texts
from spanwise.engines.verl.carry import Rows, credited, loss_factor
from spanwise.engines.verl.estimators import CARRIED
from spanwise.engines.verl.plugin import say
from spanwise.errors import AlignmentError
from spanwise.modes.parts import RowPart, token_logp, with_token
from spanwise.rollouts import Rollouts
from spanwise.scheme import Scheme
from spanwise.segment import Vocabulary, find_blocks
from spanwise.step import Step, StepResult

#: What verl calls the fields of `Batch` with a number per token: of its critic, of the policy that its loss starts from, and ids.
TOKENS = {"value_nt": "values", "logp_nt": "old_log_probs", "ids_nt": "responses"}
#: What the folder of a run is called in verl's configuration.
OPTION = "+algorithm.spanwise.folder"
#: The file of a checkpoint that holds what a method remembers of earlier batches.
MEMORY = "spanwise_memory.json"
#: What a report reads of an update -> what verl calls it.
_UPDATE = {
    "loss": "actor/loss",
    "entropy": "actor/entropy",
    "grad_norm": "actor/grad_norm",
    "learning_rate": "actor/lr",
    "completions/mean_length": "response_length/mean",
    "completions/clipped_ratio": "response_length/clip_ratio",
}


class Sampled(NamedTuple):
    """What the rows of a batch are, padding included: prompt, the ids before each response, responses, gold answers or None."""

    uids: Sequence[Any]
    prompts: Sequence[Sequence[int]]
    ids_nt: Tensor
    answers: Sequence[Any]


class VerlRun:
    """A recipe, how verl reduces the loss that it is trained with, and the folder that it is kept in.

    Attributes:
        scheme: the rule of credit.
        reduction: what `loss_factor` is told of verl's loss: mode, horizon, and rows per optimiser step.
        value_lam: lambda of what verl's critic is fitted to.
        parts: what each mode of the scheme does here, by its name (`spanwise.modes`).
        tokens: those of `TOKENS` that the method needs, or a mode.
        step: credits the batches, and says each thing of them once.
        record: writes the run folder; None: none is asked for.
        result: what was credited last.
        targets: mode -> what the losses of modes read in the old log-probabilities of its rows, at `Rows.places`.
    """

    def __init__(self, config: Any, scheme: Scheme, *, value_lam: float, parts: Mapping[str, RowPart]) -> None:
        actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
        self.config, self.scheme, self.value_lam, self.parts = config, scheme, value_lam, parts
        how = {"mode": actor.loss_agg_mode, "horizon": actor.get("loss_scale_factor")}
        self.reduction: dict[str, Any] = {**how, "mini_batch": actor.ppo_mini_batch_size * rollout.n}
        needed = scheme.needs | ({"logp_nt"} if parts else set())
        self.tokens = {name: field for name, field in TOKENS.items() if name in needed}
        self.step, self.record = Step(scheme), RunRecord.of(config.algorithm.spanwise, option=OPTION)
        self.result: StepResult | None = None
        self.targets: dict[str, Tensor] = {}
        self._vocabulary: Vocabulary | None = None

    @contextmanager
    def carrying(self, rows: Rows, number: int = 0) -> Iterator[None]:
        """Lay the rows of a batch out for verl's call of the estimator `spanwise`."""
        token = CARRIED.set(partial(self.credit, rows, number))
        try:
            yield
        finally:
            CARRIED.reset(token)

    def credit(self, rows: Rows, number: int, uids: Sequence[Any], mask_nt: Tensor) -> tuple[Tensor, Tensor]:
        """The advantages of the rows of a batch as verl's loss must see them, and what its critic is fitted to."""
        real, more, metrics = rows.real, {}, {}
        for name, part in self.parts.items():
            more |= part.fields(token_logp(rows.tokens["logp_nt"], rows.places[name])[real], number)
        adv_nt, return_nt, result = credited(rows, uids, mask_nt, self.step, value_lam=self.value_lam, more=more)
        for sentence in result.warnings:
            say(sentence)
        reading = result.own.reading
        rollouts = len(real if rows.session is None else {rows.session[n] for n in real})
        # V0's loss divides by the tokens that rejection left, V1's by all that were sampled.
        trained = mask_nt if rows.session is None else reading.length_nk
        adv_nt = adv_nt * loss_factor(mask_nt, rollouts=rollouts, tokens=int(trained.sum()), **self.reduction)
        return_nt = adv_nt if return_nt is None else return_nt
        for name, part in self.parts.items():
            weight_n, self.targets[name], of_mode = part.lesson(reading, self.scheme, number, rows=len(mask_nt))
            adv_nt[real] = with_token(adv_nt[real], rows.places[name][real], weight_n)
            metrics |= of_mode
        self.result = replace(result, metrics={**result.metrics, **metrics})
        return adv_nt, return_nt

    def save_memory(self, step: int) -> None:
        """Write what the method remembers of earlier batches into the checkpoint of a step, which verl is about to write."""
        if self.scheme.entry.stateful:
            estimator: Any = self.scheme.entry.estimator
            folder = Path(self.config.trainer.default_local_dir) / f"global_step_{step}"
            write_text(folder / MEMORY, json.dumps(estimator.state_dict()))

    def load_memory(self, step: int) -> None:
        """Give the method what it remembered when the checkpoint was written that verl has just read."""
        if step == 0 or not self.scheme.entry.stateful:
            return
        trainer = self.config.trainer
        named = trainer.resume_mode == "resume_path"
        place = Path(trainer.resume_from_path if named else f"{trainer.default_local_dir}/global_step_{step}")
        file = place / MEMORY
        state = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
        restore_estimator(self.scheme, state, place)

    @contextmanager
    def training(self, trainer: Any, *, done: int | None = None) -> Iterator[None]:
        """Train inside; `done`, steps of a checkpoint: a folder that holds something else is refused before anything is sampled."""
        if self.record is None:
            yield
            return
        with self.record.running():
            if done is not None:
                self.record.check(self._recipe(trainer), step=done * _updates(trainer))
            yield

    def keep(self, trainer: Any, rows: Rows, sampled: Callable[[], Sampled]) -> None:
        """Keep the batch that was credited last."""
        if self.record is None or self.result is None:
            return
        result, tokenizer = self.result, trainer.tokenizer
        number = (trainer.global_steps - 1) * _updates(trainer) + getattr(trainer, "local_trigger_step", 0) + 1

        def rollouts() -> Rollouts:
            batch, own = sampled(), result.own
            ids_nt = own.take(batch.ids_nt[rows.real])
            if self._vocabulary is None:
                self._vocabulary = vocabulary_of(self.config, tokenizer)
            # Reward workers send where blocks lie, so what they say is read once more.
            spans, text = find_blocks(
                ids_nt, own.spans.block_nt >= 0, layout=self.scheme.layout, vocabulary=self._vocabulary
            )
            other_n = (spans.block_nt != own.spans.block_nt).any(dim=1)
            if other_n.any():
                raise AlignmentError(
                    f"Row {int(other_n.int().argmax())}: the reward worker found other blocks than the trainer finds in the same "
                    f"tokens. Give both the same tokenizer (actor_rollout_ref.model.path) and files of the recipe."
                )
            known = replace(own, batch=replace(own.batch, ids_nt=ids_nt), reading=replace(own.reading, text=text))
            real = sorted(rows.real, key=lambda n: 0 if rows.step is None else rows.step[n])  # where a rollout begins
            texts = prompt_texts(tokenizer, [batch.uids[n] for n in real], [batch.prompts[n] for n in real])
            return self.step.rollouts(
                replace(result, own=known),
                number=number,
                prompts=own.repeat([texts[batch.uids[n]] for n in rows.real]),
                columns={"answer": own.repeat([batch.answers[n] for n in rows.real])},
            )

        known: dict[str, Any] = {"recipe": self._recipe(trainer), "tokenizer": tokenizer, "rollouts": rollouts}
        self.record.add_batch(number, result, self.scheme, **known)

    def add_update(self, logged: Mapping[str, Any]) -> None:
        """Keep what verl logs of an update."""
        if self.record is not None:
            self.record.add_update(logged, _UPDATE)

    def _recipe(self, trainer: Any) -> dict[str, Any]:
        """The `recipe.yaml` of the run: its rule of credit, and what verl says that a recipe has a field for."""
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
    """The vocabulary that completions are read with."""
    return Vocabulary.from_tokenizer(tokenizer, size=model_size(config.actor_rollout_ref.model.get("path")))


def _updates(trainer: Any) -> int:
    """How many batches a step of verl has: several where trainer and rollouts are on GPUs of their own."""
    return getattr(trainer, "parameter_sync_step", 1)
