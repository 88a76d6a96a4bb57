"""Muon in float32, for processors that are slow in bfloat16, so that a warm start takes about as long everywhere."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

#: Of the quintic iteration; see torch.optim.Muon.
_A, _B, _C, _STEPS, _EPS, _MOMENTUM = 3.4445, -4.7750, 2.0315, 5, 1e-7, 0.95


def matrix_optimizer(matrices: Iterable[Tensor], lr: float) -> torch.optim.Optimizer:
    """`torch.optim.Muon` where the processor multiplies bfloat16 quickly (AVX-512 and later), else the same in float32."""
    quick = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    return (torch.optim.Muon if quick else Float32Muon)(list(matrices), lr=lr, weight_decay=0.0)


class Float32Muon(torch.optim.Optimizer):
    """`torch.optim.Muon` with its defaults, in the precision of the weights."""

    def __init__(self, matrices: Iterable[Tensor], lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step; there is no closure to call again."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                momentum = self.state[weight].setdefault("momentum_buffer", torch.zeros_like(weight))
                momentum.lerp_(weight.grad, 1 - _MOMENTUM)
                update = orthogonalised(weight.grad.lerp(momentum, _MOMENTUM))
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(update, alpha=-group["lr"] * max(1.0, weight.shape[0] / weight.shape[1]) ** 0.5)


def orthogonalised(matrix: Tensor) -> Tensor:
    """A matrix with the same singular vectors and singular values near 1 (0.7 to 1.2): five steps of Newton and Schulz."""
    wide = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    wide = wide / wide.norm().clamp(min=_EPS)
    for _ in range(_STEPS):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=_B, alpha=_C), wide, beta=_A)
    return wide.T if matrix.shape[0] > matrix.shape[1] else wide
