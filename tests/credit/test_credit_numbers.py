"""Worked numbers: every expected value is written as a fraction or taken from a published worked example."""

import math

import pytest
import torch

from spanwise.credit import (
    advantage,
    assign,
    bae,
    blended_baseline,
    centred,
    dr_grpo,
    grpo,
    moments,
    precision_mean,
    rlcr,
    spread,
    vineppo,
)
from spanwise.errors import AlignmentError, RecipeError, RewardError
from spanwise.objective import Objective
from spanwise.types import Credit, Scores, Spans

TWO_PROMPTS = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
REWARD = torch.tensor([1.0, 0, 0, 1, 1, 0, 0, 0], dtype=torch.float64)
NAN = float("nan")


def assert_close(actual, expected, tolerance=1e-6):
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=actual.dtype), atol=tolerance, rtol=0)


def test_grpo_sample_standard_deviation():
    assert_close(
        grpo(REWARD, TWO_PROMPTS), [0.866024, -0.866024, -0.866024, 0.866024, 1.499997, -0.499999, -0.499999, -0.499999]
    )


def test_grpo_population_standard_deviation():
    assert_close(
        grpo(REWARD, TWO_PROMPTS, ddof=0),
        [0.999998, -0.999998, -0.999998, 0.999998, 1.732047, -0.577349, -0.577349, -0.577349],
    )


def test_dr_grpo_and_its_leave_one_out():
    assert_close(dr_grpo(REWARD, TWO_PROMPTS), [1 / 2, -1 / 2, -1 / 2, 1 / 2, 3 / 4, -1 / 4, -1 / 4, -1 / 4], 1e-12)
    assert_close(
        dr_grpo(REWARD, TWO_PROMPTS, leave_one_out=True), [2 / 3, -2 / 3, -2 / 3, 2 / 3, 1, -1 / 3, -1 / 3, -1 / 3], 1e-12
    )


def test_small_differences_survive_standardising():
    # Rewards 1e-5 apart: sample standard deviation is exactly scale-free apart from eps = 0.
    reward_n = torch.tensor([0.5, 0.50001, 0.50002], dtype=torch.float64)
    assert_close(grpo(reward_n, torch.zeros(3, dtype=torch.long), eps=0.0), [-1.0, 0.0, 1.0])


CORRECT = torch.tensor([1.0, 1, 0, 0, 1, 0], dtype=torch.float64)
REPORT = torch.tensor([0.9, 0.7, 0.8, 0.1, 0.8, 0.3], dtype=torch.float64)
BRIER = -((REPORT - CORRECT) ** 2)
ONE_PROMPT = torch.zeros(6, dtype=torch.long)


@pytest.mark.parametrize(
    ("baseline", "leave_one_out", "expected"),
    [
        ("outcome", False, [0.036667, -0.043333, -0.393333, 0.236667, 0.006667, 0.156667]),
        ("group", False, [0.136667, 0.056667, -0.493333, 0.136667, 0.106667, 0.056667]),
        ("outcome", True, [0.055, -0.065, -0.59, 0.355, 0.01, 0.235]),
        ("none", False, [-0.01, -0.09, -0.64, -0.01, -0.04, -0.09]),
    ],
)
def test_bae_confidence_block(baseline, leave_one_out, expected):
    adv_nk = bae(torch.stack([CORRECT, BRIER], dim=1), ONE_PROMPT, baseline=baseline, leave_one_out=leave_one_out)
    assert_close(adv_nk[:, 1], expected)
    factor = 6 / 5 if leave_one_out else 1
    assert_close(adv_nk[:, 0], [factor * (value - 0.5) for value in CORRECT.tolist()], 1e-12)


def test_leave_one_out_outcome_with_eight():
    correct = torch.tensor([1.0, 1, 0, 0, 1, 0, 1, 1], dtype=torch.float64)
    report = torch.tensor([0.9, 0.7, 0.8, 0.1, 0.8, 0.3, 0.6, 0.95], dtype=torch.float64)
    result = advantage(
        -((report - correct) ** 2),
        torch.zeros(8, dtype=torch.long),
        baseline="outcome",
        outcome_n=correct,
        leave_one_out=True,
    )
    assert_close(result.advantage_n, [0.063125, -0.036875, -0.59, 0.355, 0.025625, 0.235, -0.124375, 0.0725])


