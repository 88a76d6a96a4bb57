"""The losses per token that an engine calls and its trainer lacks. Pure functions; what a masked token holds is never read.

Every policy loss takes log-probabilities, advantages and a mask, every value loss values (or scores of bins), targets and a mask.
They return loss_nt, exactly 0 at masked tokens. Gradients flow through the first argument only. `aspo` clips a ratio to
[1 - clip_low, 1 + clip_high], as verl and SkyRL do; `dppo` bounds a divergence. `critic_error` says how far off a critic is.
"""

from spanwise.losses.policy import aspo, dppo
from spanwise.losses.value import categorical_value, categorical_value_loss, critic_error, hl_gauss, value_loss

__all__ = [
    "aspo",
    "categorical_value",
    "categorical_value_loss",
    "critic_error",
    "dppo",
    "hl_gauss",
    "value_loss",
]
