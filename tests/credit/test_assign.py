"""Assign: objectives to blocks, estimators bound by what they ask for, and every sentence of a refusal."""

import functools
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from credit_batches import PAIR, SAME, scores_of
from helpers import NAN, assert_close, double
from spanwise.credit import HistoryWeight, Method, advantage, assign, bae, dr_grpo, ha_dw, opo, rloo
from spanwise.errors import AlignmentError, RecipeError, RewardError
from spanwise.objective import Objective
from spanwise.types import Status

BLOCKS = ("solution", "confidence")


@pytest.mark.parametrize(("status", "cost"), [(1, 2 * (-1 + 0.64)), (2, 2 * (-1 + 0.64)), (3, 0.0), (4, 0.0)])
@pytest.mark.parametrize("block_is_there", [True, False])
def test_only_what_the_completion_left_out_costs_it(status, cost, block_is_there):
    # Absent and unparsable pay `if_missing`; a timeout or an error of the check costs nothing and joins nothing. A block that
    # is there pays with its own tokens (it rambled, or said something unreadable), one that is not with the decision to stop.
    scores = scores_of([[0, -0.64], [0, NAN], [0, -0.64]], ("correct", "brier"))
    scores.status_nm[1, 1] = status
    present = torch.ones(3, 2).bool()
    present[1, 1] = block_is_there
    objectives = (Objective("correct", pays=BLOCKS[:1]), Objective("brier", pays=BLOCKS[1:], if_missing=-1.0, weight=2.0))
    credit = assign(scores, torch.zeros(3, dtype=torch.long), present, objectives=objectives, block_names=BLOCKS)
    assert credit.block_nk[1].tolist() == pytest.approx([0.0, cost if block_is_there else 0.0])
    assert credit.stop_n.tolist() == pytest.approx([0.0, 0.0 if block_is_there else cost, 0.0])


@pytest.mark.parametrize("status", [Status.ABSENT, Status.ERROR])
@pytest.mark.parametrize("method", ["dr_grpo", "reinforce++"])
def test_one_number_is_paid_to_the_paid_blocks_and_leaving_them_out_costs_the_decision_to_stop(method, status):
    # Only the confidence is paid. Completion 1 has none: its last token stands for it, unless its check failed.
    scores = scores_of([[1.0], [0.0], [NAN]], ("brier",))
    scores.status_nm[2] = int(status)
    block_nt = torch.tensor([[0, 0, 1, 1], [0, 0, 1, -1], [0, 0, 0, -1]])
    present = torch.tensor([[True, True], [True, True], [True, False]])
    left_out = status == Status.ABSENT
    mean = -2 / 3 if left_out else 0.5  # the paid ones have 1, 0 and -3, and the tokens 1, 1, 0 and -3
    options, inputs = {}, {}
    if method == "reinforce++":
        options, inputs, mean = {"whiten": False}, {"block_nt": block_nt, "mask_nt": block_nt >= 0}, 0.0
    credit = assign(
        scores, torch.zeros(3).long(), present, objectives=[Objective("brier", "confidence", if_missing=-3.0)],
        block_names=BLOCKS, method=method, inputs=inputs, **options,
    )  # fmt: skip
    assert_close(credit.block_nk, [[0, 1 - mean], [0, -mean], [0, 0]], 1e-12)
    assert_close(credit.stop_n, [0, 0, -3 - mean if left_out else 0], 1e-12)
    if method == "reinforce++":
        assert credit.token_nt.tolist() == [[0, 0, 1, 1], [0, 0, 0, 0], [0, 0, 0, 0]]


def test_an_estimator_is_bound_by_the_options_of_the_scheme():
    reward_n, group_n = double([1, 0, 1, 1, 0, 1, 0, 0]), torch.tensor([0, 0, 0, 0, 0, 7, 7, 7])

    def run(function, **options):
        scores, method = scores_of(reward_n[:, None], ("correct",)), Method("mine", function, "completion", "none")
        rule = {"objectives": [Objective("correct", pays="a")], "block_names": ("a",), "method": method}
        return assign(scores, group_n, torch.ones(8, 1).bool(), **rule, **options)

    strict = run(rloo, min_stratum=5)
    assert_close(strict.block_nk[:, 0], rloo(reward_n, group_n, min_stratum=5), 1e-12)
    assert strict.singleton_m.tolist() == run(dr_grpo, min_stratum=5).singleton_m.tolist() == [3]
    assert_close(run(functools.partial(rloo, min_stratum=5)).block_nk, strict.block_nk, 1e-12)
    assert_close(run(dr_grpo, leave_one_out=True).block_nk[:, 0], rloo(reward_n, group_n), 1e-12)
    weigh = HistoryWeight()
    assert_close(run(weigh, anchor=0.1).block_nk[:, 0], ha_dw(reward_n, group_n, anchor=0.1), 1e-12)
    assert weigh.anchor != 0.1
    with pytest.raises(RecipeError, match="needs length_n"):
        run(opo)
    with pytest.raises(RecipeError, match="Method 'mine' has no option 'ddof'"):
        run(rloo, ddof=0)


