"""What credit is made of: parts that add up to it, with baselines that a slow oracle finds, too."""

import math
import random
from types import SimpleNamespace

import pytest
import torch

from spanwise import Objective
from spanwise.credit import METHODS, assign
from spanwise.types import Scores, Status

NAN = math.nan
#: Methods of one number per completion or objective that take nothing but rewards and groups.
APART = {
    "bae", "bae_paper", "dcpo", "grpo_verif", "grpo", "dr_grpo", "gdpo", "maxrl", "opo", "reinforce++-baseline", "rlcr",
    "rlcr_paper", "rloo",
}  # fmt: skip
#: Those whose credit a baseline, and perhaps a scale, always explains.
EXPLAINED = APART - {"dcpo", "grpo_verif", "gdpo", "reinforce++-baseline"}  # these scale sums, or centre them once more


def scores_of(rewards, statuses=None):
    """Objectives by name; None is a reward that is not there."""
    table = torch.tensor([[NAN if value is None else value for value in row] for row in zip(*rewards.values(), strict=True)])
    status = torch.where(table.isnan(), int(Status.ABSENT), int(Status.OK)).to(torch.int8)
    for (n, m), value in (statuses or {}).items():
        status[n, m] = int(value)
    return Scores(tuple(rewards), table.double(), status, torch.full((*table.shape, 2), NAN).double())


def taken_apart(scores, groups, objectives, method, *, blocks=("solution", "confidence"), present=None, **options):
    group_n = torch.tensor(groups)
    present_nk = torch.ones(len(groups), len(blocks)).bool() if present is None else present
    inputs = {"length_n": torch.arange(len(groups)) + 3}
    found = assign(
        scores, group_n, present_nk, objectives=objectives, block_names=blocks, method=method, inputs=inputs, **options
    )
    apart = {**vars(found.comparison), "names": found.names, "weight_m": found.weight_m}
    return found, SimpleNamespace(**apart, part_nm=found.weight_m * found.adv_nm)


def pair(**changes):
    given = {"given": "correct", "baseline": "outcome", **changes}
    return [Objective("correct", "solution"), Objective("brier", "confidence", **given)]


def dice(seed, groups=6):
    """Groups of 1 to 6 completions, right and wrong, with confidences of which some are not there."""
    roll = random.Random(seed)
    ids = [g for g in range(groups) for _ in range(roll.choice([1, 2, 4, 6]))]
    correct = [float(roll.random() < 0.5) for _ in ids]
    return ids, correct, [-round(roll.random(), 2) for _ in ids]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", sorted(APART))
def test_parts_add_up_to_the_credit_whatever_the_method(name, seed):
    groups, correct, brier = dice(seed)
    by_block = METHODS[name].kind == "block"
    paid = (("solution",), ("confidence",)) if by_block else (("solution", "confidence"),) * 2
    objectives = [Objective("correct", paid[0]), Objective("correct", paid[1], weight=0.5, name="near")]
    near = [1.0 + x for x in brier]  # maxrl takes no negative ones
    found, apart = taken_apart(scores_of({"correct": correct, "near": near}), groups, objectives, name)
    assert len(apart.names) == (2 if by_block else 1)
    for n in range(len(groups)):
        for m in range(len(apart.names)):
            part, worth = float(apart.part_nm[n, m]), float(apart.worth_nm[n, m])
            baseline, divisor = float(apart.baseline_nm[n, m]), float(apart.divisor_nm[n, m])
            if not math.isnan(baseline):
                assert float(apart.weight_m[m]) * (worth - baseline) / divisor == pytest.approx(part, abs=1e-8)
            elif name in EXPLAINED:
                assert part == 0  # nobody to compare it with
        for k in range(2):
            paid = float(apart.part_nm[n, k if by_block else 0])
            assert float(found.block_nk[n, k]) == pytest.approx(paid, abs=1e-12)
    if name in EXPLAINED:
        compared = [n for n, group in enumerate(groups) if groups.count(group) > 1]
        assert not apart.baseline_nm[compared].isnan().any()


def test_every_method_that_can_be_taken_apart_is_tested():
    by_number = {name for name in METHODS if METHODS[name].kind in ("block", "completion")}
    assert by_number - {"ha_dw"} == APART  # what it divides by goes by the sign of the credit


def test_the_numbers_of_a_group_by_hand():
    """Rewards 1 0 0 0: mean .25, standard deviation .5; the mean of the others 0 and 1/3."""
    scores, one = scores_of({"correct": [1.0, 0.0, 0.0, 0.0]}), [Objective("correct", ("all",))]
    expected = {
        "dr_grpo": ([0.25] * 4, 1.0), "grpo": ([0.25] * 4, 0.5), "rloo": ([0.0, 1 / 3, 1 / 3, 1 / 3], 1.0),
        "maxrl": ([0.25] * 4, 0.25),
    }  # fmt: skip
    for name, (baselines, divisor) in expected.items():
        options = {"eps": 0.0} if name in ("grpo", "maxrl") else {}
        _, apart = taken_apart(scores, [0] * 4, one, name, blocks=("all",), **options)
        assert apart.baseline_nm[:, 0].tolist() == pytest.approx(baselines)
        assert apart.divisor_nm[:, 0].tolist() == pytest.approx([divisor] * 4)


