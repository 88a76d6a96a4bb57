"""What one generation batch is on its way: padded tokens, and one table to gather across ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from spanwise.errors import AlignmentError
from spanwise.score import Reward
from spanwise.types import BlockText, Credit, Scores, Spans


@dataclass
class LocalBatch:
    """This rank's completions between generation and credit; `rewards` fills up objective by objective."""

    prompts: list[Any]
    completions: list[Any]
    columns: dict[str, list[Any]]
    ids_nt: Int[Tensor, "n t"]
    mask_nt: Bool[Tensor, "n t"]
    spans: Spans
    text: list[BlockText]
    rewards: dict[str, Reward] = field(default_factory=dict)
    seconds: float = 0.0


def pad_tokens(
    ids: Sequence[Sequence[int]], tool_mask: Sequence[Sequence[int]] | None = None
) -> tuple[Int[Tensor, "n t"], Bool[Tensor, "n t"]]:
    """Right-pad lists of token ids, and mark the tokens that the model sampled.

    Args:
        ids: token ids of each completion.
        tool_mask: 1 for a token the model sampled, 0 for tool or environment output; None: the model sampled them all.

    Returns:
        ids (int64, 0 at padding) and the mask.

    Raises:
        AlignmentError: a completion and its tool mask differ in length.

    Example:
        >>> pad_tokens([[5, 6, 7], [8]], [[1, 0, 1], [1]])[1].tolist()
        [[True, False, True], [True, False, False]]
    """
    lengths = [len(row) for row in ids]
    for n, (length, sampled) in enumerate(zip(lengths, tool_mask or (), strict=bool(tool_mask))):
        if length != len(sampled):
            raise AlignmentError(
                f"Completion {n} has {length} tokens and a tool mask of {len(sampled)}; give one mask value to each token."
            )
    filled_nt = torch.arange(max(lengths, default=0)) < torch.tensor(lengths, dtype=torch.long)[:, None]
    ids_nt = torch.zeros(filled_nt.shape, dtype=torch.long)
    ids_nt[filled_nt] = torch.tensor(list(chain.from_iterable(ids)), dtype=torch.long)
    if tool_mask is None:
        return ids_nt, filled_nt
    mask_nt = torch.zeros_like(filled_nt)
    mask_nt[filled_nt] = torch.tensor(list(chain.from_iterable(tool_mask)), dtype=torch.long) != 0
    return ids_nt, mask_nt


def loss_mask(inputs: Mapping[str, Any]) -> Int[Tensor, "n t"]:
    """1 at the tokens that enter TRL's loss: its completion mask, times its tool mask if there are tools."""
    tool_mask = inputs.get("tool_mask")
    return inputs["completion_mask"] if tool_mask is None else inputs["completion_mask"] * tool_mask


def restrict(spans: Spans, mask_nt: Bool[Tensor, "n t"]) -> Spans:
    """Widen spans to the trainer's final token tensor and drop the completions that it left out of the loss.

    A completion without any token in the mask (TRL's `mask_truncated_completions`) loses its spans; every other completion
    must have the same tokens on both sides.

    Args:
        spans: spans of at most as many tokens.
        mask_nt: True where a token enters the loss.

    Returns:
        Spans of the width of the mask.

    Raises:
        AlignmentError: a completion has other tokens in the loss than in its spans.

    Example:
        >>> spans = Spans(("all",), torch.tensor([[0], [0]]), torch.tensor([[2], [1]]),
        ...               torch.tensor([[0, 0], [0, -1]], dtype=torch.int8), torch.tensor([0, 0]))
        >>> restrict(spans, torch.tensor([[True, True, False], [False, False, False]])).block_nt.tolist()
        [[0, 0, -1], [-1, -1, -1]]
    """
    spare = mask_nt.shape[1] - spans.block_nt.shape[1]
    if spare < 0:
        raise AlignmentError(
            f"The spans are {spans.block_nt.shape[1]} tokens wide and the trainer's mask {mask_nt.shape[1]}; "
            "pass the same completions to both."
        )
    block_nt = pad(spans.block_nt, (0, spare), value=-1)
    kept_n = mask_nt.any(dim=1)
    differs_n = kept_n & ((block_nt >= 0) != mask_nt).any(dim=1)
    if bool(differs_n.any()):
        n = int(differs_n.nonzero()[0])
        raise AlignmentError(
            f"Completion {n} trains on {int(mask_nt[n].sum())} tokens and its spans cover {int((block_nt[n] >= 0).sum())}; "
            "the trainer masks tokens that the spans do not know of (a tool mask that changed after scoring?)."
        )
    none = torch.zeros_like(spans.start_nk)
    return replace(
        spans,
        block_nt=block_nt.masked_fill(~mask_nt, -1),
        start_nk=torch.where(kept_n[:, None], spans.start_nk, none),
        end_nk=torch.where(kept_n[:, None], spans.end_nk, none),
    )


def pack(rewards: Sequence[Reward], spans: Spans) -> Float[Tensor, "n c"]:
    """Put all that other ranks must know of these completions into one float64 table: one gather per batch.

    Columns: M rewards, M statuses, 2 M rewards by outcome, K block lengths, 1 fault.

    Args:
        rewards: the result of each objective, in order.
        spans: the spans of the same completions.

    Returns:
        (n, 4 M + K + 1).
    """
    value_nm = torch.stack([torch.as_tensor(r.value_n, dtype=torch.float64) for r in rewards], dim=1)
    status_nm = torch.stack([torch.as_tensor(r.status_n).double() for r in rewards], dim=1)
    by_outcome = torch.stack([torch.as_tensor(r.by_outcome_n2, dtype=torch.float64) for r in rewards], dim=1)
    parts = [value_nm, status_nm, by_outcome.flatten(1), spans.length_nk.double(), spans.fault_n.double()[:, None]]
    return torch.cat(parts, dim=1)


def unpack(
    table_nc: Float[Tensor, "n c"], names: Sequence[str], blocks: int
) -> tuple[Scores, Int[Tensor, "n k"], Int[Tensor, " n"]]:
    """Read the table of `pack`, usually after a gather.

    Args:
        table_nc: one row per completion.
        names: the M objective names.
        blocks: K.

    Returns:
        scores, trainable tokens of each block (0 where it is absent) and fault bits.
    """
    m = len(names)
    value_nm, status_nm, by_outcome, length_nk, fault = table_nc.split([m, m, 2 * m, blocks, 1], dim=1)
    scores = Scores(tuple(names), value_nm, status_nm.to(torch.int8), by_outcome.reshape(-1, m, 2))
    return scores, length_nk.long(), fault.squeeze(1).long()


def rows(credit: Credit, scores: Scores, here: slice) -> tuple[Credit, Scores]:
    """Take this rank's completions out of the global credit and scores."""
    local_credit = replace(credit, block_nk=credit.block_nk[here], stop_n=credit.stop_n[here])
    local_scores = Scores(scores.names, scores.reward_nm[here], scores.status_nm[here], scores.by_outcome_nmo[here])
    return local_credit, local_scores
