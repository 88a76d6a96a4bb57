"""How close estimated credit comes to credit that was measured by sampling again: baselines, token estimators, and the q* test.

Needs `pip install 'spanwise[measure]'`. What samples again and the page are `spanwise.fidelity.rerolls` and `.page`.
"""

from spanwise.credit.methods._gae import SaeSegments
from spanwise.fidelity.baselines import BASELINES, FIGURES, Fidelity, Rerolls, ScoreName, measure_fidelity, proper_score
from spanwise.fidelity.fixed_point import fixed_point, simulated_fixed_point
from spanwise.fidelity.tokens import TOKEN_ESTIMATORS, TokenFidelity, Trajectories, monte_carlo_advantage, token_fidelity

__all__ = [
    "BASELINES", "FIGURES", "TOKEN_ESTIMATORS", "Fidelity", "Rerolls", "SaeSegments", "ScoreName",
    "TokenFidelity", "Trajectories", "fixed_point", "measure_fidelity", "monte_carlo_advantage", "proper_score",
    "simulated_fixed_point", "token_fidelity",
]  # fmt: skip
