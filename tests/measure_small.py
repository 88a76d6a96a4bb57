"""Small data that tests of measuring share: reports by prompt, re-rolled completions."""

import numpy as np
import torch

from spanwise.fidelity import Rerolls


def rolled(x, s, m, *, seed=0, own_prefix=True, spread=0.15):
    """Confidences around a level of each prompt, over-confident; half of the prompts are mostly right."""
    g = torch.Generator().manual_seed(seed)
    level_x1, p_x1 = 0.5 + 0.3 * torch.rand(x, 1, generator=g), torch.rand(x, 1, generator=g)
    outcome_xs = (torch.rand(x, s, generator=g) < p_x1).double()
    prefix_xs = torch.arange(x * s).reshape(x, s) if own_prefix else (2 * torch.arange(x)[:, None] + outcome_xs).long()
    level_d = level_x1.expand(x, s if own_prefix else 2).flatten()
    confidence_xs = level_x1 + spread * (2 * torch.rand(x, s, generator=g) - 1)
    again_dm = level_d[:, None] + spread * (2 * torch.rand(len(level_d), m, generator=g) - 1)
    return Rerolls(confidence_xs.double(), outcome_xs, prefix_xs, again_dm.double())


def reports(prompts=20, samples=4, seed=0):
    """Confidences on a grid, whether they were right, and ids of prompts."""
    rng = np.random.default_rng(seed)
    p = np.repeat(rng.random(prompts), samples)
    correct = (rng.random(len(p)) < p).astype(float)
    return torch.tensor(np.round(p, 2)), torch.tensor(correct), torch.arange(prompts).repeat_interleave(samples) * 3 + 7


def on_rows(function, *columns):
    """Any function of columns as a figure of weights: each row repeats every completion as often as its weight says."""

    def figure(weight_rn):
        rows = [torch.arange(weight_rn.shape[1]).repeat_interleave(weight_n.long()) for weight_n in weight_rn]
        return torch.tensor([float(function(*(c[row_i] for c in columns))) for row_i in rows], dtype=torch.float64)

    return figure
