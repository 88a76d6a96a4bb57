"""`Trajectory`: the turns of a rollout as rows, as merged sequences, or as a graph.

A turn without a parent is a row: its prompt is its whole context. The prompt of a turn with a parent is only the text between the
two. Training on branches costs O(T) tokens instead of the O(T^2) of rows, with the same contexts and so the same gradients.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from spanwise.credit.strata import check_rewards, check_shapes, first_of, group_index, list_ids
from spanwise.credit.trajectories.rollouts import build_timeline
from spanwise.errors import AlignmentError, RecipeError, RewardError
from spanwise.segment import Vocabulary
from spanwise.types import Status

#: Maps objectives' names to rewards, or to the `Status` of a missing reward. A reward without an entry is `UNSCORED`.
Rewards = Mapping[str, "float | Status"]


@dataclass(frozen=True)
class Turn:
    """One turn of a trajectory: the tokens that the model wrote, and the prompt before them.

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
    """Turns of a trajectory that are trained as one sequence. Turns that an earlier branch trains are part of the prompt."""

    turns: tuple[int, ...]  # Positions of the turns in the trajectory; each turn is the parent of the next.
    prompt_ids: tuple[int, ...]  # All tokens before the response of the first turn.
    response_ids: tuple[int, ...]  # The responses of the turns, and the observations between them.
    mask: tuple[int, ...]  # 1 at each response token that the model sampled.
    turn: tuple[int, ...]  # The turn of each response token; -1 at observations.
    per_token: Mapping[str, tuple[float, ...]]  # Numbers such as log-probs: 0 at observations, NaN if a turn lacks them.


