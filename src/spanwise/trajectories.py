"""Turn trajectories into a `Batch` with one row per turn. Put the rows' numbers back onto the turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from spanwise.batch import Batch, Steps
from spanwise.credit import Trajectory, group_index
from spanwise.errors import AlignmentError
from spanwise.score import Reward
from spanwise.types import Status

__all__ = ["onto_turns", "turn_batch"]


def turn_batch(
    trajectories: Sequence[Trajectory], *, columns: Mapping[str, Sequence[Any]] | None = None
) -> tuple[Batch, dict[str, Reward]]:
    """Build a right-padded batch with one row per turn. Also return the rewards, for `pipeline.read`.

    The rows are the responses of the turns, trajectory by trajectory, so that a sampled token stands in one row however many
    branches share it; `Batch.steps` says whose they are. A reward of the outcome stands at the last turn that sampled a token.

    Args:
        trajectories: in any layout (rows, merged, a graph): the responses of the turns are the same.
        columns: what rewards read, one value per trajectory. `truncated` is added, of each turn.

    Raises:
        AlignmentError: a column with another number of values; a trajectory without any turn, whose vote no row could carry.

    Example:
        >>> from spanwise.credit import Turn
        >>> rows = Turn([1], [2, 3], [1, 1], rewards={"step_ok": 1.}), Turn([1, 2, 3], [4], [1])
        >>> batch, recorded = turn_batch([Trajectory("a", "sum", rows, rewards={"correct": 0.})])
        >>> batch.ids_nt.tolist(), batch.steps.trajectory_s.tolist(), batch.steps.step_s.tolist()
        ([[2, 3], [4, 0]], [0, 0], [0, 1])
        >>> recorded["step_ok"].value_n, recorded["correct"].value_n
        (tensor([1., nan], dtype=torch.float64), tensor([nan, 0.], dtype=torch.float64))
    """
    if no_turn_ids := [trajectory.id for trajectory in trajectories if not trajectory.turns]:
        raise AlignmentError(
            f"Trajectory {no_turn_ids[0]!r} has no turn, so it would be missing from the batch and from its group's baseline; "
            f"give it a turn without tokens, or leave it out."
        )
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    turn_index_pairs = [(j, t) for j, trajectory in enumerate(trajectories) for t in range(len(trajectory.turns))]
    trajectory_s = torch.tensor([j for j, _ in turn_index_pairs], dtype=torch.long)
    step_s = torch.tensor([t for _, t in turn_index_pairs], dtype=torch.long)
    turn_columns: dict[str, Sequence[Any]] = {"truncated": [turn.truncated for turn in turns]}
    for name, column in (columns or {}).items():
        if len(column) != len(trajectories):
            raise AlignmentError(
                f"Column '{name}' has {len(column)} values for {len(trajectories)} trajectories; give one value to each."
            )
        column_values = list(column)  # make a list, because pandas would look up labels instead of positions
        turn_columns[name] = [column_values[j] for j, _ in turn_index_pairs]
    anchors = [turn.anchor for turn in turns]
    steps = Steps(trajectory_s, step_s, None if all(anchor is None for anchor in anchors) else anchors)
    group_s = group_index([trajectory.group for trajectory in trajectories])[trajectory_s]
    ids, token_masks = [turn.response_ids for turn in turns], [turn.mask for turn in turns]
    return Batch.jagged(ids, group_s, sampled=token_masks, columns=turn_columns, steps=steps), _collect_rewards(trajectories)


def _collect_rewards(trajectories: Sequence[Trajectory]) -> dict[str, Reward]:
    """Collect the rewards of each objective, one per turn. The last sampled turn gets the trajectory's own rewards."""
    rewards_by_turn: list[Mapping[str, float | Status]] = []
    for trajectory in trajectories:
        sampled_turn_indices = [t for t, turn in enumerate(trajectory.turns) if any(turn.mask)]
        last_turn_index = sampled_turn_indices[-1] if sampled_turn_indices else len(trajectory.turns) - 1
        for t, turn in enumerate(trajectory.turns):
            rewards_by_turn.append({**turn.rewards, **(trajectory.rewards if t == last_turn_index else {})})
    reward_by_objective = {}
    for name in dict.fromkeys(name for turn_rewards in rewards_by_turn for name in turn_rewards):
        rewards = [turn_rewards.get(name, Status.UNSCORED) for turn_rewards in rewards_by_turn]
        reward_numbers = [None if isinstance(reward, Status) else float(reward) for reward in rewards]
        reward_statuses = [reward if isinstance(reward, Status) else Status.OK for reward in rewards]
        reward_by_objective[name] = Reward.of(reward_numbers, status=reward_statuses)
    return reward_by_objective


def onto_turns(trajectories: Sequence[Trajectory], name: str, value_st: Float[Tensor, "s t"]) -> list[Trajectory]:
    """Write numbers, such as advantages, from a batch's rows into their turns (`Turn.per_token`).

    Args:
        trajectories: those of the batch, in its order.
        name: of the entry.
        value_st: a number for each token of each row, such as `pipeline.advantages`.

    Raises:
        AlignmentError: other rows than the trajectories have turns, or fewer tokens than a turn has.

    Example:
        >>> from spanwise.credit import Turn
        >>> one = Trajectory("a", 0, (Turn([1], [2], [1]), Turn([1, 2], [3, 4], [0, 1])))
        >>> credited, = onto_turns([one], "advantages", torch.tensor([[.5, 0.], [0., -1.]]))
        >>> credited.merged().branches()[0].per_token
        {'advantages': (0.5, 0.0, -1.0)}
    """
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    longest_length = max((len(turn.response_ids) for turn in turns), default=0)
    if len(turns) != len(value_st) or longest_length > value_st.shape[1]:
        raise AlignmentError(
            f"'{name}' has the shape {tuple(value_st.shape)} for {len(turns)} turns of up to {longest_length} tokens; "
            f"give one row to each turn."
        )
    credited_turns = (
        replace(turn, per_token={**turn.per_token, name: tuple(values[: len(turn.response_ids)])})
        for turn, values in zip(turns, value_st.tolist(), strict=True)
    )
    return [replace(trajectory, turns=tuple(islice(credited_turns, len(trajectory.turns)))) for trajectory in trajectories]
