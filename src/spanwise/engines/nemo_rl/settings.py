"""Check that NeMo-RL's configuration works with a recipe of spanwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spanwise.engines.recipe_run import check_rule
from spanwise.engines.shared import deviation_fault, fixed_faults
from spanwise.errors import refuse
from spanwise.recipe import RecipeRule, rule_at

#: Maps options of NeMo-RL that would change the credit or have no effect to their required value, and the reason for it.
_FIXED: dict[str, tuple[Any, str]] = {
    "grpo.advantage_clip_low": (None, "it clips advantages, which spanwise scales up to undo the mean of the loss"),
    "grpo.advantage_clip_high": (None, "it clips advantages, which spanwise scales up to undo the mean of the loss"),
    "grpo.invalid_tool_call_advantage": (None, "the option overwrites the credit of a whole message"),
    "grpo.malformed_thinking_advantage": (None, "the option overwrites the credit of a whole message"),
    "loss_fn.use_kl_in_reward": (False, "spanwise ignores the changed reward; set reference_policy_kl_penalty instead"),
    "data_plane.enabled": (False, "NeMo-RL's trainer then gives estimators no token ids"),
}


def check(master_config: Any) -> RecipeRule:
    """Load the rule of credit from the recipe that NeMo-RL's configuration names; refuse settings that do not work with it."""
    recipe = get_setting(master_config, "grpo.adv_estimator.recipe")
    refuse(
        {
            "There is no recipe; add +grpo.adv_estimator.recipe=recipe.yaml.": recipe is None,
            **fixed_faults(_FIXED, lambda name: get_setting(master_config, name)),
        }
    )
    rule = rule_at(recipe, longest=get_setting(master_config, "policy.generation.max_new_tokens"))
    norm_setting = "grpo.adv_estimator.normalize_rewards"
    filter_note = "grpo.use_dynamic_sampling drops groups with equal environment rewards, although their blocks may differ."
    return check_rule(
        recipe,
        rule,
        engine="NeMo-RL",
        faults=deviation_fault(norm_setting, get_setting(master_config, norm_setting), rule.scheme),
        notes=[filter_note if get_setting(master_config, "grpo.use_dynamic_sampling") else ""],
    )


def get_setting(config: Any, path: str) -> Any:
    """Look a setting up by its dotted name in nested mappings or objects; None if it does not exist."""
    for name in path.split("."):
        config = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
    return config
