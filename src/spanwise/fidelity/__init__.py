"""Compare estimated advantages with Monte Carlo advantages.

Needs `pip install 'spanwise[measure]'`. The sampling is in `spanwise.fidelity.rerolls`, the page in `.page`.
"""

from spanwise.credit.methods._gae import SaeSegments
from spanwise.fidelity.baselines import FIGURES, Fidelity, Rerolls, measure_fidelity, proper_score
from spanwise.fidelity.fixed_point import fixed_point, simulated_fixed_point
from spanwise.fidelity.tokens import TokenFidelity, Trajectories, monte_carlo_advantage, token_fidelity

__all__ = [
    "FIGURES", "Fidelity", "Rerolls", "SaeSegments", "TokenFidelity", "Trajectories", "fixed_point", "measure_fidelity",
    "monte_carlo_advantage", "proper_score", "simulated_fixed_point", "token_fidelity",
]  # fmt: skip
