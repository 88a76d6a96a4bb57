"""Two gloo processes whose one group of eight spans both, against one process and against the objective by hand."""

import pytest
import torch

from launch_two_ranks import ASKED, CASES, SCORES, SHARES, TOKENS
from trl_small import (
    SAID,
    SAID_WITH_TOOLS,
    THIRD_PARTY,
    asked_first,
    largest_difference,
    paper_gradient,
    policy,
    step,
    trainer,
)
from two_ranks import launched

pytestmark = [*THIRD_PARTY, pytest.mark.long]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    return launched("launch_two_ranks.py", tmp_path_factory.mktemp("ranks"), "2", "2")


@pytest.mark.parametrize("name", CASES)
def test_a_group_that_spans_ranks_is_one_group(two_ranks, tmp_path, name):
    options = dict(CASES[name])
    said = SAID_WITH_TOOLS if options.get("tools") else SAID
    two = torch.load(two_ranks / f"{name}.pt")
    assert largest_difference(two["gradient"], paper_gradient(policy(), asked_first(said), size=8)) < 2e-6

    one = trainer(tmp_path, said=said, num_generations=8, **options)
    assert largest_difference(two["gradient"], step(one)) < 2e-6
    log = one.state.log_history[0]
    assert two["log"] == pytest.approx({key: log[key] for key in two["log"]})
    assert "credit/malformed" in two["log"]
    mine = two["advantages_nt"]
    assert mine.shape[0] == 4
    assert torch.allclose(mine, one.last_rollouts.advantages_nt[:4, : mine.shape[1]], atol=1e-7)


def test_every_rank_samples_as_much_as_the_neediest(two_ranks, tmp_path):
    two = torch.load(two_ranks / "sampling.pt")
    one = trainer(tmp_path, extra={"train_dataset": ASKED})
    assert largest_difference(two["gradient"], step(one)) < 2e-6
    assert two["log"] == {"sampling/groups": 2.0, "sampling/useless": 0.0}


@pytest.mark.parametrize("name", [*SHARES, *TOKENS, *SCORES])
def test_scores_and_counts_of_tokens_are_over_those_of_all_ranks(two_ranks, tmp_path, name):
    two = torch.load(two_ranks / f"{name}.pt")
    said = SAID if name in SCORES else SAID_WITH_TOOLS
    one = trainer(tmp_path, said=said, num_generations=8, **{**SHARES, **TOKENS, **SCORES}[name])
    assert largest_difference(two["gradient"], step(one)) < 2e-6
    mine = two["advantages_nt"]
    assert bool((mine != 0).any())
    assert torch.allclose(mine, one.last_rollouts.advantages_nt[:4, : mine.shape[1]], atol=1e-7)
