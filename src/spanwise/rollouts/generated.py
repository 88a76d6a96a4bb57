"""`Rollouts`: a generation batch as an engine leaves it, with everything that was said of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from spanwise.errors import AlignmentError
from spanwise.rollouts import schema
from spanwise.rollouts.write import credit_columns, rollout_table, score_columns, span_columns
from spanwise.types import BlockText, Credit, Scores, Spans, whole_text


@dataclass(frozen=True)
class Rollouts:
    """The completions of the last generation batch of this process, with everything that was said of them.

    Attributes:
        mode: "train" or "eval".
        step: the optimiser step they were generated at.
        method: the name of what credited them.
        group_n: the group of each completion, numbered over all processes.
        prompts: N prompts, strings or message lists, as the dataset has them.
        completions: N completions as the trainer decoded them.
        columns: the other dataset columns, N values each.
        ids_nt: token ids, right-padded with 0.
        mask_nt: True at the tokens the model sampled (no padding, no tool output).
        text: what each completion says, block by block.
        spans: where each block lies among the tokens that enter the loss.
        scores: rewards and statuses of the N completions.
        credit: credit per block of the N completions; its two counters cover all processes.
        advantages_nt: what every token is trained with, before the fold.
        value_nt: what a critic expected before each token, or (N, T, S) by `value_names`; NaN where there is none. None: no critic.
        logp_nt: log-probability of each token under the policy and at the temperature that sampled it.
        value_names: of the S values, `Scheme.value_names`.
        self_reward_n: the self-rewarding score of each completion (`Laser`), NaN where it did not end; None: there is none.
    """

    mode: str
    step: int
    method: str
    group_n: Int[Tensor, " n"]
    prompts: list[Any]
    completions: list[Any]
    columns: Mapping[str, list[Any]]
    ids_nt: Int[Tensor, "n t"]
    mask_nt: Bool[Tensor, "n t"]
    text: list[BlockText]
    spans: Spans
    scores: Scores
    credit: Credit
    advantages_nt: Float[Tensor, "n t"]
    value_nt: Float[Tensor, "n t *s"] | None = None
    logp_nt: Float[Tensor, "n t"] | None = None
    value_names: tuple[str, ...] = ()
    self_reward_n: Float[Tensor, " n"] | None = None

    def recorded(self, *, step: int, rollout_n: Int[Tensor, " n"] | None = None) -> pa.Table:
        """What a rollout file keeps of them: no padding, of the dataset's columns only `answer`.

        Args:
            step: of training, which a batch may serve several optimiser steps of.
            rollout_n: the rollout of each completion, where some are parts of one that has one vote.

        Raises:
            AlignmentError: values or log-probabilities that do not fit the tokens, values that do not fit their names.
        """
        filled_nt = self.mask_nt.flip(1).cumsum(1).flip(1) > 0  # up to the last sampled token
        learned_n1 = (self.spans.block_nt >= 0).any(dim=1, keepdim=True)
        by_block = {}
        for k, name in enumerate(self.spans.names):
            present_n = torch.tensor([text[name] is not None for text in self.text])
            by_block[name] = self.credit.block_nk[:, k].masked_fill(~present_n, torch.nan)
        advantages_nt = self.advantages_nt.masked_fill(~learned_n1, torch.nan)
        columns = {
            schema.STEP: [step] * len(self.text),
            schema.GROUP: self.group_n,
            schema.ROLLOUT: rollout_n,
            schema.PROMPT: self.prompts,
            schema.ANSWER: self.columns.get(schema.ANSWER),
            schema.TEXT: [whole_text(blocks) for blocks in self.text],
            schema.FAULT: self.spans.fault_n,
            **span_columns(self.spans.names, self.spans.start_nk, self.spans.end_nk),
            schema.SELF_REWARD: self.self_reward_n,
            **score_columns(self.scores),
            schema.IDS: self.ids_nt[filled_nt],
            schema.TRAINABLE: self.mask_nt[filled_nt],
            schema.BLOCK: self.spans.block_nt[filled_nt] if self.spans.interleaved else None,
            **{
                schema.token_column(name): known_nt.masked_fill(~self.mask_nt, torch.nan)[filled_nt].float()
                for name, known_nt in self._known().items()
            },
            **credit_columns(self.method, by_block, self.credit, advantages_nt[filled_nt]),
        }
        return rollout_table(columns, np.cumsum([0, *filled_nt.sum(dim=1).tolist()]))

    def _known(self) -> dict[str, Float[Tensor, "n t"]]:
        """Values, by stream where there are several, and log-probabilities, as far as there are any."""
        known: dict[str, Tensor] = {}
        if self.value_nt is not None:
            value_nts = self.value_nt if self.value_nt.ndim == 3 else self.value_nt[:, :, None]
            streams = value_nts.shape[2]
            if streams != max(1, len(self.value_names)):
                raise AlignmentError(
                    f"The critic has {streams} values for each token and they have {len(self.value_names)} names "
                    f"({', '.join(self.value_names) or 'none'}); give one to each."
                )
            known = dict(zip(schema.value_keys(self.value_names), value_nts.detach().cpu().unbind(dim=2), strict=True))
        if self.logp_nt is not None:
            known["logp"] = self.logp_nt.detach().cpu()
        for name, known_nt in known.items():
            if known_nt.shape != self.mask_nt.shape:
                raise AlignmentError(
                    f"There are {tuple(self.mask_nt.shape)} completions and tokens and {tuple(known_nt.shape)} of '{name}'; "
                    f"give one for each token."
                )
        return known