@dataclass(frozen=True)
class Trajectory:
    """One rollout of one prompt. It counts once in its group, however many turns, rows or branches it has.

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
            turn_label = f"Turn {t} of trajectory {self.id!r}"
            response_length = len(turn.response_ids)
            for name, numbers in {"mask": turn.mask, **turn.per_token}.items():
                if len(numbers) != response_length:
                    raise AlignmentError(
                        f"{turn_label} has {response_length} response tokens but {len(numbers)} entries of '{name}'; give "
                        f"one entry to each token."
                    )
            if turn.parent is not None and not 0 <= turn.parent < t:
                raise AlignmentError(f"{turn_label} has turn {turn.parent} as its parent; a parent must be an earlier turn.")
            _check_rewards(turn.rewards, turn_label)
            if doubled_names := [name for name in turn.rewards if name in self.rewards]:
                raise RewardError(
                    f"{turn_label} and its trajectory as a whole both have a reward '{doubled_names[0]}'; give the two "
                    "rewards different names."
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
        """Build trajectories from rows with one turn each. They keep the order in which they first appear.

        Args:
            rows: in any order, without parents. What must find its way back to its row travels in `extra`.
            trajectory: id of each row's trajectory.
            step: number of each row's turn; only the order counts.
            group: the prompt of each row.
            rewards: of the outcome, by trajectory id.

        Raises:
            AlignmentError: lists of different lengths, one turn twice, turns of one trajectory in different groups, a parent.
            RewardError: rewards of a trajectory without rows, while another trajectory has rows but no reward.

        Example:
            >>> late, early = Turn([1, 2], [3], [1]), Turn([1], [2], [1])
            >>> [t.turns == (early, late) for t in Trajectory.of_rows([late, early], ["a", "a"], [7, 2], [0, 0])]
            [True]
        """
        for name, column in (("trajectory ids", trajectory), ("step numbers", step), ("groups", group)):
            if len(column) != len(rows):
                raise AlignmentError(f"There are {len(rows)} rows but {len(column)} {name}; pass {len(rows)} {name}.")
        for row, turn in enumerate(rows):
            if turn.parent is not None:
                raise AlignmentError(
                    f"The prompt of row {row} lacks the earlier turns; pass the turns that `rows()` of its trajectory "
                    "returns."
                )
        trajectory, step, group = map(list_ids, (trajectory, step, group))  # indexing a pandas Series would go by label
        timeline = build_timeline(trajectory, torch.tensor(step, dtype=None if step else torch.long))
        timeline.groups(group)  # raises an error if a trajectory has rows of two prompts
        rows_by_trajectory: dict[Hashable, list[int]] = {name: [] for name in trajectory}
        # A reward whose trajectory has no row in `rows` may belong to a row of another training process.
        missing_ids = [name for name in rewards or {} if name not in rows_by_trajectory]
        if missing_ids and rewards and not rows_by_trajectory.keys() <= rewards.keys():
            raise RewardError(
                f"There are rewards of trajectory {missing_ids[0]!r}, but no row belongs to it; the trajectory of row 0 is "
                f"{next(iter(rows_by_trajectory), None)!r}. Use the same ids for rows and rewards."
            )
        for row in timeline.left_s.argsort(descending=True).tolist():
            rows_by_trajectory[trajectory[row]].append(row)
        return [
            Trajectory(name, group[ordered_rows[0]], tuple(rows[row] for row in ordered_rows), (rewards or {}).get(name, {}))
            for name, ordered_rows in rows_by_trajectory.items()
        ]

    def context(self, t: int) -> tuple[int, ...]:
        """Return the ids of all tokens that the model saw before it wrote turn t."""
        earlier_turns = (self.turns[turn_index] for turn_index in self._find_path(t)[:-1])
        return (*(i for turn in earlier_turns for i in (*turn.prompt_ids, *turn.response_ids)), *self.turns[t].prompt_ids)

    def _find_path(self, t: int, used_turns: Collection[int] = ()) -> list[int]:
        """Return the chain of turns that leads to turn t. It starts after the last turn in `used_turns`."""
        turn_path: list[int] = []
        turn_index: int | None = t
        while turn_index is not None and turn_index not in used_turns:
            turn_path.append(turn_index)
            turn_index = self.turns[turn_index].parent
        return turn_path[::-1]

    def rows(self) -> Trajectory:
        """Write each turn's whole context into its prompt, so that no turn needs an earlier one. This undoes `merged`."""
        turns_with_context = (replace(turn, prompt_ids=self.context(t), parent=None) for t, turn in enumerate(self.turns))
        return replace(self, turns=tuple(turns_with_context))

    def merged(self, vocabulary: Vocabulary | None = None) -> Trajectory:
        """Link each turn to its parent, if any: an earlier turn whose context and response begin the later turn's prompt.

        If several fit, the parent is the one with the most tokens, the latest of equals. The rest of the prompt is an observation,
        and is not trained. Rewards, per-token numbers and extras stay with their turns.

        Args:
            vocabulary: the bytes of every id. With it, a prompt that repeats what came before as the same text in other tokens is
                refused; without it, such a prompt opens a new sequence, as one does whose history was edited, cut or summarised.

        Raises:
            AlignmentError: a prompt was tokenised again; the message shows the first token that differs.
        """
        turns: list[Turn] = []
        contexts: list[tuple[int, ...]] = []  # for each turn, all tokens up to the end of its response
        for t, turn in enumerate(self.turns):
            earlier_context = () if turn.parent is None else contexts[turn.parent]
            whole_prompt = earlier_context + tuple(turn.prompt_ids)
            if turn.parent is None:
                context_order = sorted(range(t), key=lambda p: (len(contexts[p]), p), reverse=True)
                possible_parents = (p for p in context_order if whole_prompt[: len(contexts[p])] == contexts[p])
                parent_index = next(possible_parents, None)
                if parent_index is not None:
                    turn = replace(turn, prompt_ids=whole_prompt[len(contexts[parent_index]) :], parent=parent_index)
                elif vocabulary is not None:
                    self._refuse_other_tokens(t, whole_prompt, contexts, vocabulary)
            turns.append(turn)
            contexts.append(whole_prompt + tuple(turn.response_ids))
        return replace(self, turns=tuple(turns))

    def _refuse_other_tokens(
        self, t: int, prompt: tuple[int, ...], contexts: Sequence[tuple[int, ...]], vocabulary: Vocabulary
    ) -> None:
        """Refuse a prompt that repeats an earlier turn's text with other tokens."""
        prompt_text = vocabulary.join(np.array(prompt, dtype=np.int64))[0]
        for earlier_t, context_ids in reversed(list(enumerate(contexts))):
            context_text = vocabulary.join(np.array(context_ids, dtype=np.int64))[0]
            if not context_text or not prompt_text.startswith(context_text):
                continue
            common_length = min(len(prompt), len(context_ids))
            position = next((i for i in range(common_length) if prompt[i] != context_ids[i]), common_length)
            old_token_text = _describe_token(context_ids, position, vocabulary)
            new_token_text = _describe_token(prompt, position, vocabulary)
            raise AlignmentError(
                f"Turns {earlier_t} and {t} of trajectory {self.id!r} cannot become one sequence. The prompt of turn {t} repeats "
                f"the text of turn {earlier_t}, but with other token ids. Token {position} was {old_token_text}, and now it is "
                f"{new_token_text}. Build the prompt from the sampled token ids, not from text. Or leave out 'vocabulary', so that "
                f"turn {t} starts a new sequence."
            )

    def branches(self) -> list[Branch]:
        """Return the chains of turns to train on, one per turn that no later turn continues. A turn is in one chain only."""
        parent_turns = {turn.parent for turn in self.turns}
        used_turns: set[int] = set()
        branches = []
        for leaf in (t for t in range(len(self.turns)) if t not in parent_turns):
            turn_path = self._find_path(leaf, used_turns)
            used_turns.update(turn_path)
            branches.append(self._build_branch(turn_path))
        return branches

    def _build_branch(self, path: Sequence[int]) -> Branch:
        """Join the responses of successive turns and the observations between them."""
        token_ids, mask, turn_of_token = list[int](), list[int](), list[int]()
        numbers_by_name: dict[str, list[float]] = {name: [] for t in path for name in self.turns[t].per_token}
        for t in path:
            turn = self.turns[t]
            response_length = len(turn.response_ids)
            observation_ids = () if t == path[0] else turn.prompt_ids
            token_ids += [*observation_ids, *turn.response_ids]
            mask += [0] * len(observation_ids) + [int(bool(flag)) for flag in turn.mask]
            turn_of_token += [-1] * len(observation_ids) + [t] * response_length
            for name, token_numbers in numbers_by_name.items():
                token_numbers += [0.0] * len(observation_ids) + list(turn.per_token.get(name, [math.nan] * response_length))
        number_tuples = {name: tuple(token_numbers) for name, token_numbers in numbers_by_name.items()}
        return Branch(tuple(path), self.context(path[0]), tuple(token_ids), tuple(mask), tuple(turn_of_token), number_tuples)


