"""Why a token trains with exactly 0: one reason for every such token, so that the counts add up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from spanwise.credit import group_index, refine
from spanwise.credit.assign import completed, left_out, summed
from spanwise.errors import AlignmentError
from spanwise.objective import Objective
from spanwise.pipeline import Reading
from spanwise.scheme import Scheme
from spanwise.score import judge_of
from spanwise.types import Credit, Fault, Status

_WORDS = 32


class Zero(IntEnum):
    """Why a token gets nothing. Where several would do, the first in this order is the reason."""

    CREDITED = 0  # it does get something
    MASKED = 1  # the model did not sample it
    LEFT_OUT = 2  # the trainer left the whole completion out of the loss
    EMPTY = 3  # of a completion: it has no token at all
    UNPAID = 4  # no objective pays its block
    FAILED = 5  # the check ran into its deadline or died
    UNSCORED = 6  # the file holds no number
    TRUNCATED = 7  # what the reward reads opens and never closes
    UNPARSABLE = 8  # what the reward reads is there and cannot be read
    ABSENT = 9  # what the reward reads is not there
    SINGLETON = 10  # nobody to be compared with
    ALL_RIGHT = 11  # everybody that it is compared with has reward 1
    ALL_WRONG = 12  # everybody that it is compared with has reward 0
    ALL_EQUAL = 13  # everybody that it is compared with has one and the same reward
    AT_BASELINE = 14  # the others differ, and its reward is what it is compared with
    CANCELLED = 15  # what several objectives give it adds up to 0
    RECORDED = 16  # the trainer recorded 0 where it recorded more for others, and not why

    @property
    def words(self) -> str:
        """The reason in plain words."""
        return _SAYS[self]


_SAYS = {
    Zero.CREDITED: "credited",
    Zero.MASKED: "masked: not sampled by the model (a tool, an observation)",
    Zero.LEFT_OUT: "left out of the loss by the trainer",
    Zero.EMPTY: "empty: the completion has no tokens",
    Zero.UNPAID: "no objective pays the block",
    Zero.FAILED: "failed: the check timed out or died",
    Zero.UNSCORED: "unscored: the file holds no number",
    Zero.TRUNCATED: "truncated: what the reward reads never closes",
    Zero.UNPARSABLE: "unreadable: what the reward reads is there and says nothing",
    Zero.ABSENT: "absent: what the reward reads is not there",
    Zero.SINGLETON: "singleton: nobody to be compared with",
    Zero.ALL_RIGHT: "unanimous: all right",
    Zero.ALL_WRONG: "unanimous: all wrong",
    Zero.ALL_EQUAL: "unanimous: all rewards are equal",
    Zero.AT_BASELINE: "at the baseline: the reward is what is expected of it",
    Zero.CANCELLED: "cancelled: several objectives add up to 0",
    Zero.RECORDED: "recorded as 0, while others of the group got something",
}


@dataclass(frozen=True)
class Count:
    """How often one reason holds.

    Attributes:
        reason: why.
        objective: which reward it is about; empty where it is about none.
        tokens: with this reason.
        completions: none of whose tokens gets anything, and most of whose tokens have this reason.
        rows: the first of these completions; where there is none, the first that have such a token.
    """

    reason: Zero
    objective: str
    tokens: int
    completions: int
    rows: tuple[int, ...] = ()


@dataclass(frozen=True)
class Zeros:
    """The reason of every token of N completions; tokens lie end to end.

    Attributes:
        names: the objectives.
        key_v: reason of each token, and the objective that it is about; see `reason` and `objective`.
        row_v: the completion of each token.
        key_n: of each completion: CREDITED where any token gets something, else the reason of most of its tokens.
    """

    names: tuple[str, ...]
    key_v: Int[Tensor, " v"]
    row_v: Int[Tensor, " v"]
    key_n: Int[Tensor, " n"]

    def reason(self, key: int) -> Zero:
        """The reason that a key stands for."""
        return Zero(key % _WORDS)

    def objective(self, key: int) -> str:
        """The objective that a key is about; empty if it is about none."""
        return self.names[key // _WORDS - 1] if key >= _WORDS else ""

    def counts(self, examples: int = 3) -> list[Count]:
        """How often each reason holds, in the order of `Zero`: tokens add up to all tokens, completions to all completions."""
        found = []
        for key in sorted({*self.key_v.unique().tolist(), *self.key_n.unique().tolist()}, key=_place):
            here_v, here_n = self.key_v == key, self.key_n == key
            rows = here_n.nonzero().flatten() if bool(here_n.any()) else self.row_v[here_v].unique()
            shown = tuple(rows[:examples].tolist())
            found.append(Count(self.reason(key), self.objective(key), int(here_v.sum()), int(here_n.sum()), shown))
        return found


def zeros(
    block_nk: Int[Tensor, "n k"],
    advantage_v: Float[Tensor, " v"],
    block_v: Int[Tensor, " v"],
    row_v: Int[Tensor, " v"],
    *,
    names: Sequence[str] = (),
    trainable_v: Bool[Tensor, " v"] | None = None,
    learned_n: Bool[Tensor, " n"] | None = None,
) -> Zeros:
    """Give every token its reason, and every completion the reason of most of its tokens.

    Args:
        block_nk: what a token of block k of completion n would have as its reason, see `zero_reasons`.
        advantage_v: what each token trains with.
        block_v: its block, -1 where it has none.
        row_v: its completion.
        names: the objectives that `block_nk` speaks of.
        trainable_v: whether the model sampled it; None: whatever has a block.
        learned_n: False at completions that the trainer left out of the loss; None: it left out none.

    Raises:
        AlignmentError: fields differ in size.

    Example:
        Two completions of one prompt, both wrong; the first one's last token is a tool's.

        >>> wrong = torch.full((2, 1), int(Zero.ALL_WRONG) + 32)
        >>> found = zeros(wrong, torch.zeros(3), torch.tensor([0, -1, 0]), torch.tensor([0, 0, 1]), names=["correct"])
        >>> [(count.reason.name, count.objective, count.tokens, count.completions) for count in found.counts()]
        [('MASKED', '', 1, 0), ('ALL_WRONG', 'correct', 2, 2)]
    """
    if not len(advantage_v) == len(block_v) == len(row_v):
        raise AlignmentError(f"There are {len(advantage_v)} advantages for {len(block_v)} blocks and {len(row_v)} rows.")
    trainable_v = block_v >= 0 if trainable_v is None else trainable_v
    held = block_nk[row_v, block_v.long().clamp(min=0)] if block_nk.shape[1] else torch.zeros_like(row_v)
    key_v = torch.where(block_v >= 0, held, int(Zero.UNPAID))
    key_v = torch.where(advantage_v.isnan(), int(Zero.UNSCORED), key_v)
    if learned_n is not None:
        key_v = torch.where(learned_n[row_v], key_v, int(Zero.LEFT_OUT))
    key_v = torch.where(trainable_v, key_v, int(Zero.MASKED))
    key_v = torch.where((advantage_v != 0) & ~advantage_v.isnan(), int(Zero.CREDITED), key_v)
    return Zeros(tuple(names), key_v, row_v, _of_completions(key_v, row_v, len(block_nk)))


def zero_reasons(
    found: Credit,
    reading: Reading,
    scheme: Scheme,
    group_n: Int[Tensor, " n"],
    *,
    batch_n: Int[Tensor, " n"] | None = None,
) -> Int[Tensor, "n k"]:
    """Say why a token of each block would get nothing, if it does.

    Of several objectives that pay a block the reason is the first one in the order of `Zero`, then of the objectives.

    Args:
        found: what `pipeline.credit` gave.
        reading: what it was made of.
        scheme: the rule.
        group_n: who is compared with whom.
        batch_n: the batch of each completion, for what is compared with the whole batch; None: all are one.

    Returns:
        (N, K) keys for `zeros`.

    Raises:
        AlignmentError: the credit does not know what each objective gave.

    Example:
        >>> from spanwise import Batch, Layout, Vocabulary, credit, read
        >>> vocabulary = Vocabulary((b"<answer>", b"4", b"5", b"</answer>"))
        >>> batch = Batch.jagged([[0, 1, 3], [0, 1, 3], [0, 2, 3]], [0, 0, 1], columns={"answer": ["4", "4", "4"]})
        >>> scheme = Scheme.preset("grpo", Layout({"all": ["answer"]}))
        >>> reading = read(batch, scheme, vocabulary)
        >>> reasons = zero_reasons(credit(reading, batch, scheme), reading, scheme, batch.group_n)
        >>> [Zero(key % 32).name for key in reasons.flatten().tolist()]
        ['ALL_RIGHT', 'ALL_RIGHT', 'SINGLETON']
    """
    if found.adv_nm is None:
        raise AlignmentError("This credit does not know what each objective gave (adv_nm); take it from pipeline.credit.")
    batch_n = torch.zeros_like(group_n) if batch_n is None else batch_n
    paid_mk = torch.tensor([[name in o.pays and o.weight != 0 for name in scheme.layout.names] for o in scheme.objectives])
    if scheme.entry.kind == "block":
        columns = [_of_objective(reading, scheme, m, group_n, batch_n) for m in range(len(scheme.objectives))]
        moved_nm = found.adv_nm != 0
        key_nm = torch.stack(columns, dim=1)
    else:
        key_nm = _of_sum(reading, scheme, group_n, batch_n)[:, None].expand(-1, len(scheme.objectives))
        moved_nm = torch.zeros_like(key_nm, dtype=torch.bool)
    last = int(Zero.CANCELLED)
    place_nm = torch.where(moved_nm, _places(torch.full_like(key_nm, last)), _places(key_nm))
    result_nk = torch.full((len(reading), paid_mk.shape[1]), int(Zero.UNPAID), dtype=torch.long)
    for k in range(paid_mk.shape[1]):
        paying = paid_mk[:, k].nonzero().flatten()
        if len(paying):
            first_n = place_nm[:, paying].argmin(dim=1)
            some_n = moved_nm[:, paying].any(dim=1)
            result_nk[:, k] = torch.where(some_n, last, key_nm[:, paying].gather(1, first_n[:, None])[:, 0])
    return result_nk


def recorded_reasons(
    credit_nk: Float[Tensor, "n k"],
    group_n: Int[Tensor, " n"],
    *,
    reward_n: Float[Tensor, " n"] | None = None,
) -> Int[Tensor, "n k"]:
    """Say why a trainer gave a token nothing, as far as what it recorded shows that.

    Args:
        credit_nk: what it recorded of each block; NaN where it recorded nothing.
        group_n: who is compared with whom.
        reward_n: the reward that says what is right, NaN where there is none; None: the file has none.

    Returns:
        (N, K) keys for `zeros`: about no objective, or about the first one if there is a reward.

    Example:
        >>> keys = recorded_reasons(torch.zeros(3, 1), torch.tensor([0, 0, 1]), reward_n=torch.tensor([0.0, 0.0, 1.0]))
        >>> [Zero(key % 32).name for key in keys.flatten().tolist()]
        ['ALL_WRONG', 'ALL_WRONG', 'SINGLETON']
    """
    moved_n = credit_nk.nan_to_num().abs().amax(dim=1) if credit_nk.shape[1] else torch.zeros(len(group_n))
    size_n, _, most_n = _extent(moved_n.double(), group_n)
    key_n = torch.full_like(group_n, int(Zero.ALL_EQUAL), dtype=torch.long)
    if reward_n is not None:
        known_n = ~reward_n.isnan()
        held_n, low_n, high_n = _extent(reward_n.double(), group_n)
        verdict = bool(((reward_n == 0) | (reward_n == 1) | ~known_n).all())
        key_n = _WORDS + _unanimous(low_n, high_n, verdict=verdict)
        key_n = torch.where(held_n == size_n, key_n, int(Zero.ALL_EQUAL))
    key_n = torch.where(key_n % _WORDS == int(Zero.AT_BASELINE), int(Zero.ALL_EQUAL), key_n)
    key_n = torch.where(most_n > 0, int(Zero.RECORDED), key_n)
    key_n = torch.where(size_n < 2, int(Zero.SINGLETON), key_n)
    return torch.where(credit_nk.isnan(), int(Zero.UNSCORED), key_n[:, None])


def _of_objective(reading: Reading, scheme: Scheme, m: int, group_n: Tensor, batch_n: Tensor) -> Tensor:
    """Why one objective of a method by block gives nothing, as keys."""
    objective, prices = scheme.objectives[m], "if_missing_k" in scheme.entry.inputs
    values_nm = reading.scores.reward_nm if prices else completed(reading.scores, scheme.objectives)
    value_n = values_nm[:, m].double()
    size_n, low_n, high_n = _compared_with(objective, reading, scheme, value_n, group_n, batch_n)
    reason_n = _unanimous(low_n, high_n, verdict=_is_verdict(objective, value_n))
    reason_n = torch.where(size_n < _least(scheme), int(Zero.SINGLETON), reason_n)
    if (objective.baseline or "group") == "none":
        reason_n = torch.full_like(reason_n, int(Zero.AT_BASELINE))
    lacking_n = _lacking(reading, m)
    if objective.if_missing is not None and prices:  # what it stands for is compared, with the whole batch if need be
        anybody_n = _extent(value_n, batch_n)[0] > 0
        stands = torch.where(anybody_n, int(Zero.AT_BASELINE), int(Zero.SINGLETON))
        lacking_n = torch.where(left_out(reading.scores)[:, m], stands, lacking_n)
    return (m + 1) * _WORDS + torch.where(value_n.isnan(), lacking_n, reason_n)


def _of_sum(reading: Reading, scheme: Scheme, group_n: Tensor, batch_n: Tensor) -> Tensor:
    """Why a method of one number per completion gives nothing, as keys."""
    objectives, scores = scheme.objectives, reading.scores
    sum_n = summed(scores, objectives).double()
    grouped = not {"group_n", "group_s"}.isdisjoint(scheme.entry.inputs)
    set_n = group_n if grouped else batch_n
    size_n, low_n, high_n = _extent(sum_n, set_n)
    key_n = _unanimous(low_n, high_n, verdict=False)
    for m in reversed(range(len(objectives))):  # a verdict on which all agree says more than an equal sum
        value_n = scores.reward_nm[:, m].double()
        held_n, lowest_n, highest_n = _extent(value_n, set_n)
        agree_n = (low_n == high_n) & (held_n == size_n) & (lowest_n == highest_n)
        if _is_verdict(objectives[m], value_n):
            key_n = torch.where(agree_n, (m + 1) * _WORDS + _unanimous(lowest_n, highest_n, verdict=True), key_n)
    key_n = torch.where((size_n < _least(scheme)) & grouped, int(Zero.SINGLETON), key_n)
    lacking_nm = torch.stack([(m + 1) * _WORDS + _lacking(reading, m) for m in range(len(objectives))], dim=1)
    gone_nm = completed(scores, objectives).isnan()
    first_n = torch.where(gone_nm, _places(lacking_nm), _places(lacking_nm).max() + 1).argmin(dim=1)
    return torch.where(sum_n.isnan(), lacking_nm.gather(1, first_n[:, None])[:, 0], key_n)


def _lacking(reading: Reading, m: int) -> Tensor:
    """Why a reward is not there."""
    status_n = reading.scores.status_nm[:, m]
    cut_n = (reading.fault_n & int(Fault.TRUNCATED)) != 0
    reason_n = torch.where(cut_n, int(Zero.TRUNCATED), int(Zero.ABSENT))
    for status, reason in (
        (Status.UNPARSABLE, Zero.UNPARSABLE),
        (Status.UNSCORED, Zero.UNSCORED),
        (Status.TIMEOUT, Zero.FAILED),
        (Status.ERROR, Zero.FAILED),
    ):
        reason_n = torch.where(status_n == int(status), int(reason), reason_n)
    return reason_n


def _compared_with(
    objective: Objective, reading: Reading, scheme: Scheme, value_n: Tensor, group_n: Tensor, batch_n: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """How many rewards each is compared with, itself included, and the least and the largest of them."""
    baseline = objective.baseline or "group"
    if baseline in ("none", "batch"):
        return _extent(value_n, batch_n)
    if baseline == "group":
        return _extent(value_n, group_n)
    outcome_no = torch.stack([reading.scores.outcome(name).double() for name in objective.outcomes], dim=1)
    if baseline == "blended":  # whoever is alone in its prompt borrows from the same outcomes of others
        sets, least = [refine(group_n, outcome_no), refine(batch_n, outcome_no)], 2
    else:
        several = outcome_no.shape[1] > 1 if objective.back_off is None else objective.back_off
        counts = range(outcome_no.shape[1], -1, -1) if several else [outcome_no.shape[1]]
        sets, least = [refine(group_n, outcome_no[:, :count]) for count in counts], _least(scheme)
    extents = [_extent(value_n, set_n) for set_n in sets]
    found = extents[-1]
    for finer in reversed(extents[:-1]):
        enough_n = finer[0] >= least
        found = tuple(torch.where(enough_n, fine, coarse) for fine, coarse in zip(finer, found, strict=True))
    size_n, low_n, high_n = found
    return size_n, low_n, high_n


def _extent(value_n: Tensor, set_n: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Size, least and largest value of the set of each completion; NaN values join none, and nothing is in set -1."""
    here_n = ~value_n.isnan() & (set_n >= 0)
    dense_n = group_index(set_n)
    sets = int(dense_n.max()) + 1 if len(dense_n) else 0
    size_s = torch.zeros(sets, dtype=torch.long).index_add(0, dense_n[here_n], torch.ones_like(dense_n[here_n]))
    low_s = torch.full((sets,), torch.inf, dtype=torch.float64).scatter_reduce(0, dense_n[here_n], value_n[here_n], "amin")
    high_s = torch.full((sets,), -torch.inf, dtype=torch.float64).scatter_reduce(0, dense_n[here_n], value_n[here_n], "amax")
    return size_s[dense_n], low_s[dense_n], high_s[dense_n]


