"""Train with TRL and Unsloth: move each advantage to the column that its token has in Unsloth's loss.

Unsloth rewrites TRL's `GRPOTrainer`. Its loss moves the padding of each row to the end, so completions start in different columns.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from trl.trainer.grpo_trainer import GRPOTrainer

from spanwise.engines.shared import kl_fault
from spanwise.engines.trl import SpanGRPOTrainer, fold
from spanwise.errors import SpanwiseError, refuse, unknown
from spanwise.scheme import Scheme

__all__ = ["UnslothSpanGRPOTrainer"]

#: The supported loss types. Others need log-probabilities, which Unsloth's loss does not return.
LOSS_TYPES = ("bnpo", "cispo", "dapo", "dr_grpo", "grpo", "luspo", "sapo", "vespo")
#: Environment variables that make Unsloth weigh completions, each with the values that turn it off.
_WEIGHTS = {"UNSLOTH_GRPO_ZERO_VARIANCE_EXCLUDE": ("", "0"), "UNSLOTH_GRPO_LOSS_AGGREGATION": ("",)}
_INSTEAD = "You can also train without Unsloth (spanwise.engines.trl)."
_CANARY = f"Use unsloth 2026.10.9. {_INSTEAD}"


def packed(value_bt: Shaped[Tensor, "b t"], inputs: Mapping[str, Any], *, pad_id: int) -> Shaped[Tensor, "b u"]:
    """Move the value of each token to its column in Unsloth's loss."""
    if any(inputs.get(name) is not None for name in ("pixel_values", "pixel_values_videos")):
        return value_bt  # with images or videos, Unsloth's loss leaves all tokens in place
    prompt_ids_bp = inputs["prompt_ids"]
    ids_bl = torch.cat([prompt_ids_bp, inputs["completion_ids"]], dim=1)
    padding_last_order_bl = (ids_bl == pad_id).to(torch.uint8).argsort(dim=1, stable=True)
    value_bl = torch.cat([value_bt.new_zeros(prompt_ids_bp.shape), value_bt], dim=1)
    packed_value_bl = value_bl.gather(1, padding_last_order_bl)
    # Log-probabilities of Unsloth have as many columns as its loss expects.
    for name in ("old_per_token_logps", "ref_per_token_logps"):
        if inputs.get(name) is not None:
            return packed_value_bl[:, -inputs[name].shape[1] :]
    return packed_value_bl[:, -(value_bt.shape[1] + int((prompt_ids_bp == pad_id).sum(dim=1).max())) :]


def check_use(args: Any, scheme: Any, *, critic: Any = None) -> None:
    """Refuse settings and schemes that do not work with Unsloth's loss."""
    loss_type = getattr(args, "loss_type", "dr_grpo")
    ratio_level = getattr(args, "importance_sampling_level", "token")
    needed_fields, scheme_modes = (scheme.needs, scheme.modes) if isinstance(scheme, Scheme) else ((), ())
    mode_names = [mode.name for mode in (critic, *scheme_modes) if mode is not None]
    faults: dict[str, Any] = {
        "Unsloth has not replaced TRL's trainer. Write `import unsloth` as the first line of the script, before trl and "
        f"spanwise. {_INSTEAD}": not GRPOTrainer.__name__.startswith("Unsloth"),
        f"Under Unsloth: {unknown('loss_type', loss_type, LOSS_TYPES)}": loss_type not in LOSS_TYPES,
        **kl_fault(getattr(args, "beta", 0.0), loss_type, engine="Unsloth"),
        f"importance_sampling_level is '{ratio_level}', which needs log-probabilities that Unsloth's loss does not return. "
        f"Leave importance_sampling_level at 'token'. {_INSTEAD}": ratio_level != "token",
        "The scheme reads the tokens' log-probabilities (logp_nt), but Unsloth moves them to the columns of other tokens. "
        f"Use another method. {_INSTEAD}": "logp_nt" in needed_fields,
        f"Mode '{''.join(mode_names[:1])}' is not tested with models of Unsloth. Leave it out. {_INSTEAD}": mode_names,
    }
    for name, valid_values in _WEIGHTS.items():
        value = os.environ.get(name, "").strip()
        faults[f"{name}={value} makes Unsloth weigh completions by their rewards. Unset {name}."] = value not in valid_values
    refuse(faults)


