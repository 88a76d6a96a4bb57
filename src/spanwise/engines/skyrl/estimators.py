"""Estimators `spanwise_<method>` for SkyRL's registry, usable without our entrypoint, and the losses of modes.

The registry passes rewards, the response mask and prompt ids: no loss mask, no token ids, no reward of its own per objective. That
is enough for methods that turn one reward per rollout into one advantage; every other method says where it can be run.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from skyrl.backends.skyrl_train.utils.ppo_utils import (  # pyright: ignore[reportMissingImports]
    AdvantageEstimatorRegistry,
    PolicyLossRegistry,
)
from torch import Tensor

from spanwise.credit import METHODS
from spanwise.engines.estimators import outcome_estimators
from spanwise.engines.skyrl.config import SpanwiseAlgorithmConfig
from spanwise.errors import RecipeError

_ENTRYPOINT = "trainer.override_entrypoint=spanwise.engines.skyrl.main trainer.algorithm.spanwise.recipe=recipe.yaml"


def register() -> None:
    """Put `spanwise` and `spanwise_<method>` of every method with a preset into SkyRL's registry; a second call does nothing."""
    presets = (name for name, entry in METHODS.items() if entry.preset is not None)
    refused = {f"spanwise_{name}": partial(_refused, name) for name in presets}
    for name, function in {"spanwise": _by_recipe, **refused, **outcome_estimators()}.items():
        if name not in AdvantageEstimatorRegistry._functions:
            AdvantageEstimatorRegistry.register(name, function)


def register_loss(mode: str, kind: str, parted: Callable[..., tuple[Tensor, Tensor, Tensor]]) -> str:
    """Register a policy loss of SkyRL combined with the loss of a mode, and return its name."""
    name = f"spanwise_{mode}_{kind}"
    if name not in PolicyLossRegistry._functions:
        PolicyLossRegistry.register(name, partial(_with_mode, kind, parted))
    return name


def _with_mode(
    kind: str,
    parted: Callable[..., tuple[Tensor, Tensor, Tensor]],
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    config: Any,
    loss_mask: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Compute a policy loss of SkyRL plus the loss of a mode; both are sums, divided in the advantages."""
    old_nt, adv_nt, error_nt = parted(log_probs, old_log_probs, advantages, loss_mask)
    inner_config = copy.copy(config)
    inner_config.policy_loss_type = kind  # some losses read it
    more: dict[str, Any] = {"config": inner_config, "loss_mask": loss_mask, "rollout_logprobs": rollout_logprobs}
    loss, metrics = PolicyLossRegistry._functions[kind](log_probs, old_nt, adv_nt, **more)
    return loss + error_nt.sum(), metrics


def _by_recipe(token_level_rewards: Tensor, *, config: Any, **rest: Any) -> tuple[Tensor, Tensor]:
    """Return NaN, which the trainer of the entrypoint overwrites and no other trainer can train on."""
    if not isinstance(config, SpanwiseAlgorithmConfig):
        raise RecipeError(
            f"advantage_estimator=spanwise runs by a recipe, which the registry does not know; use {_ENTRYPOINT}."
        )
    nothing_nt = torch.full_like(token_level_rewards, torch.nan)
    return nothing_nt, nothing_nt


def _refused(name: str, *args: Any, **rest: Any) -> tuple[Tensor, Tensor]:
    """Refuse a method that needs more than SkyRL's registry passes."""
    raise RecipeError(
        f"Method '{name}' needs more than one reward per rollout, and SkyRL's registry passes neither loss masks nor token ids nor "
        f"several rewards. Write method: {name} in a recipe and use {_ENTRYPOINT}; or one of "
        f"{', '.join(outcome_estimators())}."
    )
