"""`Sequences`: prompts joined with their completions, as a model reads them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from spanwise.batch import Batch
from spanwise.types import ByCompletion

#: The inputs of TRL's forward pass besides the tokens.
_IMAGE_INPUTS = (
    "pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles", "image_sizes",
    "token_type_ids", "mm_token_type_ids", "image_position_ids",
)  # fmt: skip


@dataclass(frozen=True)
class Sequences(ByCompletion):
    """Prompts joined with their completions, as a model reads them."""

    ids_nl: Int[Tensor, "n l"]  # Each prompt, padded on the left, then its completion, padded on the right.
    attention_nl: Int[Tensor, "n l"]  # 0 at padding; 1 at prompts, completions and tool output.
    width: int  # The number of columns at the right that hold the completions.

    @property
    def end_n(self) -> Int[Tensor, " n"]:
        """The length of each completion, up to its last token that is not padding."""
        token_number_l = torch.arange(1, self.ids_nl.shape[1] + 1, device=self.ids_nl.device)
        last_token_number_n = (token_number_l * (self.attention_nl > 0)).amax(dim=1)
        return (last_token_number_n - (self.ids_nl.shape[1] - self.width)).clamp(min=0)


def sequences(output: Mapping[str, Any], batch: Batch) -> Sequences:
    """Join the prompts and completions of a TRL batch into the sequences that the model saw."""
    assert batch.ids_nt is not None, "a trainer's batch must hold token ids, but this batch has none"
    width = batch.ids_nt.shape[1]
    device = output["prompt_ids"].device
    token_count_n = torch.tensor([len(ids) for ids in batch.columns["completion_ids"]], device=device)
    is_present_nt = torch.arange(width, device=device) < token_count_n[:, None]
    ids_nl = torch.cat([output["prompt_ids"], output["completion_ids"][:, :width]], dim=1)
    return Sequences(ids_nl, torch.cat([output["prompt_mask"], is_present_nt.to(output["prompt_mask"].dtype)], dim=1), width)


def image_inputs(output: Mapping[str, Any], length: int) -> dict[str, Any]:
    """Return TRL's inputs besides token ids and masks, such as images. Inputs per token are cut to `length`. May be empty."""
    other_inputs = {name: output[name] for name in _IMAGE_INPUTS if name in output}
    return {name: value[:, :length] if name.endswith("token_type_ids") else value for name, value in other_inputs.items()}


def cut_off(batch: Batch, ends: Collection[int]) -> Bool[Tensor, " n"]:
    """Mark the completions that were cut off: their last token is no end-of-sequence token."""
    return torch.tensor([len(ids) > 0 and ids[-1] not in ends for ids in batch.columns["completion_ids"]], dtype=torch.bool)


def sampled_end(batch: Batch, ends: Collection[int]) -> Bool[Tensor, " n"]:
    """Mark the completions whose last token is an end-of-sequence token that the model sampled."""
    assert batch.mask_nt is not None, "a trainer's batch always has a mask"
    last_token_index_n = torch.tensor([max(0, len(ids) - 1) for ids in batch.columns["completion_ids"]])
    return ~cut_off(batch, ends) & batch.mask_nt.bool().cpu().gather(1, last_token_index_n[:, None])[:, 0]


def left_padded(prefixes: Sequence[Sequence[int]], padding: int, device: Any) -> tuple[Tensor, Tensor]:
    """Pad lists of token ids on the left to the longest. Return ids and mask."""
    padded_width = max(len(prefix) for prefix in prefixes)
    padded_ids = [[padding] * (padded_width - len(prefix)) + list(prefix) for prefix in prefixes]
    padded_masks = [[0] * (padded_width - len(prefix)) + [1] * len(prefix) for prefix in prefixes]
    return torch.tensor(padded_ids, device=device), torch.tensor(padded_masks, device=device)


def positions(model: Any, attention_nl: Tensor) -> dict[str, Tensor]:
    """Return `position_ids` that count from each row's first token. Empty if the model takes none."""
    if "position_ids" not in signature(model.forward).parameters:
        return {}
    return {"position_ids": (attention_nl.cumsum(dim=1) - 1).clamp(min=0)}
