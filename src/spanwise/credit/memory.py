"""Fresh memory for (N, T) results."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_NUMPY = {torch.float16: np.float16, torch.float32: np.float32, torch.float64: np.float64}


def fresh(shape: tuple[int, ...] | torch.Size, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised memory, on the CPU through NumPy: it asks Linux for huge pages where an array is large.

    Half of the time of an estimator over a large batch is the first touch of its result, page by page; with huge pages that part
    shrinks to a tenth.
    """
    if device.type == "cpu" and dtype in _NUMPY:
        return torch.from_numpy(np.empty(tuple(shape), dtype=_NUMPY[dtype]))
    return torch.empty(shape, dtype=dtype, device=device)
