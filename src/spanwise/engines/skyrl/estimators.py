"""Estimators for SkyRL's registry: `spanwise_<method>` for those who want a name and no entrypoint.

The registry passes rewards, the response mask and prompt ids: no loss mask, no token ids, no reward of its own per objective. That
is enough for methods that turn one reward per rollout into one advantage; every other method says where it can be run.
"""

import re
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Shaped
from skyrl.backends.skyrl_train.utils.ppo_utils import AdvantageEstimatorRegistry  # pyright: ignore[reportMissingImports]
from torch import Tensor

from spanwise.credit import METHODS, group_index, method, outcome_methods, to_tokens
from spanwise.engines.skyrl.config import SpanwiseAlgorithmConfig
from spanwise.errors import RecipeError

_ENTRYPOINT = "trainer.override_entrypoint=spanwise.engines.skyrl.main trainer.algorithm.spanwise.recipe=recipe.yaml"
_PAD = re.compile(r"pad\d+")


def register() -> None:
    """Put `spanwise` and `spanwise_<method>` of every method with a preset into SkyRL's registry; again does nothing."""
    entries: dict[str, Any] = {"spanwise": _by_recipe}
    for name, known in METHODS.items():
        if name in outcome_methods():
            entries[f"spanwise_{name}"] = partial(outcome_advantage, name)
        elif known.preset is not None:
            entries[f"spanwise_{name}"] = partial(_refused, name)
    for name, function in entries.items():
        if name not in AdvantageEstimatorRegistry._functions:
            AdvantageEstimatorRegistry.register(name, function)


def outcome_advantage(
    name: str,
    token_level_rewards: Float[Tensor, "n t"],
    response_mask: Shaped[Tensor, "n t"],
    index: Any,
    **rest: Any,
) -> tuple[Float[Tensor, "n t"], Float[Tensor, "n t"]]:
    """Run an outcome method as SkyRL calls estimators: one advantage per row, at every token of the mask.

    Example:
        >>> reward_nt = torch.tensor([[0., 1.], [0., 0.], [0., 1.]])
        >>> outcome_advantage("rloo", reward_nt, torch.ones(3, 2), ["7", "7", "pad0"])[0]
        tensor([[ 1.,  1.],
                [-1., -1.],
                [ 0.,  0.]])
    """
    if rest.get("grpo_norm_by_std") is False and name == "grpo":
        raise RecipeError(
            "grpo_norm_by_std=false does nothing to 'spanwise_grpo'; use advantage_estimator=spanwise_dr_grpo."
        )
    uids = [str(uid) for uid in index]
    real = len(uids)
    while real and _PAD.fullmatch(uids[real - 1]):
        real -= 1
    reward_n = token_level_rewards.double().sum(dim=1)
    adv_n = torch.zeros_like(reward_n)
    adv_n[:real] = method(name).estimator(reward_n[:real], group_index(uids[:real]))
    adv_nt = to_tokens(adv_n, response_mask)
    return adv_nt, adv_nt


def _by_recipe(token_level_rewards: Tensor, *, config: Any, **rest: Any) -> tuple[Tensor, Tensor]:
    """A place holder that the trainer of the entrypoint overwrites; NaN, so that no other one can train on it."""
    if not isinstance(config, SpanwiseAlgorithmConfig):
        raise RecipeError(
            f"advantage_estimator=spanwise runs by a recipe, which the registry does not know; use {_ENTRYPOINT}."
        )
    nothing_nt = torch.full_like(token_level_rewards, torch.nan)
    return nothing_nt, nothing_nt


def _refused(name: str, *args: Any, **rest: Any) -> tuple[Tensor, Tensor]:
    """What the registry cannot carry."""
    raise RecipeError(
        f"Method '{name}' needs more than one reward per rollout, and SkyRL's registry passes neither loss masks nor token ids nor "
        f"several rewards. Write method: {name} in a recipe and use {_ENTRYPOINT}; or one of "
        f"{', '.join(f'spanwise_{known}' for known in outcome_methods())}."
    )
