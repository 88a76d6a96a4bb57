"""Policy losses per token, and the ways to make one number of them. Pure functions; what a masked token holds is never read.

Every loss takes log-probabilities, advantages and a mask and returns loss_nt, exactly 0 at masked tokens; `aggregate` reduces it.
Gradients flow through `logp_nt` only. A ratio is clipped to [1 - clip_low, 1 + clip_high] wherever these two are an option, as in
verl and SkyRL; `dppo` has no such range, it bounds a divergence.
"""

from spanwise.losses.aggregate import Mode, aggregate
from spanwise.losses.aspo import aspo
from spanwise.losses.cispo import cispo
from spanwise.losses.dppo import dppo
from spanwise.losses.gspo import gspo
from spanwise.losses.ppo_clip import ppo_clip

__all__ = ["Mode", "aggregate", "aspo", "cispo", "dppo", "gspo", "ppo_clip"]
