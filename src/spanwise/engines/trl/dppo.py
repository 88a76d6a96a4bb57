"""DPPO in TRL, which has no such loss: `SpanGRPOTrainer` adds it to a loss of TRL's whose policy term is 0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxtyping import Float, Num
from torch import Tensor
from trl.trainer.grpo_config import GRPOConfig

from spanwise.errors import RecipeError
from spanwise.losses import dppo

#: The values of `loss_type` that are DPPO, as verl calls them -> its divergence.
DPPO: Mapping[str, Any] = {"dppo_tv": "tv", "dppo_kl": "kl"}


def check_dppo(args: GRPOConfig) -> None:
    """Refuse options that act on TRL's own policy term, which is 0 under DPPO.

    Raises:
        RecipeError: which option, and what to set.

    Example:
        >>> check_dppo(GRPOConfig("out", loss_type="dppo_tv", delta=2.0, use_cpu=True, bf16=False, gradient_checkpointing=None))
        Traceback (most recent call last):
        spanwise.errors.RecipeError: delta is 2.0, and loss_type 'dppo_tv' has no use for it... Leave it at None...
    """
    if args.loss_type not in DPPO:
        return
    unused = {"delta": None, "off_policy_mask_threshold": None, "top_entropy_quantile": 1.0, "use_liger_kernel": False}
    for name, usual in unused.items():
        if getattr(args, name) != usual:
            raise RecipeError(
                f"{name} is {getattr(args, name)}, and loss_type '{args.loss_type}' has no use for it: which tokens it leaves out "
                f"is said by epsilon and epsilon_high. Leave it at {usual}, or use another loss_type."
            )


def dppo_term(
    logps_bt: Float[Tensor, "b t"],
    inputs: Mapping[str, Any],
    mask_bt: Num[Tensor, "b t"],
    *,
    loss_type: str,
    deltas: tuple[float, float],
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """The mean over the rows of a micro-batch of the sum over tokens of `dppo`, and the share of tokens that it leaves out.

    Args:
        logps_bt: under the policy that is trained.
        inputs: of TRL's loss; the probability that a token was sampled with is the sampler's own if TRL has it (vLLM).
        mask_bt: 1 at the tokens that enter the loss.
        loss_type: one of `DPPO`.
        deltas: `epsilon` and `epsilon_high`, the largest divergence at tokens of negative and of positive advantage.
    """
    sampled_bt = inputs.get("sampling_per_token_logps")
    sampled_bt = inputs.get("old_per_token_logps") if sampled_bt is None else sampled_bt
    sampled_bt = logps_bt.detach() if sampled_bt is None else sampled_bt
    there_bt, advantages_bt = mask_bt.bool(), inputs["advantages"]
    loss_bt = dppo(
        logps_bt,
        sampled_bt,
        advantages_bt,
        there_bt,
        delta_low=deltas[0],
        delta_high=deltas[1],
        divergence=DPPO[loss_type],
    )
    dropped_bt = there_bt & (advantages_bt != 0) & (loss_bt == 0)
    return loss_bt.sum() / len(loss_bt), dropped_bt.sum() / there_bt.sum().clamp(min=1)
