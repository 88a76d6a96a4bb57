"""What credit is made of: parts that add up to it, with baselines that a slow oracle finds, too."""

import math
from types import SimpleNamespace

import pytest
import torch

from spanwise import Objective
from spanwise.credit import assign
from spanwise.types import Scores, Status

NAN = math.nan


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


def test_a_scale_and_what_is_left_out_share_their_numbers():
    """-.01 -.09 -.64 and nothing, which counts as -1: mean -.2467, scale .5173 (the docstring of `advantage`)."""
    scores = scores_of({"brier": [-0.01, -0.09, -0.64, None]})
    one = [Objective("brier", "confidence", baseline="group", scale="std", if_missing=-1.0)]
    _, apart = taken_apart(scores, [0] * 4, one, "bae", blocks=("confidence",))
    assert apart.part_nm[:, 0].tolist() == pytest.approx([0.4575, 0.3029, -0.7604, -1.4563], abs=1e-4)
    assert apart.baseline_nm[:, 0].tolist() == pytest.approx([-0.24667] * 4, abs=1e-4)
    assert apart.divisor_nm[:, 0].tolist() == pytest.approx([0.5173] * 4, abs=1e-4)


def test_a_sum_that_is_compared_is_one_part():
    scores = scores_of({"correct": [1.0, 0.0], "brier": [-0.01, -0.81]})
    objectives = [Objective("correct", ("solution", "confidence")), Objective("brier", ("solution", "confidence"))]
    _, apart = taken_apart(scores, [0, 0], objectives, "rlcr")
    assert apart.names == ("correct + brier",)
    assert apart.worth_nm[:, 0].tolist() == pytest.approx([0.99, -0.81])
    assert apart.baseline_nm[:, 0].tolist() == pytest.approx([0.09, 0.09])
