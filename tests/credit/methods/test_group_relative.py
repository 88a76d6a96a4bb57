"""GRPO and its relatives: where epsilon stands, what is empty or refused; test_comparison_exact has loops."""

import pytest
import torch

from helpers import assert_close
from spanwise.credit import (
    HistoryWeight,
    gdpo,
    ha_dw,
    maxrl,
    opo,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    rlcr,
    rloo,
)
from spanwise.errors import AlignmentError, RecipeError, RewardError


@pytest.mark.parametrize(
    ("eps_at", "eps", "size"),
    [("std", 0.21, 1 / 1.21), ("variance", 0.21, 1 / 1.1), ("floor", 0.21, 1), ("floor", 4.0, 1 / 2)],
)
def test_where_epsilon_stands(eps_at, eps, size):
    # rewards 2 and 0 on one token each: deviations +-1, population variance 1
    reward_n, group_n, ones = torch.tensor([2.0, 0.0]), torch.tensor([0, 0]), torch.tensor([1, 1])
    options = {"ddof": 0, "eps": eps, "eps_at": eps_at}
    assert_close(reinforce_plus_plus_baseline(reward_n, group_n, length_n=ones, **options), [size, -size], 1e-12)
    assert_close(reinforce_plus_plus(reward_n[:, None], ones[:, None].bool(), **options)[:, 0].double(), [size, -size])
    scores = torch.tensor([[1.0], [-1.0]])  # standardised in the group they are +-1 / (1 + eps)
    within = 1 / (1 + eps)
    divisor = {"std": within + eps, "variance": (within**2 + eps) ** 0.5, "floor": max(within, eps**0.5)}[eps_at]
    assert_close(gdpo(scores, group_n, **options), [within / divisor, -within / divisor], 1e-6)


def test_empty_batches():
    nothing, nobody = torch.zeros(0), torch.zeros(0, dtype=torch.long)
    for method in (rloo, maxrl, ha_dw):
        assert method(nothing, nobody).shape == (0,)
    for method in (opo, reinforce_plus_plus_baseline):
        assert method(nothing, nobody, length_n=nobody).shape == (0,)
    assert gdpo(torch.zeros(0, 2), nobody).shape == (0,)
    assert reinforce_plus_plus(torch.zeros(0, 3), torch.zeros(0, 3).bool()).shape == (0, 3)


BAD, ALIKE = torch.tensor([0.5, -0.25]), torch.tensor([0, 0])


@pytest.mark.parametrize(
    ("error", "sentence", "call"),
    [
        (RewardError, "completion 1 is -0.25", lambda: maxrl(BAD, ALIKE)),
        (AlignmentError, "3 weights for 1", lambda: gdpo(BAD[:, None], ALIKE, weight_m=torch.ones(3))),
        (AlignmentError, "3 weights for 1", lambda: rlcr(BAD[:, None], ALIKE, weight_m=torch.ones(3))),
        (AlignmentError, "2 rewards for 3", lambda: rloo(BAD, torch.zeros(3, dtype=torch.long))),
        (RecipeError, "window is 1", lambda: HistoryWeight()(BAD, ALIKE, window=1)),
        (RecipeError, "history is 0", lambda: HistoryWeight()(BAD, ALIKE, history=0)),
    ],
)
def test_what_is_refused(unchecked_shapes, error, sentence, call):
    with pytest.raises(error, match=sentence):
        call()
