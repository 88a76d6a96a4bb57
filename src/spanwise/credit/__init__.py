"""Turn rewards into advantages with pure functions on tensors."""

from spanwise.credit.assign import assign
from spanwise.credit.baselines import Advantage, advantage, blended_baseline
from spanwise.credit.contrib._unconfirmed import HistoryWeight, gagpo, grpo_verif, ha_dw
from spanwise.credit.methods._bae import bae, dcpo
from spanwise.credit.methods._batch_relative import gdpo, reinforce_plus_plus, reinforce_plus_plus_baseline
from spanwise.credit.methods._gae import gae, sae, value_target
from spanwise.credit.methods._gigpo import gigpo
from spanwise.credit.methods._group_relative import dr_grpo, grpo, maxrl, opo, rlcr, rloo
from spanwise.credit.methods._refinements import ktae, oar
from spanwise.credit.recursion import bootstrap_values, length_adaptive_lambda
from spanwise.credit.registry import METHODS, Method, Preset, method
from spanwise.credit.spread import spread
from spanwise.credit.strata import Explained, centred, explains, group_index, moments, refine
from spanwise.credit.trajectories.rollouts import assign_turns, step_returns
from spanwise.credit.trajectories.turns import Trajectory, Turn, Turns, merge_counts, prompt_mini_batches, split_turns

__all__ = [
    "METHODS",
    "Advantage",
    "Explained",
    "HistoryWeight",
    "Method",
    "Preset",
    "Trajectory",
    "Turn",
    "Turns",
    "advantage",
    "assign",
    "assign_turns",
    "bae",
    "blended_baseline",
    "bootstrap_values",
    "centred",
    "dcpo",
    "dr_grpo",
    "explains",
    "gae",
    "gagpo",
    "gdpo",
    "gigpo",
    "group_index",
    "grpo",
    "grpo_verif",
    "ha_dw",
    "ktae",
    "length_adaptive_lambda",
    "maxrl",
    "merge_counts",
    "method",
    "moments",
    "oar",
    "opo",
    "prompt_mini_batches",
    "refine",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "rlcr",
    "rloo",
    "sae",
    "split_turns",
    "spread",
    "step_returns",
    "value_target",
]
