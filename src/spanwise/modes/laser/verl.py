"""A reserved token in the rows of verl (`modes.laser.appended`): appended to responses, and found and taught in a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from spanwise.errors import RecipeError
from spanwise.modes.laser.appended import Appended, check_reference, parted, verdicts_of
from spanwise.modes.laser.config import Laser
from spanwise.modes.parts import VerlPart
from spanwise.pipeline import Reading
from spanwise.scheme import Scheme


def with_lesson(
    agg_loss: Callable[..., Tensor],
    loss: Callable[..., tuple[Tensor, dict[str, Any]]],
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """A policy loss of verl, plus the mean over the mini-batch's rows of what teaches a reserved token."""
    found = parted(log_prob, old_log_prob, advantages, response_mask)
    policy, shown = loss(
        old_log_prob=found.old_nt,
        log_prob=log_prob,
        advantages=found.adv_nt,
        response_mask=response_mask,
        loss_agg_mode=loss_agg_mode,
        config=config,
        rollout_is_weights=rollout_is_weights,
    )
    every_nt = torch.ones_like(found.error_nt)
    taught = agg_loss(
        loss_mat=found.error_nt, loss_mask=every_nt, loss_agg_mode="seq-mean-token-sum", **config.global_batch_info
    )
    return policy + taught, shown


class TokenInVerl(VerlPart):
    """The reserved token of a run in verl's rows.

    Attributes:
        reserved: the token, and what its log-probability is worth.
    """

    tokens = frozenset({"logp_nt"})
    policy_loss = staticmethod(with_lesson)

    def __init__(self, mode: Laser, config: Any, model: Callable[[], Any]) -> None:
        super().__init__(mode, config, model)
        faults = {
            "algorithm.rollout_correction.bypass_mode=True takes the log-probabilities of the rollout, and laser's token was not "
            "sampled there; leave one of them out.": (config.algorithm.get("rollout_correction") or {}).get("bypass_mode"),
            "distillation asks its teacher about what was sampled alone, and laser's token is one more; leave one of them "
            "out.": (config.get("distillation") or {}).get("enabled"),
        }
        for sentence, wrong in faults.items():
            if wrong:
                raise RecipeError(sentence)
        check_reference(mode)  # before the model's files are looked at
        own = model()
        self.reserved = Appended.of(
            mode,
            own.tokenizer,
            size=own.hf_config.get_text_config().vocab_size,
            generation=own.generation_config,
            temperature=config.actor_rollout_ref.rollout.temperature,
        )
        self._score_n = self._target_n = torch.zeros(0)

    def append(self, output: Any) -> None:
        """Put the token behind a response that ended, as one that the model did not sample."""
        if not self.reserved.ended(output.response_ids, output.response_mask):
            return
        output.response_ids = [*output.response_ids, self.reserved.token]
        output.response_mask = [*output.response_mask, 0]
        if output.response_logprobs is not None:
            output.response_logprobs = [*output.response_logprobs, 0.0]

    def places(self, responses: Tensor, masks: Tensor) -> list[int]:
        """Where the token stands in each row: at the end, or nowhere."""
        found = []
        for ids_t, mask_t in zip(responses.unbind(), masks.unbind(), strict=True):
            there = len(ids_t) > 1 and int(ids_t[-1]) == self.reserved.token and not bool(mask_t[-1])
            found.append(len(ids_t) - 1 if there else -1)
        return found

    def fields(self, rows: Any, number: int) -> dict[str, Tensor]:
        """The score of each row, NaN where it did not end, once it is mixed in."""
        column_n = torch.tensor(rows.places[self.mode.name])
        logp_n = rows.tokens["logp_nt"].gather(1, column_n.clamp(min=0)[:, None])[:, 0]
        self._score_n = self.reserved.scores(torch.where(column_n >= 0, logp_n, torch.nan))
        return {"self_reward_n": self._score_n} if self.mode.mixes(number) else {}

    def teach(
        self, adv_nt: Tensor, rows: Any, reading: Reading, scheme: Scheme, number: int
    ) -> tuple[Tensor, dict[str, float]]:
        """A weight at each reserved token; the verdict of padding is absent."""
        verdict_n = torch.full((len(rows.packed),), torch.nan, dtype=torch.float64)
        verdict_n[rows.real] = verdicts_of(reading, scheme, self.reserved.laser)
        lesson = self.reserved.lesson(self._score_n, verdict_n, batch=number, rows=len(adv_nt))
        self._target_n = lesson.target_n
        column_n = torch.tensor(rows.places[self.mode.name])
        at = (column_n >= 0).nonzero()[:, 0]
        adv_nt = adv_nt.clone()
        adv_nt[at, column_n[at]] = lesson.weight_n[at].to(adv_nt.dtype)
        return adv_nt, lesson.shown

    def rewrite(self, old: list[Tensor], column_n: Sequence[int]) -> list[Tensor]:
        """The target of each reserved token in the place of its old log-probability."""
        own = [row.clone() for row in old]
        for row, column, target in zip(own, column_n, self._target_n, strict=True):
            if column >= 0:
                row[column] = target
        return own
