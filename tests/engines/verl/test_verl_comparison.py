"""docs/comparison.md: what verl's own estimators give the four completions."""

import re

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from verl.trainer.ppo import core_algos

from pages import DOCS

PAGE = DOCS / "comparison.md"
RIGHT, BRIER = torch.tensor([1.0, 1.0, 0.0, 0.0]), torch.tensor([-0.01, -0.81, -0.81, -0.01])


def row(name):
    (cells,) = re.findall(rf"^\| {re.escape(name)} \| (.+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return [float(cell) for cell in cells.split("|")]


GROUP = torch.ones(4, 1), np.array(["p"] * 4, dtype=object)


def test_grpo_on_the_sum_and_gdpo():
    rewards = {"right": RIGHT.numpy(), "brier": BRIER.numpy()}
    batch = {"prompts": torch.zeros(4, 1), "attention_mask": torch.ones(4, 2).long()}
    more = {"config": OmegaConf.create({"gdpo_reward_keys": [*rewards]}), "non_tensor_batch": rewards, "batch": batch}
    grpo_nt, _ = core_algos.compute_grpo_outcome_advantage((RIGHT + BRIER)[:, None], *GROUP)
    gdpo_nt, _ = core_algos.compute_gdpo_outcome_advantage(torch.zeros(4, 1), *GROUP, **more)
    assert grpo_nt[:, 0].tolist() == pytest.approx(row("verl's `grpo` on the sum"), abs=0.006)
    assert gdpo_nt[:, 0].tolist() == pytest.approx(row("GDPO: TRL's `normalize_then_sum`, verl's `gdpo`"), abs=0.006)
