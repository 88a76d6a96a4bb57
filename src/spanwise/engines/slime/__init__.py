"""Train with slime by a recipe of spanwise, through two of slime's hooks. Written for THUDM/slime 624b824a, not run."""

from spanwise.engines.slime.hooks import post_process_rewards, set_advantages
from spanwise.engines.slime.settings import check

__all__ = ["check", "post_process_rewards", "set_advantages"]
