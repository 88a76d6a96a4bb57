"""Advantage estimators for verl and SkyRL that use one reward per completion."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from spanwise.credit import group_index, method
from spanwise.credit.registry import outcome_methods
from spanwise.credit.spread import to_tokens
from spanwise.credit.trajectories.turns import step_rewards
from spanwise.errors import refuse

#: Matches the prompt ids of rows that only fill up a batch.
_PAD = re.compile(r"pad[0-9a-f]+")


def outcome_estimators() -> dict[str, Callable[..., tuple[Tensor, Tensor]]]:
    """Map names such as `spanwise_grpo` to advantage estimators."""
    return {f"spanwise_{name}": partial(outcome_advantages, name) for name in outcome_methods()}


def outcome_advantages(
    name: str,
    token_level_rewards: Float[Tensor, "n t"],
    response_mask: Shaped[Tensor, "n t"],
    index: Any = None,
    config: Any = None,
    non_tensor_batch: Any = None,
    batch: Any = None,
    **rest: Any,
) -> tuple[Tensor, Tensor]:
    """Give all trained tokens of a completion the same advantage. Return the table twice: as advantages and as returns."""
    algorithm_settings = config if hasattr(config, "get") else {}
    spanwise_section = algorithm_settings.get("spanwise") or {}
    ignored_key = next((key for key in spanwise_section if key != "options"), None)
    refuse(
        {
            f"Estimator 'spanwise_{name}' needs the prompt id (uid) of each row, but the batch has no uids.": index is None,
            "Estimator 'spanwise_grpo' always divides by the standard deviation of a group. To train with "
            "grpo_norm_by_std=False or norm_adv_by_std_in_grpo=False, use the estimator 'spanwise_dr_grpo'.": (
                name == "grpo" and rest.get("grpo_norm_by_std", algorithm_settings.get("norm_adv_by_std_in_grpo")) is False
            ),
            f"algorithm.spanwise.{ignored_key} only works with algorithm.adv_estimator=spanwise. The estimator "
            f"'spanwise_{name}' gets one reward per completion, but no tokens. Remove the option.": ignored_key,
        }
    )
    method_options = dict(spanwise_section.get("options") or {})
    method(name).check_options(method_options)
    uids = index.tolist() if hasattr(index, "tolist") else list(index)
    # A row with a padding id is padding, unless it is trained and comes before a row without a padding id.
    rows_with_real_id = {n for n, uid in enumerate(uids) if not _PAD.fullmatch(str(uid))}
    last_real_row = max(rows_with_real_id, default=-1)
    is_trained_n = response_mask.bool().any(dim=1)
    compared_rows = sorted(rows_with_real_id | {n for n in range(last_real_row) if is_trained_n[n]})
    reward_sum_n = token_level_rewards.double().sum(dim=1)
    reward_n = torch.where(is_trained_n, step_rewards(token_level_rewards, response_mask), reward_sum_n)
    adv_n = torch.zeros_like(reward_n)
    if compared_rows:
        group_n = group_index([uids[n] for n in compared_rows])
        adv_n[compared_rows] = method(name).estimator(reward_n[compared_rows], group_n, **method_options).double()
    adv_nt = to_tokens(adv_n, response_mask, dtype=token_level_rewards.dtype)
    return adv_nt, adv_nt
