"""Worth, baseline and divisor of whole groups, worked out by hand; test_comparison_exact has the loops."""

import pytest
import torch

from credit_batches import scores_of
from helpers import NAN, assert_close
from spanwise import Objective
from spanwise.credit import assign


def compared(rewards, objectives, method, names=("correct",), **options):
    """The credit of one group, whose completions have every block."""
    blocks = sorted({block for objective in objectives for block in objective.pays})
    size = len(rewards)
    return assign(
        scores_of(rewards, names), torch.zeros(size).long(), torch.ones(size, len(blocks)).bool(), objectives=objectives,
        block_names=blocks, method=method, **options,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("method", "baseline", "divisor", "options"),
    [
        ("dr_grpo", [0.25] * 4, 1.0, {}),
        ("grpo", [0.25] * 4, 0.5, {"eps": 0.0}),
        ("rloo", [0.0, 1 / 3, 1 / 3, 1 / 3], 1.0, {}),
        ("maxrl", [0.25] * 4, 0.25, {"eps": 0.0}),
    ],
)
def test_one_right_of_four(method, baseline, divisor, options):
    """Rewards 1 0 0 0: mean .25, standard deviation .5; the mean of the others 0 and 1/3."""
    found = compared([[1.0], [0.0], [0.0], [0.0]], [Objective("correct", "all")], method, **options).comparison
    assert_close(found.baseline_nm[:, 0], baseline, 1e-12)
    assert_close(found.divisor_nm[:, 0], [divisor] * 4, 1e-12)


def test_a_scale_and_what_is_left_out_share_their_numbers():
    """-.01 -.09 -.64 and nothing, which counts as -1: mean -.2467, scale .5173 (the docstring of `advantage`)."""
    objective = Objective("brier", "confidence", baseline="group", scale="std", if_missing=-1.0)
    found = compared([[-0.01], [-0.09], [-0.64], [NAN]], [objective], "bae", names=("brier",))
    assert_close(found.adv_nm[:, 0], [0.4575, 0.3029, -0.7604, -1.4563], 1e-4)
    assert_close(found.comparison.baseline_nm[:, 0], [-0.24667] * 4, 1e-4)
    assert_close(found.comparison.divisor_nm[:, 0], [0.5173] * 4, 1e-4)


def test_a_sum_that_is_compared_is_one_part():
    objectives = [Objective("correct", "all"), Objective("brier", "all")]
    found = compared([[1.0, -0.01], [0.0, -0.81]], objectives, "rlcr", names=("correct", "brier"))
    assert found.names == ("correct + brier",)
    assert_close(found.comparison.worth_nm[:, 0], [0.99, -0.81], 1e-12)
    assert_close(found.comparison.baseline_nm[:, 0], [0.09, 0.09], 1e-12)
