"""A critic in two gloo processes, each with half of one group, against the same run in one process."""

import pytest
import torch

from critic_small import equal, state
from launch_two_ranks_critic import CASES, SHAPE
from trl_critic_small import Watched, critic_lines, with_critic
from trl_small import THIRD_PARTY
from two_ranks import launched

pytestmark = [*THIRD_PARTY, pytest.mark.long]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    return launched("launch_two_ranks_critic.py", tmp_path_factory.mktemp("ranks"), timeout=280)


@pytest.mark.parametrize("name", CASES)
def test_two_processes_fit_the_critic_of_one(two_ranks, tmp_path, name):
    ranks = [torch.load(two_ranks / f"{name}.{rank}.pt") for rank in (0, 1)]
    assert equal(ranks[0]["critic"], ranks[1]["critic"])
    assert equal(ranks[0]["policy"], ranks[1]["policy"])

    one = with_critic(tmp_path, **SHAPE, **CASES[name])
    start = state(one.critic.model)
    watched = Watched(one)
    one.train()
    # Sums in another order; single weights part by 3e-5 on some processors.
    torch.testing.assert_close(ranks[0]["critic"], state(one.critic.model), atol=1e-4, rtol=0)
    torch.testing.assert_close(ranks[0]["policy"], state(one.model), atol=1e-6, rtol=0)
    assert not equal(start, state(one.critic.model))
    for batch, found in enumerate(watched.said):
        for rank in (0, 1):
            mine = ranks[rank]["values"][batch]
            whole = found.value_nts[4 * rank : 4 * rank + 4, : mine.shape[1]]
            # TRL pads a rank's completions to those of that rank; what stands behind the end is of no token.
            read = watched.asked[batch][1].mask_snt[:, 4 * rank : 4 * rank + 4, : mine.shape[1]].permute(1, 2, 0)
            torch.testing.assert_close(mine[read], whole[read], atol=2e-5, rtol=0)
    for rank in (0, 1):
        mine = ranks[rank]["advantages_nt"]
        whole = one.last_rollouts.advantages_nt[4 * rank : 4 * rank + 4, : mine.shape[1]]
        torch.testing.assert_close(mine, whole, atol=2e-5, rtol=0)
        assert mine.any()
    assert len(ranks[0]["lines"]) == 3
    for two, whole in zip(ranks[0]["lines"], critic_lines(one), strict=True):
        assert two == pytest.approx(whole, abs=2e-3, rel=2e-3)  # as far as log lines are rounded


def test_a_critic_that_diverges_in_one_process_stops_both(two_ranks):
    said = [torch.load(two_ranks / f"broken.{rank}.pt") for rank in (0, 1)]
    assert all("The critic has diverged" in one["said"] for one in said)
    assert [one["step"] for one in said] == [1, 1]
