"""Convert slime's samples to a `Batch`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from spanwise.batch import Batch, Steps
from spanwise.credit import group_index
from spanwise.engines.shared import columns_of
from spanwise.errors import AlignmentError
from spanwise.scheme import Scheme


def batch_of(args: Any, samples: Sequence[Any], scheme: Scheme) -> tuple[Batch, Int[Tensor, " n"], Bool[Tensor, "n t"]]:
    """Return the samples as a batch, the rollout number of each, and the mask of the tokens that slime trains."""
    loss_masks = [[1] * one.response_length if one.loss_mask is None else list(one.loss_mask) for one in samples]
    completion_ids = [list(one.tokens[len(one.tokens) - one.response_length :]) for one in samples]
    for n, sample in enumerate(samples):
        if sample.group_index is None:
            raise AlignmentError(f"Sample {n} has no group_index; give the samples of a prompt one.")
    rollout_n = group_index([("none", n) if one.rollout_id is None else one.rollout_id for n, one in enumerate(samples)])
    has_turns = len(rollout_n.unique()) < len(samples)
    rollout_logps = [one.rollout_log_probs for one in samples] if "logp_nt" in scheme.needs else [None]
    batch = Batch.jagged(
        completion_ids,
        [one.group_index for one in samples],
        # A sample that is left out of the loss is still scored and compared, so all its tokens count as sampled.
        sampled=[mask if any(mask) else [1] * len(mask) for mask in loss_masks],
        columns=columns_of([_columns(args, one, row) for one, row in zip(samples, completion_ids, strict=True)]),
        steps=Steps(rollout_n, torch.arange(len(samples))) if has_turns else None,
        logp_nt=None if None in rollout_logps else pad_sequence([torch.tensor(logp) for logp in rollout_logps], True),
    )
    is_left_out_n = torch.tensor([one.remove_sample or not any(mask) for one, mask in zip(samples, loss_masks, strict=True)])
    assert batch.mask_nt is not None
    return batch, rollout_n, batch.mask_nt & ~is_left_out_n[:, None]


def _columns(args: Any, sample: Any, ids: list[int]) -> dict[str, Any]:
    """Return what reward functions read of a sample of slime: its metadata, its label, its text and slime's own reward."""
    reward_parts = sample.reward if isinstance(sample.reward, Mapping) else {}
    text_columns = {"prompts": sample.prompt, "completions": sample.response, "completion_ids": ids}
    label = {} if sample.label is None else {"label": sample.label, args.label_key or "label": sample.label}
    return {**reward_parts, **(sample.metadata or {}), **label, **text_columns, "environment": own_reward(args, sample)}


def own_reward(args: Any, sample: Any) -> Any:
    """Return the reward that slime's own reward function gave a sample; None if it gave none."""
    return sample.reward if sample.reward is None else sample.get_reward_value(args)