def _unanimous(low_n: Tensor, high_n: Tensor, *, verdict: bool) -> Tensor:
    """Whether all rewards of a set are right, wrong or equal; else the reward is what it is compared with."""
    equal_n = torch.where(low_n == high_n, int(Zero.ALL_EQUAL), int(Zero.AT_BASELINE))
    if not verdict:
        return equal_n
    wrong_n = torch.where(high_n == 0, int(Zero.ALL_WRONG), equal_n)
    return torch.where((low_n == high_n) & (low_n == 1), int(Zero.ALL_RIGHT), torch.where(low_n == high_n, wrong_n, equal_n))


def _is_verdict(objective: Objective, value_n: Tensor) -> bool:
    """Whether a reward says right and wrong: 1 and 0, and it is not judged by another one."""
    return judge_of(objective) is None and bool(((value_n == 0) | (value_n == 1) | value_n.isnan()).all())


def _least(scheme: Scheme) -> int:
    """How many completions a comparison takes."""
    return max(int(scheme.options.get("min_stratum", scheme.entry.options.get("min_stratum", 2))), 2)


def _place(key: int) -> tuple[int, int]:
    return key % _WORDS, key // _WORDS


def _places(key: Tensor) -> Tensor:
    """Keys in the order of their reasons, then of their objectives."""
    return key % _WORDS * 4096 + key // _WORDS


def _of_completions(key_v: Tensor, row_v: Tensor, completions: int) -> Tensor:
    """The reason of most tokens of each completion; CREDITED where any gets something, MASKED where none could."""
    key_n = torch.full((completions,), int(Zero.EMPTY), dtype=torch.long)
    if not len(key_v):
        return key_n
    largest = int(key_v.max()) + 1
    pairs, count_p = torch.unique(row_v * largest + key_v, return_counts=True)
    row_p, key_p = pairs // largest, pairs % largest
    rank_p = torch.where(key_p == int(Zero.MASKED), 0, count_p)  # a tool's tokens speak only where the model said nothing
    rank_p = torch.where(key_p == int(Zero.CREDITED), int(count_p.max()) + 1, rank_p)
    order = torch.argsort(_places(key_p), stable=True)
    order = order[torch.argsort(rank_p[order], descending=True, stable=True)]
    order = order[torch.argsort(row_p[order], stable=True)]
    row_p, key_p = row_p[order], key_p[order]
    first_p = torch.ones_like(row_p, dtype=torch.bool)
    first_p[1:] = row_p[1:] != row_p[:-1]
    key_n[row_p[first_p]] = key_p[first_p]
    return key_n
