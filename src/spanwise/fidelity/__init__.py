"""How close estimated credit comes to credit that was measured by sampling again: baselines, token estimators, and the q* test.

Needs `pip install 'spanwise[measure]'`. What samples again and the page are `spanwise.fidelity.rerolls` and `.page`.
"""

from spanwise.fidelity.baselines import BASELINES, FIGURES, Fidelity, Rerolls, measure_fidelity
from spanwise.fidelity.fixed_point import fixed_point, gradient_shares
from spanwise.fidelity.fixed_point_simulated import SimulatedFixedPoint, simulated_fixed_point
from spanwise.fidelity.proper_score import ScoreName, proper_score
from spanwise.fidelity.tokens import TokenFidelity, token_fidelity
from spanwise.fidelity.trajectories import (
    TOKEN_ESTIMATORS,
    SaeSegments,
    TokenEstimator,
    Trajectories,
    monte_carlo_advantage,
)

__all__ = [
    "BASELINES", "FIGURES", "TOKEN_ESTIMATORS", "Fidelity", "Rerolls", "SaeSegments", "ScoreName", "SimulatedFixedPoint",
    "TokenEstimator", "TokenFidelity", "Trajectories", "fixed_point", "gradient_shares", "measure_fidelity",
    "monte_carlo_advantage", "proper_score", "simulated_fixed_point", "token_fidelity",
]  # fmt: skip
