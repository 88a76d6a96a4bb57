"""Why a token trains with 0: every token has one reason, the counts add up, and each reason is what it says."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers import NAN
from spanwise import AlignmentError, Batch, Layout, Objective, Scheme, Steps, Vocabulary
from spanwise.pipeline import Reading, advantages, credit_batch, read
from spanwise.types import Credit, Fault, Scores, Spans, Status
from spanwise.zeros import Zero, reason_of, recorded_reasons, tally_zeros, zero_reasons

LAYOUT = Layout({"a": ["x"], "b": ["y"], "c": ["z"]})
OK, ABSENT, UNPARSABLE, TIMEOUT, ERROR, UNSCORED, BROKE = Status


def reading_of(reward_nm, status_nm, length_nk, fault_n=None):
    reward_nm = torch.tensor(reward_nm, dtype=torch.float64)
    n, m = reward_nm.shape
    status_nm = torch.tensor([[int(status) for status in row] for row in status_nm], dtype=torch.int8)
    scores = Scores(("right", "said", "more")[:m], reward_nm, status_nm, torch.full((n, m, 2), NAN, dtype=torch.float64))
    length_nk, fault_n = torch.tensor(length_nk), torch.tensor(fault_n or [0] * n)
    # A tool's token comes first in each row.
    rows = [torch.tensor([-1, *torch.arange(3).repeat_interleave(length_k)]) for length_k in length_nk]
    block_nt = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1).to(torch.int8)
    return Reading(scores, length_nk, fault_n, Spans.of_blocks(LAYOUT.names, block_nt, fault_n))


def explained(reading, scheme, group, learned=None):
    """Tally the reasons as the command does: rows end to end, a tool's token before each."""
    group_n = torch.tensor(group)
    credit = credit_batch(reading, Batch(group_n), scheme)
    learned_n, spans = None if learned is None else torch.tensor(learned), reading.spans
    advantage_nt = advantages(credit, spans, scheme)
    if learned is not None:
        advantage_nt = advantage_nt * learned_n[:, None]
    width_n = reading.length_nk.sum(dim=1) + 1
    filled_nt = torch.arange(advantage_nt.shape[1]) < width_n[:, None]
    row_v = torch.arange(len(reading)).repeat_interleave(width_n)
    tally = tally_zeros(
        zero_reasons(credit, scheme), advantage_nt[filled_nt], spans.block_nt[filled_nt], row_v, names=scheme.names,
        learned_n=learned_n, trainable_v=(spans.block_nt >= 0)[filled_nt],
    )  # fmt: skip
    return tally, credit, advantage_nt[filled_nt]


def named(tally):
    return [(reason_of(key).name, tally.objective(key)) for key in tally.key_n.tolist()]


def names_of(keys):
    return [reason_of(key).name for key in keys.flatten().tolist()]


ONE = Scheme("bae", LAYOUT, [Objective("format", "a", name="right")])


def test_cut_off_is_a_reason_of_its_own_and_an_unpaid_block_as_well():
    lengths = [[1, 0, 0], [1, 0, 3], [1, 0, 0]]
    reading = reading_of([[NAN], [1.0], [0.0]], [[ABSENT], [OK], [OK]], lengths, [Fault.TRUNCATED, 0, 0])
    tally, *_ = explained(reading, ONE, [0, 0, 0])
    counts = [(c.reason.name, c.tokens, c.completions, c.rows) for c in tally.counts(examples=2)]
    assert counts[:2] == [("CREDITED", 2, 2, (1, 2)), ("MASKED", 3, 0, (0, 1))]
    assert counts[2:] == [("UNPAID", 3, 0, (1,)), ("TRUNCATED", 1, 1, (0,))]


def test_a_completion_without_a_last_value_is_left_out():
    """So it is under a critic's `truncated: mask`. The others have credit under `gae`."""
    scheme = Scheme.preset("gae", Layout({"all": ["answer"]}), objectives=[Objective("environment", "all")])
    values = {"value_nt": torch.full((3, 1), 0.3), "bootstrap_n": torch.tensor([0.0, NAN, 0.0])}
    batch = Batch.jagged([[0]] * 3, [0, 0, 0], columns={"environment": [1.0, 0.0, 0.0]}, **values)
    credit = credit_batch(read(batch, scheme, Vocabulary((b"4",))), batch, scheme)
    assert (credit.block_nk[:, 0] != 0).tolist() == [True, False, True]
    assert reason_of(int(zero_reasons(credit, scheme)[1, 0])).name == "LEFT_OUT"


