"""A self-rewarding score where a trainer gives log-probabilities of its rows alone: the reserved token is one more token of a row.

It stands behind the end of the completion and outside the loss mask, as tool output does, so that every pass of the trainer gives
its log-probability and no term of its loss looks at it. What teaches it travels where nothing else is read: at its place the
advantage is a weight and the old log-probability a target (`Appended.lesson`), which a loss of ours takes out (`parted`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from spanwise.credit.spread import completed
from spanwise.errors import RecipeError
from spanwise.modes.laser.config import Laser
from spanwise.modes.laser.logps import reserved_id
from spanwise.modes.laser.score import class_weights, self_reward, verification_loss
from spanwise.pipeline import Reading
from spanwise.scheme import Scheme


class Lesson(NamedTuple):
    """What teaches each row's reserved token: a weight (0: nothing does), a target, and what is logged of the scores."""

    weight_n: Float[Tensor, " n"]
    target_n: Float[Tensor, " n"]
    metrics: dict[str, float]


class Appended:
    """The reserved token of a policy in a trainer's rows, and what its log-probability is worth.

    Args:
        laser: with its reference.
        tokenizer, size: of the policy, and how many ids it knows.
        generation: its generation configuration; None: it has none.
        temperature: at which the trainer gives log-probabilities.
    """

    def __init__(self, laser: Laser, tokenizer: Any, *, size: int, generation: Any, temperature: float) -> None:
        more = getattr(generation, "eos_token_id", None)
        self.laser, self.reference, self.temperature = laser, check_reference(laser), temperature
        self.ends = {tokenizer.eos_token_id, *(more if isinstance(more, list) else [more])} - {None}
        self.token = reserved_id(laser, tokenizer, size=size, ends=self.ends)
        self._score_n = torch.zeros(0)

    def ended(self, ids: Sequence[int], mask: Sequence[Any]) -> bool:
        """Whether the last token of a row is the model's own, trained, and one that ends a completion."""
        return len(ids) > 0 and ids[-1] in self.ends and mask[-1] > 0

    def fields(self, logp_n: Float[Tensor, " n"], number: int) -> dict[str, Tensor]:
        """The score of each row by the trainer's log-probability, NaN for NaN, once it is mixed in."""
        self._score_n = self_reward(self.temperature * logp_n.float(), beta=self.laser.beta, reference=self.reference)
        return {"score_n": self._score_n} if self.laser.mixes(number) else {}

    def lesson(self, reading: Reading, scheme: Scheme, number: int, *, real: Sequence[int] | None = None) -> Lesson:
        r"""The verification loss of the rows that were scored last, as a squared error of log-probabilities.

        Equation
            alpha l = 1/rows * sum of weight (logp - target)^2
            weight = alpha w (beta T)^2 rows / (N_c + N_i),   target = (reference + r_v / beta) / T

        Where a batch makes several optimiser steps, w and N_c + N_i are those of the batch, as in the mean over the steps.
        `real`: the rows that were read; the verdict of padding is absent.
        """
        laser, score_n = self.laser, self._score_n
        verdict_n = torch.full((len(score_n),), torch.nan).double()
        read_n = completed(reading.scores, scheme.objectives)[:, scheme.names.index(laser.verdict)].double()
        verdict_n[slice(None) if real is None else torch.tensor(real, dtype=torch.long)] = read_n
        known_n = ~(score_n.isnan() | verdict_n.isnan())
        verdict_n = torch.where(known_n, verdict_n, torch.nan)
        w_n, count, metrics = class_weights(verdict_n, balanced=laser.balanced), int(known_n.sum()), {}
        if count:
            right_n = (score_n > 0.5) == (verdict_n > 0.5)
            metrics["laser/loss"] = float(verification_loss(score_n.double(), verdict_n, weight_n=w_n))
            metrics["laser/accuracy"] = float(right_n[known_n].double().mean())
        scale = laser.alpha * (laser.beta * self.temperature) ** 2 * len(score_n) / max(count, 1)
        target_n = (self.reference + verdict_n.nan_to_num(nan=0.0) / laser.beta) / self.temperature
        return Lesson((scale * w_n * (number >= laser.reasoning_warmup)).float(), target_n.float(), metrics)


def check_reference(laser: Laser) -> float:
    """The reference, where no trainer measures it.

    >>> check_reference(Laser("<unk>"))
    Traceback (most recent call last):
    spanwise.errors.RecipeError: laser has no reference, which nothing measures here; run `spanwise reference RECIPE` and write...
    """
    if laser.reference is None:
        raise RecipeError(
            "laser has no reference, which nothing measures here; run `spanwise reference RECIPE` and write what it finds as "
            "reference: under laser:."
        )
    return laser.reference


class Parted(NamedTuple):
    """Old log-probabilities and advantages without what travels in them, and the weighted squared errors (0 elsewhere)."""

    old_nt: Float[Tensor, "n t"]
    adv_nt: Float[Tensor, "n t"]
    error_nt: Float[Tensor, "n t"]


def parted(
    logp_nt: Float[Tensor, "n t"], old_nt: Float[Tensor, "n t"], adv_nt: Float[Tensor, "n t"], mask_nt: Shaped[Tensor, "n t"]
) -> Parted:
    """Take a lesson out of a batch. What is left is a batch in which a reserved token is one more token that nothing reads.

    Its place is outside the mask, right behind a trained token. Rows without a trained token have none: trainers fill batches up
    with such rows, whatever their advantages.

    >>> logp_nt, mask_nt = torch.tensor([[-1., -20.]]), torch.tensor([[1, 0]])
    >>> found = parted(logp_nt, torch.tensor([[-1.5, -13.]]), torch.tensor([[.5, .01]]), mask_nt)
    >>> found.old_nt.tolist(), found.adv_nt.tolist(), round(float(found.error_nt.sum()), 6)
    ([[-1.5, -20.0]], [[0.5, 0.0]], 0.49)
    """
    trained_nt = mask_nt > 0
    behind_nt = torch.cat([torch.zeros_like(trained_nt[:, :1]), trained_nt[:, :-1]], dim=1)
    here_nt = behind_nt & ~trained_nt & (adv_nt != 0)
    gap_nt = torch.where(here_nt, logp_nt - old_nt, 0.0)
    return Parted(
        torch.where(here_nt, logp_nt.detach().to(old_nt.dtype), old_nt),
        torch.where(here_nt, 0.0, adv_nt),
        torch.where(here_nt, adv_nt, 0.0) * gap_nt.square(),
    )
