"""The recursion over trainable tokens: truncation, dtypes; tests of its methods have oracles."""

import torch

from credit_batches import all_of
from helpers import NAN, assert_close, double
from spanwise.credit import recursion
from spanwise.credit.methods._batch_relative import reinforce_plus_plus
from spanwise.credit.methods._gae import gae
from spanwise.credit.recursion import bootstrap_values


def test_three_ways_to_take_truncation():
    truncated, end = torch.tensor([True, False]), double([0.8, NAN])
    inputs = double([[0, 0], [0, 1]]), double([[0.3, 0.4], [0.3, 0.4]]), all_of(2, 2)
    expected = {"terminal": [-0.3, -0.4], "bootstrap": [0.5, 0.4], "mask": [0.0, 0.0]}
    for truncation, row in expected.items():
        bootstrap = bootstrap_values(truncated, truncated=truncation, value_end_n=end)
        assert_close(gae(*inputs, lam=1.0, bootstrap_n=bootstrap), [row, [0.7, 0.6]], 1e-12)
    assert bootstrap_values(truncated).tolist() == [0.0, 0.0]


def test_half_precision_is_only_the_wrapping():
    reward, mask = torch.full((1, 600), 0.125, dtype=torch.bfloat16), all_of(1, 600)
    assert reinforce_plus_plus(reward, mask, whiten=False)[0, 0].item() == 75.0  # sums in bfloat16 stop growing at 32


def test_rewards_may_be_whole_numbers(unchecked_shapes):
    reward, mask = torch.tensor([[0, 1], [0, 0]]), all_of(2, 2)
    for whiten in (True, False):
        found = reinforce_plus_plus(reward, mask, gamma=0.5, whiten=whiten)
        assert found.dtype == torch.float32
        assert torch.equal(found, reinforce_plus_plus(reward.float(), mask, gamma=0.5, whiten=whiten))
    assert gae(reward, torch.zeros_like(reward), mask, gamma=0.5, lam=1.0).tolist() == [[0.5, 1.0], [0.0, 0.0]]


def test_the_scratch_does_not_grow_with_the_batch():
    for n, t in ((1 << 13, 1 << 12), (1 << 15, 1 << 14), (1, 1 << 20)):
        assert (
            max((rows.stop - rows.start) * (cols.stop - cols.start) for rows, cols in recursion._cut_blocks(n, t)) <= 1 << 18
        )
