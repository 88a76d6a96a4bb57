"""A self-rewarding score where a trainer gives log-probabilities of its rows alone: the reserved token is one more token of a row.

It stands behind the end of the completion and outside the loss mask, as tool output does, so that every pass of the trainer gives
its log-probability and no term of its loss looks at it. What teaches it travels where nothing else is read: at its place the
advantage is a weight and the old log-probability a target (`Appended.lesson`), which a loss of ours takes out (`parted`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from spanwise.credit.assign import completed
from spanwise.errors import RecipeError
from spanwise.modes.laser.config import Laser
from spanwise.modes.laser.logps import reserved_id
from spanwise.modes.laser.mixing import self_reward
from spanwise.modes.laser.verification import class_weights, verification_loss
from spanwise.pipeline import Reading
from spanwise.scheme import Scheme


class Lesson(NamedTuple):
    """What teaches each row's reserved token: a weight (0: nothing does), a target, and what is logged of the scores."""

    weight_n: Float[Tensor, " n"]
    target_n: Float[Tensor, " n"]
    shown: dict[str, float]


@dataclass(frozen=True)
class Appended:
    """The reserved token of a policy, and what its log-probability is worth.

    Attributes:
        laser: with its reference.
        token: the reserved token.
        ends: ids that end a completion, which it may stand behind.
        temperature: at which the trainer gives log-probabilities.
    """

    laser: Laser
    token: int
    ends: frozenset[int]
    temperature: float = 1.0

    @staticmethod
    def of(laser: Laser, tokenizer: Any, *, size: int, generation: Any, temperature: float) -> Appended:
        """For a policy with this tokenizer, size of its embedding and generation configuration (None: it has none)."""
        check_reference(laser)
        said = getattr(generation, "eos_token_id", None)
        ends = {tokenizer.eos_token_id, *(said if isinstance(said, list) else [said])} - {None}
        return Appended(laser, reserved_id(laser, tokenizer, size=size, ends=ends), frozenset(ends), temperature)

    def ended(self, ids: Sequence[int], mask: Sequence[Any]) -> bool:
        """Whether the last token of a row is the model's own, trained, and one that ends a completion.

        >>> reserved = Appended(Laser("<unk>", reference=-23.0), 2, frozenset([1]))
        >>> reserved.ended([7, 1], [1, 1]), reserved.ended([7, 8], [1, 1]), reserved.ended([7, 1], [1, 0]), reserved.ended([], [])
        (True, False, False, False)
        """
        return len(ids) > 0 and ids[-1] in self.ends and mask[-1] > 0

    def scores(self, logp_n: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        """The self-rewarding score by the trainer's log-probability, NaN for NaN."""
        return self_reward(self.temperature * logp_n.float(), beta=self.laser.beta, reference=check_reference(self.laser))

    def lesson(self, score_n: Float[Tensor, " n"], verdict_n: Float[Tensor, " n"], *, batch: int, rows: int) -> Lesson:
        r"""The verification loss as a squared error of log-probabilities.

        Equation
            alpha l = 1/rows * sum of weight (logp - target)^2
            weight = alpha w (beta T)^2 rows / (N_c + N_i),   target = (reference + r_v / beta) / T

        Where a batch makes several optimiser steps, w and N_c + N_i are those of the batch, as in the mean over the steps.

        Example:
            >>> reserved = Appended(Laser("<unk>", reference=-23.0), 2, frozenset([1]))
            >>> score_n, verdict_n = torch.tensor([.9, .7, .3, .1]), torch.tensor([1., 0., 0., 0.])
            >>> found = reserved.lesson(score_n, verdict_n, batch=0, rows=4)
            >>> [round(w, 6) for w in found.weight_n.tolist()], found.target_n.tolist(), found.shown["laser/accuracy"]
            ([0.002, 0.000667, 0.000667, 0.000667], [-13.0, -23.0, -23.0, -23.0], 0.75)
        """
        laser = self.laser
        known_n = ~(score_n.isnan() | verdict_n.isnan())
        verdict_n = torch.where(known_n, verdict_n.double(), torch.nan)
        w_n, count, shown = class_weights(verdict_n, balanced=laser.balanced), int(known_n.sum()), {}
        if count:
            right_n = (score_n > 0.5) == (verdict_n > 0.5)
            shown["laser/loss"] = float(verification_loss(score_n.double(), verdict_n, weight_n=w_n))
            shown["laser/accuracy"] = float(right_n[known_n].double().mean())
        scale = laser.alpha * (laser.beta * self.temperature) ** 2 * rows / max(count, 1)
        target_n = (check_reference(laser) + torch.where(known_n, verdict_n, 0.0) / laser.beta) / self.temperature
        return Lesson((scale * w_n * (batch >= laser.first_loss)).float(), target_n.float(), shown)


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


def verdicts_of(reading: Reading, scheme: Scheme, laser: Laser) -> Float[Tensor, " n"]:
    """The verdict on each completion; what is left out counts as what it stands for, NaN where that is not said."""
    return completed(reading.scores, scheme.objectives)[:, scheme.names.index(laser.verdict)].double()


class Parted(NamedTuple):
    """Old log-probabilities and advantages without what travels in them, and the weighted squared errors (0 elsewhere)."""

    old_nt: Float[Tensor, "n t"]
    adv_nt: Float[Tensor, "n t"]
    error_nt: Float[Tensor, "n t"]


def parted(
    logp_nt: Float[Tensor, "n t"], old_nt: Float[Tensor, "n t"], adv_nt: Float[Tensor, "n t"], mask_nt: Shaped[Tensor, "n t"]
) -> Parted:
    """Take a lesson out of a batch. What is left is a batch in which a reserved token is one more token that nothing reads.

    Example:
        >>> logp_nt, mask_nt = torch.tensor([[-1., -20.]]), torch.tensor([[1, 0]])
        >>> found = parted(logp_nt, torch.tensor([[-1.5, -13.]]), torch.tensor([[.5, .01]]), mask_nt)
        >>> found.old_nt.tolist(), found.adv_nt.tolist(), round(float(found.error_nt.sum()), 6)
        ([[-1.5, -20.0]], [[0.5, 0.0]], 0.49)
    """
    here_nt = _places(mask_nt, adv_nt)
    gap_nt = torch.where(here_nt, logp_nt - old_nt, 0.0)
    return Parted(
        torch.where(here_nt, logp_nt.detach().to(old_nt.dtype), old_nt),
        torch.where(here_nt, 0.0, adv_nt),
        torch.where(here_nt, adv_nt, 0.0) * gap_nt.square(),
    )


def _places(mask_nt: Shaped[Tensor, "n t"], adv_nt: Float[Tensor, "n t"]) -> Bool[Tensor, "n t"]:
    """Where weights stand: outside the mask, right behind a trained token.

    Rows without a trained token have none: trainers fill batches up with such rows, whatever their advantages.

    >>> _places(torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0]]), torch.tensor([[.1, .1, 2., 0.], [.6, .6, .6, .6]])).long()
    tensor([[0, 0, 1, 0],
            [0, 0, 0, 0]])
    """
    trained_nt = mask_nt > 0
    behind_nt = torch.cat([torch.zeros_like(trained_nt[:, :1]), trained_nt[:, :-1]], dim=1)
    return behind_nt & ~trained_nt & (adv_nt != 0)
