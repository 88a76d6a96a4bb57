"""Make TRL's loss sum over tokens and average over completions. Add DPPO and KL terms, and check every step.

Every surrogate of TRL depends on the advantage as A f(sign A, ratio). So a positive factor on A scales the token's loss, and a
factor on A undoes the normaliser of each `loss_type` without a copy of TRL's loss.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Num
from torch import Tensor
from transformers import TrainerCallback
from trl.trainer.grpo_config import GRPOConfig

from spanwise.engines.shared import fold_factor as fold_factor  # re-exported for `trainer.py`
from spanwise.errors import DivergedError, SpanwiseError
from spanwise.losses import dppo
from spanwise.mode import Mode

#: Maps DPPO losses to the divergences that they bound.
DPPO: Mapping[str, Any] = {"dppo_tv": "tv", "dppo_kl": "kl"}
#: The supported loss types: DPPO, and TRL's losses whose normaliser can be undone exactly.
LOSS_TYPES: tuple[str, ...] = ("bnpo", "cispo", "dapo", "dppo_kl", "dppo_tv", "dr_grpo", "grpo", "luspo", "sapo", "vespo")
#: The values of `importance_sampling_level`, which say which tokens share an importance ratio.
RATIO_LEVELS: tuple[str, ...] = ("token", "block", "sequence")
_CANARY = (
    "The loss would not give each span its own credit. Use a TRL version that this release of spanwise supports. If "
    "your subclass overrides _compute_loss, check this method. To train anyway, set canary=False in SpanGRPOConfig."
)
_ADVICE = "No weight was updated. Resume from the last checkpoint with a lower learning_rate."


def loss_mask(inputs: Mapping[str, Any]) -> Int[Tensor, "n t"]:
    """Return the mask of the tokens in TRL's loss."""
    tool_mask = inputs.get("tool_mask")
    return inputs["completion_mask"] if tool_mask is None else inputs["completion_mask"] * tool_mask


def pooled_logps(
    logps_bt: Float[Tensor, "b t"],
    old_logp_bt: Float[Tensor, "b t"],
    mask_bt: Num[Tensor, "b t"],
    block_bt: Int[Tensor, "b t"] | None,
) -> Float[Tensor, "b t"]:
    """Change old log-probabilities so that all tokens of a block share one importance ratio.

    log ratio[t] = sg(mean over the block of t of logp - old) + logp[t] - sg(logp[t]): GSPO-token (Zheng et al. 2025, arXiv
    2507.18071, equations 13 and 14), with a block in place of the completion. `block_bt`: from 0; None: one block.
    """
    detached_logp_bt = logps_bt.detach()
    block_bt = torch.zeros_like(mask_bt, dtype=torch.long) if block_bt is None else block_bt.long()
    log_ratio_bt = torch.where(mask_bt.bool(), detached_logp_bt - old_logp_bt, 0.0)
    zeros_bk = detached_logp_bt.new_zeros(len(block_bt), int(block_bt.max()) + 1)
    log_ratio_sum_bk = zeros_bk.scatter_add(1, block_bt, log_ratio_bt)
    token_count_bk = zeros_bk.scatter_add(1, block_bt, mask_bt.to(zeros_bk.dtype))
    return detached_logp_bt - (log_ratio_sum_bk / token_count_bk.clamp(min=1)).gather(1, block_bt)


def clip_range(args: GRPOConfig) -> tuple[float, float]:
    """Return how far an importance ratio may lie below and above 1. DPPO uses these as its bounds."""
    return args.epsilon, args.epsilon if args.epsilon_high is None else args.epsilon_high