@pytest.mark.parametrize("second", ["a", "b"])
def test_two_missing_blocks_and_two_objectives_of_one_both_cost_the_decision_to_stop(second):
    objectives = [Objective("correct", pays=("a",), if_missing=-1.0), Objective("brier", pays=(second,), if_missing=-2.0)]
    present = torch.tensor([[True, True, True], [False, False, True]])
    credit = assign(scores_of([[0.5, 0.25], [NAN, NAN]]), SAME, present, objectives=objectives, block_names=("a", "b", "c"))
    assert_close(credit.stop_n, [0.0, -1.5 - 2.25], 1e-12)


def test_a_sum_is_not_rounded_to_single_precision_and_counts_who_is_alone_and_who_is_absent():
    correct, brier = Objective("correct", pays=("a",), weight=0.1), Objective("brier", pays=("a",))

    def summed(objectives):
        group_n, rule = torch.tensor([0, 0, 1]), {"block_names": ("a",), "method": "rlcr"}
        return assign(
            scores_of([[1, -0.5], [0, NAN], [1, 1]]), group_n, torch.ones(3, 1).bool(), objectives=objectives, **rule
        )

    assert_close(summed([correct, replace(brier, if_missing=-0.3)]).block_nk, [[-0.05], [0.05], [0.0]], 1e-15)
    credit = summed([correct, brier])
    assert (credit.singleton_m.tolist(), credit.absent_m.tolist()) == ([2, 2], [0, 1])
    assert credit.block_nk.tolist() == [[0.0]] * 3


@pytest.mark.parametrize("baseline", ["outcome", "blended"])
def test_an_outcome_is_discrete(baseline):
    objectives = [Objective("correct", pays=("a",)), Objective("brier", pays=("a",), given="correct", baseline=baseline)]
    for count, judgement in ((16, nullcontext()), (17, pytest.raises(RecipeError, match="took 17 different values"))):
        scores, present = scores_of([[i, 0.0] for i in range(count)]), torch.ones(count, 1).bool()
        with judgement:
            assign(scores, torch.zeros(count).long(), present, objectives=objectives, block_names=("a",))


BRIER = [Objective("brier", pays=("c",))]
ONE, TWO, BROKEN = scores_of([[0.5], [1]], ("brier",)), scores_of([[1, -0.1], [0, -0.1]]), scores_of([[1, -0.1], [0, -0.1]])
BROKEN.reward_nm[1, 1] = NAN


@pytest.mark.parametrize(
    ("error", "sentence", "scores", "objectives", "blocks", "shape"),
    [
        (RecipeError, "right", ONE, [Objective("brier", ("a",), given="right", baseline="outcome")], ("a",), (2, 1)),
        (RecipeError, "'c'", ONE, BRIER, ("a", "b"), (2, 2)),
        (AlignmentError, r"must have the shape \(2, 1\); it has \(2, 1\)\. .* it has \(2, 2\)", ONE, BRIER, ("a",), (2, 2)),
        (AlignmentError, r"must have the shape \(2, 1\); it has \(2, 2\)\. .* it has \(2, 1\)", TWO, BRIER, ("a",), (2, 1)),
        (RewardError, "'brier' of completion 1", BROKEN, [Objective("correct", "solution"), *BRIER], BLOCKS, (2, 2)),
    ],
)
def test_what_does_not_fit_is_refused(unchecked_shapes, error, sentence, scores, objectives, blocks, shape):
    with pytest.raises(error, match=sentence):
        assign(scores, SAME, torch.ones(shape), objectives=objectives, block_names=blocks)


def test_what_does_not_fit_an_advantage_is_refused(unchecked_shapes):
    for function in (dr_grpo, advantage, lambda reward_n, group_n: bae(reward_n[:, None], group_n)):
        with pytest.raises(AlignmentError, match="2 rewards for 1 group"):
            function(PAIR, SAME[:1])
    with pytest.raises(RecipeError, match="grup"):
        advantage(PAIR, SAME, baseline="grup")
    for baseline in ("none", "blended"):
        with pytest.raises(RecipeError, match=baseline):
            advantage(PAIR, SAME, baseline=baseline, scale="std", outcome_no=PAIR)