def test_rlcr_rewards():
    # (q, c) -> R: (.9,1) .99, (.9,0) -.81, (.2,1) .36, (.2,0) -.04; mean .125
    report, correct = torch.tensor([[0.9, 0.9, 0.2, 0.2], [1, 0, 1, 0]], dtype=torch.float64)
    adv_n = rlcr(correct, -((report - correct) ** 2), torch.zeros(4, dtype=torch.long))
    assert_close(adv_n, [0.99 - 0.125, -0.81 - 0.125, 0.36 - 0.125, -0.04 - 0.125], 1e-12)


def test_batch_baseline_crosses_prompts():
    result = advantage(torch.tensor([1.0, 0.0, 0.5]), torch.tensor([0, 1, 2]), baseline="batch")
    assert_close(result.advantage_n, [0.5, -0.5, 0.0], 1e-12)


def test_groups_of_one_get_exactly_zero_and_are_counted():
    result = advantage(torch.tensor([0.7, 1.0, 0.0]), torch.tensor([5, 9, 9]), baseline="group")
    assert result.advantage_n.tolist() == [0.0, 0.5, -0.5]
    assert result.alone_n.tolist() == [True, False, False]


def test_singleton_outcome_is_zero_unless_blended():
    reward_n = torch.tensor([-0.64, -0.09, -0.01, -0.25, -0.04, -0.16], dtype=torch.float64)
    outcome_n = torch.tensor([1.0, 0, 0, 0, 0, 0], dtype=torch.float64)
    result = advantage(reward_n, ONE_PROMPT, baseline="outcome", outcome_n=outcome_n)
    # the five wrong ones: mean -.11
    assert_close(result.advantage_n, [0.0, 0.02, 0.10, -0.14, 0.07, -0.05], 1e-12)
    assert result.alone_n.tolist() == [True] + [False] * 5


