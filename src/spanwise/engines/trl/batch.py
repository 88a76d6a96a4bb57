"""What TRL's inputs say of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxtyping import Int
from torch import Tensor


def loss_mask(inputs: Mapping[str, Any]) -> Int[Tensor, "n t"]:
    """1 at the tokens that enter TRL's loss: its completion mask, times its tool mask if there are tools."""
    tool_mask = inputs.get("tool_mask")
    return inputs["completion_mask"] if tool_mask is None else inputs["completion_mask"] * tool_mask
