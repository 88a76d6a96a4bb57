"""slime with the credit of a recipe, by two of its hooks. Written for THUDM/slime 624b824a, not run."""

from spanwise.engines.slime.hooks import post_process_rewards, set_advantages
from spanwise.engines.slime.settings import check

__all__ = ["check", "post_process_rewards", "set_advantages"]
