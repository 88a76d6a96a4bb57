"""What verl's registries take: estimators that need one reward per completion, `spanwise` itself, and losses verl lacks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from spanwise.credit import group_index, method, outcome_methods, step_rewards, to_tokens
from spanwise.errors import RecipeError
from spanwise.losses import aspo
from spanwise.mode import Mode, part_class
from spanwise.modes import MODES

#: How the prompt ids of V1's padding rows begin.
PADDING = "pad"
#: What a trainer of ours lays out for the estimator `spanwise`, which verl calls with rewards and a mask alone: a function from
#: group ids and mask to advantages and returns.
CARRIED: ContextVar[Callable[[Sequence[Any], Tensor], tuple[Tensor, Tensor]] | None] = ContextVar("carried", default=None)


def attach(core_algos: Any) -> None:
    """Register everything with verl's `core_algos`; names that are there already stay as they are."""
    named = {f"spanwise_{name}": partial(outcome_advantages, name) for name in outcome_methods()}
    for name, function in {**named, "spanwise": carried_advantages}.items():
        if name not in core_algos.ADV_ESTIMATOR_REGISTRY:
            core_algos.register_adv_est(name)(function)
    if "spanwise_aspo" not in core_algos.POLICY_LOSS_REGISTRY:
        core_algos.register_policy_loss("spanwise_aspo")(partial(_aspo, core_algos.agg_loss))
    for mode in MODES.values():
        policy_loss: Any = getattr(part_class(mode, "verl"), "policy_loss", None)
        for name, loss in list(core_algos.POLICY_LOSS_REGISTRY.items()) if policy_loss else ():
            with_mode = loss_of(mode, name)
            if not name.startswith(loss_of(mode, "")) and with_mode not in core_algos.POLICY_LOSS_REGISTRY:
                core_algos.register_policy_loss(with_mode)(partial(policy_loss, core_algos.agg_loss, loss))


def loss_of(mode: Mode | type[Mode], name: str) -> str:
    """How a policy loss of verl is called that has what a mode adds to it."""
    return f"spanwise_{mode.name}_{name}"


def outcome_advantages(
    name: str,
    token_level_rewards: Float[Tensor, "n t"],
    response_mask: Shaped[Tensor, "n t"],
    index: Any = None,
    config: Any = None,
    non_tensor_batch: Any = None,
    batch: Any = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """A method on one reward per completion, under the signature of verl's estimators.

    Edge cases:
        Rows without a trained token get 0. Rejected rollouts are still compared with, as under `spanwise`; the padding of V1
        trainers, known by its prompt id, is left out.

    Example:
        >>> rewards_nt, mask_nt = torch.tensor([[0., 1.], [0., 0.], [0., 5.]]), torch.tensor([[1, 1], [1, 1], [0, 0]])
        >>> outcome_advantages("rloo", rewards_nt, mask_nt, index=["a", "a", "pad0"])[0]
        tensor([[ 1.,  1.],
                [-1., -1.],
                [ 0.,  0.]])
    """
    if index is None:
        raise RecipeError(f"adv_estimator 'spanwise_{name}' compares completions of one prompt and verl gave no uid.")
    trained_n = response_mask.bool().any(dim=1)
    whole_n = token_level_rewards.double().sum(dim=1)  # of a rejected rollout no token is left to carry the reward
    reward_n = torch.where(trained_n, step_rewards(token_level_rewards, response_mask), whole_n)
    ids = _plain(index)
    real = [n for n, trained in enumerate(trained_n.tolist()) if trained or not str(ids[n]).startswith(PADDING)]
    adv_n = torch.zeros(len(ids), dtype=torch.float64)
    if real:
        group_n = group_index([ids[n] for n in real])
        adv_n[real] = method(name).estimator(reward_n[real], group_n, **_options(config)).double()
    adv_nt = to_tokens(adv_n, response_mask, dtype=token_level_rewards.dtype)
    return adv_nt, adv_nt


def carried_advantages(
    token_level_rewards: Tensor, response_mask: Tensor, index: Any = None, **_: Any
) -> tuple[Tensor, Tensor]:
    """The advantages and returns of a recipe, from what the reward workers read; the trainer lays it out before verl calls this."""
    credited = CARRIED.get()
    if credited is None:
        raise RecipeError(
            "adv_estimator 'spanwise' needs what the reward workers read, and this trainer passes rewards alone. Use "
            "verl.trainer.main_ppo with trainer.v1.trainer_mode sync, colocate_async or separate_async, or trainer.use_v1=False. "
            "With another trainer use an estimator of one reward: "
            + ", ".join(f"spanwise_{n}" for n in outcome_methods())
            + "."
        )
    adv_nt, return_nt = credited(_plain(index), response_mask)
    return adv_nt.to(token_level_rewards.dtype), return_nt.to(token_level_rewards.dtype)


def _plain(index: Any) -> list[Any]:
    return index.tolist() if hasattr(index, "tolist") else list(index)


def _options(config: Any) -> dict[str, Any]:
    own = (config.get("spanwise") if config is not None else None) or {}
    kept = [name for name in ("folder", "keep_rollouts", "report") if name in own]
    if kept:
        raise RecipeError(
            f"algorithm.spanwise.{kept[0]} keeps the run of algorithm.adv_estimator=spanwise with a recipe, and an estimator of "
            f"one reward sees no completion; leave it out."
        )
    return dict(own.get("options") or {})


def _aspo(
    agg_loss: Callable[..., Tensor],
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """`spanwise.losses.aspo` as verl's policy loss; its cap is verl's `clip_ratio_c`."""
    mask_nt = response_mask.bool()
    low, high = (config.clip_ratio if clip is None else clip for clip in (config.clip_ratio_low, config.clip_ratio_high))
    loss_nt = aspo(log_prob, old_log_prob, advantages, mask_nt, clip_low=low, clip_high=high, cap=config.clip_ratio_c)
    if rollout_is_weights is not None:
        loss_nt = loss_nt * rollout_is_weights
    loss = agg_loss(loss_mat=loss_nt, loss_mask=mask_nt, loss_agg_mode=loss_agg_mode, **config.global_batch_info)
    drift_nt = torch.where(mask_nt, old_log_prob - log_prob.detach(), 0.0)
    return loss, {"actor/ppo_kl": float(drift_nt.sum() / mask_nt.sum().clamp(min=1))}
