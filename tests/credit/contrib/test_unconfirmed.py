"""GAGPO against its slow oracle, and the history of HA-DW, which moves, settles and is resumed."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from credit_batches import WORKED, step_batches
from helpers import NAN, assert_close
from oracles import slow_gagpo
from spanwise.credit import HistoryWeight
from spanwise.credit.contrib._unconfirmed import gagpo
from spanwise.errors import RecipeError


def test_gagpo_standardised_in_the_prompt():
    plain = gagpo(*WORKED)
    assert_close(gagpo(*WORKED, scale="std", eps=0.0), ((plain - plain.mean()) / plain.std()).tolist(), 1e-12)
    assert gagpo(*WORKED, scale="std", min_stratum=len(plain) + 1).tolist() == [0.0] * len(plain)  # too few to compare


@given(batch=step_batches(), gamma=st.sampled_from([0.5, 0.95, 1.0]), lam=st.sampled_from([0.0, 0.95, 1.0]))
@settings(max_examples=80, deadline=None)
def test_gagpo_equals_the_slow_oracle(batch, gamma, lam):
    torch.testing.assert_close(gagpo(*batch, gamma=gamma, lam=lam), slow_gagpo(batch, gamma, lam), atol=1e-9, rtol=0)


@pytest.mark.parametrize(("window", "first_anchors"), [(2, [0.0, 0.5]), (3, [0.0, 0.5, 0.75])])
def test_history_weight_slows_down_as_its_anchor_settles(window, first_anchors):
    weigh = HistoryWeight()
    ones, group_n = torch.ones(2), torch.zeros(2, dtype=torch.long)
    anchors = [0.0]
    for batch in range(4):
        weigh(ones, group_n, eta=0.5, window=window, anchor=0.0)
        recent = torch.tensor(anchors[-window:], dtype=torch.float64)
        eta = 0.5 * float(recent.std()) if batch >= window - 1 else 0.5
        anchors.append((1 - eta) * anchors[-1] + eta)
        weigh(torch.full((2,), NAN), group_n, eta=0.5, window=window)  # without a reward it stays where it is
        assert weigh.anchor == pytest.approx(anchors[-1], abs=1e-12)
    assert anchors[:window] == first_anchors


def test_history_weight_with_a_moving_average():
    weigh = HistoryWeight()
    for rewards, anchor in (([1.0, 0.0], 0.5), ([1.0, 1.0], 0.75), ([0.0, 1.0], 0.75)):
        weigh(torch.tensor(rewards), torch.zeros(2, dtype=torch.long), history=2)
        assert weigh.anchor == anchor


@pytest.mark.parametrize("history", [None, 3])
def test_history_weight_continues_after_a_resume(history):
    torch.manual_seed(0)
    completion_batches = [(torch.rand(6) < 0.4).float() for _ in range(8)]
    group_n = torch.tensor([0, 0, 0, 1, 1, 1])
    uninterrupted, resumed, options = HistoryWeight(), HistoryWeight(), {"window": 3, "history": history}
    for number, reward_n in enumerate(completion_batches):
        if number == 4:
            resumed.load_state_dict(json.loads(json.dumps(uninterrupted.state_dict())))
        adv_n = uninterrupted(reward_n, group_n, **options)
        assert number < 4 or torch.equal(resumed(reward_n, group_n, **options), adv_n)
    assert uninterrupted.state_dict() == resumed.state_dict()
    with pytest.raises(RecipeError):
        resumed.load_state_dict({"anchor": [0.5]})
