"""Two gloo processes train as one does, to rounding, over three steps of a policy that samples what it is trained on."""

import pytest
import torch

from launch_three_steps import CASES, GROUP, PROMPTS, STEPS, train
from trl_small import THIRD_PARTY, largest_difference
from two_ranks import launched

pytestmark = [*THIRD_PARTY, pytest.mark.long]
BATCH = GROUP * PROMPTS
#: The weights are float64; the advantages and the norms inside the model are float32.
ROUNDING = 1e-7


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    return launched("launch_three_steps.py", tmp_path_factory.mktemp("ranks"), "3", "2", timeout=280)


def both(folder, name):
    """What the two processes did as one: step by step, the first one's completions before the second one's."""
    ranks = [torch.load(folder / f"{name} {rank}.pt") for rank in (0, 1)]
    half = BATCH // 2
    steps = [rank["seen"][step * half : (step + 1) * half] for step in range(STEPS) for rank in ranks]
    return [row for rows in steps for row in rows], ranks


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    return {name: train(folder, name, rows=BATCH // 2, accumulation=2)[0] for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_three_steps_of_two_processes_are_those_of_one(two_ranks, one, name):
    alone, (seen, (first, second)) = one[name], both(two_ranks, name)
    assert seen == alone["seen"]  # sampled from the same weights, and credited
    assert largest_difference(first["weights"], second["weights"]) == 0
    assert largest_difference(first["weights"], alone["weights"]) < ROUNDING
    assert len(alone["seen"]) == STEPS * BATCH
    assert len({len(ids) for ids, _ in alone["seen"]}) > 3  # ragged
    moved = [any(float(a) != 0 for a in advantages) for _, advantages in alone["seen"]]
    assert all(any(moved[place : place + GROUP]) for place in (GROUP, BATCH + GROUP, 2 * BATCH + GROUP))  # the split groups
    assert largest_difference(alone["weights"], alone["before"]) > 1e-3


def test_the_processes_ask_each_other_once_per_step(two_ranks):
    _, ranks = both(two_ranks, "dr_grpo")
    assert [rank["gathers"] for rank in ranks] == [STEPS, STEPS]