def test_of_two_objectives_the_graver_reason_counts_and_what_cancels_is_said():
    rule = Scheme("bae", LAYOUT, [*ONE.objectives, Objective("format", "a", name="said", weight=-1)])
    reading = reading_of([[1, NAN], [1, 1], [1, 0], [0, 0]], [[OK, ERROR], [OK, OK], [OK, OK], [OK, OK]], [[1, 0, 0]] * 4)
    tally, *_ = explained(reading, rule, [0, 0, 1, 1])
    assert named(tally) == [("ERROR", "said"), ("SINGLETON", "said"), ("CREDITED", ""), ("CREDITED", "")]
    tally, *_ = explained(reading_of([[1, 1], [0, 0]], [[OK, OK]] * 2, [[1, 0, 0]] * 2), rule, [0, 0])
    assert named(tally) == [("CANCELLED", "")] * 2
    # A third objective that gives nothing is not the reason: the other two cancel each other all the same.
    rule = Scheme("bae", LAYOUT, [*rule.objectives, Objective("format", "a", name="more")])
    tally, *_ = explained(reading_of([[1, 1, 0], [0, 0, 0]], [[OK] * 3] * 2, [[1, 0, 0]] * 2), rule, [0, 0])
    assert named(tally) == [("CANCELLED", "")] * 2


@pytest.mark.parametrize(
    ("right_n", "said", "reason"),
    [((0,) * 3, 1, "ALL_WRONG"), ((0.5,) * 3, 1, "ALL_EQUAL"), ((0, 1, 0.5), 1, "AT_BASELINE"), ((1,) * 3, 0, "ALL_RIGHT")],
)
def test_if_several_objectives_of_a_block_were_compared_the_first_is_named(right_n, said, reason):
    """Answers that are all wrong are not called all right because their tags are; of the others, the last earns the mean."""
    rule = Scheme("bae", LAYOUT, [*ONE.objectives, Objective("format", "a", name="said", weight=0.25)])
    reading = reading_of([[right, said] for right in right_n], [[OK, OK]] * 3, [[1, 0, 0]] * 3)
    tally, *_ = explained(reading, rule, [0, 0, 0])
    assert named(tally)[2] == (reason, "right")


def test_turns_of_rollouts_are_explained_by_their_rollouts():
    """Two prompts: rollouts 0 and 1 are wrong at their last turn; rollout 2 is right, and alone."""
    steps = Steps(torch.tensor([0, 0, 1, 1, 2]), torch.tensor([0, 1, 0, 1, 0]))
    group_n = torch.tensor([0, 0, 0, 0, 1])
    rewards = [[NAN, 0.5], [0.0, 0.5], [NAN, 0.5], [0.0, NAN], [1.0, NAN]]
    statuses = [[ABSENT, OK], [OK, OK], [ABSENT, OK], [OK, ERROR], [OK, ABSENT]]
    reading = reading_of(rewards, statuses, [[1, 1, 0]] * 5)
    scheme = Scheme("bae", LAYOUT, [*ONE.objectives, Objective("format", "b", name="said", scope="turn")])
    credit = credit_batch(reading, Batch(group_n, steps=steps), scheme)
    assert not credit.has_signal
    compared = ["ALL_WRONG", "ALL_EQUAL", "UNPAID"] * 3
    names = [*compared, "ALL_WRONG", "ERROR", "UNPAID", "SINGLETON", "ABSENT", "UNPAID"]
    assert names_of(zero_reasons(credit, scheme)) == names
    alone = zero_reasons(credit_batch(reading, Batch(torch.tensor([0, 0, 1, 1, 2]), steps=steps), scheme), scheme)
    assert names_of(alone[:3, 1]) == ["SINGLETON"] * 3  # two turns are one vote


def test_what_a_trainer_recorded():
    credit_nk = torch.tensor([[0.0], [0.0], [0.5], [0.0], [0.0], [0.0], [NAN]])
    group_n = torch.tensor([-1, -1, -(2**63), -(2**63), 5, 2**62, 2**62])  # hashes of prompts
    reward_n = torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0, 0.0, 1.0])
    others = ["RECORDED", "RECORDED", "SINGLETON", "ALL_EQUAL", "UNSCORED"]
    assert names_of(recorded_reasons(credit_nk, group_n, reward_n=reward_n)) == ["ALL_RIGHT", "ALL_RIGHT", *others]
    assert names_of(recorded_reasons(credit_nk, group_n)) == ["ALL_EQUAL", "ALL_EQUAL", *others]
    # Rollouts of two turns have one reward and one vote: two of the first prompt, one of the second.
    rollout_n, reward_n = torch.tensor([4, 4, -2, -2, 9, 9]), torch.tensor([0.0, 0.0, NAN, 0.0, NAN, 0.0])
    keys = recorded_reasons(torch.zeros(6, 1), (rollout_n == 9).long(), reward_n=reward_n, rollout_n=rollout_n)
    assert names_of(keys) == ["ALL_WRONG"] * 4 + ["SINGLETON"] * 2


def test_what_does_not_fit_is_refused(unchecked_shapes):
    with pytest.raises(AlignmentError, match="have 3, 2 and"):
        tally_zeros(torch.zeros(1, 1).long(), torch.zeros(3), torch.zeros(2).long(), torch.zeros(3).long())
    blank = Credit(torch.zeros(1, 3).double(), torch.zeros(1).double(), torch.zeros(1).long(), torch.zeros(1).long())
    with pytest.raises(AlignmentError, match=r"Compute it with spanwise\.credit_batch"):
        zero_reasons(blank, ONE)


