"""Rewards of rollouts that stand at a turn without the block they pay: the rollout has it elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from spanwise.credit.strata import group_index
from spanwise.objective import Objective, ScopeName
from spanwise.types import Scores, Status


def keep_for_rollouts(
    scores: Scores,
    present_sk: Bool[Tensor, "s k"],
    trajectory_s: Int[Tensor, " s"],
    *,
    objectives: Sequence[Objective],
    block_names: Sequence[str],
    scope: ScopeName = "rollout",
) -> Scores:
    """Give a turn back the number that was set aside because it has no paid block, where its rollout has one.

    A completion that lacks every paid block has no reward. Where rows are turns, the completion is the whole rollout: its outcome
    may stand at a last turn that says goodbye, and the block that it pays in the turn before.

    Args:
        scores: of turns; `unused_nm` holds the numbers that were set aside.
        present_sk: the blocks of each turn.
        trajectory_s: the rollout of each turn.
        objectives: M; those of scope turn keep to their turn.
        block_names: the K blocks.
        scope: of objectives that name none.

    Example:
        Rollout 0 has the block in its first turn, rollout 1 has none; the numbers came with the last turns.

        >>> nan = torch.nan
        >>> scores = Scores(("won",), torch.full((3, 1), nan).double(), torch.ones(3, 1).to(torch.int8),
        ...                 torch.full((3, 1, 2), nan).double(), unused_nm=torch.tensor([[nan], [1.], [0.]]).double())
        >>> present_sk, trajectory_s = torch.tensor([[True], [False], [False]]), torch.tensor([0, 0, 1])
        >>> won = Objective("correct", name="won", pays="all")
        >>> keep_for_rollouts(scores, present_sk, trajectory_s, objectives=[won], block_names=["all"]).reward_nm.flatten()
        tensor([nan, 1., nan], dtype=torch.float64)
    """
    if scores.unused_nm is None or not len(trajectory_s):
        return scores
    index_s = group_index(trajectory_s)
    pays_mk = torch.tensor(
        [[(o.scope or scope) == "rollout" and name in o.pays for name in block_names] for o in objectives]
    )
    paid_sm = (present_sk[:, None] & pays_mk.to(present_sk.device)).any(dim=2)
    paid_jm = torch.zeros((int(index_s.max()) + 1, paid_sm.shape[1]), dtype=torch.long, device=paid_sm.device)
    paid_jm.index_add_(0, index_s, paid_sm.long())
    back_sm = ~scores.unused_nm.isnan() & (paid_jm[index_s] > 0)
    return replace(
        scores,
        reward_nm=torch.where(back_sm, scores.unused_nm, scores.reward_nm),
        status_nm=scores.status_nm.masked_fill(back_sm, int(Status.OK)),
        unused_nm=scores.unused_nm.masked_fill(back_sm, torch.nan),
    )
