"""From rollouts to figures: calibration, accuracy, refusals, voting, and how much of a difference is noise.

Needs `pip install 'spanwise[measure]'`.
"""

from spanwise.errors import lacking

try:
    import scipy as _scipy  # noqa: F401  (it loads scipy.stats when that is first used)
except ModuleNotFoundError as error:  # the core installs without it
    raise lacking("spanwise.measure", error) from error

from spanwise.losses.critic_error import CriticError, critic_error, explained_variance
from spanwise.measure.alarms import (
    CALIBRATION,
    CAUSES,
    LASER,
    LASER_FIGURES,
    SHOWN_BY,
    alarms,
    batch_alarms,
    critic_alarms,
    critic_streams,
)
from spanwise.measure.bins import BinScheme, One
from spanwise.measure.bootstrap import Kind, Weighted, bootstrap, on_rows, paired_bootstrap
from spanwise.measure.calibration import auroc, brier, ece, figure_intervals, figures, sharpness
from spanwise.measure.compare import Cell, Comparison, Difference, compare, holm
from spanwise.measure.ece_interval import Reports, ece_difference, ece_interval
from spanwise.measure.fidelity import BASELINES, FIGURES, Fidelity, Rerolls, fidelity
from spanwise.measure.fixed_point import fixed_point, gradient_shares
from spanwise.measure.fixed_point_simulated import SimulatedFixedPoint, simulated_fixed_point
from spanwise.measure.intervals import Interval, Prompts, mean_interval, prompt_index, seeds_needed, sem, t_power, wilson
from spanwise.measure.parts import own_advantage, to_go_advantage
from spanwise.measure.proper_score import ScoreName, proper_score
from spanwise.measure.reliability import BrierParts, Reliability, brier_parts, reliability
from spanwise.measure.token_fidelity import TokenFidelity, token_fidelity
from spanwise.measure.token_reference import Segments, monte_carlo_advantage
from spanwise.measure.trajectories import TOKEN_ESTIMATORS, TokenEstimator, Trajectories
from spanwise.measure.voting import Curve, curve_difference, pass_at_k, voting
from spanwise.measure.weighted import (
    weighted_auroc,
    weighted_brier,
    weighted_correlation,
    weighted_ece,
    weighted_gaps,
    weighted_mean,
    weighted_sharpness,
)

__all__ = [
    "BASELINES",
    "CALIBRATION",
    "CAUSES",
    "FIGURES",
    "LASER",
    "LASER_FIGURES",
    "SHOWN_BY",
    "TOKEN_ESTIMATORS",
    "BinScheme",
    "BrierParts",
    "Cell",
    "Comparison",
    "CriticError",
    "Curve",
    "Difference",
    "Fidelity",
    "Interval",
    "Kind",
    "One",
    "Prompts",
    "Reliability",
    "Reports",
    "Rerolls",
    "ScoreName",
    "Segments",
    "SimulatedFixedPoint",
    "TokenEstimator",
    "TokenFidelity",
    "Trajectories",
    "Weighted",
    "alarms",
    "auroc",
    "batch_alarms",
    "bootstrap",
    "brier",
    "brier_parts",
    "compare",
    "critic_alarms",
    "critic_error",
    "critic_streams",
    "curve_difference",
    "ece",
    "ece_difference",
    "ece_interval",
    "explained_variance",
    "fidelity",
    "figure_intervals",
    "figures",
    "fixed_point",
    "gradient_shares",
    "holm",
    "mean_interval",
    "monte_carlo_advantage",
    "on_rows",
    "own_advantage",
    "paired_bootstrap",
    "pass_at_k",
    "prompt_index",
    "proper_score",
    "reliability",
    "seeds_needed",
    "sem",
    "sharpness",
    "simulated_fixed_point",
    "t_power",
    "to_go_advantage",
    "token_fidelity",
    "voting",
    "weighted_auroc",
    "weighted_brier",
    "weighted_correlation",
    "weighted_ece",
    "weighted_gaps",
    "weighted_mean",
    "weighted_sharpness",
    "wilson",
]
