"""A sequence that holds several turns, as one row per turn and back; the rewards of such rows, and mini-batches of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from spanwise.credit.checks import check_rewards, first_of
from spanwise.credit.strata import group_index
from spanwise.errors import AlignmentError, RecipeError


@dataclass(frozen=True)
class Turns:
    """Where the turns of N sequences lie.

    Attributes:
        row_s: the sequence of each turn; ascending.
        step_s: its number in the sequence, from 0.
        place_su: the position in the sequence of each token of the turn, -1 at padding.
        width: tokens of a sequence, padding included.

    Example:
        Two turns of one sequence, of two tokens and of one.

        >>> turns = split_turns(torch.tensor([[0, 1, 1, 0, 1]]).bool())
        >>> turns.take(torch.tensor([[1, 2, 3, 4, 5]])).tolist()
        [[2, 3], [5, 0]]
    """

    row_s: Int[Tensor, " s"]
    step_s: Int[Tensor, " s"]
    place_su: Int[Tensor, "s u"]
    width: int

    def take(self, value_nt: Shaped[Tensor, "n t *v"], *, fill: Any = 0) -> Shaped[Tensor, "s u *v"]:
        """What the tokens of each turn hold, one number or several; `fill` at padding."""
        filled_su = (self.place_su >= 0).reshape(*self.place_su.shape, *(1 for _ in value_nt.shape[2:]))
        value_su = value_nt[self.row_s[:, None], self.place_su.clamp(min=0)]
        return torch.where(filled_su, value_su, torch.tensor(fill, dtype=value_nt.dtype, device=value_nt.device))

    def put(self, value_su: Shaped[Tensor, "s u"], *, rows: int) -> Shaped[Tensor, "n t"]:
        """What each turn's tokens hold, at their places in `rows` sequences; 0 at every other one.

        Raises:
            AlignmentError: the values are of other turns.
        """
        if value_su.shape != self.place_su.shape:
            raise AlignmentError(f"Values are {tuple(value_su.shape)} and the turns are {tuple(self.place_su.shape)}.")
        value_nt = torch.zeros((rows, self.width), dtype=value_su.dtype, device=value_su.device)
        filled_su = self.place_su >= 0
        row_su = self.row_s[:, None].expand_as(self.place_su)
        value_nt[row_su[filled_su], self.place_su[filled_su]] = value_su[filled_su]
        return value_nt

    def repeat(self, values: Sequence[Any]) -> list[Any]:
        """One value per sequence as one per turn."""
        return [values[row] for row in self.row_s.tolist()]


def runs(mask_nt: Bool[Tensor, "n t"]) -> Int[Tensor, "n t"]:
    """The number of the run that each token of a mask lies in, from 0 in each row; -1 outside.

    >>> runs(torch.tensor([[True, True, False, True]])).tolist()
    [[0, 0, -1, 1]]
    """
    before_nt = torch.nn.functional.pad(mask_nt, (1, 0))[:, :-1]
    return torch.where(mask_nt, (mask_nt & ~before_nt).cumsum(dim=1) - 1, -1)


def split_turns(mask_nt: Bool[Tensor, "n t"], turn_nt: Int[Tensor, "n t"] | None = None) -> Turns:
    """Find the turns of sequences: each run of sampled tokens, or the tokens of one turn id.

    Args:
        mask_nt: the tokens that the model sampled and that are trained.
        turn_nt: a turn id for each token that belongs to one, negative elsewhere, in any alignment; needed where two turns follow
            each other without a token between them. None: a turn is a run of the mask.

    Edge cases:
        A sequence without a sampled token has no turn. A turn of `turn_nt` without one has none either.

    Raises:
        AlignmentError: shapes differ, or a sampled token belongs to no turn.

    Example:
        >>> turns = split_turns(torch.tensor([[0, 1, 1, 0, 1], [1, 0, 0, 0, 0]]).bool())
        >>> turns.row_s.tolist(), turns.step_s.tolist(), turns.place_su.tolist()
        ([0, 0, 1], [0, 1, 0], [[1, 2], [4, -1], [0, -1]])
        >>> turns.put(torch.tensor([[.5, .5], [2., 0.], [3., 0.]]), rows=2)
        tensor([[0.0000, 0.5000, 0.5000, 0.0000, 2.0000],
                [3.0000, 0.0000, 0.0000, 0.0000, 0.0000]])
    """
    mask_nt = mask_nt.bool()
    if turn_nt is None:
        turn_nt = runs(mask_nt)
    elif turn_nt.shape != mask_nt.shape:
        raise AlignmentError(f"Turn ids are {tuple(turn_nt.shape)}, the mask is {tuple(mask_nt.shape)}.")
    if lost := first_of(mask_nt & (turn_nt < 0)):
        row, place = lost
        raise AlignmentError(f"Token {place} of sequence {row} was sampled and belongs to no turn; give it a turn id.")
    row_i, place_i = torch.nonzero(turn_nt >= 0, as_tuple=True)
    key_i = torch.stack([row_i, turn_nt[row_i, place_i].long()], dim=1)
    keys, turn_i = torch.unique(key_i, dim=0, return_inverse=True)  # by sequence, then by id
    sampled_s = torch.zeros(len(keys), dtype=torch.long, device=mask_nt.device).index_add(
        0, turn_i, mask_nt[row_i, place_i].long()
    )
    keep_s = sampled_s > 0
    dense_s = keep_s.long().cumsum(dim=0) - 1
    kept_i = keep_s[turn_i]
    place_i, turn_i = place_i[kept_i], dense_s[turn_i[kept_i]]
    order = turn_i.argsort(stable=True)  # places stay ascending inside a turn
    place_i, turn_i = place_i[order], turn_i[order]
    length_s = turn_i.bincount(minlength=int(keep_s.sum()))
    start_s = length_s.cumsum(dim=0) - length_s
    place_su = torch.full((len(length_s), int(length_s.max()) if len(length_s) else 0), -1, device=mask_nt.device)
    place_su[turn_i, torch.arange(len(turn_i), device=mask_nt.device) - start_s[turn_i]] = place_i
    row_s = keys[keep_s, 0]
    first_n = torch.full((len(mask_nt),), len(row_s), device=mask_nt.device)
    rank_s = torch.arange(len(row_s), device=mask_nt.device)
    first_n.scatter_reduce_(0, row_s, rank_s, "amin")
    return Turns(row_s, rank_s - first_n[row_s], place_su, mask_nt.shape[1])


def step_rewards(reward_st: Float[Tensor, "s t"], mask_st: Shaped[Tensor, "s t"]) -> Float[Tensor, " s"]:
    r"""Add up the token rewards of each step row.

    Equation
        r[s] = sum over t >= the first trainable token of row s of r[s, t]

    Args:
        reward_st: one reward per token, mostly 0, also in the padding; NaN at a trainable token: the row's reward is absent.
        mask_st: each row's own response mask, bool or 0/1, left- or right-aligned.

    Edge cases:
        A reward on a masked token (an observation at the end of the turn) counts for the trainable token before it; one before
        the first trainable token is dropped, for nothing that was chosen can have caused it. NaN at a masked token is no reward.
        A row without trainable tokens has reward 0.

    Example:
        >>> step_rewards(torch.tensor([[9., .5, 1.], [9., 2., .25]]), torch.tensor([[0, 1, 1], [0, 1, 0]]))
        tensor([1.5000, 2.2500], dtype=torch.float64)
    """
    if reward_st.shape != mask_st.shape:
        raise AlignmentError(f"Token rewards are {tuple(reward_st.shape)}, the mask is {tuple(mask_st.shape)}.")
    check_rewards(reward_st, row="row")
    kept_st = mask_st.bool()
    counts_st = (kept_st.cumsum(dim=1) > 0) & (kept_st | ~reward_st.isnan())
    return torch.where(counts_st, reward_st.double(), 0.0).sum(dim=1)


def prompt_mini_batches(group_s: Int[Tensor, " s"], *, prompts_per_batch: int) -> list[Int[Tensor, " b"]]:
    """Split a batch into mini-batches that hold whole prompts, however many rows the turns of each prompt make.

    Args:
        group_s: prompt ids, in any order, of any sizes.
        prompts_per_batch: prompts in each mini-batch; the last one may hold fewer.

    Returns:
        The rows of each mini-batch, ascending; prompts in the order in which they first appear. Where the rows of a prompt lie
        together, each mini-batch is a range of rows.

    Example:
        >>> prompt_mini_batches(torch.tensor([8, 8, 8, 3, 5, 5]), prompts_per_batch=2)
        [tensor([0, 1, 2, 3]), tensor([4, 5])]
    """
    if prompts_per_batch < 1:
        raise RecipeError(f"prompts_per_batch={prompts_per_batch} must be at least 1.")
    index_s = group_index(group_s)
    rows = torch.arange(len(index_s), device=index_s.device)
    first_g = torch.full((int(index_s.max()) + 1 if len(rows) else 0,), len(rows), device=index_s.device)
    first_g.scatter_reduce_(0, index_s, rows, "amin")
    batch_s = first_g.argsort().argsort()[index_s] // prompts_per_batch
    return list(batch_s.argsort(stable=True).split(batch_s.bincount().tolist()))
