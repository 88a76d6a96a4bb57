"""The last look before an update: a loss or a gradient that is not finite stops the run, and no weight has taken it in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from spanwise.errors import DivergedError

_ADVICE = "No weight has taken that in. Go on from the last checkpoint with a lower learning_rate, or look at"


def check_loss(
    loss: Tensor, logps_bt: Tensor | None, inputs: Mapping[str, Any], mask_bt: Tensor, tokenizer: Any, *, step: int
) -> None:
    """Refuse a loss that is not finite, and name the completion that it comes from."""
    if bool(loss.detach().isfinite()):
        return
    value = float(loss.detach())
    parts = {"advantage": inputs.get("advantages"), "log-probability": logps_bt}
    for name, key in (("log-probability before the update", "old_per_token_logps"), ("reference", "ref_per_token_logps")):
        parts[name] = inputs.get(key)
    if logps_bt is not None and (old_bt := inputs.get("old_per_token_logps")) is not None:
        parts["ratio"] = (logps_bt.detach() - old_bt).exp()
    where = next(
        (found for name, part in parts.items() if part is not None and (found := _first(name, part, mask_bt))), None
    )
    if where is None:
        raise DivergedError(f"Step {step}: the loss is {value} and no completion alone is. {_ADVICE} beta and entropy.")
    said, b = where
    ids = inputs["completion_ids"][b][mask_bt[b].bool()].tolist()
    text = repr(tokenizer.decode(ids, skip_special_tokens=False)[:200])
    raise DivergedError(
        f"Step {step}: the loss is {value}; it comes from completion {b} of the micro-batch of {len(mask_bt)}, whose {said}: "
        f"{text}. {_ADVICE} that completion."
    )


def _first(name: str, part: Tensor, mask_bt: Tensor) -> tuple[str, int] | None:
    """The first completion in which something is not finite, in words and by its row."""
    wrong_bt = ~part.detach().isfinite()
    if not bool(wrong_bt.any()):
        return None
    seen_bt = wrong_bt & mask_bt.bool()  # a NaN survives a mask that is multiplied with, as TRL's is
    wrong_bt = seen_bt if bool(seen_bt.any()) else wrong_bt
    b, t = wrong_bt.nonzero()[0].tolist()
    masked = "" if bool(mask_bt[b, t]) else "masked "
    return f"{name} at {masked}token {t} is {float(part.detach()[b, t])}", b


class GradientGuard(TrainerCallback):
    """Stops before an optimizer step whose gradient is not finite, unless a scaler of float16 skips such steps itself."""

    def __init__(self, scaled: Callable[[], bool]) -> None:
        self.scaled = scaled

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Look at what the optimizer is about to take in."""
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        if not gradients or self.scaled():
            return
        norm = torch.nn.utils.get_total_norm(gradients)
        if not bool(norm.isfinite()):
            wrong = [
                name for name, p in model.named_parameters() if p.grad is not None and not bool(p.grad.isfinite().all())
            ]
            raise DivergedError(
                f"Step {state.global_step}: the gradient is not finite (norm {float(norm)}), in {len(wrong)} of {len(gradients)} "
                f"parameters, {wrong[0] if wrong else 'by its size'} first. {_ADVICE} the prompts of this batch (last_rollouts)."
            )
