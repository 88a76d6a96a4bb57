"""TRL under Unsloth: each advantage goes where Unsloth's loss has the token's log-probability.

Unsloth rewrites TRL's `GRPOTrainer`. Its loss moves padding behind the tokens of a row, so completions start at different columns.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from trl.trainer.grpo_trainer import GRPOTrainer

from spanwise.engines.trl import SpanGRPOTrainer, fold
from spanwise.errors import SpanwiseError, refuse, unknown
from spanwise.scheme import Scheme

__all__ = ["UnslothSpanGRPOTrainer"]

#: The values of `loss_type` that need no log-probabilities from outside of Unsloth's loss.
LOSS_TYPES = ("bnpo", "cispo", "dapo", "dr_grpo", "grpo", "luspo", "sapo", "vespo")
#: Those under which Unsloth's KL, divided like the policy term, is a mean over the tokens of a completion.
KL_LOSS_TYPES = ("grpo", "sapo")
#: Variables by which Unsloth weighs completions in a way that cannot be undone -> values that leave it out.
_WEIGHTS = {"UNSLOTH_GRPO_ZERO_VARIANCE_EXCLUDE": ("", "0"), "UNSLOTH_GRPO_LOSS_AGGREGATION": ("",)}
_INSTEAD = "train without Unsloth (spanwise.engines.trl)"
_CANARY = f"Use unsloth 2026.10.9, or {_INSTEAD}."


def packed(value_bt: Shaped[Tensor, "b t"], inputs: Mapping[str, Any], *, pad_id: int) -> Shaped[Tensor, "b u"]:
    """Move a table of completion tokens to the columns that Unsloth's loss has them in.

    >>> inputs = {"prompt_ids": torch.tensor([[0, 5], [6, 7]]), "completion_ids": torch.tensor([[8, 9], [8, 0]])}
    >>> packed(torch.tensor([[1.0, 2.0], [3.0, 0.0]]), inputs, pad_id=0).tolist()
    [[1.0, 2.0, 0.0], [0.0, 3.0, 0.0]]
    """
    if any(inputs.get(name) is not None for name in ("pixel_values", "pixel_values_videos")):
        return value_bt  # with images, Unsloth leaves padding where it is
    prompt_bp = inputs["prompt_ids"]
    is_pad_bl = torch.cat([prompt_bp, inputs["completion_ids"]], dim=1) == pad_id
    value_bl = torch.cat([value_bt.new_zeros(prompt_bp.shape), value_bt], dim=1)
    value_bl = value_bl.gather(1, is_pad_bl.to(torch.uint8).argsort(dim=1, stable=True))
    # Log-probabilities from before the loss are as wide as the longest padding of the generation batch demands.
    scored = [inputs.get(name) for name in ("old_per_token_logps", "ref_per_token_logps")]
    widths = [logps.shape[1] for logps in scored if logps is not None]
    return value_bl[:, -(widths or [value_bt.shape[1] + int((prompt_bp == pad_id).sum(dim=1).max())])[0] :]


def check_use(args: Any, scheme: Any, *, critic: Any = None) -> None:
    """Refuse settings and schemes that Unsloth's loss cannot serve."""
    loss_type, beta = getattr(args, "loss_type", "dr_grpo"), getattr(args, "beta", 0.0)
    level = getattr(args, "importance_sampling_level", "token")
    needs, modes = (scheme.needs, scheme.modes) if isinstance(scheme, Scheme) else ((), ())
    mode_names = [mode.name for mode in (critic, *modes) if mode is not None]
    faults: dict[str, Any] = {
        "Unsloth has not replaced TRL's trainer. Write `import unsloth` as the first line of the script, before trl and "
        f"spanwise; or {_INSTEAD}.": not GRPOTrainer.__name__.startswith("Unsloth"),
        f"Under Unsloth: {unknown('loss_type', loss_type, LOSS_TYPES)}": loss_type not in LOSS_TYPES,
        f"beta is {beta}, and under loss_type '{loss_type}' Unsloth does not average the KL over the tokens of each completion. "
        f"Set loss_type to {' or '.join(KL_LOSS_TYPES)}, or beta to 0.": beta and loss_type not in KL_LOSS_TYPES,
        f"importance_sampling_level is '{level}', which needs log-probabilities from inside Unsloth's loss. Leave it at 'token', "
        f"or {_INSTEAD}.": level != "token",
        f"The scheme reads log-probabilities (logp_nt), which Unsloth has in other columns. Use another method, or {_INSTEAD}.": (
            "logp_nt" in needs
        ),
        f"'{''.join(mode_names[:1])}' was never run on a model of Unsloth. Leave it out, or {_INSTEAD}.": mode_names,
    }
    for name, idle in _WEIGHTS.items():
        value = os.environ.get(name, "").strip()
        faults[f"{name}={value} makes Unsloth weigh completions by their rewards. Unset it."] = value not in idle
    refuse(faults)


