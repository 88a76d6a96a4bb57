"""From rewards to advantages: baselines, methods and `spread`. Pure functions on tensors."""

from spanwise.credit.assign import assign
from spanwise.credit.baselines import Advantage, advantage
from spanwise.credit.blended import blended_baseline
from spanwise.credit.contrib._canon import canon
from spanwise.credit.contrib._gagpo import gagpo
from spanwise.credit.contrib._group_nce import group_nce
from spanwise.credit.contrib._grpo_verif import grpo_verif
from spanwise.credit.contrib._ha_dw import HistoryWeight, ha_dw, history_weighted
from spanwise.credit.contrib._san import san
from spanwise.credit.contrib._spo_chain import spo_chain
from spanwise.credit.contrib._vineppo import vineppo
from spanwise.credit.explained import Explained, explains
from spanwise.credit.methods._bae import bae
from spanwise.credit.methods._dcpo import dcpo, smoothed_calibration
from spanwise.credit.methods._dr_grpo import dr_grpo
from spanwise.credit.methods._gae import gae, value_target
from spanwise.credit.methods._gdpo import gdpo
from spanwise.credit.methods._gigpo import gigpo
from spanwise.credit.methods._grpo import grpo
from spanwise.credit.methods._ktae import ktae
from spanwise.credit.methods._maxrl import maxrl
from spanwise.credit.methods._oar import oar
from spanwise.credit.methods._opo import opo
from spanwise.credit.methods._reinforce_plus_plus import reinforce_plus_plus
from spanwise.credit.methods._reinforce_plus_plus_baseline import reinforce_plus_plus_baseline
from spanwise.credit.methods._rlcr import rlcr
from spanwise.credit.methods._rloo import rloo
from spanwise.credit.methods._sae import sae, segment_openings
from spanwise.credit.presets import preset_layout, preset_objectives, states_confidence
from spanwise.credit.recursion import bootstrap_values, discounted_returns, length_adaptive_lambda
from spanwise.credit.refinement import Refinement, refined
from spanwise.credit.registry import METHODS, Method, Preset, method
from spanwise.credit.spread import restrict, spread, spread_tokens, to_tokens
from spanwise.credit.strata import Moments, centred, compare_in_strata, group_index, moments, precision_mean, refine
from spanwise.credit.streams import Streams, reward_streams
from spanwise.credit.trajectories.anchors import anchor_groups
from spanwise.credit.trajectories.graph import Branch, Trajectory, Turn, merge_counts
from spanwise.credit.trajectories.rollouts import assign_turns
from spanwise.credit.trajectories.step_returns import Outcomes, Timeline, step_returns, timeline, trajectory_outcomes
from spanwise.credit.trajectories.stepwise import (
    broadcast_to_steps,
    check_stepwise,
    outcome_methods,
    prompt_mini_batches,
    step_rewards,
    stepwise,
)
from spanwise.credit.trajectories.turns import Turns, split_turns
from spanwise.credit.trajectories.unused import keep_for_rollouts

__all__ = [
    "METHODS",
    "Advantage",
    "Branch",
    "Explained",
    "HistoryWeight",
    "Method",
    "Moments",
    "Outcomes",
    "Preset",
    "Refinement",
    "Streams",
    "Timeline",
    "Trajectory",
    "Turn",
    "Turns",
    "advantage",
    "anchor_groups",
    "assign",
    "assign_turns",
    "bae",
    "blended_baseline",
    "bootstrap_values",
    "broadcast_to_steps",
    "canon",
    "centred",
    "check_stepwise",
    "compare_in_strata",
    "dcpo",
    "discounted_returns",
    "dr_grpo",
    "explains",
    "gae",
    "gagpo",
    "gdpo",
    "gigpo",
    "group_index",
    "group_nce",
    "grpo",
    "grpo_verif",
    "ha_dw",
    "history_weighted",
    "keep_for_rollouts",
    "ktae",
    "length_adaptive_lambda",
    "maxrl",
    "merge_counts",
    "method",
    "moments",
    "oar",
    "opo",
    "outcome_methods",
    "precision_mean",
    "preset_layout",
    "preset_objectives",
    "prompt_mini_batches",
    "refine",
    "refined",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "restrict",
    "reward_streams",
    "rlcr",
    "rloo",
    "sae",
    "san",
    "segment_openings",
    "smoothed_calibration",
    "split_turns",
    "spo_chain",
    "spread",
    "spread_tokens",
    "states_confidence",
    "step_returns",
    "step_rewards",
    "stepwise",
    "timeline",
    "to_tokens",
    "trajectory_outcomes",
    "value_target",
    "vineppo",
]
