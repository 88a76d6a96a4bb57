"""Check that slime's arguments work with a recipe of spanwise."""

from __future__ import annotations

from typing import Any

from spanwise.engines.recipe_run import check_rule
from spanwise.engines.shared import Discounts, deviation_fault, fixed_faults
from spanwise.errors import refuse
from spanwise.recipe import RecipeRule, rule_at

#: Maps slime's arguments for hooks to the functions of spanwise that they must name.
HOOKS = {
    "custom_reward_post_process_path": "spanwise.engines.slime.post_process_rewards",
    "custom_advantage_function_path": "spanwise.engines.slime.set_advantages",
}
#: Maps arguments of slime that would change the credit or have no effect to their required value, and the reason for it.
_FIXED: dict[str, tuple[Any, str]] = {
    "normalize_advantages": (False, "the option subtracts one mean over the tokens of all blocks"),
    "rewards_normalization": (True, "the recipe decides with what a reward is compared"),
    "kl_coef": (0, "the option changes a reward that spanwise does not use; set use_kl_loss instead"),
    "loss_type": ("policy_loss", "only slime's own policy loss uses the advantages of each token"),
    "compute_advantages_and_returns": (True, "without it no token gets an advantage"),
    "custom_pg_loss_reducer_function_path": (None, "spanwise cannot undo the divisor of a reducer of your own"),
    "custom_convert_samples_to_train_data_path": (None, "it replaces the step in which spanwise computes credit"),
    "mask_offpolicy_in_partial_rollout": (
        False,
        "the option masks the start of some completions, where their first block begins",
    ),
}
#: slime's estimators whose losses work with any advantages.
_ESTIMATORS = ("grpo", "gspo", "cispo")


def check(args: Any) -> RecipeRule:
    """Load the rule of credit from the recipe that slime's arguments name; refuse arguments that conflict with it.

    The hooks call it with their first batch. As slime's `custom_megatron_init_path` it runs before anything is sampled.

    Args:
        args: slime's arguments; `spanwise_recipe` is the path of the recipe.

    Raises:
        RecipeError: an argument does not work with the recipe; the message says what to set.

    Example:
        >>> from argparse import Namespace
        >>> check(Namespace(advantage_estimator="ppo"))
        Traceback (most recent call last):
        spanwise.errors.RecipeError: There is no recipe; add spanwise_recipe: recipe.yaml to the file of --custom-config-path.
    """
    recipe: Any = getattr(args, "spanwise_recipe", None)
    estimator_name = getattr(args, "advantage_estimator", None)
    filter_path = getattr(args, "dynamic_sampling_filter_path", None)
    refuse(
        {
            "There is no recipe; add spanwise_recipe: recipe.yaml to the file of --custom-config-path.": recipe is None,
            f"advantage_estimator is '{estimator_name}', which trains a critic or normalises advantages. Use "
            f"{', '.join(_ESTIMATORS)}, whose losses work with the recipe's advantages.": estimator_name not in _ESTIMATORS,
            **{f"{name} is {getattr(args, name, None)}; set it to {hook}.": getattr(args, name, None) != hook
               for name, hook in HOOKS.items()},
            **fixed_faults(_FIXED, lambda name: getattr(args, name, None)),
            "use_opd with opd_type 'sglang' reads its teacher's numbers in the hook that spanwise replaces. Use opd_type "
            "'megatron'.": getattr(args, "use_opd", False) and args.opd_type == "sglang",
        }
    )  # fmt: skip
    discounts = Discounts.of({"gamma": "gamma", "lambd": "lam"}, lambda name: getattr(args, name, None))
    rule = rule_at(recipe, longest=args.rollout_max_response_len, options=discounts.options)
    has_single_samples = args.n_samples_per_prompt == 1  # slime ignores grpo_std_normalization for single samples
    divides_by_std = has_single_samples or args.grpo_std_normalization
    filter_note = f"{filter_path} drops groups by slime's own reward, although the blocks of a dropped group may differ."
    remarks = discounts.remarks(rule.scheme, rule.recipe.options, engine="slime")
    return check_rule(
        recipe,
        rule,
        engine="slime",
        faults=deviation_fault("grpo_std_normalization", divides_by_std, rule.scheme) | discounts.faults(rule.scheme),
        notes=[*remarks, "" if filter_path is None else filter_note],
    )
