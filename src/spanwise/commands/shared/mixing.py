"""Where a rollout file's self-rewarding scores are mixed into its credit, and with what share."""

from __future__ import annotations

import pyarrow as pa
import torch

from spanwise.modes.laser import Laser, own_opinion
from spanwise.rollouts import schema
from spanwise.rollouts.recorded import numbers


def own_shares(table: pa.Table, laser: Laser) -> list[tuple[float, float]]:
    """The share of its own score in the credit of each completion, and that score as its group compares it (`own_opinion`).

    Args:
        table: whole groups, columns of `rollouts.schema`; none where it has no scores or does not say the groups.
        laser: how they are mixed.

    Returns:
        (tau, z) of each completion, (0, 0) where its score is not mixed in.

    Example:
        >>> table = pa.table({"step": [1] * 4, "group": [0] * 4, "self_reward": [.9, .7, .3, .1]})
        >>> [(round(t, 4), round(z, 4)) for t, z in own_shares(table, Laser("<unk>", self_rewarding_warmup=0))]
        [(0.1, 1.0954), (0.1, 0.5477), (0.1, -0.5477), (0.1, -1.0954)]
    """
    if not {schema.SELF_REWARD, schema.GROUP} <= set(table.column_names):
        return [(0.0, 0.0)] * len(table)
    stepped = schema.STEP in table.column_names
    step_n = numbers(table, schema.STEP).nan_to_num().long() if stepped else torch.zeros(len(table)).long()
    group_n = torch.unique(torch.stack([step_n, numbers(table, schema.GROUP).long()]), dim=1, return_inverse=True)[1]
    score_n = numbers(table, schema.SELF_REWARD).masked_fill(~laser.mixes_at(step_n), torch.nan)
    share_n, own_n = own_opinion(score_n, group_n, mix=laser.mix, threshold=laser.threshold, scale=laser.scale)
    return list(zip(share_n.tolist(), own_n.where(share_n > 0, 0.0).tolist(), strict=True))