def merge_counts(trajectories: Iterable[Trajectory]) -> dict[str, int]:
    """Count the sequences and tokens to train on, before and after turns are merged.

    Example:
        >>> rows = Trajectory("a", 0, (Turn([1, 2], [3, 4], [1, 1]), Turn([1, 2, 3, 4, 9], [5], [1])))
        >>> merge_counts([rows.merged()])
        {'trajectories': 1, 'rows': 2, 'row_tokens': 10, 'branches': 1, 'branch_tokens': 6, 'trained_tokens': 3}
    """
    trajectories = list(trajectories)
    turns_as_rows = [turn for trajectory in trajectories for turn in trajectory.rows().turns]
    branches = [branch for trajectory in trajectories for branch in trajectory.branches()]

    def tokens(sequences: Sequence[Turn | Branch]) -> int:
        return sum(len(sequence.prompt_ids) + len(sequence.response_ids) for sequence in sequences)

    return {
        "trajectories": len(trajectories),
        "rows": len(turns_as_rows),
        "row_tokens": tokens(turns_as_rows),
        "branches": len(branches),
        "branch_tokens": tokens(branches),
        "trained_tokens": sum(sum(map(bool, row.mask)) for row in turns_as_rows),
    }


def _check_rewards(rewards: Rewards, who: str) -> None:
    """Refuse a reward that is neither a finite number nor a `Status`."""
    for name, value in rewards.items():
        try:
            is_valid_reward = isinstance(value, Status) or math.isfinite(value)
        except TypeError:  # `value` is not a number
            is_valid_reward = False
        if not is_valid_reward:
            raise RewardError(
                f"{who} has {value!r} as reward '{name}'; give a finite number, or a Status that says why there is none."
            )


def _describe_token(ids: Sequence[int], position: int, vocabulary: Vocabulary) -> str:
    """Describe the token at a position by its id and text, or say "not there" if the sequence is shorter."""
    return f"{ids[position]} ({vocabulary.pieces[ids[position]]!r})" if position < len(ids) else "not there"


@dataclass(frozen=True)
class Turns:
    """The positions of the tokens of each turn in N sequences.

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
        """Gather the values at the tokens of each turn, in one row per turn. Padding gets `fill`."""
        value_su = value_nt[self.row_s[:, None], self.place_su.clamp(min=0)]
        value_su[self.place_su < 0] = fill
        return value_su

    def put(self, value_su: Shaped[Tensor, "s u"], *, rows: int) -> Shaped[Tensor, "n t"]:
        """Copy each turn's values to the turn's place in one of `rows` sequences, and set all other tokens to 0.

        Raises:
            AlignmentError: the values are of other turns.
        """
        check_shapes(value_su=value_su, place_su=self.place_su)
        value_nt = torch.zeros((rows, self.width), dtype=value_su.dtype, device=value_su.device)
        is_token_su = self.place_su >= 0
        row_su = self.row_s[:, None].expand_as(self.place_su)
        value_nt[row_su[is_token_su], self.place_su[is_token_su]] = value_su[is_token_su]
        return value_nt

    def repeat(self, values: Sequence[Any]) -> list[Any]:
        """Repeat each sequence's value for every turn in it."""
        value_by_row = list(values)  # make a list, because pandas would look up labels instead of positions
        return [value_by_row[row] for row in self.row_s.tolist()]