def schemes():
    first = Objective("format", "a", name="right")
    others = [Objective("format", "b", name="said", baseline=baseline, if_missing=price)
              for baseline in ("none", "batch", "group") for price in (None, 0.0)]  # fmt: skip
    others += [Objective("format", ("a", "b"), name="said", given="right", baseline="outcome", back_off=back)
               for back in (None, True)]  # fmt: skip
    by_block = [Scheme("bae", LAYOUT, [first, other]) for other in others]
    sums = [Objective("format", ("a", "b"), name=name) for name in ("right", "said")]
    priced = Objective("format", ("a", "b"), name="said", if_missing=0.0)
    per_completion = [Scheme(name, LAYOUT, sums, per="completion") for name in ("rlcr", "rloo", "dr_grpo")]
    return [*by_block, *per_completion, *[Scheme("rloo", LAYOUT, [sums[0], priced], per="completion")] * 3]


@st.composite
def batches(draw):
    n = draw(st.integers(1, 10))
    status = st.sampled_from([OK, OK, OK, OK, OK, *Status])
    statuses = [[draw(status), draw(status)] for _ in range(n)]
    values = (st.sampled_from([0.0, 1.0]), st.sampled_from([0.0, 0.5, 1.0]))
    rewards = [[draw(values[m]) if row[m] is OK else NAN for m in (0, 1)] for row in statuses]
    lengths = [[draw(st.integers(0, 3)) for _ in range(3)] for _ in range(n)]
    faults = [draw(st.sampled_from([0, Fault.TRUNCATED, Fault.MISSING])) for _ in range(n)]
    group = [draw(st.integers(0, 3)) for _ in range(n)]
    return (rewards, statuses, lengths, faults), group, draw(st.none() | st.lists(st.booleans(), min_size=n, max_size=n))


def by_definition(credit, scheme, k, i):
    """Return the gravest of the reasons that the credit itself gives for block k of completion i (see test_comparison_exact)."""
    comparison, paying = credit.explained[1], [m for m, o in enumerate(scheme.objectives) if LAYOUT.names[k] in o.pays]
    columns = paying if comparison.reason_nm.shape[1] > 1 else paying[:1] and [0]
    reasons = [(Zero(int(comparison.reason_nm[i, m])), int(comparison.about_nm[i, m])) for m in columns]
    if not reasons:
        return "UNPAID", ""
    if any(reason is Zero.CREDITED for reason, _ in reasons):
        return "CANCELLED", ""
    compared = range(Zero.ALL_RIGHT, Zero.AT_BASELINE + 1)  # they rank alike: the first objective is named
    reason, about = min(reasons, key=lambda pair: (compared[0] if pair[0] in compared else pair[0], pair[1]))
    return reason.name, scheme.names[about] if about >= 0 else ""


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(batches(), st.sampled_from(schemes()))
def test_every_token_has_one_reason_and_it_is_true(batch, scheme):
    given_as, group, learned = batch
    reading = reading_of(*given_as)
    tally, credit, advantage_v = explained(reading, scheme, group, learned)
    n, tokens = len(reading), int((reading.length_nk.sum(dim=1) + 1).sum())
    counts = tally.counts(examples=1)
    assert sum(count.tokens for count in counts) == tokens == len(tally.key_v)
    assert sum(count.completions for count in counts) == n
    by_reason = {reason: sum(c.tokens for c in counts if c.reason is reason) for reason in Zero}
    assert by_reason[Zero.MASKED] == n  # the tool's tokens
    assert by_reason[Zero.CREDITED] == int((advantage_v != 0).sum())
    assert tokens - by_reason[Zero.MASKED] == int(reading.length_nk.sum())
    rows = zip(reading.spans.block_nt, reading.length_nk, strict=True)
    block_v = torch.cat([row[: int(length.sum()) + 1] for row, length in rows])
    for key, i, k, advantage in torch.stack([tally.key_v, tally.row_v, block_v, advantage_v.sign().long()], dim=1).tolist():
        named_reason = (reason_of(key).name, tally.objective(key))
        if k < 0:
            assert named_reason[0] == "MASKED"
        elif learned is not None and not learned[i]:
            assert named_reason[0] == "LEFT_OUT"
        elif advantage != 0:
            assert named_reason[0] == "CREDITED"
        else:
            assert named_reason == by_definition(credit, scheme, k, i)
    for i, key in enumerate(tally.key_n.tolist()):
        reasons = [reason_of(k) for k in tally.key_v[tally.row_v == i].tolist()]
        if Zero.CREDITED in reasons:
            assert reason_of(key) is Zero.CREDITED
        else:
            sampled = [reason for reason in reasons if reason is not Zero.MASKED] or reasons
            assert sampled.count(reason_of(key)) == max(map(sampled.count, sampled)) or len({*sampled}) > 1
