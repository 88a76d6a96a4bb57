"""The two hooks: one sees the whole batch of slime and computes its credit, the other hands it to the loss on every rank.

slime is imported inside the functions that call it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import nan
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import AutoTokenizer

from spanwise.engines.shared import model_size, say
from spanwise.engines.slime.samples import batch_of, own_reward
from spanwise.engines.slime.settings import HOOKS, check
from spanwise.errors import AlignmentError, refuse
from spanwise.segment import Vocabulary
from spanwise.step import Step

#: Recipe -> the credit of its run, which remembers what it has warned about.
_STEPS: dict[str, Step] = {}


def post_process_rewards(args: Any, samples: Sequence[Any]) -> tuple[list[float], list[Tensor]]:
    """Compute the credit of a batch; slime carries it to its ranks as rewards. For `--custom-reward-post-process-path`.

    Args:
        args: slime's arguments; `spanwise_recipe` is the path of the recipe.
        samples: slime's samples of whole groups. Samples with one `rollout_id` are the turns of one rollout, in order.

    Returns:
        The reward of slime's own reward function for each sample (NaN if it gave none), which slime logs; and for each sample a
        float32 tensor with one number per response token: its advantage times what slime's loss divides the sample by.

    Raises:
        SpanwiseError: see `check` and `Step`.
        AlignmentError: a sample belongs to no group.

    Example:
        >>> from argparse import Namespace
        >>> post_process_rewards(Namespace(spanwise_recipe=None), [])
        Traceback (most recent call last):
        spanwise.errors.RecipeError: There is no recipe; add spanwise_recipe: recipe.yaml to the file of --custom-config-path.
    """
    if args.spanwise_recipe not in _STEPS:
        scheme, tokenizer = check(args), AutoTokenizer.from_pretrained(args.hf_checkpoint, trust_remote_code=True)
        vocabulary = Vocabulary.from_tokenizer(tokenizer, size=model_size(args.hf_checkpoint))
        _STEPS[args.spanwise_recipe] = Step(scheme, vocabulary)
    step = _STEPS[args.spanwise_recipe]
    batch, rollout_n, trained_nt = batch_of(args, samples, step.scheme)
    own = step.read(batch)
    result = step.finish(own, mask_nt=trained_nt)
    adv_nt = own.put(result.advantages_nt, width=trained_nt.shape[1])
    factor_n = fold_factor(
        trained_nt.sum(dim=1), rollout_n, batch_size=args.global_batch_size, per_token=args.calculate_per_token_loss
    )
    _log(args, result.metrics)
    say(*result.warnings)
    rows = zip(adv_nt, factor_n, samples, strict=True)
    raw_rewards = [nan if (value := own_reward(args, sample)) is None else float(value) for sample in samples]
    return raw_rewards, [adv_t[: sample.response_length] * factor for adv_t, factor, sample in rows]


def set_advantages(args: Any, rollout_data: dict[str, Any]) -> None:
    """Hand the tokens of a rank their credit, in its context-parallel slice. For `--custom-advantage-function-path`.

    Args:
        args: slime's arguments.
        rollout_data: the samples of a rank; `advantages` and `returns` are set, and `rewards` are slime's own again.

    Raises:
        RecipeError: the rewards are no credit, because the other hook is not set.
        AlignmentError: a slice has another length than slime's log-probabilities.

    Example:
        >>> set_advantages(None, {"rewards": [1.0, 0.0]})
        Traceback (most recent call last):
        spanwise.errors.RecipeError: custom_advantage_function_path works only beside custom_reward_post_process_path: ...
    """
    credit = rollout_data["rewards"]
    name, other = reversed(HOOKS)
    refuse({f"{name} works only beside {other}: {HOOKS[other]}.": not all(isinstance(row, Tensor) for row in credit)})
    from slime.backends.megatron_utils.cp_utils import slice_log_prob_with_cp  # pyright: ignore[reportMissingImports]

    advantages = []
    lengths = zip(rollout_data["total_lengths"], rollout_data["response_lengths"], strict=True)
    for n, (row, (total, response), kl) in enumerate(zip(credit, lengths, rollout_data["kl"], strict=True)):
        own = slice_log_prob_with_cp(row, total, response).to(device=kl.device, dtype=torch.float32)
        if own.shape != kl.shape:
            raise AlignmentError(f"Sample {n} of this rank has {len(own)} advantages and {len(kl)} log-probabilities.")
        advantages.append(own)
    rollout_data["advantages"], rollout_data["returns"] = advantages, list(advantages)
    rollout_data["rewards"] = rollout_data["local_raw_reward"]  # slime logs numbers


def fold_factor(
    trained_n: Int[Tensor, " n"], rollout_n: Int[Tensor, " n"], *, batch_size: int, per_token: bool
) -> Float[Tensor, " n"]:
    """Compute the factor on advantages that turns slime's loss into the mean over a step's rollouts of sums over tokens.

    factor[i] = D[i], the trained tokens of i's rollout; with `calculate_per_token_loss` those of i's step / its rollouts
    """
    if per_token:  # slime fills its steps with rollouts in the order of their first sample
        part_n, count_n, rollouts = rollout_n // batch_size, trained_n.clamp(min=1), batch_size
    else:
        part_n, count_n, rollouts = rollout_n, trained_n, 1
    total_p = torch.zeros(int(part_n.max()) + 1).index_add(0, part_n, count_n.float())
    return total_p.clamp(min=1)[part_n] / rollouts


def _log(args: Any, metrics: Mapping[str, float]) -> None:
    """Log the metrics beside slime's, at the number of the rollout."""
    from slime.observability import logging_utils, metric_utils  # pyright: ignore[reportMissingImports]
    from slime.rollout import sample_hooks  # pyright: ignore[reportMissingImports]

    number = metric_utils.compute_rollout_step(args, sample_hooks._current_rollout_id)
    values = {f"rollout/{name}": value for name, value in metrics.items() if value == value}
    logging_utils.log(args, {**values, "rollout/step": number}, step_key="rollout/step")
