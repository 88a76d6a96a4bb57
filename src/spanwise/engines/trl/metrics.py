"""What the credit of one generation batch looks like, as numbers for the trainer's log."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from jaxtyping import Bool, Int
from torch import Tensor

from spanwise.types import Credit


def credit_metrics(
    credit: Credit,
    present_nk: Bool[Tensor, "n k"],
    fault_n: Int[Tensor, " n"],
    *,
    block_names: Sequence[str],
    objective_names: Sequence[str],
) -> dict[str, float]:
    """Summarise the credit of a batch of all ranks.

    `credit/<block>/mean_abs`: mean |credit| of the completions that have the block; `credit/<block>/zero_frac`: the share of
    them whose credit is exactly 0; `credit/<objective>/singletons` and `credit/<objective>/reward_absent`: shares of all
    completions; `credit/malformed`: share with any fault in its tags; `credit/stop/mean_abs`: mean |credit| of the decision
    to stop; `credit/no_signal`: 1 if every credit is 0, so its mean over a log interval is a share of batches.

    Args:
        credit: of all N completions.
        present_nk: which blocks each has.
        fault_n: `Fault` bits.
        block_names: K names.
        objective_names: M names.

    Returns:
        name -> value; NaN for a block that no completion has.

    Example:
        >>> import torch
        >>> credit = Credit(torch.tensor([[1.0], [0.0]]).double(), torch.zeros(2).double(), torch.tensor([1]), torch.tensor([0]))
        >>> metrics = credit_metrics(credit, torch.ones(2, 1).bool(), torch.tensor([0, 4]),
        ...                          block_names=("all",), objective_names=("correct",))
        >>> metrics["credit/all/mean_abs"], metrics["credit/all/zero_frac"], metrics["credit/correct/singletons"]
        (0.5, 0.5, 0.5)
    """
    completions = max(len(fault_n), 1)
    metrics = {
        "credit/malformed": float((fault_n != 0).double().mean()),
        "credit/stop/mean_abs": float(credit.stop_n.abs().mean()),
        "credit/no_signal": float(not has_signal(credit)),
    }
    for k, block in enumerate(block_names):
        here_n = credit.block_nk[present_nk[:, k], k]
        metrics[f"credit/{block}/mean_abs"] = float(here_n.abs().mean())
        metrics[f"credit/{block}/zero_frac"] = float((here_n == 0).double().mean())
    for m, objective in enumerate(objective_names):
        metrics[f"credit/{objective}/singletons"] = float(credit.singleton_m[m]) / completions
        metrics[f"credit/{objective}/reward_absent"] = float(credit.absent_m[m]) / completions
    return metrics


def has_signal(credit: Credit) -> bool:
    """Whether any block or any decision to stop has a credit other than 0."""
    return bool((credit.block_nk != 0).any() or (credit.stop_n != 0).any())


class MetricBuffer:
    """Values seen since the last log, kept apart for training and evaluation; a log line holds their means.

    Example:
        >>> buffer = MetricBuffer()
        >>> buffer.add("eval", {"credit/malformed": 0.5}); buffer.add("eval", {"credit/malformed": 0.0})
        >>> buffer.flush("eval"), buffer.flush("eval")
        ({'eval_credit/malformed': 0.25}, {})
    """

    def __init__(self) -> None:
        self._values: dict[str, dict[str, list[float]]] = {"train": defaultdict(list), "eval": defaultdict(list)}

    def add(self, mode: str, metrics: Mapping[str, float]) -> None:
        """Remember one batch."""
        for name, value in metrics.items():
            self._values[mode][name].append(value)

    def flush(self, mode: str) -> dict[str, float | None]:
        """The mean of each metric, NaN left out (None if nothing is left), and forget them."""
        prefix = "eval_" if mode == "eval" else ""
        means: dict[str, float | None] = {}
        for name, values in self._values[mode].items():
            valid = [value for value in values if not math.isnan(value)]
            means[prefix + name] = sum(valid) / len(valid) if valid else None
        self._values[mode].clear()
        return means
