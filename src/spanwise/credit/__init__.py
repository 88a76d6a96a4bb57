"""From rewards to advantages: baselines, methods and `spread`. Pure functions on tensors."""

from spanwise.credit.assign import assign
from spanwise.credit.bae import bae
from spanwise.credit.baselines import Advantage, advantage
from spanwise.credit.blended import blended_baseline
from spanwise.credit.dr_grpo import dr_grpo
from spanwise.credit.grpo import grpo
from spanwise.credit.methods import preset_layout, preset_objectives
from spanwise.credit.registry import METHODS, Method, Preset, load_plugins, method, register
from spanwise.credit.rlcr import rlcr
from spanwise.credit.spread import spread
from spanwise.credit.strata import Moments, centred, group_index, moments, precision_mean, refine

__all__ = [
    "METHODS",
    "Advantage",
    "Method",
    "Moments",
    "Preset",
    "advantage",
    "assign",
    "bae",
    "blended_baseline",
    "centred",
    "dr_grpo",
    "group_index",
    "grpo",
    "load_plugins",
    "method",
    "moments",
    "precision_mean",
    "preset_layout",
    "preset_objectives",
    "refine",
    "register",
    "rlcr",
    "spread",
]
