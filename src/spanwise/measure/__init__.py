"""Compute figures of rollouts (calibration, accuracy, refusals, voting). Tell real differences from noise.

Needs `pip install 'spanwise[measure]'`.
"""

from spanwise.errors import lacking

try:
    import scipy as _scipy  # noqa: F401  (it loads scipy.stats when that is first used)
except ModuleNotFoundError as error:  # SciPy is an optional dependency
    raise lacking("spanwise.measure", error) from error

from spanwise.measure.calibration import auroc, ece, reliability, weighted_auroc, weighted_ece
from spanwise.measure.compare import ArmComparison, Difference, compare_arms
from spanwise.measure.evaluation import Reports, ece_difference, ece_interval, figure_intervals, figures
from spanwise.measure.intervals import Interval, Prompts, bootstrap, mean_interval, weighted_mean, wilson
from spanwise.measure.voting import Curve, curve_difference, voting

__all__ = [
    "ArmComparison", "Curve", "Difference", "Interval", "Prompts", "Reports", "auroc", "bootstrap", "compare_arms",
    "curve_difference", "ece", "ece_difference", "ece_interval", "figure_intervals", "figures", "mean_interval",
    "reliability", "voting", "weighted_auroc", "weighted_ece", "weighted_mean", "wilson",
]  # fmt: skip