def runs(mask_nt: Bool[Tensor, "n t"]) -> Int[Tensor, "n t"]:
    """For each True in a mask, return the number of its run in the row, from 0. Entries outside the mask get -1."""
    shifted_mask_nt = torch.nn.functional.pad(mask_nt, (1, 0))[:, :-1]
    return torch.where(mask_nt, (mask_nt & ~shifted_mask_nt).cumsum(dim=1) - 1, -1)


def split_turns(mask_nt: Bool[Tensor, "n t"], turn_nt: Int[Tensor, "n t"] | None = None) -> Turns:
    """Find the turns of sequences: each run of sampled tokens, or all tokens with the same turn id.

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
    turn_nt = runs(mask_nt) if turn_nt is None else turn_nt
    check_shapes(turn_nt=turn_nt, mask_nt=mask_nt)
    if bad_token := first_of(mask_nt & (turn_nt < 0)):
        sequence_index, position = bad_token
        raise AlignmentError(
            f"Token {position} of sequence {sequence_index} was sampled but has no turn id; give each sampled token one."
        )
    row_i, position_i = torch.nonzero(turn_nt >= 0, as_tuple=True)
    row_and_turn_i = torch.stack([row_i, turn_nt[row_i, position_i].long()], dim=1)
    # `unique` sorts the turns by sequence, then by turn id.
    distinct_turns, turn_i = torch.unique(row_and_turn_i, dim=0, return_inverse=True)
    is_sampled_s = turn_i[mask_nt[row_i, position_i]].bincount(minlength=len(distinct_turns)) > 0
    row_s = distinct_turns[is_sampled_s, 0]
    token_count_s = turn_i.bincount(minlength=len(distinct_turns))[is_sampled_s]
    position_order = turn_i.argsort(stable=True)  # a stable sort keeps the token positions of each turn in order
    position_i = position_i[position_order][is_sampled_s[turn_i[position_order]]]
    position_su = position_i.new_empty(0, 0)
    if len(row_s):
        position_su = pad_sequence([*position_i.split(token_count_s.tolist())], batch_first=True, padding_value=-1)
    first_turn_s = torch.searchsorted(row_s, row_s)  # for each turn, the index of the first turn of its sequence
    step_s = torch.arange(len(row_s), device=mask_nt.device) - first_turn_s
    return Turns(row_s, step_s, position_su, mask_nt.shape[1])


def step_rewards(reward_st: Float[Tensor, "s t"], mask_st: Shaped[Tensor, "s t"]) -> Float[Tensor, " s"]:
    """Add up the rewards on the tokens of each row (step).

    A reward on a masked token counts for the trainable token before it; one before the first trainable token is dropped, for
    nothing that was chosen can have caused it. NaN at a trainable token makes the reward absent; at a masked token it is no
    reward.
    """
    check_shapes(reward_st=reward_st, mask_st=mask_st)
    check_rewards(reward_st, row="row")
    is_trainable_st = mask_st.bool()
    has_started_st = is_trainable_st.cumsum(dim=1) > 0  # True from the row's first trainable token on
    is_counted_st = has_started_st & (is_trainable_st | ~reward_st.isnan())
    return torch.where(is_counted_st, reward_st.double(), 0.0).sum(dim=1)


def prompt_mini_batches(group_s: Int[Tensor, " s"], *, prompts_per_batch: int) -> list[Int[Tensor, " b"]]:
    """Split a batch into mini-batches of `prompts_per_batch` prompts, each prompt with all of its rows.

    Args:
        group_s: prompt ids, in any order, of any sizes.
        prompts_per_batch: prompts in each mini-batch; the last one may hold fewer.

    Returns:
        The rows of each mini-batch, ascending; prompts in the order in which they first appear.

    Example:
        >>> prompt_mini_batches(torch.tensor([8, 8, 8, 3, 5, 5]), prompts_per_batch=2)
        [tensor([0, 1, 2, 3]), tensor([4, 5])]
    """
    if prompts_per_batch < 1:
        raise RecipeError(f"prompts_per_batch is {prompts_per_batch}; it must be at least 1.")
    # Pass a list, because only then does `group_index` number the groups in order of appearance.
    mini_batch_index_s = group_index(group_s.tolist()).to(group_s.device) // prompts_per_batch
    return list(mini_batch_index_s.argsort(stable=True).split(mini_batch_index_s.bincount().tolist()))
