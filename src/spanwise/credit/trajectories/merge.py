"""Prefix merging: consecutive steps of a trajectory become one sequence with one mask, so that a context is read once.

Step k's prompt repeats everything before it, so training on rows reads O(T^2) tokens of a trajectory of T tokens; training on
merged sequences reads O(T). A trained token sees the same context either way, so its gradient is the same.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from spanwise.errors import AlignmentError


@dataclass(frozen=True)
class Step:
    """One turn of a trajectory as a row: the context the model saw, and what it wrote.

    Attributes:
        trajectory: id of its trajectory.
        step: its number; only the order counts.
        prompt_ids: the whole context.
        response_ids: the tokens that followed, observations that came after included.
        mask: 1 at each response token the model wrote, 0 at observations.
        reward: of the turn; NaN where absent.
        per_token: further numbers for each response token (advantages, log-probs, token rewards), by name.
        extra: anything else about the turn, by name.
    """

    trajectory: Hashable
    step: int
    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    mask: Sequence[int]
    reward: float = float("nan")
    per_token: Mapping[str, Sequence[float]] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        size = len(self.response_ids)
        for name, values in {"mask": self.mask, **self.per_token}.items():
            if len(values) != size:
                raise AlignmentError(
                    f"Step {self.step} of trajectory {self.trajectory!r} has {size} response tokens and {len(values)} "
                    f"entries of '{name}'."
                )


@dataclass(frozen=True)
class MergedSequence:
    """One or more consecutive steps of a trajectory as one prompt and one response.

    Attributes:
        trajectory: id of its trajectory.
        rows: which of the given steps it is made of, in order; the tuples below with one entry per turn follow it.
        steps, rewards: number and reward of each turn.
        prompt_ids: the prompt of its first turn.
        response_ids: all that followed, with the observations between the turns.
        mask: 1 at each token the model wrote.
        turn: the step number each response token came with, -1 at an observation from between two turns.
        per_token: as in `Step`, 0 at observations from between two turns, NaN at the tokens of a turn that has no such entry.
        extra: for each name one entry per turn, None where the turn has none.
    """

    trajectory: Hashable
    rows: tuple[int, ...]
    steps: tuple[int, ...]
    rewards: tuple[float, ...]
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    mask: tuple[int, ...]
    turn: tuple[int, ...]
    per_token: Mapping[str, tuple[float, ...]]
    extra: Mapping[str, tuple[Any, ...]]


@dataclass(frozen=True)
class Merge:
    """Merged sequences, and what merging saved.

    Attributes:
        sequences: trajectories in the order in which they first appear, the sequences of each in the order of its steps.
        rows_before, rows_after: sequences to train on.
        tokens_before, tokens_after: tokens of the forward pass, prompts included.
        trained_tokens: tokens with mask 1, the same before and after.
    """

    sequences: tuple[MergedSequence, ...]
    rows_before: int
    rows_after: int
    tokens_before: int
    tokens_after: int
    trained_tokens: int


def merge_steps(steps: Sequence[Step]) -> Merge:
    """Join consecutive steps wherever the next prompt starts with all that came before it.

    A step joins the sequence before it if its prompt starts with that sequence's prompt and response (or equals them); what the
    prompt adds is the observation between, and is masked. Otherwise (the history was edited, cut or summarised) it opens a new
    sequence, and the steps after it may join that one. Every reward, per-token number and extra field is kept, by turn.

    Args:
        steps: in any order.

    Edge cases:
        A prompt that shares only a part with what came before, or that ends inside the response before it, opens a new sequence.
        A turn with an empty response joins with no token and keeps its reward.

    Raises:
        AlignmentError: a trajectory has one step twice.

    Example:
        >>> first = Step("a", 0, [1, 2], [3, 4], [1, 1], reward=0.)
        >>> second = Step("a", 1, [1, 2, 3, 4, 9], [5], [1], reward=1.)
        >>> one = merge_steps([first, second]).sequences[0]
        >>> one.prompt_ids, one.response_ids, one.mask, one.turn, one.rewards
        ((1, 2), (3, 4, 9, 5), (1, 1, 0, 1), (0, 0, -1, 1), (0.0, 1.0))
    """
    trajectories: dict[Hashable, list[int]] = {}
    for row, step in enumerate(steps):
        trajectories.setdefault(step.trajectory, []).append(row)
    sequences = []
    for rows in trajectories.values():
        rows.sort(key=lambda row: steps[row].step)
        _refuse_twice(steps, rows)
        sequences += [_join(steps, part) for part in _parts(steps, rows)]
    return Merge(
        tuple(sequences),
        rows_before=len(steps),
        rows_after=len(sequences),
        tokens_before=sum(len(step.prompt_ids) + len(step.response_ids) for step in steps),
        tokens_after=sum(len(merged.prompt_ids) + len(merged.response_ids) for merged in sequences),
        trained_tokens=sum(_trained(merged.mask) for merged in sequences),
    )


def _parts(steps: Sequence[Step], rows: list[int]) -> list[list[int]]:
    """Cut the rows of one trajectory wherever a prompt does not start with all that came before it."""
    parts: list[list[int]] = []
    context: list[int] = []
    for row in rows:
        prompt = list(steps[row].prompt_ids)
        if parts and prompt[: len(context)] == context:
            parts[-1].append(row)
        else:
            parts.append([row])
        context = prompt + list(steps[row].response_ids)
    return parts


def _join(steps: Sequence[Step], rows: list[int]) -> MergedSequence:
    turns = [steps[row] for row in rows]
    names = {name: None for step in turns for name in step.per_token}
    response_ids: list[int] = []
    mask: list[int] = []
    turn: list[int] = []
    per_token: dict[str, list[float]] = {name: [] for name in names}
    start = len(turns[0].prompt_ids)
    for step in turns:
        between = list(step.prompt_ids)[start + len(response_ids) :]
        response_ids += [*between, *step.response_ids]
        mask += [0] * len(between) + [int(bool(kept)) for kept in step.mask]
        turn += [-1] * len(between) + [step.step] * len(step.response_ids)
        for name, values in per_token.items():
            values += [0.0] * len(between)
            values += step.per_token.get(name, [float("nan")] * len(step.response_ids))
    extras = {name: None for step in turns for name in step.extra}
    return MergedSequence(
        trajectory=turns[0].trajectory,
        rows=tuple(rows),
        steps=tuple(step.step for step in turns),
        rewards=tuple(step.reward for step in turns),
        prompt_ids=tuple(turns[0].prompt_ids),
        response_ids=tuple(response_ids),
        mask=tuple(mask),
        turn=tuple(turn),
        per_token={name: tuple(values) for name, values in per_token.items()},
        extra={name: tuple(step.extra.get(name) for step in turns) for name in extras},
    )


def _refuse_twice(steps: Sequence[Step], rows: list[int]) -> None:
    for row, other in pairwise(rows):
        if steps[row].step == steps[other].step:
            raise AlignmentError(
                f"Rows {row} and {other} are both step {steps[row].step} of trajectory {steps[row].trajectory!r}; number the "
                f"steps of a trajectory differently, and give the trajectories of different prompts different ids."
            )


def _trained(mask: Sequence[int]) -> int:
    return sum(1 for kept in mask if kept)
