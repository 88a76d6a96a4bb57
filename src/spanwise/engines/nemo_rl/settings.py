"""Check that NeMo-RL's configuration works with a recipe of spanwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spanwise.engines.shared import deviation_fault, fixed_faults, idle_fields, say
from spanwise.errors import refuse
from spanwise.recipe import load, scheme_at
from spanwise.scheme import Scheme

#: Maps options of NeMo-RL that would change the credit or have no effect to their required value, and the reason for it.
_FIXED: dict[str, tuple[Any, str]] = {
    "grpo.advantage_clip_low": (None, "it clips advantages, which spanwise scales up to undo the mean of the loss"),
    "grpo.advantage_clip_high": (None, "it clips advantages, which spanwise scales up to undo the mean of the loss"),
    "grpo.invalid_tool_call_advantage": (None, "the option overwrites the credit of a whole message"),
    "grpo.malformed_thinking_advantage": (None, "the option overwrites the credit of a whole message"),
    "loss_fn.use_kl_in_reward": (
        False,
        "it changes a reward that spanwise does not use; set reference_policy_kl_penalty instead",
    ),
    "data_plane.enabled": (False, "NeMo-RL's trainer then gives estimators no token ids"),
}


def check(master_config: Any) -> Scheme:
    """Load the rule of credit from the recipe that NeMo-RL's configuration names; refuse settings that do not work with it."""
    recipe = get_setting(master_config, "grpo.adv_estimator.recipe")
    refuse(
        {
            "There is no recipe; add +grpo.adv_estimator.recipe=recipe.yaml.": recipe is None,
            **fixed_faults(_FIXED, lambda name: get_setting(master_config, name)),
        }
    )
    scheme = scheme_at(recipe, longest=get_setting(master_config, "policy.generation.max_new_tokens"))
    norm_setting, has_critic = "grpo.adv_estimator.normalize_rewards", "critic" in load(recipe).modes
    refuse(
        {
            "The recipe has a critic section, but NeMo-RL's GRPO has no critic. Remove the section.": has_critic,
            **deviation_fault(norm_setting, get_setting(master_config, norm_setting), scheme),
        }
    )
    scheme.check_forgets("NeMo-RL")
    scheme.check_loads("NeMo-RL")
    scheme.check({"group_n", "ids_nt", "mask_nt", "columns", "steps", "logp_nt"})
    filter_warning = (
        "grpo.use_dynamic_sampling drops groups with equal environment rewards, although their blocks may differ."
    )
    filters_groups = get_setting(master_config, "grpo.use_dynamic_sampling")
    say(idle_fields(recipe, engine="NeMo-RL"), filter_warning if filters_groups else "")
    return scheme


def get_setting(config: Any, path: str) -> Any:
    """Look a setting up by its dotted name in nested mappings or objects; None if it does not exist."""
    for name in path.split("."):
        config = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
    return config
