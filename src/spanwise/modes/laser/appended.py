"""A self-rewarding score where a trainer gives log-probabilities of its rows alone: the reserved token is one more token of a row.

It stands behind the end of the completion and outside the loss mask, as tool output does, so that every pass of the trainer gives
its log-probability and no term of its loss looks at it. What teaches it travels where nothing else is read: at its place the
advantage is a weight and the old log-probability a target (`Appended.lesson`), which a loss of ours takes out (`Appended.parted`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from spanwise.credit.spread import completed
from spanwise.errors import RecipeError, refuse
from spanwise.modes.laser.config import Laser
from spanwise.modes.laser.logps import reserved_id
from spanwise.modes.laser.score import class_weights, self_reward, verification_loss
from spanwise.modes.parts import RowPart
from spanwise.pipeline import Reading
from spanwise.scheme import Scheme


class Appended(RowPart):
    """The reserved token of a policy in a trainer's rows, and what its log-probability is worth."""

    def __init__(self, mode: Laser, tokenizer: Any, *, size: int, generation: Any, temperature: float) -> None:
        more = getattr(generation, "eos_token_id", None)
        self.mode, self.reference, self.temperature = mode, check_reference(mode), temperature
        self.ends = {tokenizer.eos_token_id, *(more if isinstance(more, list) else [more])} - {None}
        self.token = reserved_id(mode, tokenizer, size=size, ends=self.ends)
        self._score_n = torch.zeros(0)

    @staticmethod
    def check(mode: Laser, engine: str, config: Any) -> None:
        """Refuse rows that are no completions, and passes that do not give the log-probability of a token not sampled."""
        refuse(_verl_faults(config) if engine == "verl" else _skyrl_faults(config))
        check_reference(mode)

    def ended(self, ids: Sequence[int], mask: Sequence[Any]) -> bool:
        """Whether the last token of a row is the model's own, trained, and one that ends a completion."""
        return len(ids) > 0 and ids[-1] in self.ends and mask[-1] > 0

    def fields(self, logp_n: Float[Tensor, " n"], number: int) -> dict[str, Tensor]:
        """The score of each row by the trainer's log-probability, NaN for NaN, once it is mixed in."""
        self._score_n = self_reward(self.temperature * logp_n.float(), beta=self.mode.beta, reference=self.reference)
        return {"score_n": self._score_n} if self.mode.mixes(number) else {}

    def lesson(self, reading: Reading, scheme: Scheme, number: int, *, rows: int) -> tuple[Tensor, Tensor, dict[str, float]]:
        r"""The verification loss of the rows that were scored last, as a squared error of log-probabilities.

        Equation
            alpha l = 1/rows * sum of weight (logp - target)^2
            weight = alpha w (beta T)^2 rows / (N_c + N_i),   target = (reference + r_v / beta) / T

        Where a batch makes several optimiser steps, w and N_c + N_i are those of the batch, as in the mean over the steps.
        """
        laser, score_n, metrics = self.mode, self._score_n, {}
        verdict_n = completed(reading.scores, scheme.objectives)[:, scheme.names.index(laser.verdict)].double()
        known_n = ~(score_n.isnan() | verdict_n.isnan())
        verdict_n = torch.where(known_n, verdict_n, torch.nan)
        w_n, count = class_weights(verdict_n, balanced=laser.balanced), int(known_n.sum())
        if count:
            right_n = (score_n > 0.5) == (verdict_n > 0.5)
            metrics["laser/loss"] = float(verification_loss(score_n.double(), verdict_n, weight_n=w_n))
            metrics["laser/accuracy"] = float(right_n[known_n].double().mean())
        scale = laser.alpha * (laser.beta * self.temperature) ** 2 * rows / max(count, 1)
        target_n = (self.reference + torch.where(known_n, verdict_n, 0.0) / laser.beta) / self.temperature
        return (scale * w_n * (number >= laser.reasoning_warmup)).float(), target_n.float(), metrics

    @staticmethod
    def parted(
        logp_nt: Float[Tensor, "n t"],
        old_nt: Float[Tensor, "n t"],
        adv_nt: Float[Tensor, "n t"],
        mask_nt: Shaped[Tensor, "n t"],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Take a lesson out of a batch: what is left is one in which a reserved token is one more token that nothing reads.

        Weights stand outside the mask, right behind a trained token. Rows without a trained token have none: trainers fill batches
        up with such rows, whatever their advantages.

        >>> logp_nt, mask_nt = torch.tensor([[-1., -20.], [-1., -2.]]), torch.tensor([[1, 0], [0, 0]])
        >>> adv_nt = torch.tensor([[.5, .01], [.6, .6]])
        >>> old_nt, adv_nt, error_nt = Appended.parted(logp_nt, torch.tensor([[-1.5, -13.], [-1., -2.]]), adv_nt, mask_nt)
        >>> old_nt.tolist(), adv_nt[0].tolist(), round(float(error_nt.sum()), 6)
        ([[-1.5, -20.0], [-1.0, -2.0]], [0.5, 0.0], 0.49)
        """
        trained_nt = mask_nt > 0
        behind_nt = torch.cat([torch.zeros_like(trained_nt[:, :1]), trained_nt[:, :-1]], dim=1)
        here_nt = behind_nt & ~trained_nt & (adv_nt != 0)
        gap_nt = torch.where(here_nt, logp_nt - old_nt, 0.0)
        old_nt = torch.where(here_nt, logp_nt.detach().to(old_nt.dtype), old_nt)
        return old_nt, torch.where(here_nt, 0.0, adv_nt), torch.where(here_nt, adv_nt, 0.0) * gap_nt.square()


def _verl_faults(config: Any) -> dict[str, Any]:
    """Settings of verl that hide the token's log-probability."""
    return {
        "algorithm.rollout_correction.bypass_mode=True takes the log-probabilities of the rollout, and laser's token was not "
        "sampled there; leave one of them out.": (config.algorithm.get("rollout_correction") or {}).get("bypass_mode"),
        "distillation asks its teacher about what was sampled alone, and laser's token is one more; leave one of them out.": (
            (config.get("distillation") or {}).get("enabled")
        ),
    }


def _skyrl_faults(cfg: Any) -> dict[str, Any]:
    """Settings of SkyRL that make rows no completions, or hide the token's log-probability."""
    return {
        "laser scores a completion at its end, and generator.step_wise_trajectories=true makes rows of turns, which have ends of "
        "their own. Use flat rows, or leave laser out.": cfg.generator.step_wise_trajectories,
        "laser is trained by SkyRL's synchronous trainer; set trainer.fully_async.enabled=false, or leave laser out.": (
            cfg.trainer.fully_async.enabled
        ),
        "trainer.algorithm.enable_sample_support_replay=true needs what the sampler saw at each token, and laser's token was not "
        "sampled; leave one of them out.": getattr(cfg.trainer.algorithm, "enable_sample_support_replay", False),
    }


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