def test_opo_subtracts_what_its_lengths_say():
    """Lengths 3 4 5 6 of rewards 1 0 0 1: (3 + 6) / 18."""
    scores, one = scores_of({"correct": [1.0, 0.0, 0.0, 1.0]}), [Objective("correct", ("all",))]
    _, apart = taken_apart(scores, [0] * 4, one, "opo", blocks=("all",))
    assert apart.baseline_nm[:, 0].tolist() == pytest.approx([0.5] * 4)


def test_outcome_baselines_are_means_of_their_stratum_and_strata_tell_who():
    scores = scores_of({"correct": [1.0, 1.0, 0.0, 0.0], "brier": [-0.01, -0.09, -0.64, -0.01]})
    _, apart = taken_apart(scores, [0] * 4, pair(), "bae")
    assert apart.baseline_nm[:, 1].tolist() == pytest.approx([-0.05, -0.05, -0.325, -0.325])
    assert apart.stratum_nm[0, 1] == apart.stratum_nm[1, 1] != apart.stratum_nm[2, 1]
    assert len(set(apart.stratum_nm[:, 0].tolist())) == 1


def test_what_is_left_out_failed_or_alone_is_told_apart():
    scores = scores_of(
        {"correct": [1.0, 1.0, 1.0, 0.0, None], "brier": [-0.2, None, -0.4, -0.5, -0.5]},
        {(4, 0): Status.TIMEOUT},
    )
    found, apart = taken_apart(scores, [0] * 5, pair(if_missing=-1.0), "bae")
    assert apart.worth_nm[1, 1] == -1.0  # absent, counts as -1
    assert float(apart.baseline_nm[1, 1]) == pytest.approx(-0.3)
    assert float(apart.part_nm[1, 1]) == pytest.approx(-0.7)
    assert apart.stratum_nm[1, 1] == apart.stratum_nm[0, 1] >= 0  # compared there, though it joins no baseline
    assert apart.worth_nm[4, 0].isnan()  # the check failed
    assert [float(apart.part_nm[4, 0]), bool(apart.baseline_nm[4, 0].isnan())] == [0.0, True]
    assert [float(apart.part_nm[3, 1]), bool(apart.baseline_nm[3, 1].isnan())] == [0.0, True]  # the only wrong one
    assert torch.equal(found.block_nk[:, 1], apart.part_nm[:, 1])


def test_a_scale_and_what_is_left_out_share_their_numbers():
    """-.01 -.09 -.64 and nothing, which counts as -1: mean -.2467, scale .5173 (the docstring of `advantage`)."""
    scores = scores_of({"brier": [-0.01, -0.09, -0.64, None]})
    one = [Objective("brier", "confidence", baseline="group", scale="std", if_missing=-1.0)]
    _, apart = taken_apart(scores, [0] * 4, one, "bae", blocks=("confidence",))
    assert apart.part_nm[:, 0].tolist() == pytest.approx([0.4575, 0.3029, -0.7604, -1.4563], abs=1e-4)
    assert apart.baseline_nm[:, 0].tolist() == pytest.approx([-0.24667] * 4, abs=1e-4)
    assert apart.divisor_nm[:, 0].tolist() == pytest.approx([0.5173] * 4, abs=1e-4)


def test_no_baseline_is_zero():
    scores = scores_of({"correct": [1.0, 0.5]})
    _, apart = taken_apart(scores, [0, 1], [Objective("correct", "all", baseline="none")], "bae", blocks=("all",))
    assert apart.baseline_nm[:, 0].tolist() == [0.0, 0.0]
    assert apart.part_nm[:, 0].tolist() == [1.0, 0.5]


def test_a_sum_that_is_compared_is_one_part():
    scores = scores_of({"correct": [1.0, 0.0], "brier": [-0.01, -0.81]})
    objectives = [Objective("correct", ("solution", "confidence")), Objective("brier", ("solution", "confidence"))]
    _, apart = taken_apart(scores, [0, 0], objectives, "rlcr")
    assert apart.names == ("correct + brier",)
    assert apart.worth_nm[:, 0].tolist() == pytest.approx([0.99, -0.81])
    assert apart.baseline_nm[:, 0].tolist() == pytest.approx([0.09, 0.09])


def test_no_number_is_made_up_for_sums_of_scaled_rewards():
    """gdpo scales each reward in its group and the sum over the batch: in a group of several, no baseline explains it."""
    groups, correct, brier = dice(1)
    objectives = [
        Objective("correct", ("solution", "confidence")),
        Objective("correct", ("solution", "confidence"), name="near"),
    ]
    _, apart = taken_apart(scores_of({"correct": correct, "near": brier}), groups, objectives, "gdpo")
    moved = apart.part_nm[:, 0] != 0
    assert bool(apart.baseline_nm[moved].isnan().any())
