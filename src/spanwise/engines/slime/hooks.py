"""slime's two hooks: the first computes the credit of the whole batch, the second passes it to the loss on every rank.

Only the functions that call slime import it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import nan
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from spanwise.engines.recipe_run import RecipeRun
from spanwise.engines.slime.samples import batch_of, own_reward
from spanwise.engines.slime.settings import HOOKS, check
from spanwise.errors import AlignmentError, refuse

#: Maps the paths of recipes to their `RecipeRun`, which remembers the warnings already given.
_RUNS: dict[str, RecipeRun] = {}


def post_process_rewards(args: Any, samples: Sequence[Any]) -> tuple[list[float], list[Tensor]]:
    """Compute the credit of a batch, which slime passes to its ranks as rewards; for `--custom-reward-post-process-path`.

    Args:
        args: slime's arguments; `spanwise_recipe` is the path of the recipe.
        samples: slime's samples of whole groups. Samples with the same `rollout_id` are the turns of one rollout, in order.

    Returns:
        The reward of slime's own reward function for each sample, NaN without one, which slime logs; and for each sample a float32
        tensor with one number per response token: the token's advantage times the divisor of slime's loss.

    Raises:
        SpanwiseError: see `check` and `Step`.
        AlignmentError: a sample belongs to no group.

    Example:
        >>> from argparse import Namespace
        >>> post_process_rewards(Namespace(spanwise_recipe=None), [])
        Traceback (most recent call last):
        spanwise.errors.RecipeError: There is no recipe; add spanwise_recipe: recipe.yaml to the file of --custom-config-path.
    """
    if args.spanwise_recipe not in _RUNS:
        _RUNS[args.spanwise_recipe] = RecipeRun.of(check(args), model=args.hf_checkpoint, resumes=True)
    from slime.observability import logging_utils, metric_utils  # pyright: ignore[reportMissingImports]
    from slime.rollout import sample_hooks  # pyright: ignore[reportMissingImports]

    run, rollout_number = _RUNS[args.spanwise_recipe], sample_hooks._current_rollout_id
    batch, rollout_n, trained_nt = batch_of(args, samples, run.scheme)
    scored_batch = run.step.read(batch)
    step_result = run.finish(scored_batch, mask_nt=trained_nt, number=rollout_number + 1)
    adv_nt = scored_batch.put(step_result.advantages_nt, width=trained_nt.shape[1])
    factor_n = fold_factor(
        trained_nt.sum(dim=1), rollout_n, batch_size=args.global_batch_size, per_token=args.calculate_per_token_loss
    )
    logged_values = {f"rollout/{name}": value for name, value in step_result.metrics.items() if value == value}
    logged_values["rollout/step"] = metric_utils.compute_rollout_step(args, rollout_number)
    logging_utils.log(args, logged_values, step_key="rollout/step")
    credited_rows = zip(adv_nt, factor_n, samples, strict=True)
    raw_rewards = [nan if (value := own_reward(args, sample)) is None else float(value) for sample in samples]
    return raw_rewards, [adv_t[: sample.response_length] * factor for adv_t, factor, sample in credited_rows]


def set_advantages(args: Any, rollout_data: dict[str, Any]) -> None:
    """Set the advantages of a rank's tokens, cut for context parallelism; for `--custom-advantage-function-path`.

    Args:
        args: slime's arguments.
        rollout_data: the samples of a rank; this sets `advantages` and `returns`, and `rewards` back to slime's own.

    Raises:
        RecipeError: the rewards hold no credit, because the other hook is not set.
        AlignmentError: the advantages and slime's log-probabilities of a sample differ in length.

    Example:
        >>> set_advantages(None, {"rewards": [1.0, 0.0]})
        Traceback (most recent call last):
        spanwise.errors.RecipeError: custom_advantage_function_path works only beside custom_reward_post_process_path: ...
    """
    credit_rows, (own_option, other_option) = rollout_data["rewards"], reversed(HOOKS)
    has_credit = all(isinstance(row, Tensor) for row in credit_rows)
    refuse({f"{own_option} works only beside {other_option}: {HOOKS[other_option]}.": not has_credit})
    from slime.backends.megatron_utils.cp_utils import slice_log_prob_with_cp  # pyright: ignore[reportMissingImports]

    advantage_rows = []
    length_pairs = zip(rollout_data["total_lengths"], rollout_data["response_lengths"], strict=True)
    for n, (row, (total, response), kl) in enumerate(zip(credit_rows, length_pairs, rollout_data["kl"], strict=True)):
        adv_t = slice_log_prob_with_cp(row, total, response).to(device=kl.device, dtype=torch.float32)
        if adv_t.shape != kl.shape:
            raise AlignmentError(f"Sample {n} of this rank has {len(adv_t)} advantages and {len(kl)} log-probabilities.")
        advantage_rows.append(adv_t)
    rollout_data["advantages"], rollout_data["returns"] = advantage_rows, list(advantage_rows)
    # slime logs the field `rewards`, which held credit until here, so slime's own rewards are put back.
    rollout_data["rewards"] = rollout_data["local_raw_reward"]


def fold_factor(
    trained_n: Int[Tensor, " n"], rollout_n: Int[Tensor, " n"], *, batch_size: int, per_token: bool
) -> Float[Tensor, " n"]:
    """Compute what advantages are multiplied by, so that slime's loss is a mean over a step's rollouts of sums over tokens.

    factor[i] = D[i], the trained tokens of i's rollout; with `calculate_per_token_loss` those of i's step / its rollouts
    """
    if per_token:  # slime fills optimizer steps with rollouts in the order of their numbers
        divisor_index_n, token_count_n, rollout_count = rollout_n // batch_size, trained_n.clamp(min=1), batch_size
    else:
        divisor_index_n, token_count_n, rollout_count = rollout_n, trained_n, 1
    tokens_per_divisor = torch.zeros(int(divisor_index_n.max()) + 1).index_add(0, divisor_index_n, token_count_n.float())
    return tokens_per_divisor.clamp(min=1)[divisor_index_n] / rollout_count
