"""What one generation batch is on its way: padded tokens, one table to gather across ranks, and the rollouts kept after it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxtyping import Bool, Float, Int
from torch import Tensor

from spanwise.types import BlockText, Credit, Scores, Spans


@dataclass(frozen=True)
class Rollouts:
    """The completions of the last generation batch of this process, with everything that was said of them.

    Attributes:
        mode: "train" or "eval".
        step: the optimiser step they were generated at.
        prompts: N prompts, strings or message lists, as the dataset has them.
        completions: N completions as TRL decoded them.
        columns: the other dataset columns, N values each.
        ids_nt: token ids, right-padded with 0.
        mask_nt: True at the tokens the model sampled (no padding, no tool output).
        text: what each completion says, block by block.
        spans: where each block lies among the tokens that enter the loss.
        scores: rewards and statuses of the N completions.
        credit: credit per block of the N completions; its two counters cover all processes.
        advantages_nt: what every token is trained with, before the fold.
    """

    mode: str
    step: int
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


def loss_mask(inputs: Mapping[str, Any]) -> Int[Tensor, "n t"]:
    """1 at the tokens that enter TRL's loss: its completion mask, times its tool mask if there are tools."""
    tool_mask = inputs.get("tool_mask")
    return inputs["completion_mask"] if tool_mask is None else inputs["completion_mask"] * tool_mask
