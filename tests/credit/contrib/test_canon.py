"""CANON: worked numbers, halves of odd groups, ties and missing metrics."""

import functools

import torch

from credit_batches import ONE_PROMPT
from helpers import NAN, assert_close
from spanwise.credit import canon, dr_grpo

CANON_REWARD = torch.tensor([1.0, 1, 0, 1, 0, 0, 0, 0], dtype=torch.float64)
METRIC = torch.tensor([8.0, 7, 6, 5, 4, 3, 2, 1])


def test_canon():
    run = functools.partial(canon, CANON_REWARD, ONE_PROMPT, metric_n=METRIC)
    assert_close(run(), [1, 1, 0, 1, -0.75, -0.75, -0.75, -0.75], 1e-12)
    assert_close(run(mu=0.0), [0.25, 0.25, -0.75, 0.25, 0, 0, 0, 0], 1e-12)
    assert_close(run(mu=0.5), [0.625, 0.625, -0.375, 0.625, -0.375, -0.375, -0.375, -0.375], 1e-12)
    assert_close(run(alpha=0.9), [0.9, 0.9, 0, 0.9, -0.675, -0.675, -0.675, -0.675], 1e-12)
    # entropies favour the low half: high r - .9 * 0, low .9 r - .75
    assert_close(run(alpha=0.9, favoured="low"), [1, 1, 0, 1, -0.75, -0.75, -0.75, -0.75], 1e-12)
    assert_close(run(divide_by=8192), [value / 8192 for value in (1, 1, 0, 1, -0.75, -0.75, -0.75, -0.75)], 1e-15)


def test_canon_favouring_the_low_half_with_rewards_in_both():
    # high half {0: r 1, 1: r 0}, low half {2: r 1, 3: r 1}: high r - .5 * 1, low .5 r - .5
    reward_n, metric_n = torch.tensor([1.0, 0, 1, 1]), torch.tensor([4.0, 3, 2, 1])
    adv_n = canon(reward_n, torch.zeros(4, dtype=torch.long), metric_n=metric_n, alpha=0.5, favoured="low")
    assert_close(adv_n, [0.5, -0.5, 0.0, 0.0], 1e-12)


def test_canon_of_odd_size_has_one_more_in_the_high_half():
    reward_n, metric_n = torch.tensor([1.0, 0, 1]), torch.tensor([1.0, 2, 3])
    group_n = torch.zeros(3, dtype=torch.long)
    assert_close(canon(reward_n, group_n, metric_n=metric_n, mu=0.5), [0.25, -0.75, 0.25], 1e-12)
    assert_close(dr_grpo(reward_n, group_n), [1 / 3, -2 / 3, 1 / 3], 1e-12)


def test_canon_shares_ties_whatever_their_order():
    # Metrics 1 2 2 2: one completion of the three ties belongs to the low half, so each belongs to it by a third.
    reward_n, metric_n = torch.tensor([1.0, 0, 0, 1]), torch.tensor([1.0, 2, 2, 2])
    group_n = torch.zeros(4, dtype=torch.long)
    high, low = (1 / 3), (1 + 1 / 3) / 2  # mean of the ties; of completion 0 and a third of each tie
    expected = [1 - high, *(r - (2 * low + high) / 3 for r in (0, 0, 1))]
    assert_close(canon(reward_n, group_n, metric_n=metric_n), expected, 1e-12)
    in_order = canon(reward_n, group_n, metric_n=metric_n, ties="order")  # low: 0 and 1
    assert_close(in_order, [1 - 0.5, 0 - 0.5, 0 - 0.5, 1 - 0.5], 1e-12)


def test_canon_leaves_out_who_has_no_metric():
    reward_n, group_n = torch.tensor([1.0, 0, 5.0]), torch.tensor([0, 0, 0])
    assert_close(canon(reward_n, group_n, metric_n=torch.tensor([2.0, 1, NAN])), [1.0, -1.0, 0.0], 1e-12)
