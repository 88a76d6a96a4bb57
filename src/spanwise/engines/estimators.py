"""Methods on one reward per completion, as the registries of verl and SkyRL call estimators: `spanwise_<method>`."""

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

#: The prompt ids of rows that a trainer adds as padding.
_PAD = re.compile(r"pad[0-9a-f]+")


def outcome_estimators() -> dict[str, Callable[..., tuple[Tensor, Tensor]]]:
    """Return every estimator, by its name in the registry."""
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
    asked = config if hasattr(config, "get") else {}
    section = asked.get("spanwise") or {}
    idle = next((option for option in section if option != "options"), None)
    refuse(
        {
            f"The estimator 'spanwise_{name}' compares completions of one prompt, and there is no uid.": index is None,
            "grpo_norm_by_std or norm_adv_by_std_in_grpo of false does nothing to 'spanwise_grpo'; use spanwise_dr_grpo.": (
                name == "grpo" and rest.get("grpo_norm_by_std", asked.get("norm_adv_by_std_in_grpo")) is False
            ),
            f"algorithm.spanwise.{idle} only works with algorithm.adv_estimator=spanwise: 'spanwise_{name}' sees one "
            f"reward and no completion; leave it out.": idle,
        }
    )
    ids = index.tolist() if hasattr(index, "tolist") else list(index)
    # Padding stands last or has no trained token. Rejected rollouts have no token either, but count in the comparison.
    padding = [bool(_PAD.fullmatch(str(uid))) for uid in ids]
    last = max((n + 1 for n, pad in enumerate(padding) if not pad), default=0)
    trained_n = response_mask.bool().any(dim=1)
    real = [n for n, pad in enumerate(padding) if not pad or (n < last and trained_n[n])]
    # A rejected rollout has no trained token, so its reward is summed over all tokens.
    reward_n = torch.where(
        trained_n, step_rewards(token_level_rewards, response_mask), token_level_rewards.double().sum(dim=1)
    )
    adv_n = torch.zeros_like(reward_n)
    if real:
        options = dict(section.get("options") or {})
        adv_n[real] = method(name).estimator(reward_n[real], group_index([ids[n] for n in real]), **options).double()
    adv_nt = to_tokens(adv_n, response_mask, dtype=token_level_rewards.dtype)
    return adv_nt, adv_nt