@pytest.mark.parametrize("value", [0.806, 0.7, 1 / 3, 0.1, -0.123456789])
@pytest.mark.parametrize("size", [2, 3, 7, 8, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_constant_groups_give_exactly_zero(value, size, dtype):
    reward_n = torch.full((size,), value, dtype=dtype)
    group_n = torch.zeros(size, dtype=torch.long)
    assert grpo(reward_n, group_n, eps=0.0).tolist() == [0.0] * size
    assert dr_grpo(reward_n, group_n).tolist() == [0.0] * size
    outcome_n = torch.ones(size)
    assert advantage(reward_n, group_n, baseline="blended", outcome_n=outcome_n).advantage_n.abs().max() == 0.0


def test_absent_reward_is_deletion_not_zero():
    with_hole = dr_grpo(torch.tensor([1.0, NAN, 0.0, 0.0]), torch.zeros(4, dtype=torch.long))
    assert_close(with_hole, [2 / 3, 0.0, -1 / 3, -1 / 3], 1e-12)


def test_min_stratum():
    assert centred(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), min_stratum=3).tolist() == [0.0, 0.0]


def test_unknown_outcome_joins_no_stratum():
    result = advantage(
        torch.tensor([1.0, 0.0, 5.0]), torch.zeros(3, dtype=torch.long), baseline="outcome",
        outcome_n=torch.tensor([1.0, 1.0, NAN]),
    )  # fmt: skip
    assert result.advantage_n.tolist() == [0.5, -0.5, 0.0]
    assert result.alone_n.tolist() == [False, False, True]


@pytest.mark.parametrize(
    ("baseline", "outcome", "expected"),
    [
        ("none", [1.0, 1.0, 0.0, 0.0], -1.0),
        ("group", [1.0, 1.0, 0.0, 0.0], -1.0 + 0.25),  # mean of -.1, -.2, -.45
        ("outcome", [1.0, 1.0, 0.0, 0.0], -1.0 + 0.45),  # the only other wrong one
        ("outcome", [1.0, 1.0, 1.0, 0.0], -1.0 + 0.25),  # nobody else is wrong: the group
    ],
)
def test_missing_block_pays_at_the_decision_to_stop(baseline, outcome, expected):
    reward_n = torch.tensor([-0.1, -0.2, -0.45, NAN], dtype=torch.float64)
    result = advantage(
        reward_n, torch.zeros(4, dtype=torch.long), baseline=baseline, outcome_n=torch.tensor(outcome), if_missing=-1.0
    )
    assert_close(result.missing_n, [0.0, 0.0, 0.0, expected], 1e-12)
    assert result.advantage_n[3] == 0.0


def test_blended_by_hand_without_rescoring():
    # Three prompts with rewards 0 2, 4 8 and 3 3, one outcome. What prompt 0 learns from the other two: s2 = (8 + 0)/2 = 4; means 6
    # and 3, variance 4.5, noise 4/2: t2 = 2.5. So ml = 2 with v = 4/1, mu = 18/4 with v = 2.5 (1 + 1/2) + 4/4 = 4.75.
    reward_n = torch.tensor([0.0, 2.0, 4.0, 8.0, 3.0, 3.0], dtype=torch.float64)
    baseline_n = blended_baseline(reward_n, torch.tensor([0, 0, 1, 1, 2, 2]), torch.ones(6))

    def mix(ml, v_ml, mu, v_mu):
        return (ml / v_ml + mu / v_mu) / (1 / v_ml + 1 / v_mu)

    first = [mix(2, 4, 4.5, 4.75), mix(0, 4, 4.5, 4.75)]
    second = [mix(8, 1, 2, 2.5), mix(4, 1, 2, 2.5)]  # s2 = 2/2, t2 = 2 - 1/2
    third = [mix(3, 5, 3.5, 16.25)] * 2  # s2 = 10/2, t2 = 12.5 - 5/2
    assert_close(baseline_n, first + second + third, 1e-9)


def test_blended_with_one_other_prompt():
    # One other prompt cannot say how much prompts differ: mu stands in only for the completion that has nothing else.
    reward_n = torch.tensor([0.0, 4.0, 8.0], dtype=torch.float64)
    assert_close(blended_baseline(reward_n, torch.tensor([0, 1, 1]), torch.ones(3)), [6.0, 8.0, 4.0], 1e-9)


def test_blended_by_hand_with_rescoring():
    # Brier of reports q; prompts 0, 1 and 3 hold right and wrong answers, prompt 2 right ones only. Worked for outcome 1: own
    # rewards -(q-1)^2, the wrong ones re-scored as if they had been right.
    q = torch.tensor([0.5, 0.9, 0.6, 0.8, 0.4, 0.7, 0.3, 0.5, 0.2, 0.6, 0.9], dtype=torch.float64)
    c = torch.tensor([1.0, 1, 0, 1, 0, 0, 1, 1, 1, 0, 0], dtype=torch.float64)
    group = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 3, 3, 3])
    own = {0: [-0.25, -0.01], 1: [-0.04], 2: [-0.49, -0.25], 3: [-0.64]}
    other = {0: [-0.16], 1: [-0.36, -0.09], 3: [-0.16, -0.01]}

    def mean(values):
        return sum(values) / len(values)

    def variance(values):
        return sum((v - mean(values)) ** 2 for v in values) / (len(values) - 1)

    def precision(pairs):
        return sum(e / v for e, v in pairs) / sum(1 / v for _, v in pairs)

    # Prompt 0 learns from 1, 2 and 3: only 2 has two right answers; 1 and 3 have both outcomes.
    s2, s2_x = 2 * 0.12**2, (2 * 0.135**2 + 2 * 0.075**2) / 2
    t2 = max(0, variance([-0.04, -0.37, -0.64]) - s2 * mean([1, 1 / 2, 1]))
    gaps = [-0.04 + 0.225, -0.64 + 0.085]
    d2 = max(0, variance(gaps) - (s2 + s2_x / 2))
    assert t2 > 0 < d2
    x = (-0.16 + mean(gaps), d2 * 1.5 + s2_x)
    mu = (mean(own[1] + own[2] + own[3]), t2 * 4 / 3 + s2 / 4)
    baseline_n = blended_baseline(reward := -((q - c) ** 2), group, c, torch.stack([-(q**2), -((q - 1) ** 2)], dim=1))
    assert baseline_n[0].item() == pytest.approx(precision([(-0.01, s2), x, mu]), rel=1e-9)

    # Prompt 1, whose only right answer stands alone, learns from 0, 2 and 3; 0 and 3 have both outcomes.
    s2, s2_x = (2 * 0.12**2 + 2 * 0.12**2) / 2, 2 * 0.075**2
    t2 = max(0, variance([-0.13, -0.37, -0.64]) - s2 * mean([1 / 2, 1 / 2, 1]))
    gaps = [-0.13 + 0.16, -0.64 + 0.085]
    d2 = max(0, variance(gaps) - mean([s2 / 2 + s2_x, s2 + s2_x / 2]))
    assert t2 > 0 < d2
    x = (-0.225 + mean(gaps), d2 * 1.5 + s2_x / 2)
    mu = (mean(own[0] + own[2] + own[3]), t2 * 4 / 3 + s2 / 5)
    assert baseline_n[3].item() == pytest.approx(precision([x, mu]), rel=1e-9)
    assert mean(other[1]) == pytest.approx(-0.225)
    assert reward[3].item() == pytest.approx(own[1][0])


