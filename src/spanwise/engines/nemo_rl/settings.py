"""The settings of NeMo-RL that a recipe works with, and those that are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spanwise.engines.shared import deviation_fault, fixed_faults, idle_fields, say
from spanwise.errors import refuse
from spanwise.recipe import load, scheme_at
from spanwise.scheme import Scheme

#: Settings that would change the credit or have no effect: their required value, and why.
_FIXED: dict[str, tuple[Any, str]] = {
    "grpo.advantage_clip_low": (None, "the option cuts off numbers that are large only to undo the mean of the loss"),
    "grpo.advantage_clip_high": (None, "the option cuts off numbers that are large only to undo the mean of the loss"),
    "grpo.invalid_tool_call_advantage": (None, "the option overwrites the credit of a whole message"),
    "grpo.malformed_thinking_advantage": (None, "the option overwrites the credit of a whole message"),
    "loss_fn.use_kl_in_reward": (False, "the option changes a reward that pays no block; reference_policy_kl_penalty works"),
    "data_plane.enabled": (False, "its trainer hands estimators no token ids"),
}


def check(master_config: Any) -> Scheme:
    """Load the scheme that NeMo-RL's configuration names; refuse settings that it cannot combine with it."""
    recipe = get_setting(master_config, "grpo.adv_estimator.recipe")
    refuse(
        {
            "There is no recipe; add +grpo.adv_estimator.recipe=recipe.yaml.": recipe is None,
            **fixed_faults(_FIXED, lambda name: get_setting(master_config, name)),
        }
    )
    scheme = scheme_at(recipe, longest=get_setting(master_config, "policy.generation.max_new_tokens"))
    norm_name, has_critic = "grpo.adv_estimator.normalize_rewards", "critic" in load(recipe).modes
    refuse(
        {
            "The recipe has a critic section, and NeMo-RL's GRPO has no critic; leave it out.": has_critic,
            **deviation_fault(norm_name, get_setting(master_config, norm_name), scheme),
        }
    )
    scheme.check_forgets("NeMo-RL")
    scheme.check_loads("NeMo-RL")
    scheme.check({"group_n", "ids_nt", "mask_nt", "columns", "steps", "logp_nt"})
    remark = (
        "grpo.use_dynamic_sampling drops groups by the environment's reward, though the blocks of such a group may differ."
    )
    filters = get_setting(master_config, "grpo.use_dynamic_sampling")
    say(idle_fields(recipe, engine="NeMo-RL"), remark if filters else "")
    return scheme


def get_setting(config: Any, path: str) -> Any:
    """Return a setting by its dotted name, from mappings and objects alike; None if it is not there."""
    for name in path.split("."):
        config = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
    return config
