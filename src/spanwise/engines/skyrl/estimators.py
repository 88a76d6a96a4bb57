"""Register spanwise's advantage estimators and policy losses with SkyRL.

Estimators `spanwise_<method>` work without spanwise's entrypoint. SkyRL passes them one reward per rollout, the response mask and
prompt ids, but no loss mask or token ids. Methods that do more than turn one reward into one advantage need the entrypoint.
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
    """Register the estimators `spanwise` and `spanwise_<method>` with SkyRL, unless SkyRL has them."""
    preset_names = (name for name, entry in METHODS.items() if entry.preset is not None)
    refusal_by_name = {f"spanwise_{name}": partial(_refused, name) for name in preset_names}
    for name, estimator in {"spanwise": _by_recipe, **refusal_by_name, **outcome_estimators()}.items():
        if name not in AdvantageEstimatorRegistry._functions:
            AdvantageEstimatorRegistry.register(name, estimator)


def register_loss(mode: str, loss_name: str, split_loss: Callable[..., tuple[Tensor, Tensor, Tensor]]) -> str:
    """Register a SkyRL policy loss plus the loss of `mode`, a training feature such as LaSeR. Return its registry name."""
    combined_name = f"spanwise_{mode}_{loss_name}"
    if combined_name not in PolicyLossRegistry._functions:
        PolicyLossRegistry.register(combined_name, partial(_with_mode, loss_name, split_loss))
    return combined_name


def _with_mode(
    loss_name: str,
    split_loss: Callable[..., tuple[Tensor, Tensor, Tensor]],
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    config: Any,
    loss_mask: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Return SkyRL's policy loss plus the loss that a mode such as LaSeR adds."""
    old_logp_nt, adv_nt, mode_loss_nt = split_loss(log_probs, old_log_probs, advantages, loss_mask)
    loss_config = copy.copy(config)
    loss_config.policy_loss_type = loss_name  # some losses of SkyRL read their own name from this field
    loss_options: dict[str, Any] = {"config": loss_config, "loss_mask": loss_mask, "rollout_logprobs": rollout_logprobs}
    compute_policy_loss = PolicyLossRegistry._functions[loss_name]
    policy_loss, metrics = compute_policy_loss(log_probs, old_logp_nt, adv_nt, **loss_options)
    return policy_loss + mode_loss_nt.sum(), metrics


def _by_recipe(token_level_rewards: Tensor, *, config: Any, **rest: Any) -> tuple[Tensor, Tensor]:
    """Return NaN for every token, where spanwise's trainer later writes the recipe's advantages."""
    if not isinstance(config, SpanwiseAlgorithmConfig):
        raise RecipeError(f"advantage_estimator=spanwise needs a recipe, but SkyRL alone reads none. Add {_ENTRYPOINT}.")
    nan_nt = torch.full_like(token_level_rewards, torch.nan)
    return nan_nt, nan_nt


def _refused(name: str, *args: Any, **rest: Any) -> tuple[Tensor, Tensor]:
    """Refuse a method that needs more than one reward per rollout."""
    raise RecipeError(
        f"Method '{name}' needs loss masks, token ids or several rewards per rollout, but SkyRL gives estimators one "
        f"reward. Write method: {name} in a recipe, and add {_ENTRYPOINT}. Or use the estimator "
        f"{' or '.join(outcome_estimators())}."
    )
