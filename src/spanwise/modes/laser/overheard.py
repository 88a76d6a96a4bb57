"""What a policy says of the reserved token while it generates, so that no pass of its own is needed for it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor


class Overheard:
    """The log-probability of a token after the end of each row, taken from the steps of `model.generate` that feed that end.

    A row that ends while others go on is fed once more, with its end as the last token; the logits of that step are what is asked
    for. Rows that end in the very last step are not fed again and stay NaN.

    Attributes:
        logp_n: of the rows of the last call of `generate`; None before it.
        calls: of `generate`, so far.
    """

    def __init__(self, token: int, ends: Collection[int], *, temperature: float) -> None:
        self.token, self.temperature = token, temperature
        self.ends = torch.tensor(list(ends))
        self.logp_n: Float[Tensor, " n"] | None = None
        self.calls = 0
        self._open_n = torch.zeros(0, dtype=torch.bool)

    def forget(self) -> None:
        """Know of no call."""
        self.logp_n, self.calls = None, 0

    @contextmanager
    def listening(self, model: Any) -> Iterator[None]:
        """Listen to the forward passes of a causal language model."""
        self.forget()
        handle = model.register_forward_hook(self._hear, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    def _hear(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        fed = kwargs.get("input_ids", args[0] if args else None)
        logits = getattr(output, "logits", None)
        if fed is None or logits is None:
            return
        if fed.shape[1] != 1 or self.logp_n is None or len(fed) != len(self.logp_n):  # the prompts
            self.calls += 1
            self.logp_n = torch.full((len(fed),), torch.nan)
            self._open_n = torch.ones(len(fed), dtype=torch.bool)
            return
        row_r = (torch.isin(fed[:, 0].cpu(), self.ends) & self._open_n).nonzero()[:, 0]
        if len(row_r):
            scaled_rv = logits[row_r.to(logits.device), -1].float() / self.temperature
            self.logp_n[row_r] = self.temperature * scaled_rv.log_softmax(dim=-1)[:, self.token].cpu()
            self._open_n[row_r] = False
