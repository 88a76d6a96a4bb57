"""From rollouts to figures: calibration, accuracy, refusals, voting, and how much of a difference is noise.

Needs `pip install 'spanwise[measure]'`.
"""

from spanwise.errors import lacking

try:
    import scipy as _scipy  # noqa: F401  (it loads scipy.stats when that is first used)
except ModuleNotFoundError as error:  # the core installs without it
    raise lacking("spanwise.measure", error) from error

from spanwise.losses import critic_error
from spanwise.measure.bootstrap import Kind, Weighted, bootstrap, paired_bootstrap
from spanwise.measure.calibration import auroc, brier, ece, figure_intervals, figures, sharpness
from spanwise.measure.compare import ArmComparison, Cell, Difference, compare_arms, holm
from spanwise.measure.ece_interval import Reports, ece_difference, ece_interval
from spanwise.measure.intervals import Interval, Prompts, mean_interval, prompt_index, seeds_needed, sem, t_power, wilson
from spanwise.measure.reliability import Reliability, reliability
from spanwise.measure.voting import Curve, curve_difference, pass_at_k, voting
from spanwise.measure.weighted import (
    BinScheme,
    One,
    weighted_auroc,
    weighted_brier,
    weighted_ece,
    weighted_gaps,
    weighted_mean,
    weighted_sharpness,
)

__all__ = [
    "ArmComparison", "BinScheme", "Cell", "Curve", "Difference", "Interval", "Kind", "One", "Prompts",
    "Reliability", "Reports", "Weighted", "auroc", "bootstrap", "brier", "compare_arms", "critic_error", "curve_difference",
    "ece", "ece_difference", "ece_interval", "figure_intervals", "figures", "holm", "mean_interval", "paired_bootstrap",
    "pass_at_k", "prompt_index", "reliability", "seeds_needed", "sem", "sharpness", "t_power", "voting", "weighted_auroc",
    "weighted_brier", "weighted_ece", "weighted_gaps", "weighted_mean", "weighted_sharpness", "wilson",
]  # fmt: skip