def test_blended_alone_in_the_batch_is_counted():
    result = advantage(torch.tensor([-0.2]), torch.tensor([0]), baseline="blended", outcome_n=torch.tensor([1.0]))
    assert result.advantage_n.tolist() == [0.0]
    assert result.alone_n.tolist() == [True]


def test_precision_mean():
    nothing = precision_mean(torch.tensor([[NAN]]), torch.tensor([[1.0]]))
    assert math.isnan(nothing.item())
    assert_close(precision_mean(torch.tensor([[0.0], [3.0]]), torch.tensor([[1.0], [0.5]])), [2.0])


def test_moments_standard_deviation_of_one_is_zero():
    assert moments(torch.tensor([3.0]), torch.tensor([0])).std_n(ddof=1).tolist() == [0.0]


def layout_spans():
    # completion 0: solution of 2 tokens, a tool token, confidence of 2; completion 1: solution only, 3 tokens, then padding
    block_nt = torch.tensor([[0, 0, -1, 1, 1], [0, 0, 0, -1, -1]], dtype=torch.int8)
    start, end = torch.tensor([[0, 3], [0, 0]]), torch.tensor([[2, 5], [3, 0]])
    return Spans(("solution", "confidence"), start, end, block_nt, torch.tensor([0, 1]))


CREDIT = Credit(
    torch.tensor([[1.0, -0.5], [-1.0, 0.0]]).double(), torch.tensor([0.0, -0.75]).double(), torch.zeros(2).long(),
    torch.zeros(2).long(),
)  # fmt: skip


@pytest.mark.parametrize(
    ("per", "expected"),
    [
        ("block", [[1 / 2, 1 / 2, 0, -1 / 4, -1 / 4], [-1 / 3, -1 / 3, -1 / 3 - 3 / 4, 0, 0]]),
        ("completion", [[1 / 4, 1 / 4, 0, -1 / 8, -1 / 8], [-1 / 3, -1 / 3, -1 / 3 - 3 / 4, 0, 0]]),
        (10, [[1 / 10, 1 / 10, 0, -1 / 20, -1 / 20], [-1 / 10, -1 / 10, -1 / 10 - 3 / 4, 0, 0]]),
    ],
)
def test_spread(per, expected):
    assert_close(spread(CREDIT, layout_spans(), per=per, dtype=torch.float64), expected, 1e-12)
    assert spread(CREDIT, layout_spans(), per=per).dtype == torch.float32