def dppo_term(
    logps_bt: Float[Tensor, "b t"], inputs: Mapping[str, Any], mask_bt: Num[Tensor, "b t"], args: GRPOConfig
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Compute the DPPO loss, and the share of tokens that it drops."""
    sampling_logp_bt, old_logp_bt = inputs.get("sampling_per_token_logps"), inputs.get("old_per_token_logps")
    old_logp_bt = logps_bt.detach() if old_logp_bt is None else old_logp_bt
    sampling_logp_bt = old_logp_bt if sampling_logp_bt is None else sampling_logp_bt
    # vLLM may not know the log-probability of a token (NaN).
    sampling_logp_bt = torch.where(sampling_logp_bt.isnan(), old_logp_bt, sampling_logp_bt)
    is_in_loss_bt = mask_bt.bool()
    advantages_bt = inputs["advantages"]
    clip_low, clip_high = clip_range(args)
    clip_options: dict[str, Any] = {"delta_low": clip_low, "delta_high": clip_high, "divergence": DPPO[args.loss_type]}
    loss_bt = dppo(logps_bt, sampling_logp_bt, advantages_bt, is_in_loss_bt, **clip_options)
    is_dropped_bt = is_in_loss_bt & (advantages_bt != 0) & (loss_bt == 0)
    return loss_bt.sum() / len(loss_bt), is_dropped_bt.sum() / is_in_loss_bt.sum().clamp(min=1)


def token_kl(
    logp_bt: Float[Tensor, "b t"],
    ref_bt: Float[Tensor, "b t"],
    mask_bt: Num[Tensor, "b t"],
    *,
    old_bt: Float[Tensor, "b t"] | None = None,
) -> Float[Tensor, "b t"]:
    """Estimate KL(policy || reference) at every sampled token (Schulman's k3).

    kl = exp(d) - d - 1,  d = ref - logp (Shao et al. 2024, arXiv 2402.03300, equation 4); with `old_bt` times exp(logp - old)
    """
    log_ratio_bt = torch.where(mask_bt.bool(), ref_bt - logp_bt, 0.0)
    kl_bt = log_ratio_bt.exp() - log_ratio_bt - 1
    return kl_bt if old_bt is None else kl_bt * torch.where(mask_bt.bool(), logp_bt - old_bt, 0.0).exp()


def kl_term(kl_bt: Float[Tensor, "b t"], mask_bt: Num[Tensor, "b t"]) -> Float[Tensor, ""]:
    """Average the KL over each completion's tokens, then over completions (arXiv 2402.03300, equation 3)."""
    return (kl_bt.sum(dim=1) / mask_bt.sum(dim=1).clamp(min=1)).mean()


def surrogate_slope(logps_bt: Float[Tensor, "b t"], inputs: Mapping[str, Any], args: GRPOConfig) -> Float[Tensor, "b t"]:
    """Differentiate each token's surrogate by its log-probability, for an advantage of 1. NaN: clipping may act."""
    old_logp_bt = inputs.get("old_per_token_logps")
    clip_low, clip_high = clip_range(args)
    ratio_bt = torch.ones_like(logps_bt) if old_logp_bt is None else (logps_bt - old_logp_bt).exp()
    highest_ratio = 1 + clip_high if args.delta is None else min(1 + clip_high, args.delta)
    is_unclipped_bt = (ratio_bt > 1 - clip_low) & (ratio_bt < highest_ratio)
    slope_bt = torch.where(is_unclipped_bt, ratio_bt, torch.nan)
    if args.loss_type == "cispo":
        slope_bt = ratio_bt.clamp(max=clip_high)
    if args.loss_type == "sapo":
        temperature_bt = torch.where(inputs["advantages"] > 0, args.sapo_temperature_pos, args.sapo_temperature_neg)
        gate_bt = torch.sigmoid(temperature_bt * (ratio_bt - 1))
        slope_bt = 4 * gate_bt * (1 - gate_bt) * ratio_bt
    if args.loss_type == "vespo":  # for vespo, the slope is 1 without old log-probabilities, else unknown (NaN)
        slope_bt = torch.full_like(logps_bt, 1.0 if old_logp_bt is None else torch.nan)
    return slope_bt * inputs.get("importance_sampling_ratio", 1.0)


def check_own_advantage(
    loss: Float[Tensor, ""],
    logps_bt: Float[Tensor, "b t"],
    advantages_bt: Float[Tensor, "b t"],
    mask_bt: Num[Tensor, "b t"] | Bool[Tensor, "b t"],
    *,
    factor_b1: Float[Tensor, "b 1"],
    accumulation: int,
    height_bt: Float[Tensor, "b t"],
) -> None:
    """Check that the gradient of each token is weighted by its own advantage.

    d/dA_t of sum_s w_s dL/dlogp_s = -height_t w_t mask_t / (b accumulation factor), w: test weights; no check at NaN heights
    """
    # Differentiate the loss by log-probabilities, then by advantages, to see if TRL averages a completion's advantages.
    token_index_t = torch.arange(advantages_bt.shape[1], device=advantages_bt.device, dtype=torch.float64)
    test_weight_t = 1 + (token_index_t * 0.6180339887) % 1  # different weights, in [1, 2), tell tokens apart
    test_weight_bt = test_weight_t.to(advantages_bt.dtype).expand_as(advantages_bt)
    (logp_gradient_bt,) = torch.autograd.grad(loss, logps_bt, create_graph=True, allow_unused=True)
    advantage_gradient_bt = None
    if logp_gradient_bt is not None and logp_gradient_bt.requires_grad:
        gradient_sum = (logp_gradient_bt * test_weight_bt).sum()
        (advantage_gradient_bt,) = torch.autograd.grad(gradient_sum, advantages_bt, retain_graph=True, allow_unused=True)
    if advantage_gradient_bt is None:
        raise SpanwiseError(f"The loss does not depend on the advantage of any token. {_CANARY}")
    loss_divisor_b1 = factor_b1 * advantages_bt.shape[0] * accumulation
    token_weight_bt = -advantage_gradient_bt * loss_divisor_b1
    expected_weight_bt = torch.where(mask_bt.bool(), test_weight_bt * height_bt, 0.0)
    # Allow differences up to 0.05, because rounding to bfloat16 changes the weights by less than that.
    is_wrong_bt = (token_weight_bt - expected_weight_bt).abs() > 0.05
    if bool(is_wrong_bt.any()):
        b, t = is_wrong_bt.nonzero()[0].tolist()
        raise SpanwiseError(
            f"The loss does not weigh token {t} of completion {b} by the token's own advantage. In a test, its weight "
            f"was {float(token_weight_bt[b, t]):.4g}, not {float(expected_weight_bt[b, t]):.4g}. {_CANARY}"
        )


def check_loss(
    loss: Tensor, logps_bt: Tensor | None, inputs: Mapping[str, Any], mask_bt: Tensor, tokenizer: Any, *, step: int
) -> None:
    """Raise an error if the loss is not finite. The error names the first completion with a faulty number."""
    if bool(loss.detach().isfinite()):
        return
    loss_value = float(loss.detach())
    old_logp_bt = inputs.get("old_per_token_logps")
    token_values_by_name = {
        "advantage": inputs.get("advantages"),
        "log-probability": logps_bt,
        "log-probability before the update": old_logp_bt,
        "reference": inputs.get("ref_per_token_logps"),
        "ratio": None if logps_bt is None or old_logp_bt is None else (logps_bt.detach() - old_logp_bt).exp(),
    }
    for name, value_bt in token_values_by_name.items():
        if value_bt is None or bool(value_bt.isfinite().all()):
            continue
        is_faulty_bt = ~value_bt.isfinite()
        # A NaN at a masked token also makes the loss NaN, because 0 times NaN is NaN.
        if bool((is_faulty_bt & mask_bt.bool()).any()):
            is_faulty_bt &= mask_bt.bool()
        b, t = is_faulty_bt.nonzero()[0].tolist()
        token_label = f"token {t}" if bool(mask_bt[b, t]) else f"masked token {t}"
        completion_ids = inputs["completion_ids"][b][mask_bt[b].bool()].tolist()
        completion_text = repr(tokenizer.decode(completion_ids, skip_special_tokens=False)[:200])
        raise DivergedError(
            f"Step {step}: the loss is {loss_value}. In completion {b} of {len(mask_bt)} in the micro-batch, the {name} of "
            f"{token_label} is {float(value_bt.detach()[b, t])}. {_ADVICE} The text of completion {b} is {completion_text}"
        )
    raise DivergedError(
        f"Step {step}: the loss is {loss_value}, but advantages, log-probabilities and ratios are finite at all tokens. {_ADVICE} "
        "Also check whether beta or entropy_coef is too large."
    )


class LengthGuard(TrainerCallback):
    """Refuses a run that is too short for its modes, such as laser."""

    def __init__(self, modes: Sequence[Mode]) -> None:
        self.modes = modes

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Tell each mode how many generation batches the run has. Only the main process warns."""
        micro_batch_count = state.max_steps * args.gradient_accumulation_steps
        batch_count = -(-micro_batch_count // (args.steps_per_generation * args.num_iterations))
        with warnings.catch_warnings():
            if not state.is_world_process_zero:
                warnings.simplefilter("ignore")
            for mode in self.modes:
                mode.check_steps(batch_count)


def check_gradient(model: Any, *, scaled: bool, step: int) -> None:
    """Raise an error if the gradient is not finite, unless a float16 scaler skips such steps. Call it before clipping."""
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    if not gradients or scaled:
        return
    gradient_norm = torch.nn.utils.get_total_norm(list(gradients.values()))
    if not bool(gradient_norm.isfinite()):
        faulty_names = [name for name, gradient in gradients.items() if not bool(gradient.isfinite().all())]
        gradient_note = "The gradients of all parameters are finite, but their common norm is not."
        if faulty_names:
            gradient_note = (
                f"The gradient is not finite in {len(faulty_names)} of {len(gradients)} parameters; the first is "
                f"{faulty_names[0]}."
            )
        raise DivergedError(
            f"Step {step}: the gradient has the norm {float(gradient_norm)}. {gradient_note} {_ADVICE} Also look at the "
            "prompts of this batch in trainer.last_rollouts."
        )
