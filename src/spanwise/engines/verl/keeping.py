"""A verl run leaves the folder behind that `spanwise train` does: `algorithm.spanwise.folder`. No verl here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxtyping import Int
from torch import Tensor

from spanwise.engines.keep import RunRecord, check_folder, own_recipe
from spanwise.engines.verl.carry import Credited, Rows
from spanwise.engines.verl.vocabulary import vocabulary_of
from spanwise.errors import AlignmentError, RecipeError
from spanwise.rollouts import Rollouts
from spanwise.scheme import Scheme
from spanwise.segment import Vocabulary, find_blocks
from spanwise.step import Step, StepResult
from spanwise.types import BlockText, Spans

#: What the folder is called in verl's configuration.
OPTION = "+algorithm.spanwise.folder"
#: All that `algorithm.spanwise` may say under the estimator `spanwise`.
_KNOWN = ("recipe", "folder", "keep_rollouts", "report")
#: What a report reads of an update -> what verl calls it.
UPDATE = {
    "loss": "actor/loss",
    "entropy": "actor/entropy",
    "grad_norm": "actor/grad_norm",
    "learning_rate": "actor/lr",
    "completions/mean_length": "response_length/mean",
    "completions/clipped_ratio": "response_length/clip_ratio",
}


def check_options(config: Any) -> None:
    """Refuse what `algorithm.spanwise` says and nobody would do.

    Example:
        >>> check_options({"algorithm": {"spanwise": {"keep_rollout": 5}}})
        Traceback (most recent call last):
        spanwise.errors.RecipeError: algorithm.spanwise.keep_rollout is no option; there are recipe, folder, keep_rollouts, report.
    """
    own = config["algorithm"]["spanwise"]
    if "options" in own:
        raise RecipeError(
            "algorithm.spanwise.options belongs to the estimators of one reward (spanwise_grpo, ...); write options: in the recipe."
        )
    for name in own:
        if name not in _KNOWN:
            raise RecipeError(f"algorithm.spanwise.{name} is no option; there are {', '.join(_KNOWN)}.")
    folder = own.get("folder")
    check_folder(folder, own.get("keep_rollouts", 0), own.get("report", False), option=OPTION)
    if folder is None:
        return
    if config["trainer"].get("val_only"):
        raise RecipeError(f"trainer.val_only=True trains nothing, so there is no run to keep; leave {OPTION} out.")
    dump = config["trainer"].get("rollout_data_dir")
    if dump and Path(dump).resolve() == (Path(str(folder)) / "rollouts").resolve():
        raise RecipeError(
            f"trainer.rollout_data_dir is '{dump}', where {OPTION} keeps rollouts of its own; leave it out, or give another folder."
        )


@dataclass(frozen=True)
class Sampled:
    """What the rows of a batch are, padding included, for those who read a run later.

    Attributes:
        uids: the prompt of each row.
        prompts: the token ids before each row's response.
        ids_nt: the responses.
        answers: the gold answer of each row, None where there is none.
    """

    uids: Sequence[Any]
    prompts: Sequence[Sequence[int]]
    ids_nt: Int[Tensor, "n t"]
    answers: Sequence[Any]


class Keeper:
    """Keeps the run of one trainer of verl in a folder."""

    def __init__(self, config: Any, scheme: Scheme) -> None:
        own = config.algorithm.spanwise
        self.config, self.scheme = config, scheme
        self._vocabulary: Vocabulary | None = None
        kept = {"keep_rollouts": own.get("keep_rollouts", 0), "report": own.get("report", False)}
        self.record = RunRecord(str(own.folder), **kept, output=OPTION)

    @staticmethod
    def of(config: Any, scheme: Scheme) -> Keeper | None:
        """That of a configuration, see `check_options`; None: it names no folder."""
        check_options(config)
        return None if config.algorithm.spanwise.get("folder") is None else Keeper(config, scheme)

    @contextmanager
    def running(self, trainer: Any, *, done: int | None) -> Iterator[None]:
        """Train inside: a folder that holds something else is refused before the first completion is sampled."""
        with self.record.running():
            if done is not None:
                self.record.check(self.recipe_of(trainer), step=done * _updates(trainer))
            yield

    def keep(
        self, trainer: Any, rows: Rows, found: Credited, shown: Mapping[str, float], sampled: Callable[[], Sampled]
    ) -> None:
        """Keep a batch: a row is what was read as one, a completion or a turn of a rollout."""
        number = (trainer.global_steps - 1) * _updates(trainer) + getattr(trainer, "local_trigger_step", 0) + 1
        self.record.begin_with(lambda: self.recipe_of(trainer), step=number - 1, tokenizer=trainer.tokenizer)
        self.record.add_batch(number, found.result.own.reading, shown, self.scheme)
        if self.record.wants(number):
            made = self._rollouts(trainer.tokenizer, rows, found.result, sampled(), number=number)
            self.record.write_batch(made, found.result.own.batch.steps)

    def recipe_of(self, trainer: Any) -> dict[str, Any]:
        """The `recipe.yaml` of the run: its rule of credit, and what verl says that a recipe has a field for."""
        config = self.config
        rollout, own = config.actor_rollout_ref.rollout, config.algorithm.spanwise
        return own_recipe(
            self.scheme,
            model=config.actor_rollout_ref.model.path,
            steps=trainer.total_training_steps * _updates(trainer),
            prompts=config.data.train_batch_size // _updates(trainer),
            group_size=max(2, rollout.n),
            temperature=float(rollout.temperature),
            seed=config.data.get("seed"),
            keep_rollouts=own.get("keep_rollouts", 0),
            report=own.get("report", False),
        )

    def _rollouts(self, tokenizer: Any, rows: Rows, result: StepResult, sampled: Sampled, *, number: int) -> Rollouts:
        """Reward workers send where blocks lie; tokens and text are those of the rows."""
        own = result.own
        assert own.batch.mask_nt is not None, "the batch of a trainer has a mask"
        ids_nt = own.take(sampled.ids_nt[rows.real])
        text = self._text(ids_nt, own.batch.mask_nt, own.spans, tokenizer)
        known = replace(own, batch=replace(own.batch, ids_nt=ids_nt), reading=replace(own.reading, text=text))
        told = {"prompts": prompts_of(tokenizer, sampled, rows), "answers": sampled.answers}
        each = {name: own.repeat([values[n] for n in rows.real]) for name, values in told.items()}
        result, columns = replace(result, own=known), {"answer": each["answers"]}
        return Step(self.scheme).rollouts(result, number=number, prompts=each["prompts"], columns=columns)

    def _text(self, ids_nt: Tensor, mask_nt: Tensor, sent: Spans, tokenizer: Any) -> list[BlockText]:
        """What the blocks say: reward workers send where they lie, so they are read once more."""
        if self._vocabulary is None:
            self._vocabulary = vocabulary_of(self.config, tokenizer)
        spans, text = find_blocks(ids_nt, mask_nt, layout=self.scheme.layout, vocabulary=self._vocabulary)
        other_n = (spans.block_nt != sent.block_nt).any(dim=1)
        if other_n.any():
            raise AlignmentError(
                f"Row {int(other_n.int().argmax())}: the reward worker found other blocks than the trainer finds in the same "
                f"tokens. Give both the same tokenizer (actor_rollout_ref.model.path) and files of the recipe."
            )
        return text


def prompts_of(tokenizer: Any, sampled: Sampled, rows: Rows) -> list[str]:
    """What each row answers: the prompt of its group, where a rollout begins."""
    first: dict[Any, tuple[int, int]] = {}
    for n in rows.real:
        step = 0 if rows.step is None else rows.step[n]
        first[sampled.uids[n]] = min(first.get(sampled.uids[n], (step, n)), (step, n))
    said = {uid: tokenizer.decode(list(sampled.prompts[n]), skip_special_tokens=False) for uid, (_, n) in first.items()}
    return [said.get(uid, "") for uid in sampled.uids]


def _updates(trainer: Any) -> int:
    """How many batches a step of verl has: several where trainer and rollouts are on GPUs of their own."""
    return getattr(trainer, "parameter_sync_step", 1)
