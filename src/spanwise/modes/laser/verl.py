"""A reserved token in the rows of verl (`modes.laser.appended`): appended to responses, and found and taught in a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from spanwise.errors import refuse
from spanwise.modes.laser.appended import Appended, check_reference, parted
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
    """The reserved token of a run in verl's rows."""

    tokens = frozenset({"logp_nt"})
    policy_loss = staticmethod(with_lesson)

    def __init__(self, mode: Laser, config: Any, model: Callable[[], Any]) -> None:
        super().__init__(mode, config, model)
        refuse(
            {
                "algorithm.rollout_correction.bypass_mode=True takes the log-probabilities of the rollout, and laser's token was "
                "not sampled there; leave one of them out.": (config.algorithm.get("rollout_correction") or {}).get(
                    "bypass_mode"
                ),
                "distillation asks its teacher about what was sampled alone, and laser's token is one more; leave one of them "
                "out.": (config.get("distillation") or {}).get("enabled"),
            }
        )
        check_reference(mode)  # before the model's files are looked at
        own = model()
        self.reserved = Appended(
            mode,
            own.tokenizer,
            size=own.hf_config.get_text_config().vocab_size,
            generation=own.generation_config,
            temperature=config.actor_rollout_ref.rollout.temperature,
        )
        self._target_n = torch.zeros(0)

    def append(self, output: Any) -> None:
        """Put the token behind a response that ended, as one that the model did not sample."""
        if self.reserved.ended(output.response_ids, output.response_mask):
            output.response_ids = [*output.response_ids, self.reserved.token]
            output.response_mask = [*output.response_mask, 0]
            if output.response_logprobs is not None:
                output.response_logprobs = [*output.response_logprobs, 0.0]

    def places(self, responses: Tensor, masks: Tensor) -> list[int]:
        """Where the token stands in each row: at the end, or nowhere."""
        rows = zip(responses.unbind(), masks.unbind(), strict=True)
        return [
            len(ids) - 1 if len(ids) > 1 and int(ids[-1]) == self.reserved.token and not bool(mask[-1]) else -1
            for ids, mask in rows
        ]

    def fields(self, rows: Any, number: int) -> dict[str, Tensor]:
        """The score of each row, NaN where it did not end, once it is mixed in."""
        column_n = torch.tensor(rows.places[self.mode.name])
        logp_n = rows.tokens["logp_nt"].gather(1, column_n.clamp(min=0)[:, None])[:, 0]
        return self.reserved.fields(torch.where(column_n >= 0, logp_n, torch.nan), number)

    def teach(
        self, adv_nt: Tensor, rows: Any, reading: Reading, scheme: Scheme, number: int
    ) -> tuple[Tensor, dict[str, float]]:
        """A weight at each reserved token; the verdict of padding is absent."""
        weight_n, self._target_n, metrics = self.reserved.lesson(reading, scheme, number, real=rows.real)
        column_n = torch.tensor(rows.places[self.mode.name])
        at = (column_n >= 0).nonzero()[:, 0]
        adv_nt = adv_nt.clone()
        adv_nt[at, column_n[at]] = weight_n[at].to(adv_nt.dtype)
        return adv_nt, metrics

    def rewrite(self, old: list[Tensor], column_n: Sequence[int]) -> list[Tensor]:
        """The target of each reserved token in the place of its old log-probability."""
        own = [row.clone() for row in old]
        for row, column, target in zip(own, column_n, self._target_n, strict=True):
            if column >= 0:
                row[column] = target
        return own