def scores_of(reward_nm, names):
    reward_nm = torch.tensor(reward_nm, dtype=torch.float64)
    status = torch.where(reward_nm.isnan(), 1, 0).to(torch.int8)
    return Scores(names, reward_nm, status, torch.full((*reward_nm.shape, 2), NAN, dtype=torch.float64))


BLOCKS = ("solution", "confidence")
BAE = (
    Objective("correct", pays=("solution",)),
    Objective("brier", pays=("confidence",), given="correct", baseline="outcome", if_missing=-1.0, weight=2.0),
)


def test_assign_blockwise_with_a_missing_confidence():
    scores = scores_of([[1, -0.01], [1, -0.09], [0, -0.64], [0, NAN]], ("correct", "brier"))
    present = torch.tensor([[1, 1], [1, 1], [1, 1], [1, 0]]).bool()
    credit = assign(scores, torch.zeros(4, dtype=torch.long), present, objectives=BAE, block_names=BLOCKS)
    assert_close(credit.block_nk, [[0.5, 0.08], [0.5, -0.08], [-0.5, 0.0], [-0.5, 0.0]], 1e-12)
    assert_close(credit.stop_n, [0, 0, 0, 2 * (-1 + 0.64)], 1e-12)
    assert credit.singleton_m.tolist() == [0, 1]
    assert credit.absent_m.tolist() == [0, 1]


def test_assign_summed_first_pays_every_block():
    objectives = (Objective("correct", pays=BLOCKS), Objective("brier", pays=BLOCKS, weight=0.5, if_missing=-1.0))
    scores = scores_of([[1, -0.2], [0, NAN]], ("correct", "brier"))  # totals .9 and -.5, mean .2
    present = torch.tensor([[1, 1], [1, 0]]).bool()
    credit = assign(scores, torch.zeros(2).long(), present, objectives=objectives, block_names=BLOCKS, sum_first=True)
    assert_close(credit.block_nk, [[0.7, 0.7], [-0.7, 0.0]], 1e-12)
    assert credit.stop_n.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(("status", "cost"), [(1, -1 + 0.64), (2, -1 + 0.64), (3, 0.0), (4, 0.0)])
@pytest.mark.parametrize("block_is_there", [True, False])
def test_only_what_the_completion_left_out_costs_it(status, cost, block_is_there):
    # Absent and unparsable pay `if_missing`; a timeout or an error of the check costs nothing and joins nothing. A block that
    # is there pays with its own tokens (it rambled, or said something unreadable), one that is not with the decision to stop.
    scores = scores_of([[0, -0.64], [0, NAN], [0, -0.64]], ("correct", "brier"))
    scores.status_nm[1, 1] = status
    present = torch.ones(3, 2).bool()
    present[1, 1] = block_is_there
    objectives = (Objective("correct", pays=BLOCKS[:1]), Objective("brier", pays=BLOCKS[1:], if_missing=-1.0))
    credit = assign(scores, torch.zeros(3, dtype=torch.long), present, objectives=objectives, block_names=BLOCKS)
    assert credit.block_nk[1].tolist() == pytest.approx([0.0, cost if block_is_there else 0.0])
    assert credit.stop_n.tolist() == pytest.approx([0.0, 0.0 if block_is_there else cost, 0.0])


@pytest.mark.parametrize(("status", "left_out"), [(1, True), (2, True), (3, False), (4, False)])
def test_a_sum_takes_if_missing_only_for_what_was_left_out(status, left_out):
    scores = scores_of([[0, -0.64], [0, NAN], [0, -0.64]], ("correct", "brier"))
    scores.status_nm[1, 1] = status
    objectives = (Objective("correct", pays=BLOCKS), Objective("brier", pays=BLOCKS, if_missing=-1.0))
    present, group = torch.ones(3, 2).bool(), torch.zeros(3, dtype=torch.long)
    credit = assign(scores, group, present, objectives=objectives, block_names=BLOCKS, sum_first=True)
    expected = -1 + (0.64 * 2 + 1) / 3 if left_out else 0.0
    assert credit.block_nk[1].tolist() == pytest.approx([expected, expected])


