"""A trajectory as its turns, in whatever layout: a row per turn, merged sequences, or a graph with branches.

A turn knows where it goes on from. With no parent its prompt is the whole context, and it is a row of its own; with a parent its
prompt is only what came in between. So rows, merged sequences and graphs are one structure, and merging loses nothing.

Training on rows reads O(T^2) tokens of a trajectory of T tokens, for each prompt repeats everything before it; training on branches
reads O(T). A trained token sees the same context either way, so its gradient is the same.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from spanwise.errors import AlignmentError, RewardError
from spanwise.segment import Vocabulary
from spanwise.types import Status

#: Objective -> its reward, or why there is none. An objective that is left out was not asked here (`Status.UNSCORED`).
Rewards = Mapping[str, "float | Status"]


@dataclass(frozen=True)
class Turn:
    """What the model wrote once, and what it saw before.

    Attributes:
        prompt_ids: what it saw: everything, or with a parent what came after the parent's response.
        response_ids: the tokens that followed; observations that came after may be among them.
        mask: 1 at each response token that the model sampled, 0 at the others.
        parent: position in the trajectory of the turn that this one goes on from.
        rewards: of this turn alone.
        anchor: the state it starts from, for methods that compare steps; None: not known.
        truncated: it was cut off before the model stopped.
        per_token: further numbers for each response token (advantages, log-probs), by name.
        extra: anything else about the turn, by name. It is carried along untouched.

    Example:
        >>> turn = Turn([1, 2], [3, 4, 5], [1, 1, 0], rewards={"correct": 1.0})
        >>> turn.response_ids, turn.mask
        ((3, 4, 5), (1, 1, 0))
    """

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    mask: Sequence[int]
    parent: int | None = None
    rewards: Rewards = field(default_factory=dict)
    anchor: Hashable = None
    truncated: bool = False
    per_token: Mapping[str, Sequence[float]] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("prompt_ids", "response_ids", "mask"):
            object.__setattr__(self, name, tuple(getattr(self, name)))


@dataclass(frozen=True)
class Branch:
    """Turns of one trajectory that are trained as one sequence.

    Every turn is in exactly one branch. What a branch shares with an earlier one is its prompt, so that a sampled token trains once
    and is context everywhere else.

    Attributes:
        turns: positions of the turns, each the next one's parent.
        prompt_ids: all that stands before the first of them.
        response_ids: the rest, with the observations between the turns.
        mask: 1 at each token that the model sampled.
        turn: position of the turn that each response token came with; -1 at an observation from between two turns.
        per_token: as in `Turn`; 0 at observations from between two turns, NaN at the tokens of a turn without such an entry.

    Example:
        The second turn goes on from the first and sees one token more, 5.

        >>> turns = (Turn([1, 2], [3, 4], [1, 1]), Turn([5], [6], [1], parent=0))
        >>> (branch,) = Trajectory("a", "q", turns).branches()
        >>> branch.prompt_ids, branch.response_ids, branch.mask, branch.turn
        ((1, 2), (3, 4, 5, 6), (1, 1, 0, 1), (0, 0, -1, 1))
    """

    turns: tuple[int, ...]
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    mask: tuple[int, ...]
    turn: tuple[int, ...]
    per_token: Mapping[str, tuple[float, ...]]


@dataclass(frozen=True)
class Trajectory:
    """One rollout of one prompt: a vote in its group, however many turns, rows or branches it has.

    Attributes:
        id: its name, for messages.
        group: the prompt; trajectories of one group are compared with each other.
        turns: in the order in which they happened.
        rewards: of the outcome.
        extra: anything else, by name. It is carried along untouched.

    Raises:
        AlignmentError: a turn whose lists differ in length, or whose parent does not come before it.
        RewardError: a reward that is no finite number, or that is both the outcome's and a turn's.

    Example:
        >>> first, second = Turn([1, 2], [3, 4], [1, 1]), Turn([1, 2, 3, 4, 9], [5], [1])
        >>> rows = Trajectory("a", 0, (first, second))
        >>> one, = rows.merged().branches()
        >>> one.prompt_ids, one.response_ids, one.mask, one.turn
        ((1, 2), (3, 4, 9, 5), (1, 1, 0, 1), (0, 0, -1, 1))
        >>> rows.merged().rows() == rows
        True
    """

    id: Hashable
    group: Hashable
    turns: tuple[Turn, ...]
    rewards: Rewards = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "turns", tuple(self.turns))
        _check_rewards(self.rewards, f"Trajectory {self.id!r}")
        for t, turn in enumerate(self.turns):
            self._check(t, turn)

    def _check(self, t: int, turn: Turn) -> None:
        who, size = f"Turn {t} of trajectory {self.id!r}", len(turn.response_ids)
        for name, values in {"mask": turn.mask, **turn.per_token}.items():
            if len(values) != size:
                raise AlignmentError(
                    f"{who} has {size} response tokens and {len(values)} entries of '{name}'; give one to each."
                )
        if turn.parent is not None and not 0 <= turn.parent < t:
            raise AlignmentError(f"{who} goes on from turn {turn.parent}, which does not come before it.")
        _check_rewards(turn.rewards, who)
        twice = next((name for name in turn.rewards if name in self.rewards), None)
        if twice is not None:
            raise RewardError(
                f"{who} has a reward '{twice}', and so has the trajectory as a whole; give the two different names."
            )

    @staticmethod
    def of_rows(
        rows: Sequence[Turn],
        trajectory: Sequence[Hashable],
        step: Sequence[int],
        group: Sequence[Hashable],
        *,
        rewards: Mapping[Hashable, Rewards] | None = None,
    ) -> list[Trajectory]:
        """Sort rows, one per turn, into trajectories.

        Args:
            rows: in any order, without parents. What must find its way back to its row travels in `extra`.
            trajectory: id of each row's trajectory.
            step: number of each row's turn; only the order counts.
            group: the prompt of each row.
            rewards: of the outcome, by trajectory id.

        Returns:
            Trajectories in the order in which they first appear.

        Raises:
            AlignmentError: lists of different lengths, one turn twice, turns of one trajectory in different groups, a parent.

        Example:
            >>> late, early = Turn([1, 2], [3], [1]), Turn([1], [2], [1])
            >>> [t.turns == (early, late) for t in Trajectory.of_rows([late, early], ["a", "a"], [7, 2], [0, 0])]
            [True]
        """
        sizes = {"trajectory ids": len(trajectory), "step numbers": len(step), "groups": len(group)}
        for name, size in sizes.items():
            if size != len(rows):
                raise AlignmentError(f"There are {len(rows)} rows and {size} {name}; give one to each row.")
        held: dict[Hashable, list[int]] = {}
        for row, (name, turn) in enumerate(zip(trajectory, rows, strict=True)):
            held.setdefault(name, []).append(row)
            if turn.parent is not None:
                raise AlignmentError(
                    f"Row {row} has a parent, but a row holds its whole context; take `rows()` of its trajectory."
                )
        found = []
        for name, own in held.items():
            own.sort(key=lambda row: step[row])
            for row, other in pairwise(own):
                if step[row] == step[other]:
                    fault = (
                        f"Rows {row} and {other} are both step {step[row]} of trajectory {name!r}; number its steps apart"
                    )
                elif group[row] != group[other]:
                    where = [f"in group {group[one]!r} (row {one})" for one in (row, other)]
                    fault = f"Trajectory {name!r} has a step {where[0]} and one {where[1]}; keep a trajectory in one group"
                else:
                    continue
                raise AlignmentError(f"{fault}, and give the trajectories of different prompts different ids.")
            found.append(Trajectory(name, group[own[0]], tuple(rows[row] for row in own), (rewards or {}).get(name, {})))
        return found

    def context(self, t: int) -> tuple[int, ...]:
        """All that the model saw before it wrote turn t.

        >>> Trajectory("a", 0, (Turn([1], [2], [1]), Turn([3], [4], [1], parent=0))).context(1)
        (1, 2, 3)
        """
        parts: list[tuple[int, ...]] = []
        at: int | None = t
        while at is not None:
            turn = self.turns[at]
            parts += [tuple(turn.response_ids), tuple(turn.prompt_ids)]
            at = turn.parent
        return tuple(i for part in reversed(parts[1:]) for i in part)

    def rows(self) -> Trajectory:
        """The same with the whole context as prompt of every turn: the inverse of `merged`."""
        turns = (replace(turn, prompt_ids=self.context(t), parent=None) for t, turn in enumerate(self.turns))
        return replace(self, turns=tuple(turns))

    def merged(self, vocabulary: Vocabulary | None = None) -> Trajectory:
        """The same with every turn going on from the earlier one whose context and response its prompt starts with.

        Of several that fit it is the one with the most tokens, the latest of equals. What the prompt adds is an observation, and is
        not trained. Rewards, per-token numbers and extras stay with their turns.

        Args:
            vocabulary: the bytes of every id. With it, a prompt that repeats what came before as the same text in other tokens is
                refused; without it, such a prompt opens a new sequence, as one does whose history was edited, cut or summarised.

        Raises:
            AlignmentError: a prompt was tokenised again; the message shows the first token that differs.
        """
        turns: list[Turn] = []
        whole: list[tuple[int, ...]] = []  # context and response of each turn
        longest: list[int] = []  # turns by the length of `whole`, the latest of equals first
        for t, turn in enumerate(self.turns):
            prompt = tuple(turn.prompt_ids) if turn.parent is None else whole[turn.parent] + tuple(turn.prompt_ids)
            if turn.parent is None:
                fit = next((p for p in longest if prompt[: len(whole[p])] == whole[p]), None)
                if fit is not None:
                    turn = replace(turn, prompt_ids=prompt[len(whole[fit]) :], parent=fit)
                elif vocabulary is not None:
                    self._refuse_other_tokens(t, prompt, whole, vocabulary)
            turns.append(turn)
            whole.append(prompt + tuple(turn.response_ids))
            before = next((n for n, p in enumerate(longest) if len(whole[p]) <= len(whole[t])), len(longest))
            longest.insert(before, t)
        return replace(self, turns=tuple(turns))

    def _refuse_other_tokens(
        self, t: int, prompt: tuple[int, ...], whole: Sequence[tuple[int, ...]], vocabulary: Vocabulary
    ) -> None:
        text = _bytes(prompt, vocabulary)
        for p in reversed(range(t)):
            before = _bytes(whole[p], vocabulary)
            if not before or not text.startswith(before):
                continue
            size = min(len(prompt), len(whole[p]))
            at = next((i for i in range(size) if prompt[i] != whole[p][i]), size)
            shown = [_shown(ids, at, vocabulary) for ids in (prompt, whole[p])]
            raise AlignmentError(
                f"Turn {t} of trajectory {self.id!r} repeats the text up to the end of turn {p} in other tokens, so they cannot be "
                f"one sequence: token {at} is {shown[0]} in its prompt, and was {shown[1]}. Pass sampled tokens on as ids, not as "
                f"text that is tokenised again; or merge without a vocabulary, and the turn opens a sequence of its own."
            )

    def branches(self) -> list[Branch]:
        """The sequences to train on: a path of turns to each that nothing goes on from, less what an earlier path holds."""
        inner = {turn.parent for turn in self.turns}
        taken: set[int] = set()
        found = []
        for leaf in (t for t in range(len(self.turns)) if t not in inner):
            path: list[int] = []
            at: int | None = leaf
            while at is not None and at not in taken:
                path.append(at)
                at = self.turns[at].parent
            taken.update(path)
            found.append(self._branch(path[::-1]))
        return found

    def _branch(self, path: Sequence[int]) -> Branch:
        turns = [self.turns[t] for t in path]
        response: list[int] = []
        mask: list[int] = []
        of_turn: list[int] = []
        per_token: dict[str, list[float]] = {name: [] for turn in turns for name in turn.per_token}
        for t, turn in zip(path, turns, strict=True):
            between = () if t == path[0] else turn.prompt_ids
            size = len(turn.response_ids)
            response += [*between, *turn.response_ids]
            mask += [0] * len(between) + [int(bool(flag)) for flag in turn.mask]
            of_turn += [-1] * len(between) + [t] * size
            for name, values in per_token.items():
                values += [0.0] * len(between)
                values += turn.per_token.get(name, [math.nan] * size)
        return Branch(
            tuple(path),
            self.context(path[0]),
            tuple(response),
            tuple(mask),
            tuple(of_turn),
            {name: tuple(values) for name, values in per_token.items()},
        )


def merge_counts(trajectories: Iterable[Trajectory]) -> dict[str, int]:
    """What merging saves, to be logged: sequences of a forward pass and their tokens, as rows and as branches.

    Example:
        >>> rows = Trajectory("a", 0, (Turn([1, 2], [3, 4], [1, 1]), Turn([1, 2, 3, 4, 9], [5], [1])))
        >>> merge_counts([rows.merged()])
        {'trajectories': 1, 'rows': 2, 'row_tokens': 10, 'branches': 1, 'branch_tokens': 6, 'trained_tokens': 3}
    """
    names = ("trajectories", "rows", "row_tokens", "branches", "branch_tokens", "trained_tokens")
    counts: dict[str, int] = dict.fromkeys(names, 0)
    for trajectory in trajectories:
        ends: list[int] = []  # how many tokens stand up to the end of each turn
        for turn in trajectory.turns:
            before = 0 if turn.parent is None else ends[turn.parent]
            ends.append(before + len(turn.prompt_ids) + len(turn.response_ids))
            counts["trained_tokens"] += sum(map(bool, turn.mask))
        inner = {turn.parent for turn in trajectory.turns}
        leaves = [end for t, end in enumerate(ends) if t not in inner]
        for name, count in zip(names, (1, len(ends), sum(ends), len(leaves), sum(leaves)), strict=False):
            counts[name] += count
    return counts


def _check_rewards(rewards: Rewards, who: str) -> None:
    for name, value in rewards.items():
        if not isinstance(value, Status) and not math.isfinite(value):
            raise RewardError(
                f"{who} has {value} as reward '{name}'; give a finite number, or the Status that says why there is none."
            )


def _bytes(ids: Sequence[int], vocabulary: Vocabulary) -> bytes:
    return vocabulary.join(np.array(ids, dtype=np.int64))[0]


def _shown(ids: Sequence[int], at: int, vocabulary: Vocabulary) -> str:
    """A token with what it writes."""
    return f"{ids[at]} ({vocabulary.pieces[ids[at]]!r})" if at < len(ids) else "not there"
