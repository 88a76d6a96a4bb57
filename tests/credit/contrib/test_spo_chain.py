"""SPO-chain: completions without cut points."""

import torch

from helpers import NAN, double
from spanwise.credit.contrib._vineppo import spo_chain


def test_a_completion_without_cut_points_gets_nothing():
    assert spo_chain(double([[NAN]]), double([1]), torch.zeros(1, 3).long()).tolist() == [[0.0] * 3]