def test_sentences(unchecked_shapes):
    reward_n, group_n = torch.tensor([1.0, 0.0]), torch.tensor([0, 0])
    with pytest.raises(AlignmentError, match="2 rewards for 3 group ids"):
        dr_grpo(reward_n, torch.tensor([0, 0, 0]))
    with pytest.raises(RecipeError, match="needs an outcome"):
        advantage(reward_n, group_n, baseline="outcome")
    with pytest.raises(RecipeError, match="no stratum whose standard deviation"):
        advantage(reward_n, group_n, baseline="none", scale="std")
    with pytest.raises(RecipeError, match=r"per=-1\) is not known"):
        spread(CREDIT, layout_spans(), per=-1)
    continuous = scores_of([[i / 32, 0.0] for i in range(32)], ("correct", "brier"))
    with pytest.raises(RecipeError, match="took 32 different values"):
        assign(continuous, torch.zeros(32).long(), torch.ones(32, 2).bool(), objectives=BAE, block_names=BLOCKS)
    with pytest.raises(RecipeError, match="pays 'confidence', which is no block"):
        assign(scores_of([[1, 0]], ("correct", "brier")), torch.tensor([0]), torch.ones(1, 2).bool(),
               objectives=BAE, block_names=("solution", "reflection"))  # fmt: skip
    bad = scores_of([[1, -0.1], [0, -0.1]], ("correct", "brier"))
    bad.reward_nm[1, 1] = NAN
    with pytest.raises(RewardError, match="'brier' of completion 1 is nan with status OK"):
        assign(bad, torch.zeros(2).long(), torch.ones(2, 2).bool(), objectives=BAE, block_names=BLOCKS)
    with pytest.raises(RecipeError, match="share one baseline"):
        assign(scores_of([[1, 0]], ("correct", "brier")), torch.tensor([0]), torch.ones(1, 2).bool(),
               objectives=BAE, block_names=BLOCKS, sum_first=True)  # fmt: skip


def test_credit_that_is_not_finite_is_refused():
    broken = Credit(CREDIT.block_nk.clone(), CREDIT.stop_n, CREDIT.singleton_m, CREDIT.absent_m)
    broken.block_nk[1, 1] = NAN
    with pytest.raises(RewardError, match="credit of completion 1 is not finite"):
        spread(broken, layout_spans())


@pytest.mark.parametrize(
    ("start", "end", "sentence"),
    [
        ([3, 0], [5, 2], "'confidence' of completion 0 is [0, 2) and starts before token 5"),
        ([0, 1], [2, 5], "'confidence' of completion 0 is [1, 5) and starts before token 2"),
        ([0, 5], [2, 3], "'confidence' of completion 0 is [5, 3), which is no interval"),
        ([0, 3], [2, 6], "'confidence' of completion 0 is [3, 6), but the completion has 5 tokens"),
    ],
)
def test_unsorted_spans_are_refused(start, end, sentence):
    spans = layout_spans()
    broken = Spans(spans.names, torch.tensor([start, [0, 0]]), torch.tensor([end, [3, 0]]), spans.block_nt, spans.fault_n)
    with pytest.raises(AlignmentError) as error:
        spread(CREDIT, broken)
    assert sentence in str(error.value)


def test_span_numbers_out_of_order_are_refused():
    values = torch.tensor([[0.5, 0.25], [0.5, 0.25]])
    with pytest.raises(AlignmentError, match="completion 1 are not in order: token 2 belongs to span 0 and stands behind"):
        vineppo(values, torch.tensor([1.0, 0.0]), torch.tensor([[0, 1, -1], [1, -1, 0]]))
    with pytest.raises(AlignmentError, match="Token 1 of completion 0 belongs to span 2, but there are 2 spans"):
        vineppo(values, torch.tensor([1.0, 0.0]), torch.tensor([[0, 2, -1], [0, -1, 1]]))
