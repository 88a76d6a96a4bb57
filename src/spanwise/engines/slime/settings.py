"""The arguments of slime that a recipe works with, and those that are refused."""

from __future__ import annotations

from typing import Any

from spanwise.engines.shared import Discounts, deviation_fault, fixed_faults, idle_fields, say
from spanwise.errors import refuse
from spanwise.recipe import load, scheme_at
from spanwise.scheme import Scheme

#: slime's arguments that name our hooks.
HOOKS = {
    "custom_reward_post_process_path": "spanwise.engines.slime.post_process_rewards",
    "custom_advantage_function_path": "spanwise.engines.slime.set_advantages",
}
#: Arguments that would change the credit or have no effect: their required value, and why.
_FIXED: dict[str, tuple[Any, str]] = {
    "normalize_advantages": (False, "the option subtracts one mean over the tokens of all blocks"),
    "rewards_normalization": (True, "the recipe says what a reward is compared with"),
    "kl_coef": (0, "the option changes a reward that pays no block; set use_kl_loss instead"),
    "loss_type": ("policy_loss", "no other loss reads advantages as slime's own does"),
    "compute_advantages_and_returns": (True, "without it no token gets an advantage"),
    "custom_pg_loss_reducer_function_path": (None, "a reducer of your own may average in a way that cannot be undone"),
    "custom_convert_samples_to_train_data_path": (None, "it takes the place of the step in which spanwise computes credit"),
    "mask_offpolicy_in_partial_rollout": (False, "the option hides the start of a completion, where its first block begins"),
}
#: slime's estimators whose loss takes any advantage.
_ESTIMATORS = ("grpo", "gspo", "cispo")


def check(args: Any) -> Scheme:
    """Return the scheme of the recipe that slime's arguments name; refuse arguments that cannot work with it.

    The hooks call it with their first batch. As slime's `custom_megatron_init_path` it runs before anything is sampled.

    Args:
        args: slime's arguments; `spanwise_recipe` is the path of the recipe.

    Raises:
        RecipeError: the first argument that does not work, and what to do.

    Example:
        >>> from argparse import Namespace
        >>> check(Namespace(advantage_estimator="ppo"))
        Traceback (most recent call last):
        spanwise.errors.RecipeError: There is no recipe; add spanwise_recipe: recipe.yaml to the file of --custom-config-path.
    """
    recipe: Any = getattr(args, "spanwise_recipe", None)
    estimator = getattr(args, "advantage_estimator", None)
    filter_path = getattr(args, "dynamic_sampling_filter_path", None)
    refuse(
        {
            "There is no recipe; add spanwise_recipe: recipe.yaml to the file of --custom-config-path.": recipe is None,
            f"advantage_estimator is '{estimator}', which trains a critic or normalises advantages; use one of "
            f"{', '.join(_ESTIMATORS)}, whose loss takes the recipe's.": estimator not in _ESTIMATORS,
            **{f"{name} is {getattr(args, name, None)}; set it to {hook}.": getattr(args, name, None) != hook
               for name, hook in HOOKS.items()},
            **fixed_faults(_FIXED, lambda name: getattr(args, name, None)),
            "use_opd with opd_type 'sglang' takes its teacher's numbers out of the hook that spanwise needs; use opd_type "
            "'megatron'.": getattr(args, "use_opd", False) and args.opd_type == "sglang",
        }
    )  # fmt: skip
    discounts = Discounts.of({"gamma": "gamma", "lambd": "lam"}, lambda name: getattr(args, name, None))
    scheme = scheme_at(recipe, longest=args.rollout_max_response_len, options=discounts.options)
    alone = args.n_samples_per_prompt == 1  # slime itself then switches the deviation off
    refuse(
        {
            "The recipe has a critic section, and slime has its values only after the credit; leave it out.": (
                load(recipe).modes.get("critic") is not None
            ),
            **({} if alone else deviation_fault("grpo_std_normalization", args.grpo_std_normalization, scheme)),
            **discounts.faults(scheme),
        }
    )
    scheme.check_forgets("slime")
    scheme.check_loads("slime")
    scheme.check({"group_n", "ids_nt", "mask_nt", "columns", "steps", "logp_nt"})
    sentences = [idle_fields(recipe, engine="slime"), *discounts.remarks(scheme, load(recipe).options, engine="slime")]
    if filter_path is not None:
        sentences.append(
            f"{filter_path} keeps or drops groups by slime's own reward, though the blocks of a dropped group may differ."
        )
    say(*sentences)
    return scheme
