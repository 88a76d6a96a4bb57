"""Advantage estimators `spanwise_<method>` for the registries of verl and SkyRL; each takes one reward per completion."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from spanwise.credit import group_index, method, outcome_methods, step_rewards, to_tokens
from spanwise.errors import refuse

#: The pattern of prompt ids that a trainer gives to padding rows.
_PAD = re.compile(r"pad[0-9a-f]+")


def outcome_estimators() -> dict[str, Callable[..., tuple[Tensor, Tensor]]]:
    """Return every estimator by registry name."""
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
    """Put one advantage per row on every token of the mask; return it twice, as advantages and as returns."""
    settings = config if hasattr(config, "get") else {}
    section = settings.get("spanwise") or {}
    ignored = next((key for key in section if key != "options"), None)
    refuse(
        {
            f"The estimator 'spanwise_{name}' compares completions of one prompt, but the batch has no uid.": index is None,
            "Estimator 'spanwise_grpo' ignores grpo_norm_by_std=False and norm_adv_by_std_in_grpo=False; use spanwise_dr_grpo.": (
                name == "grpo" and rest.get("grpo_norm_by_std", settings.get("norm_adv_by_std_in_grpo")) is False
            ),
            f"algorithm.spanwise.{ignored} only works with algorithm.adv_estimator=spanwise: the estimator 'spanwise_{name}' sees "
            f"one reward and no completion. Leave the option out.": ignored,
        }
    )
    ids = index.tolist() if hasattr(index, "tolist") else list(index)
    # A padding row stands last or has no trained token. A rejected rollout has no trained token either, but it is compared.
    is_padding_n = [bool(_PAD.fullmatch(str(uid))) for uid in ids]
    padding_start = max((n + 1 for n, is_padding in enumerate(is_padding_n) if not is_padding), default=0)
    trained_n = response_mask.bool().any(dim=1)
    rows = [n for n, is_padding in enumerate(is_padding_n) if not is_padding or (n < padding_start and trained_n[n])]
    # A rejected rollout has no trained token, so its reward is summed over all tokens.
    reward_n = torch.where(
        trained_n, step_rewards(token_level_rewards, response_mask), token_level_rewards.double().sum(dim=1)
    )
    adv_n = torch.zeros_like(reward_n)
    if rows:
        options = dict(section.get("options") or {})
        adv_n[rows] = method(name).estimator(reward_n[rows], group_index([ids[n] for n in rows]), **options).double()
    adv_nt = to_tokens(adv_n, response_mask, dtype=token_level_rewards.dtype)
    return adv_nt, adv_nt
