"""From rewards to advantages: baselines, methods and `spread`. Pure functions on tensors."""

from spanwise.credit.anchors import anchor_groups
from spanwise.credit.assign import assign
from spanwise.credit.bae import bae
from spanwise.credit.baselines import Advantage, advantage
from spanwise.credit.blended import blended_baseline
from spanwise.credit.canon import canon
from spanwise.credit.compat import COMPAT, compat_table, compatible
from spanwise.credit.dcpo import dcpo, smoothed_calibration
from spanwise.credit.dr_grpo import dr_grpo
from spanwise.credit.gae import gae, length_adaptive_lambda, value_target
from spanwise.credit.gagpo import gagpo
from spanwise.credit.gdpo import gdpo
from spanwise.credit.gigpo import gigpo
from spanwise.credit.grpo import grpo
from spanwise.credit.grpo_verif import grpo_verif
from spanwise.credit.ha_dw import HistoryWeight, ha_dw, history_weighted
from spanwise.credit.ktae import ktae
from spanwise.credit.maxrl import maxrl
from spanwise.credit.merge import Merge, MergedSequence, Step, merge_steps
from spanwise.credit.methods import preset_layout, preset_objectives
from spanwise.credit.oar import oar
from spanwise.credit.opo import opo
from spanwise.credit.recursion import bootstrap_values, discounted_returns
from spanwise.credit.registry import METHODS, Method, Preset, load_plugins, method, register
from spanwise.credit.reinforce_plus_plus import reinforce_plus_plus
from spanwise.credit.reinforce_plus_plus_baseline import reinforce_plus_plus_baseline
from spanwise.credit.rlcr import rlcr
from spanwise.credit.rloo import rloo
from spanwise.credit.sae import sae
from spanwise.credit.san import san
from spanwise.credit.spo_chain import spo_chain
from spanwise.credit.spread import spread, to_tokens
from spanwise.credit.step_returns import Outcomes, Timeline, step_returns, timeline, trajectory_outcomes
from spanwise.credit.stepwise import (
    broadcast_to_steps,
    check_stepwise,
    outcome_methods,
    prompt_mini_batches,
    step_rewards,
    stepwise,
)
from spanwise.credit.strata import Moments, centred, group_index, moments, precision_mean, refine
from spanwise.credit.vineppo import vineppo

__all__ = [
    "COMPAT",
    "METHODS",
    "Advantage",
    "HistoryWeight",
    "Merge",
    "MergedSequence",
    "Method",
    "Moments",
    "Outcomes",
    "Preset",
    "Step",
    "Timeline",
    "advantage",
    "anchor_groups",
    "assign",
    "bae",
    "blended_baseline",
    "bootstrap_values",
    "broadcast_to_steps",
    "canon",
    "centred",
    "check_stepwise",
    "compat_table",
    "compatible",
    "dcpo",
    "discounted_returns",
    "dr_grpo",
    "gae",
    "gagpo",
    "gdpo",
    "gigpo",
    "group_index",
    "grpo",
    "grpo_verif",
    "ha_dw",
    "history_weighted",
    "ktae",
    "length_adaptive_lambda",
    "load_plugins",
    "maxrl",
    "merge_steps",
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
    "register",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "rlcr",
    "rloo",
    "sae",
    "san",
    "smoothed_calibration",
    "spo_chain",
    "spread",
    "step_returns",
    "step_rewards",
    "stepwise",
    "timeline",
    "to_tokens",
    "trajectory_outcomes",
    "value_target",
    "vineppo",
]