def check_gradient(gradient_bu: Float[Tensor, "b u"] | None, expected_bu: Float[Tensor, "b u"], *, exact: bool) -> None:
    """Raise unless the gradient by each log-probability is the expected one; if not `exact`, has its sign or is 0."""
    if gradient_bu is None:
        raise SpanwiseError(f"Unsloth's loss keeps no gradient that can be checked. {_CANARY}")
    wrong_bu = (gradient_bu - expected_bu).abs() > 0.05 * expected_bu.abs() + 1e-6 * expected_bu.abs().max()
    if not exact:  # the clip and the ratios to old log-probabilities and to the sampler change the size
        wrong_bu = (gradient_bu * expected_bu < 0) | ((expected_bu == 0) & (gradient_bu != 0))
    if bool(wrong_bu.any()):
        row, column = wrong_bu.nonzero()[0].tolist()
        raise SpanwiseError(
            f"Unsloth does not weigh the tokens of completion {row} with their own advantages: in column {column} the gradient is "
            f"{float(gradient_bu[row, column]):.4g} and must be {float(expected_bu[row, column]):.4g}. {_CANARY}"
        )


class _Packed(GRPOTrainer):
    """Stands between our trainer and Unsloth's: what goes into the loss is moved on its way."""

    args: Any
    processing_class: Any

    @property
    def _pad_id(self) -> int:
        return getattr(self.processing_class, "tokenizer", self.processing_class).pad_token_id

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        prompt_ids, completion_ids, sampled, *rest = super()._generate(*args, **kwargs)
        ends = [list(ids[-1:]) == [self._pad_id] for ids in completion_ids]
        if any(ends):  # Unsloth's loss leaves out padding, so a last token that pads counts like a tool's
            masks = [[1] * len(ids) for ids in completion_ids] if sampled is None else sampled
            sampled = [[*mask[:-1], 0] if is_pad else mask for mask, is_pad in zip(masks, ends, strict=True)]
        return prompt_ids, completion_ids, sampled, *rest

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        mask_nt = output["completion_mask"]
        within_nt = torch.arange(mask_nt.shape[1], device=mask_nt.device) < mask_nt.sum(dim=1, keepdim=True) - 1
        broken_n = (within_nt & (output["completion_ids"] == self._pad_id)).any(dim=1)
        if bool(broken_n.any()):  # Unsloth moves what follows the padding, but not its mask: leave the completion out
            output["tool_mask"] = output.get("tool_mask", mask_nt) * ~broken_n[:, None]
        return output

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Tensor:
        moved = {**inputs, "advantages": packed(inputs["advantages"].detach(), inputs, pad_id=self._pad_id)}
        self.beta = self.args.beta  # our trainer set it to 0, to add the KL from log-probabilities that it does not get here
        return super().compute_loss(model, moved, return_outputs, num_items_in_batch)


class UnslothSpanGRPOTrainer(SpanGRPOTrainer, _Packed):
    """spanwise's trainer for TRL on a model of Unsloth; `import unsloth` is the first line of the script.

    Args:
        model: what `FastLanguageModel` of Unsloth returned.
        args, scheme, options: as in `spanwise.engines.trl.SpanGRPOTrainer`.

    Raises:
        RecipeError: Unsloth was not imported first; a setting or a scheme that its loss cannot serve.
        SpanwiseError: the gradient of the first micro-batch is not that of the advantages (`canary`).
    """

    _moves_columns = True

    def __init__(self, model: Any, *, args: Any = None, scheme: Any = None, **options: Any) -> None:
        check_use(args, scheme, critic=options.get("critic"))
        super().__init__(model, args=args, scheme=scheme, **options)

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Tensor:
        """Compute Unsloth's loss with its normaliser undone in the advantages; check the gradient of the first micro-batch."""
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if self._canary_due and self.model.training and not (self.args.beta or self.args.entropy_coef):
            self._canary_due = False
            saved = getattr(loss.grad_fn, "saved_tensors", ())  # Unsloth computes the gradient together with the loss
            value_bt = inputs["advantages"]
            slope_bt = fold.surrogate_slope(torch.zeros_like(value_bt), {"advantages": value_bt}, self.args)
            scale = 1.0 if self.accelerator.scaler is None else self.accelerator.scaler.get_scale()
            scale /= len(value_bt) * self.current_gradient_accumulation_steps
            expected_bu = -packed(value_bt * slope_bt * scale, inputs, pad_id=self._pad_id)
            check_gradient(saved[0] if saved else None, expected_bu, exact=inputs.get("old_per_token_logps") is None)
        return loss