def check_gradient(gradient_bu: Float[Tensor, "b u"] | None, expected_bu: Float[Tensor, "b u"], *, exact: bool) -> None:
    """Raise an error if the gradient of a log-probability is wrong. Unless `exact`, compare only its sign."""
    if gradient_bu is None:
        raise SpanwiseError(f"Unsloth's loss stores no gradient, so spanwise cannot check how it uses advantages. {_CANARY}")
    tolerance_bu = 0.05 * expected_bu.abs() + 1e-6 * expected_bu.abs().max()
    is_wrong_bu = (gradient_bu - expected_bu).abs() > tolerance_bu
    if not exact:  # clipping and importance ratios change the size of the gradient, not its sign
        is_wrong_bu = (gradient_bu * expected_bu < 0) | ((expected_bu == 0) & (gradient_bu != 0))
    if bool(is_wrong_bu.any()):
        row, column = is_wrong_bu.nonzero()[0].tolist()
        raise SpanwiseError(
            f"Unsloth's loss does not use the advantage of each token in completion {row}. The gradient of the token in column "
            f"{column} is {float(gradient_bu[row, column]):.4g}. The token's advantage asks for a gradient of "
            f"{float(expected_bu[row, column]):.4g}. {_CANARY}"
        )


class _Packed(GRPOTrainer):
    """Moves advantages to where Unsloth's loss reads them. Inherited after `SpanGRPOTrainer`, before Unsloth's trainer."""

    args: Any
    processing_class: Any

    @property
    def _pad_id(self) -> int:
        return getattr(self.processing_class, "tokenizer", self.processing_class).pad_token_id

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        prompt_ids, completion_ids, masks, *other_outputs = super()._generate(*args, **kwargs)
        has_final_padding_n = [len(ids) > 0 and ids[-1] == self._pad_id for ids in completion_ids]
        if any(has_final_padding_n):  # Unsloth's loss drops a final padding token
            sampled_masks = [[1] * len(ids) for ids in completion_ids] if masks is None else masks
            masks_with_flags = zip(sampled_masks, has_final_padding_n, strict=True)
            masks = [[*mask[:-1], 0] if has_padding else mask for mask, has_padding in masks_with_flags]
        return prompt_ids, completion_ids, masks, *other_outputs

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        mask_nt = output["completion_mask"]
        last_column_n1 = mask_nt.sum(dim=1, keepdim=True) - 1
        is_before_last_nt = torch.arange(mask_nt.shape[1], device=mask_nt.device) < last_column_n1
        is_padding_nt = output["completion_ids"] == self._pad_id
        has_inner_padding_n = (is_before_last_nt & is_padding_nt).any(dim=1)
        # Leave rows with inner padding out of the loss, because Unsloth does not move their mask.
        if bool(has_inner_padding_n.any()):
            output["tool_mask"] = output.get("tool_mask", mask_nt) * ~has_inner_padding_n[:, None]
        return output

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Tensor:
        packed_advantages = packed(inputs["advantages"].detach(), inputs, pad_id=self._pad_id)
        # Let Unsloth add the KL term: spanwise cannot, because Unsloth returns no log-probabilities.
        self.beta = self.args.beta
        return super().compute_loss(model, {**inputs, "advantages": packed_advantages}, return_outputs, num_items_in_batch)


class UnslothSpanGRPOTrainer(SpanGRPOTrainer, _Packed):
    """`SpanGRPOTrainer` for a model of Unsloth. The first line of the script must be `import unsloth`.

    Settings and schemes that do not work with Unsloth's loss raise a `RecipeError`. On the first micro-batch with credit, the
    check `canary` raises a `SpanwiseError` if the gradient does not follow the advantages. All else is as in
    `spanwise.engines.trl.SpanGRPOTrainer`.
    """

    _moves_columns = True

    def __init__(self, model: Any, *, args: Any = None, scheme: Any = None, **options: Any) -> None:
        check_use(args, scheme, critic=options.get("critic"))
        super().__init__(model, args=args, scheme=scheme, **options)

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Tensor:
        """Compute Unsloth's loss with scaled advantages, to undo its normaliser. Check the gradient once."""
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if self._canary_due and self.model.training and not (self.args.beta or self.args.entropy_coef):
            # Unsloth computes the gradient with the loss, and stores it in `grad_fn`.
            saved_tensors = getattr(loss.grad_fn, "saved_tensors", ())
            advantage_bt = inputs["advantages"]
            equal_logp_bt = torch.zeros_like(advantage_bt)  # equal log-probabilities make every importance ratio 1
            slope_bt = fold.surrogate_slope(equal_logp_bt, {"advantages": advantage_bt}, self.args)
            gradient_scale = 1.0 if self.accelerator.scaler is None else self.accelerator.scaler.get_scale()
            gradient_scale /= len(advantage_bt) * self.current_gradient_accumulation_steps
            expected_gradient_bu = -packed(advantage_bt * slope_bt * gradient_scale, inputs, pad_id=self._pad_id)
            self._canary_due = not bool(expected_gradient_bu.any())  # if the gradient is 0 everywhere, check the next one
            gradient_bu = saved_tensors[0] if saved_tensors else None
            check_gradient(gradient_bu, expected_gradient_bu, exact=inputs.get("old_per_token_logps") is None)
        return loss
