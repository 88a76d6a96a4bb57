"""Why an objective gives a block nothing: what is not there, and what does not differ from what it is compared with."""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from spanwise.batch import Steps
from spanwise.credit import group_index, refine
from spanwise.credit.assign import completed, left_out, summed
from spanwise.credit.trajectories.rollouts import rollout_scores, turn_scores
from spanwise.credit.trajectories.step_returns import timeline
from spanwise.errors import AlignmentError
from spanwise.objective import Objective
from spanwise.pipeline import Reading
from spanwise.scheme import Scheme
from spanwise.score import judge_of
from spanwise.types import Credit, Fault, Status
from spanwise.zeros.tally import KEYS, Zero, places


def zero_reasons(
    found: Credit,
    reading: Reading,
    scheme: Scheme,
    group_n: Int[Tensor, " n"],
    *,
    batch_n: Int[Tensor, " n"] | None = None,
    steps: Steps | None = None,
) -> Int[Tensor, "n k"]:
    """Say why a token of each block would get nothing, if it does.

    Of several objectives that pay a block the reason is the first one in the order of `Zero`, then of the objectives.

    Args:
        found: what `pipeline.credit` gave.
        reading: what it was made of.
        scheme: the rule.
        group_n: who is compared with whom.
        batch_n: the batch of each completion, for what is compared with the whole batch; None: all are one.
        steps: where rows that are turns of rollouts stand; a reward of a rollout then has one reason at all of its turns.

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
    group_n, batch_n = group_index(group_n), torch.zeros_like(group_n) if batch_n is None else group_index(batch_n)
    paid_mk = torch.tensor([[name in o.pays and o.weight != 0 for name in scheme.layout.names] for o in scheme.objectives])
    key_nm = (
        _keys(reading, scheme, group_n, batch_n) if steps is None else _turn_keys(reading, scheme, group_n, batch_n, steps)
    )
    by_block = scheme.entry.kind == "block"
    moved_nm = found.adv_nm != 0 if by_block else torch.zeros_like(key_nm, dtype=torch.bool)
    last = int(Zero.CANCELLED)
    place_nm = torch.where(moved_nm, places(torch.full_like(key_nm, last)), places(key_nm))
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
    rollout_n: Int[Tensor, " n"] | None = None,
) -> Int[Tensor, "n k"]:
    """Say why a trainer gave a token nothing, as far as what it recorded shows that.

    Args:
        credit_nk: what it recorded of each block; NaN where it recorded nothing.
        group_n: who is compared with whom.
        reward_n: the reward that says what is right, NaN where there is none; None: the file has none.
        rollout_n: the rollout of each completion, where some are parts of one; None: each is one.

    Returns:
        (N, K) keys for `zeros`: about no objective, or about the first one if there is a reward.

    Example:
        >>> keys = recorded_reasons(torch.zeros(3, 1), torch.tensor([0, 0, 1]), reward_n=torch.tensor([0.0, 0.0, 1.0]))
        >>> [Zero(key % 32).name for key in keys.flatten().tolist()]
        ['ALL_WRONG', 'ALL_WRONG', 'SINGLETON']
    """
    moved_n = credit_nk.nan_to_num().abs().amax(dim=1) if credit_nk.shape[1] else torch.zeros(len(group_n))
    group_n = group_index(group_n)
    size_n, _, most_n = _extent(moved_n.double(), group_n, rollout_n)
    key_n = torch.full_like(group_n, int(Zero.ALL_EQUAL), dtype=torch.long)
    if reward_n is not None:
        known_n = ~reward_n.isnan()
        held_n, low_n, high_n = _extent(reward_n.double(), group_n, rollout_n)
        verdict = bool(((reward_n == 0) | (reward_n == 1) | ~known_n).all())
        key_n = KEYS + _unanimous(low_n, high_n, verdict=verdict)
        key_n = torch.where(held_n == size_n, key_n, int(Zero.ALL_EQUAL))
    key_n = torch.where(key_n % KEYS == int(Zero.AT_BASELINE), int(Zero.ALL_EQUAL), key_n)
    key_n = torch.where(most_n > 0, int(Zero.RECORDED), key_n)
    key_n = torch.where(size_n < 2, int(Zero.SINGLETON), key_n)
    return torch.where(credit_nk.isnan(), int(Zero.UNSCORED), key_n[:, None])


def _keys(reading: Reading, scheme: Scheme, group_n: Tensor, batch_n: Tensor) -> Tensor:
    """Why each objective gives nothing, as keys; one reason for all of them where the method has one number."""
    count = len(scheme.objectives)
    if scheme.entry.kind != "block":
        return _of_sum(reading, scheme, group_n, batch_n)[:, None].expand(-1, count)
    return torch.stack([_of_objective(reading, scheme, m, group_n, batch_n) for m in range(count)], dim=1)


def _turn_keys(reading: Reading, scheme: Scheme, group_s: Tensor, batch_s: Tensor, steps: Steps) -> Tensor:
    """The same where rows are turns: rollouts are compared with rollouts, and rewards of turns with those of other rollouts."""
    line = timeline(steps.trajectory_s, steps.step_s)
    rollouts, by_block = int(line.index_s.max()) + 1 if len(line.index_s) else 0, scheme.entry.kind == "block"

    def of_rollouts(value_s: Tensor) -> Tensor:
        return torch.zeros((rollouts, *value_s.shape[1:]), dtype=value_s.dtype).index_copy(0, line.index_s, value_s)

    bits = torch.stack([(reading.fault_n & int(fault)) != 0 for fault in Fault if fault], dim=1).long()
    some_jb = torch.zeros((rollouts, bits.shape[1]), dtype=torch.long).index_add(0, line.index_s, bits) > 0
    fault_j = (some_jb * torch.tensor([int(fault) for fault in Fault if fault])).sum(dim=1)
    length_jk = torch.zeros((rollouts, reading.length_nk.shape[1]), dtype=reading.length_nk.dtype)
    length_jk.index_add_(0, line.index_s, reading.length_nk)
    scores = rollout_scores(reading.scores, line, scheme.objectives, summed=not by_block)
    whole = Reading(scores, length_jk, fault_j)
    key_sm = _keys(whole, scheme, of_rollouts(group_s), of_rollouts(batch_s))[line.index_s]
    turn_m = torch.tensor([objective.scope == "turn" and by_block for objective in scheme.objectives])
    own = replace(reading, scores=turn_scores(reading.scores, scores, line, turn_m))
    for m in turn_m.nonzero().flatten().tolist():
        key_sm[:, m] = _of_objective(own, scheme, m, group_s, batch_s, voter_n=line.index_s)
    return key_sm


def _of_objective(
    reading: Reading, scheme: Scheme, m: int, group_n: Tensor, batch_n: Tensor, *, voter_n: Tensor | None = None
) -> Tensor:
    """Why one objective of a method by block gives nothing, as keys."""
    objective, prices = scheme.objectives[m], "if_missing_k" in scheme.entry.inputs
    values_nm = reading.scores.reward_nm if prices else completed(reading.scores, scheme.objectives)
    value_n = values_nm[:, m].double()
    size_n, low_n, high_n = _compared_with(objective, reading, scheme, value_n, group_n, batch_n, voter_n)
    reason_n = _unanimous(low_n, high_n, verdict=_is_verdict(objective, value_n))
    reason_n = torch.where(size_n < _least(scheme), int(Zero.SINGLETON), reason_n)
    if (objective.baseline or "group") == "none":
        reason_n = torch.full_like(reason_n, int(Zero.AT_BASELINE))
    lacking_n = _lacking(reading, m)
    if objective.if_missing is not None and prices:  # what it stands for is compared, with the whole batch if need be
        anybody_n = _extent(value_n, batch_n)[0] > 0
        stands = torch.where(anybody_n, int(Zero.AT_BASELINE), int(Zero.SINGLETON))
        lacking_n = torch.where(left_out(reading.scores)[:, m], stands, lacking_n)
    return (m + 1) * KEYS + torch.where(value_n.isnan(), lacking_n, reason_n)


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
            key_n = torch.where(agree_n, (m + 1) * KEYS + _unanimous(lowest_n, highest_n, verdict=True), key_n)
    key_n = torch.where((size_n < _least(scheme)) & grouped, int(Zero.SINGLETON), key_n)
    lacking_nm = torch.stack([(m + 1) * KEYS + _lacking(reading, m) for m in range(len(objectives))], dim=1)
    weighs_m = torch.tensor([objective.weight != 0 for objective in objectives])
    gone_nm = completed(scores, objectives).isnan() & weighs_m
    first_n = torch.where(gone_nm, places(lacking_nm), places(lacking_nm).max() + 1).argmin(dim=1)
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
    objective: Objective,
    reading: Reading,
    scheme: Scheme,
    value_n: Tensor,
    group_n: Tensor,
    batch_n: Tensor,
    voter_n: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """How many rewards each is compared with, itself included, and the least and the largest of them."""
    baseline = objective.baseline or "group"
    if baseline in ("none", "batch"):
        return _extent(value_n, batch_n, voter_n)
    if baseline == "group":
        return _extent(value_n, group_n, voter_n)
    outcome_no = torch.stack([reading.scores.outcome(name).double() for name in objective.outcomes], dim=1)
    if baseline == "blended":  # whoever is alone in its prompt borrows from the same outcomes of others
        sets, least = [refine(group_n, outcome_no), refine(batch_n, outcome_no)], 2
    else:
        several = outcome_no.shape[1] > 1 if objective.back_off is None else objective.back_off
        counts = range(outcome_no.shape[1], -1, -1) if several else [outcome_no.shape[1]]
        sets, least = [refine(group_n, outcome_no[:, :count]) for count in counts], _least(scheme)
    extents = [_extent(value_n, set_n, voter_n) for set_n in sets]
    found = extents[-1]
    for finer in reversed(extents[:-1]):
        enough_n = finer[0] >= least
        found = tuple(torch.where(enough_n, fine, coarse) for fine, coarse in zip(finer, found, strict=True))
    size_n, low_n, high_n = found
    return size_n, low_n, high_n


def _extent(value_n: Tensor, set_n: Tensor, voter_n: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Size, least and largest value of the set of each completion; NaN values join none, and nothing is in set -1.

    The size counts voters, of which several rows may be one.
    """
    here_n = ~value_n.isnan() & (set_n >= 0)
    dense_n = group_index(set_n)
    sets = int(dense_n.max()) + 1 if len(dense_n) else 0
    voters = torch.arange(len(value_n)) if voter_n is None else voter_n
    pairs = torch.unique(torch.stack([dense_n[here_n], voters[here_n]]), dim=1)
    size_s = torch.zeros(sets, dtype=torch.long).index_add(0, pairs[0], torch.ones_like(pairs[0]))
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
