"""`Batch`: the completions of a training step as an engine hands them to spanwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from spanwise.credit import Turns, group_index, split_turns
from spanwise.errors import AlignmentError


@dataclass(frozen=True)
class Steps:
    """The trajectory and the step number of each row. Methods that credit single steps need them.

    Attributes:
        trajectory_s: id of each row's trajectory.
        step_s: number of the step; only its order counts.
        anchor_s: the state each step starts from: integer ids or anything hashable.

    Example:
        >>> steps = Steps(torch.tensor([0, 0, 1]), torch.tensor([0, 1, 0]), anchor_s=["door", "key", "door"])
        >>> Batch(["q", "q", "q"], steps=steps).steps.trajectory_s.tolist()
        [0, 0, 1]
    """

    trajectory_s: Int[Tensor, " s"]
    step_s: Int[Tensor, " s"]
    anchor_s: Any = None


@dataclass(frozen=True)
class Batch:
    """The completions of a training step, as an engine hands them to spanwise.

    Attributes:
        group_n: the prompt of each completion: integer ids or anything hashable, in any order, groups of any sizes.
        ids_nt: token ids, aligned left, right or with gaps; any value where the mask is 0.
        mask_nt: the tokens that the model sampled and that are trained (no prompt, padding or tool output).
        columns: the dataset's columns and other columns that rewards read, N values each.
        extras: further objects that rewards may ask for by name, such as a trainer's state.
        value_nt: a critic's values before each token: (N, T), or (N, T, S) with one per stream, ordered as `Scheme.value_names`.
        logp_nt: log-probabilities of the sampled tokens, for methods that need them.
        bootstrap_n: the value after the last token of completions that were cut off, (N,) or (N, S); 0 for those that ended.
        steps: the trajectory and step of each row, for rows that are steps of trajectories.
        score_n: a mode's score of each completion, NaN if it has none; None: no mode gives scores, or they do not count yet.

    Raises:
        AlignmentError: two fields differ in size; the message names both.

    Example:
        >>> Batch(["a", "b", "a"]).group_n
        tensor([0, 1, 0])
    """

    group_n: Any
    ids_nt: Int[Tensor, "n t"] | None = None
    mask_nt: Shaped[Tensor, "n t"] | None = None
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    extras: Mapping[str, Any] = field(default_factory=dict)
    value_nt: Float[Tensor, "n t *s"] | None = None
    logp_nt: Float[Tensor, "n t"] | None = None
    bootstrap_n: Float[Tensor, " n *b"] | None = None
    steps: Steps | None = None
    score_n: Float[Tensor, " n"] | None = None

    def __post_init__(self) -> None:
        if getattr(self.group_n, "ndim", 1) != 1:  # a list has no `ndim` and counts as a vector
            raise AlignmentError(
                f"group_n has the shape {tuple(self.group_n.shape)}, but each completion has one group id; pass a vector, "
                f"such as group_n.flatten()."
            )
        if not isinstance(self.group_n, Tensor):
            object.__setattr__(self, "group_n", group_index(list(self.group_n)))
        n_rows = len(self.group_n)
        ids_shape = None if self.ids_nt is None else tuple(self.ids_nt.shape)
        for name, ndim in {"ids_nt": 2, "mask_nt": 2, "value_nt": 2, "logp_nt": 2, "bootstrap_n": 1, "score_n": 1}.items():
            field_tensor = getattr(self, name)
            if field_tensor is None:
                continue
            needed_shape = ids_shape if ndim == 2 else None
            # A critic may predict a value per objective.
            max_ndim = ndim + 1 if name in ("value_nt", "bootstrap_n") else ndim
            has_fitting_shape = ndim <= field_tensor.dim() <= max_ndim and len(field_tensor) == n_rows
            if not has_fitting_shape or (needed_shape is not None and tuple(field_tensor.shape[:2]) != needed_shape):
                ids_note = "" if needed_shape is None else f" The token ids have the shape {needed_shape}."
                raise AlignmentError(
                    f"{name} has the shape {tuple(field_tensor.shape)}, which does not fit {n_rows} group ids.{ids_note}"
                )
        for name, step_values in vars(self.steps).items() if self.steps is not None else ():
            if step_values is not None and len(step_values) != n_rows:
                raise AlignmentError(
                    f"steps.{name} has {len(step_values)} values for {n_rows} completions; give one value to each row."
                )
        for name, column in self.columns.items():
            if len(column) != n_rows:
                raise AlignmentError(
                    f"Column '{name}' has {len(column)} values for {n_rows} completions; give each a value."
                )

    @staticmethod
    def jagged(
        ids: Sequence[Sequence[int]], group_n: Any, *, sampled: Sequence[Sequence[int]] | None = None, **more: Any
    ) -> Batch:
        """Build a batch from completions given as lists of token ids.

        Args:
            ids: token ids of each completion.
            group_n, more: fields of `Batch`.
            sampled: 1 for a token the model sampled, 0 for tool or environment output; None: it sampled them all.

        Raises:
            AlignmentError: a completion and its flags differ in length.

        Example:
            >>> batch = Batch.jagged([[5, 6, 7], [8]], [0, 0], sampled=[[1, 0, 1], [1]])
            >>> batch.ids_nt.tolist(), batch.mask_nt.tolist()
            ([[5, 6, 7], [8, 0, 0]], [[True, False, True], [True, False, False]])
        """
        return Batch(group_n, *pad_tokens(ids, sampled), **more)

    @property
    def provides(self) -> frozenset[str]:
        """The names of the batch's fields that are not None. `Scheme.check` compares them with a method's needs."""
        return frozenset(f.name for f in fields(self) if getattr(self, f.name) is not None)


def by_turn(
    batch: Batch,
    *,
    turn_nt: Int[Tensor, "n t"] | None = None,
    anchor_s: Any = None,
    columns: Mapping[str, Sequence[Any]] | None = None,
) -> tuple[Batch, Turns]:
    """Split completions into one row per turn. The returned `Turns` can join the turns of each completion again.

    Args:
        batch: one row per rollout, with token ids and mask.
        turn_nt: see `split_turns`; None: a turn is a run of sampled tokens.
        anchor_s: the state each turn starts from, in the order of the rows of the result.
        columns: the columns that rewards read, one value per turn in that order; they replace columns of the batch.

    Returns:
        The batch of turns, with the columns of their completions and their places in `steps`; and the `Turns`.

    Raises:
        AlignmentError: a column or the anchors are not one per turn; see `split_turns`.

    Example:
        >>> batch = Batch.jagged([[5, 6, 7, 8], [9]], ["a", "a"], sampled=[[1, 1, 0, 1], [1]], columns={"answer": ["4", "4"]})
        >>> rows, turns = by_turn(batch)
        >>> rows.ids_nt.tolist(), rows.steps.trajectory_s.tolist(), rows.columns["answer"]
        ([[5, 6], [8, 0], [9, 0]], [0, 0, 1], ['4', '4', '4'])
        >>> turns.put(torch.tensor([[.5, .5], [-1., 0.], [2., 0.]]), rows=2).tolist()
        [[0.5, 0.5, 0.0, -1.0], [2.0, 0.0, 0.0, 0.0]]
    """
    if batch.ids_nt is None or batch.mask_nt is None:
        raise AlignmentError("This batch has no token ids and mask, so it has no turns; give ids_nt and mask_nt.")
    turns = split_turns(batch.mask_nt.bool(), turn_nt)
    if anchor_s is not None and len(anchor_s) != len(turns.row_s):
        raise AlignmentError(f"There are {len(anchor_s)} anchor states for {len(turns.row_s)} turns; give each a state.")
    turn_bootstrap_s = None
    if batch.bootstrap_n is not None:  # only a completion's last turn can be cut off
        last_turn_flag = torch.ones_like(turns.row_s[:1], dtype=torch.bool)
        is_last_turn_s = torch.cat([turns.row_s[1:] != turns.row_s[:-1], last_turn_flag])
        turn_bootstrap_s = batch.bootstrap_n[turns.row_s]
        turn_bootstrap_s[~is_last_turn_s] = 0.0
    return Batch(
        batch.group_n[turns.row_s],
        turns.take(batch.ids_nt),
        turns.take(batch.mask_nt.bool()),
        columns={name: turns.repeat(values) for name, values in batch.columns.items()} | dict(columns or {}),
        extras=batch.extras,
        value_nt=None if batch.value_nt is None else turns.take(batch.value_nt),
        logp_nt=None if batch.logp_nt is None else turns.take(batch.logp_nt),
        bootstrap_n=turn_bootstrap_s,
        steps=Steps(turns.row_s, turns.step_s, anchor_s),
    ), turns


def pad_tokens(
    ids: Sequence[Sequence[int]], sampled: Sequence[Sequence[int]] | None = None
) -> tuple[Int[Tensor, "n t"], Bool[Tensor, "n t"]]:
    """Pad token ids with 0 on the right, and mask the sampled tokens. Without `sampled`, all are sampled."""
    row_lengths = [len(row) for row in ids]
    for n, (length, mask) in enumerate(zip(row_lengths, sampled or (), strict=bool(sampled))):
        if length != len(mask):
            raise AlignmentError(
                f"Completion {n} has {length} tokens, but its tool mask has {len(mask)} values; give each token one value."
            )
    is_token_nt = torch.arange(max(row_lengths, default=0)) < torch.tensor(row_lengths, dtype=torch.long)[:, None]
    ids_nt = torch.zeros(is_token_nt.shape, dtype=torch.long)
    ids_nt[is_token_nt] = torch.tensor(list(chain.from_iterable(ids)), dtype=torch.long)
    if sampled is None:
        return ids_nt, is_token_nt
    mask_nt = torch.zeros_like(is_token_nt)
    mask_nt[is_token_nt] = torch.tensor(list(chain.from_iterable(sampled)), dtype=torch.long) != 0
    return ids_nt, mask_nt
