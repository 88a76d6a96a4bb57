"""`Laser` (LaSeR): a model's confidence from the probability of a reserved token."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from spanwise.batch import Batch
from spanwise.credit.spread import fill_missing
from spanwise.errors import DataError, RecipeError, unknown
from spanwise.mode import Mode, setting
from spanwise.modes.laser.score import own_opinion
from spanwise.pipeline import Reading
from spanwise.registry import register
from spanwise.scheme import Scheme
from spanwise.types import Credit

#: The name of the file with laser's measured reference log-probability, in a run folder or checkpoint.
FILE = "laser.json"


def read_measured(file: Path) -> dict[str, Any]:
    """Read laser's reference log-probability, and its `token` and `id`, from the file of the run that measured it."""
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        return {**record, "token": record["token"], "id": record["id"], "reference": float(record["reference"])}
    except KeyError as error:
        raise DataError(f"laser's reference cannot be read from '{file}': the file has no '{error.args[0]}'.") from error
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"laser's reference cannot be read from '{file}': {error}.") from error


@register("laser", kind="mode")
@dataclass(frozen=True)
class Laser(Mode):
    """The settings of a policy's score of its own answers (LaSeR).

    Equation
        r_s = beta (log pi(token | prompt, completion, end) - reference)
        loss = ... + alpha * mean of w (r_s - r_v)^2, w balances right and wrong (`verification_loss`)
        A = (1 - mix) A_v + mix z(clip(r_s, 0, 1)) in the blocks that the verdict pays

    The score of a completion that did not end is absent: it has no loss and is not mixed in.

    Attributes:
        token: the reserved token, as the tokenizer writes it or as an id; the policy must never write it.
        verdict: the objective whose reward r_v is 1 for right and 0 for wrong.
        beta: the score of one nat.
        reference: the mean of log pi(token | ...) under the starting policy; None: the mean over the first generation batch.
        alpha: the weight of the loss.
        mix: the share of the score in the credit, tau in the paper; 0: none.
        threshold: a group whose scores have a smaller standard deviation is not mixed.
        scale: the divisor of a group's scores: "std", as in the paper, which also divides A_v; "none" for methods that do not
            divide (`bae`, `dr_grpo`, `rloo`), under which the score is one more reward.
        balanced: True: right and wrong answers weigh the same in the loss, as in the paper, so the score is the probability of
            being right if half of the answers were. False: it is the probability itself (`class_weights`).
        reasoning_warmup: generation batches without the loss.
        self_rewarding_warmup: further generation batches without the mixing.

    Raises:
        RecipeError: a value cannot work, or would change nothing.

    Source: LaSeR, arXiv 2510.14943; the defaults are those of its code, the warm-ups those of a model that reasons already.

    Example:
        >>> Laser("<|vision_start|>", reference=-23.0).first_mix
        200
        >>> Laser("<unk>", reference=-4.2)
        Traceback (most recent call last):
        spanwise.errors.RecipeError: With laser.beta ... the score is at most 0.42. ... Set beta to 0.24 or more.
    """

    about: ClassVar[str] = (
        "for any method: the policy's confidence in its answer, read from the probability of a reserved token; its fields are "
        "those of `Laser`, such as token"
    )
    adds: ClassVar[frozenset[str]] = frozenset({"score_n"})
    parts: ClassVar[Mapping[str, str]] = {
        "trl": "spanwise.modes.laser.trl:SelfRewarding",
        "verl": "spanwise.modes.laser.logps:Appended",
        "model": "spanwise.modes.laser.logps:ScoreReader",
        "skyrl": "spanwise.modes.laser.logps:Appended",
    }

    token: str | int
    verdict: str = "correct"
    beta: float = setting(0.1, above=0.0)
    reference: float | None = setting(None, most=math.inf)
    alpha: float = setting(0.1, above=0.0)
    mix: float = setting(0.1, least=0.0, most=1.0)
    threshold: float = setting(0.1, least=0.0)
    scale: Literal["std", "none"] = "std"
    balanced: bool = True
    reasoning_warmup: int = setting(0, least=0.0)
    self_rewarding_warmup: int = setting(200, least=0.0)

    def __post_init__(self) -> None:
        if isinstance(self.token, bool) or not isinstance(self.token, str | int) or self.token == "":
            raise RecipeError(f"laser.token is {self.token!r}; name one token of the vocabulary, or its id.")
        super().__post_init__()
        for name in ("threshold", "scale", "self_rewarding_warmup"):
            if self.mix == 0 and getattr(self, name) != getattr(Laser, name):
                raise RecipeError(
                    f"laser.{name} is {getattr(self, name)}, but it would change nothing: with laser.mix 0, no score "
                    f"enters the credit. Remove laser.{name}, or raise laser.mix."
                )
        if self.reference is not None:
            self.check_reach(self.reference)

    def check_reach(self, reference: float) -> None:
        """Refuse a reference with which no score, beta (logp - reference), can reach 1: logp is at most 0."""
        if -self.beta * reference < 1:
            lowest_beta = math.ceil(-100 / reference) / 100 if reference < 0 else math.inf
            remedy_text = f"Set beta to {lowest_beta:.2f} or more" if reference < 0 else "Set a reference below 0"
            raise RecipeError(
                f"With laser.beta {self.beta:g} and laser.reference {reference:.3g}, the score is at most "
                f"{-self.beta * reference:.2g}. But laser trains the score of right completions towards 1. {remedy_text}."
            )

    @property
    def first_mix(self) -> int | None:
        """The index of the first batch whose credit contains laser's scores. None if there is none."""
        return self.reasoning_warmup + self.self_rewarding_warmup if self.mix > 0 else None

    @property
    def compares(self) -> bool:
        """True if laser ever compares scores within groups. It does so to mix them into the credit."""
        return self.first_mix is not None

    def mixes(self, number: int) -> bool:
        """Return whether laser's score enters the credit of a generation batch. The first has number 0."""
        return self.first_mix is not None and number >= self.first_mix

    def check_scheme(self, scheme: Scheme) -> None:
        """Refuse a scheme that lacks the objective `self.verdict`, or that credits turns instead of whole completions."""
        if self.verdict not in scheme.names:
            raise RecipeError(f"laser.verdict: {unknown('objective', self.verdict, scheme.names)}")
        if_missing = scheme.objectives[scheme.names.index(self.verdict)].if_missing
        if if_missing not in (None, 0, 1):
            raise RecipeError(
                f"laser.verdict names objective '{self.verdict}', whose if_missing makes a missing reward {if_missing:g}. But a "
                "verdict must be 1 or 0. Set if_missing of this objective to 0, or remove if_missing."
            )
        if scheme.entry.kind == "step" or any(objective.scope == "turn" for objective in scheme.objectives):
            raise RecipeError(
                f"laser gives a whole completion one score, at its end, but method '{scheme.method}' gives credit to single "
                "turns. Leave laser out, or credit whole rollouts: use a method such as 'bae', and remove scope: turn."
            )

    def check_provided(self, provided: Collection[str]) -> None:
        """Refuse an engine that does not provide `score_n`, the policy's score of each of its own completions."""
        if "score_n" not in provided:
            raise RecipeError(
                f"laser needs the log-probability of '{self.token}' after the end of each completion (score_n). In this setting, "
                "nothing computes score_n. Leave laser out, or train with TRL."
            )

    def check_turns(self) -> None:
        """Refuse rollouts of several turns. Laser scores whole completions, and a row holds only one turn."""
        raise RecipeError(
            "laser scores a completion at its end, but these rollouts have several turns or outputs, each with an end of its own. "
            "Leave laser out."
        )

    def check_steps(self, steps: int) -> None:
        """Refuse a warm-up that lasts the whole run. Laser's loss, or the mixing of its score, would never start."""
        mix_remedy = (
            "To mix the score in earlier, lower laser.self_rewarding_warmup. To leave the score out, set laser.mix: 0."
        )
        for delay, effect, remedy in (
            (self.reasoning_warmup, "Laser's loss would begin", "Lower laser.reasoning_warmup."),
            (self.first_mix, "Laser's score would be mixed in", mix_remedy),
        ):
            if delay is not None and delay >= steps:
                raise RecipeError(f"{effect} after {delay} generation batches, but the run has only {steps}. {remedy}")

    def mixes_at(self, step_n: Int[Tensor, " n"]) -> Bool[Tensor, " n"]:
        """Mark the completions whose advantage contains their self-rewarding score. Unknown steps (0) count as mixed.

        >>> Laser("<unk>", self_rewarding_warmup=2).mixes_at(torch.tensor([0, 1, 2, 3]))
        tensor([ True, False, False,  True])
        """
        if self.first_mix is None:
            return torch.zeros_like(step_n).bool()
        return (step_n == 0) | (step_n > self.first_mix)

    def recorded(self, table: Any, rows: Any) -> dict[str, Tensor]:
        """Return the recorded scores of a policy's own completions `rows`, all of one step. {} if the credit uses none."""
        if self.first_mix is None:
            return {}
        if table.score_n is None:
            raise RecipeError(
                f"The recipe has laser, which mixes the model's own score into each completion's credit. '{table.path}' "
                f"has no column 'self_reward' with that score. Use the rollouts of a run with laser, or leave laser out."
            )
        mixes_scores = len(rows) > 0 and bool(self.mixes_at(table.step_n[rows])[0])
        return {"score_n": table.score_n[rows]} if mixes_scores else {}

    def opinion(self, score_n: Tensor, group_n: Tensor, step_n: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weight of each laser score in the credit (0 before mixing), and the score relative to its group."""
        return self._compared(score_n.masked_fill(~self.mixes_at(step_n), torch.nan), group_n)

    def _compared(self, score_n: Tensor, group_n: Tensor) -> tuple[Tensor, Tensor]:
        return own_opinion(score_n, group_n, mix=self.mix, threshold=self.threshold, scale=self.scale)

    @property
    def readable(self) -> bool:
        """True if the reference log-probability is known, so that laser's scores can be computed."""
        return self.reference is not None

    def as_trained(self, places: Sequence[Path]) -> Laser:
        """Fill in the reference log-probability that a run measured, unless the recipe gives one."""
        reference_file = next((place / FILE for place in places if (place / FILE).is_file()), None)
        if reference_file is None:
            if self.reference is None:
                raise DataError(
                    f"laser cannot score the model in '{places[0]}', because no run left a {FILE} with a measured reference, and "
                    "the recipe sets no laser.reference. Set laser.reference in the recipe, or leave laser out."
                )
            return self
        measured_reference = read_measured(reference_file)
        if self.token not in (measured_reference["token"], measured_reference["id"]):
            raise DataError(
                f"The recipe has laser.token '{self.token}', but '{reference_file}' says that the run trained "
                f"'{measured_reference['token']}' (id {measured_reference['id']}). Set laser.token to the token that was trained."
            )
        return self if self.reference is not None else replace(self, reference=measured_reference["reference"])

    @property
    def judge(self) -> str:
        """The name of the objective, such as `correct`, whose reward (1 or 0) the policy predicts with its score."""
        return self.verdict

    def note(self, table: Any) -> str:
        """Say how many completions were sampled before laser's scores became part of the credit. Empty if none were."""
        if self.first_mix is None or table.score_n is None:
            return ""
        warmup_count = int((~self.mixes_at(table.step_n)).sum())
        warmup_note = (
            f"laser's score is part of the credit only from step {self.first_mix + 1} on (self_rewarding_warmup). "
            f"{warmup_count:,} of {len(table):,} completions are from earlier steps, so their credit does not contain the score."
        )
        return warmup_note if warmup_count else ""

    def credit(self, credit: Credit, reading: Reading, batch: Batch, scheme: Scheme) -> Credit:
        """Mix laser's scores into advantages. Only the blocks that the objective `self.verdict` pays change."""
        if batch.score_n is None:
            return credit
        if batch.steps is not None:
            self.check_turns()
        verdict_index = scheme.names.index(self.verdict)
        objective = scheme.objectives[verdict_index]
        is_paid_k = torch.tensor([name in objective.pays for name in scheme.layout.names])
        is_paid_nk = reading.present_nk & is_paid_k.to(reading.length_nk.device)
        mix_share_n1, relative_score_n1 = (vector_n[:, None] for vector_n in self._compared(batch.score_n, batch.group_n))
        # If each objective has its own advantages, change only those of the objective `self.verdict`.
        if scheme.entry.kind == "block" and credit.adv_nm is not None:
            verdict_adv_n1 = credit.adv_nm[:, verdict_index, None].double()
            credit_change_n1 = objective.weight * mix_share_n1 * (relative_score_n1 - verdict_adv_n1)
            return replace(credit, block_nk=credit.block_nk + torch.where(is_paid_nk, credit_change_n1, 0.0))
        block_change_nk = mix_share_n1 * (relative_score_n1 - credit.block_nk)
        block_credit_nk = credit.block_nk + torch.where(is_paid_nk, block_change_nk, 0.0)
        token_credit_nt = credit.token_nt
        if token_credit_nt is not None and reading.spans is not None:
            block_nt = reading.spans.block_nt.long()
            is_paid_nt = is_paid_nk.gather(1, block_nt.clamp(min=0)) & (block_nt >= 0)
            token_change_nt = mix_share_n1 * (relative_score_n1 - token_credit_nt.double())
            token_credit_nt = token_credit_nt + torch.where(is_paid_nt, token_change_nt, 0.0).to(token_credit_nt.dtype)
        return replace(credit, block_nk=block_credit_nk, token_nt=token_credit_nt)


def verdicts(laser: Laser, reading: Reading, scheme: Scheme) -> Tensor:
    """Return the rewards that laser learns to predict (the verdicts). `if_missing` replaces missing rewards."""
    return fill_missing(reading.scores, scheme.objectives)[:, scheme.names.index(laser.verdict)]
