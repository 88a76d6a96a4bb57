"""Arguments of slime that would change the credit, drop it or lose it on its way to the loss."""

from argparse import Namespace

from border.case import case, check, write_recipe
from spanwise.engines import slime
from spanwise.engines.slime import HOOKS, set_advantages
from spanwise.engines.slime import check as check_arguments


@case
def checked(folder, method="bae", more="", **changes):
    write_recipe(folder, method, more)
    usual = {"spanwise_recipe": "recipe.yaml", "advantage_estimator": "grpo", "rollout_max_response_len": 64}
    usual |= {"n_samples_per_prompt": 8, "grpo_std_normalization": True, **HOOKS}
    return check_arguments(Namespace(**{**usual, **changes})).scheme.method


CASES = {
    "slime without `spanwise_recipe`": checked(spanwise_recipe=None),
    "slime with `--advantage-estimator ppo`": checked(advantage_estimator="ppo"),
    "slime without `custom_advantage_function_path`": checked(custom_advantage_function_path=None),
    "slime without `custom_reward_post_process_path`": lambda folder: set_advantages(Namespace(), {"rewards": [1.0]}),
    "slime with `--normalize-advantages`": checked(normalize_advantages=True),
    "slime with `--disable-rewards-normalization`": checked(rewards_normalization=False),
    "slime with `--kl-coef 0.1`": checked(kl_coef=0.1),
    "slime with `--loss-type custom_loss`": checked(loss_type="custom_loss"),
    "slime with `--disable-compute-advantages-and-returns`": checked(compute_advantages_and_returns=False),
    "slime with `--custom-pg-loss-reducer-function-path m.f`": checked(custom_pg_loss_reducer_function_path="m.f"),
    "slime with `--custom-convert-samples-to-train-data-path m.f`": checked(custom_convert_samples_to_train_data_path="m.f"),
    "slime with `--mask-offpolicy-in-partial-rollout`": checked(mask_offpolicy_in_partial_rollout=True),
    "slime with `--use-opd --opd-type sglang`": checked(use_opd=True, opd_type="sglang"),
    "slime with `--disable-grpo-std-normalization` and `method: grpo`": checked("grpo", grpo_std_normalization=False),
    "slime with `--gamma 0.9` and a method that does not discount": checked("grpo", gamma=0.9),
    "slime with `--dynamic-sampling-filter-path m.f`": checked(dynamic_sampling_filter_path="m.f"),
    "slime with rewards that are dicts and no `--reward-key`": lambda folder: slime._columns(
        Namespace(reward_key=""), Namespace(reward={"score": 1.0, "format": 0.0}), []
    ),
    "slime with `method: gae`": checked("gae"),
    "slime with a `critic` in the recipe": checked(more="critic: {gae_lambda_value: 0.5}\n"),
}

test = check(__doc__, CASES)
