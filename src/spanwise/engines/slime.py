"""Let slime train with a spanwise recipe, through two of slime's hooks. Written for THUDM/slime 624b824a, not run.

The first hook computes the credit of the whole batch, the second passes it to the loss on every rank. Only they import slime.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isnan, nan
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from spanwise.batch import Batch, Steps
from spanwise.credit import group_index
from spanwise.engines.recipe_run import RecipeRun
from spanwise.engines.rule import check_rule, read_rule
from spanwise.engines.shared import columns_of
from spanwise.errors import AlignmentError, refuse
from spanwise.recipe import RecipeRule
from spanwise.scheme import Scheme

__all__ = ["check", "post_process_rewards", "set_advantages"]

#: Maps slime's hook arguments to the functions that they must name.
HOOKS = {
    "custom_reward_post_process_path": "spanwise.engines.slime.post_process_rewards",
    "custom_advantage_function_path": "spanwise.engines.slime.set_advantages",
}
#: Maps slime arguments to pairs: the argument's required value, and a sentence that gives the reason.
_FIXED: dict[str, tuple[Any, str]] = {
    "normalize_advantages": (False, "slime would subtract the mean advantage of all tokens from every advantage."),
    "rewards_normalization": (True, "The recipe's baseline, not slime, decides what is subtracted from a reward."),
    "kl_coef": (
        0,
        "slime would put the KL penalty into its own reward, which spanwise does not use. Set use_kl_loss instead.",
    ),
    "loss_type": ("policy_loss", "Only slime's own policy loss uses the advantage of each token."),
    "compute_advantages_and_returns": (True, "slime would compute no advantages."),
    "custom_pg_loss_reducer_function_path": (None, "spanwise cannot undo how your loss reducer may divide the loss."),
    "custom_convert_samples_to_train_data_path": (None, "slime would call your function instead of computing credit."),
    "mask_offpolicy_in_partial_rollout": (
        False,
        "slime would leave the first tokens of some completions, and so of their first block, out of the loss.",
    ),
}
#: slime's estimators whose losses work with any advantages.
_ESTIMATORS = ("grpo", "gspo", "cispo")
#: Maps the path of a recipe to its run.
_RUNS: dict[str, RecipeRun] = {}


def check(args: Any) -> RecipeRule:
    """Load the recipe that slime's arguments name. Refuse arguments that conflict with it.

    The hooks call it with their first batch. As slime's `custom_megatron_init_path` it runs before anything is sampled.
    """
    get_argument = vars(args).get
    recipe_path = get_argument("spanwise_recipe")
    estimator_name = get_argument("advantage_estimator")
    setting_faults = {
        "There is no recipe; add spanwise_recipe: recipe.yaml to the file of --custom-config-path.": recipe_path is None,
        f"advantage_estimator is '{estimator_name}', which trains a critic or normalises advantages. Use "
        f"{' or '.join(_ESTIMATORS)}, whose losses work with the recipe's advantages.": estimator_name not in _ESTIMATORS,
        **{f"{name} is {get_argument(name)}; set it to {hook}.": get_argument(name) != hook for name, hook in HOOKS.items()},
        "With use_opd and opd_type 'sglang', slime reads the teacher's log-probabilities in a hook that spanwise replaces. "
        "Use opd_type 'megatron'.": get_argument("use_opd") and args.opd_type == "sglang",
    }
    rule, notes = read_rule(
        recipe_path,
        engine="slime",
        longest=args.rollout_max_response_len,
        get_setting=get_argument,
        faults=setting_faults,
        fixed=_FIXED,
        discounts={"gamma": "gamma", "lambd": "lam"},
        # With one sample per prompt, slime ignores grpo_std_normalization.
        deviation="" if get_argument("n_samples_per_prompt") == 1 else "grpo_std_normalization",
    )
    if (filter_path := get_argument("dynamic_sampling_filter_path")) is not None:
        notes.append(f"The filter {filter_path} sees only slime's rewards. It may drop groups whose block rewards differ.")
    return check_rule(recipe_path, rule, engine="slime", notes=notes)


def post_process_rewards(args: Any, samples: Sequence[Any]) -> tuple[list[float], list[Tensor]]:
    """Compute the credit of a batch in slime's hook `--custom-reward-post-process-path`. Return it as rewards.

    Return slime's own reward of each sample, NaN without one, which slime logs; and for each sample a float32 tensor with each
    response token's advantage times the divisor of slime's loss. Samples with the same `rollout_id` are the turns of one rollout,
    in order. A sample of no group raises an `AlignmentError`.
    """
    if args.spanwise_recipe not in _RUNS:
        _RUNS[args.spanwise_recipe] = RecipeRun.of(check(args), model=args.hf_checkpoint, resumes=True)
    from slime.observability import logging_utils, metric_utils  # pyright: ignore[reportMissingImports]
    from slime.rollout import sample_hooks  # pyright: ignore[reportMissingImports]

    run = _RUNS[args.spanwise_recipe]
    rollout_number = sample_hooks._current_rollout_id
    batch, rollout_n, is_trained_nt = _batch(args, samples, run.scheme)
    adv_nt, metrics = run.finish(run.step.read(batch), mask_nt=is_trained_nt, number=rollout_number + 1)
    fold_factor_n = fold_factor(
        is_trained_nt.sum(dim=1), rollout_n, batch_size=args.global_batch_size, per_token=args.calculate_per_token_loss
    )
    logged_values = {f"rollout/{name}": value for name, value in metrics.items() if not isnan(value)}
    logged_values["rollout/step"] = metric_utils.compute_rollout_step(args, rollout_number)
    logging_utils.log(args, logged_values, step_key="rollout/step")
    raw_rewards = [nan if reward is None else float(reward) for reward in batch.columns["environment"]]
    advantages_with_samples = zip(adv_nt * fold_factor_n[:, None], samples, strict=True)
    return raw_rewards, [adv_t[: sample.response_length] for adv_t, sample in advantages_with_samples]


def set_advantages(args: Any, rollout_data: dict[str, Any]) -> None:
    """Set one rank's token advantages in slime's hook `--custom-advantage-function-path`.

    Rewards without credit (the other hook is not set) raise a `RecipeError`; another number of log-probabilities than advantages
    an `AlignmentError`.
    """
    reward_hook, advantage_hook = HOOKS
    sample_credits = rollout_data["rewards"]  # `post_process_rewards` wrote the credit into the field `rewards`
    has_credit = all(isinstance(credit_t, Tensor) for credit_t in sample_credits)
    refuse({f"{advantage_hook} works only together with {reward_hook}={HOOKS[reward_hook]}.": not has_credit})
    from slime.backends.megatron_utils.cp_utils import slice_log_prob_with_cp  # pyright: ignore[reportMissingImports]

    advantages_by_sample = []
    row_lengths = zip(rollout_data["total_lengths"], rollout_data["response_lengths"], strict=True)
    for n, (credit_t, lengths, kl) in enumerate(zip(sample_credits, row_lengths, rollout_data["kl"], strict=True)):
        adv_t = slice_log_prob_with_cp(credit_t, *lengths).to(device=kl.device, dtype=torch.float32)
        if adv_t.shape != kl.shape:
            raise AlignmentError(f"Sample {n} of this rank has {len(adv_t)} advantages but {len(kl)} log-probabilities.")
        advantages_by_sample.append(adv_t)
    rollout_data["advantages"] = advantages_by_sample
    rollout_data["returns"] = list(advantages_by_sample)
    # The field `rewards` held the credit. Restore slime's own rewards, because slime logs the field.
    rollout_data["rewards"] = rollout_data["local_raw_reward"]


def fold_factor(
    trained_n: Int[Tensor, " n"], rollout_n: Int[Tensor, " n"], *, batch_size: int, per_token: bool
) -> Float[Tensor, " n"]:
    """Return the factors on advantages that undo the normaliser of slime's loss.

    factor[i] = D[i], the trained tokens of i's rollout; with `calculate_per_token_loss` those of i's step / its rollouts
    """
    # slime averages the loss over the tokens of `batch_size` rollouts if `per_token`, else over the tokens of each rollout.
    rollouts_per_average = batch_size if per_token else 1
    average_index_n = rollout_n // rollouts_per_average
    token_count_n = trained_n.clamp(min=1).float() if per_token else trained_n.float()
    tokens_per_average = torch.bincount(average_index_n, weights=token_count_n)
    return tokens_per_average.clamp(min=1)[average_index_n] / rollouts_per_average


def _batch(args: Any, samples: Sequence[Any], scheme: Scheme) -> tuple[Batch, Int[Tensor, " n"], Bool[Tensor, "n t"]]:
    """Build a batch from slime's samples. Also return rollout numbers and the mask of trained tokens."""
    loss_masks, completion_ids, rollout_ids, left_out_flags = [], [], [], []
    for n, sample in enumerate(samples):
        group_fault = f"Sample {n} has no group_index; set the same group_index for all samples of a prompt."
        refuse({group_fault: sample.group_index is None}, AlignmentError)
        loss_masks.append([1] * sample.response_length if sample.loss_mask is None else list(sample.loss_mask))
        left_out_flags.append(sample.remove_sample or not any(loss_masks[n]))
        completion_ids.append(list(sample.tokens[len(sample.tokens) - sample.response_length :]))
        rollout_ids.append(("sample", n) if sample.rollout_id is None else sample.rollout_id)
    rollout_n = group_index(rollout_ids)
    has_turns = len(rollout_n.unique()) < len(samples)
    logp_rows = [sample.rollout_log_probs for sample in samples]
    has_logps = "logp_nt" in scheme.needs and all(row is not None for row in logp_rows)
    batch = Batch.jagged(
        completion_ids,
        [sample.group_index for sample in samples],
        # Rewards are computed from tokens marked as sampled. A sample whose loss mask is all 0 needs a reward, too.
        sampled=[mask if any(mask) else [1] * len(mask) for mask in loss_masks],
        columns=columns_of([_columns(args, sample, row) for sample, row in zip(samples, completion_ids, strict=True)]),
        steps=Steps(rollout_n, torch.arange(len(samples))) if has_turns else None,
        logp_nt=pad_sequence([torch.tensor(row) for row in logp_rows], True) if has_logps else None,
    )
    assert batch.mask_nt is not None
    return batch, rollout_n, batch.mask_nt & ~torch.tensor(left_out_flags)[:, None]


def _columns(args: Any, sample: Any, ids: list[int]) -> dict[str, Any]:
    """Return the data of a slime sample for reward functions."""
    reward_parts = sample.reward if isinstance(sample.reward, Mapping) else {}
    parts_text = ", ".join(map(str, reward_parts))
    key_fault = f"slime logs one number, but its rewards are dicts ({parts_text}). With --reward-key, name the entry to log."
    refuse({key_fault: isinstance(sample.reward, Mapping) and not args.reward_key})
    slime_reward = None if sample.reward is None else sample.get_reward_value(args)
    sample_columns = {"prompts": sample.prompt, "completions": sample.response, "completion_ids": ids}
    label_columns = {} if sample.label is None else {"label": sample.label, args.label_key or "label": sample.label}
    return {**reward_parts, **(sample.metadata or {}), **label_columns, **sample_columns, "environment": slime_reward}
