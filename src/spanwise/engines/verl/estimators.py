"""Register spanwise's advantage estimators and policy losses with verl."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor

from spanwise.engines.estimators import outcome_estimators
from spanwise.errors import RecipeError
from spanwise.losses import aspo
from spanwise.mode import Mode, part_class
from spanwise.modes import MODES

CreditFunction = Callable[[Sequence[Any], Tensor], tuple[Tensor, Tensor]]
#: The function that computes advantages for the estimator `spanwise`. The trainer sets it.
CREDIT_FUNCTION: ContextVar[CreditFunction | None] = ContextVar("credit_function", default=None)


@contextmanager
def carrying(compute_credit: CreditFunction) -> Iterator[None]:
    """In a `with` block, let `compute_credit` compute the advantages of verl's estimator `spanwise`."""
    context_token = CREDIT_FUNCTION.set(compute_credit)
    try:
        yield
    finally:
        CREDIT_FUNCTION.reset(context_token)


def attach(core_algos: Any) -> None:
    """Register spanwise's estimators and policy losses with verl's `core_algos`. Existing names stay as they are."""
    for name, estimator in {**outcome_estimators(), "spanwise": recipe_advantages}.items():
        if name not in core_algos.ADV_ESTIMATOR_REGISTRY:
            core_algos.register_adv_est(name)(estimator)
    if "spanwise_aspo" not in core_algos.POLICY_LOSS_REGISTRY:
        core_algos.register_policy_loss("spanwise_aspo")(partial(_aspo, core_algos.agg_loss))
    for mode in MODES.values():
        for name, loss in list(core_algos.POLICY_LOSS_REGISTRY.items()) if "verl" in mode.parts else ():
            mode_loss_name = loss_of(mode, name)
            if not name.startswith(loss_of(mode, "")) and mode_loss_name not in core_algos.POLICY_LOSS_REGISTRY:
                split_loss = part_class(mode, "verl").parted
                core_algos.register_policy_loss(mode_loss_name)(partial(_with_mode, core_algos.agg_loss, loss, split_loss))


def loss_of(mode: Mode | type[Mode], name: str) -> str:
    """Return the name under which verl finds the sum of a policy loss and a mode's loss, such as laser's."""
    return f"spanwise_{mode.name}_{name}"


def _with_mode(
    agg_loss: Callable[..., Tensor],
    loss: Callable[..., tuple[Tensor, dict[str, Any]]],
    split_loss: Callable[..., tuple[Tensor, Tensor, Tensor]],
    *,
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    **rest: Any,
) -> tuple[Tensor, dict[str, Any]]:
    """Return verl's policy loss plus the loss that a mode such as LaSeR adds, averaged over rows."""
    old_logp_nt, adv_nt, mode_loss_nt = split_loss(log_prob, old_log_prob, advantages, rest["response_mask"])
    policy_loss, metrics = loss(old_log_prob=old_logp_nt, log_prob=log_prob, advantages=adv_nt, **rest)
    agg_options = {"loss_agg_mode": "seq-mean-token-sum", **rest["config"].global_batch_info}
    return policy_loss + agg_loss(loss_mat=mode_loss_nt, loss_mask=torch.ones_like(mode_loss_nt), **agg_options), metrics


def recipe_advantages(
    token_level_rewards: Tensor, response_mask: Tensor, index: Any = None, **_: Any
) -> tuple[Tensor, Tensor]:
    """Let `CREDIT_FUNCTION` compute the advantages and returns (critic targets) of verl's estimator `spanwise`."""
    compute_credit = CREDIT_FUNCTION.get()
    if compute_credit is None:
        raise RecipeError(
            "adv_estimator 'spanwise' does not work with this trainer, which passes on rewards but no blocks. Use "
            "verl.trainer.main_ppo with trainer.use_v1=False, or with trainer.v1.trainer_mode sync, colocate_async or "
            "separate_async. To keep this trainer, use an adv_estimator that needs one reward: "
            f"{', '.join(outcome_estimators())}."
        )
    adv_nt, return_nt = compute_credit(list(index), response_mask)
    return adv_nt.to(token_level_rewards.dtype), return_nt.to(token_level_rewards.dtype)


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
    """Compute the policy loss ASPO (`spanwise.losses.aspo`) for verl. The cap is verl's `clip_ratio_c`."""
    mask_nt = response_mask.bool()
    clip_low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
    clip_high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
    loss_nt = aspo(
        log_prob, old_log_prob, advantages, mask_nt, clip_low=clip_low, clip_high=clip_high, cap=config.clip_ratio_c
    )
    if rollout_is_weights is not None:
        loss_nt = loss_nt * rollout_is_weights
    mean_loss = agg_loss(loss_mat=loss_nt, loss_mask=mask_nt, loss_agg_mode=loss_agg_mode, **config.global_batch_info)
    kl_estimate_nt = torch.where(mask_nt, old_log_prob - log_prob.detach(), 0.0)
    return mean_loss, {"actor/ppo_kl": float(kl_estimate_nt.sum() / mask_nt.sum().clamp(min=1))}
