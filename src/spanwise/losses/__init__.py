"""Losses per token, and the ways to make one number of them. Pure functions; what a masked token holds is never read.

Every policy loss takes log-probabilities, advantages and a mask, every value loss values (or scores of bins), targets and a mask.
They return loss_nt, exactly 0 at masked tokens; `aggregate` reduces it. Gradients flow through the first argument only. A ratio is
clipped to [1 - clip_low, 1 + clip_high] wherever these two are an option, as in verl and SkyRL; `dppo` has no such range, it bounds
a divergence. `critic_error` says how far off a critic is; `verification_loss` teaches a score of the
policy's own what the verifier says.
"""

from spanwise.losses.aggregate import Mode, aggregate
from spanwise.losses.aspo import aspo
from spanwise.losses.cispo import cispo
from spanwise.losses.critic_error import CriticError, critic_error, explained_variance
from spanwise.losses.dppo import dppo
from spanwise.losses.gspo import gspo
from spanwise.losses.ppo_clip import ppo_clip
from spanwise.losses.value import categorical_value, categorical_value_loss, hl_gauss, value_loss
from spanwise.losses.verification import class_weights, verification_loss

__all__ = [
    "CriticError",
    "Mode",
    "aggregate",
    "aspo",
    "categorical_value",
    "categorical_value_loss",
    "cispo",
    "class_weights",
    "critic_error",
    "dppo",
    "explained_variance",
    "gspo",
    "hl_gauss",
    "ppo_clip",
    "value_loss",
    "verification_loss",
]
