"""Base classes that run a mode, such as laser, inside a trainer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spanwise.disk import write_text
from spanwise.pipeline import Reading
from spanwise.scheme import Scheme


class TrlPart:
    """Base class of objects that run a mode (critic, laser) inside TRL's trainer. It never sets the trainer's attributes."""

    def __init__(self, mode: Any, trainer: Any) -> None:
        self.mode: Any = mode
        self.trainer = trainer

    def gather(self, table_nc: Tensor) -> Tensor:
        """Gather the rows of a table from all processes. Each process must have the same number of rows."""
        gathered_table_nc: Any = self.trainer.accelerator.gather(table_nc.to(self.trainer.accelerator.device))
        return gathered_table_nc.cpu()

    def generating(self) -> AbstractContextManager[Any]:
        """Return the context manager in which TRL generates completions. A mode can watch the sampling there."""
        return nullcontext()

    def forward(self, score: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call TRL's `_get_per_token_logps_and_entropies` with its arguments. A mode may change them."""
        return score(*args, **kwargs)

    def fill(self, read_batch: Any, output: dict[str, Any]) -> tuple[Any, dict[str, float]]:
        """Add the mode's fields to a batch before the credit is computed. Return the batch with metrics."""
        return read_batch, {}  # TRL splits `output` into the micro-batches that `loss` receives

    def loss(self, inputs: Mapping[str, Any]) -> tuple[Tensor | float, dict[str, float]]:
        """Return the mode's term in the loss of a micro-batch, and metrics."""
        return 0.0, {}

    @property
    def waits(self) -> bool:
        """True while the mode, such as a critic, trains alone and the policy stays unchanged."""
        return False

    @property
    def files(self) -> dict[str, str]:
        """The mode's files in checkpoints and run folders. Maps each name to the text."""
        return {}

    def save(self, folder: Path) -> None:
        """Write the mode's files into a checkpoint."""
        for name, file_text in self.files.items():
            write_text(folder / name, file_text)

    def restore(self, folder: Path) -> None:
        """Restore the mode's state from the files of a checkpoint."""


class RowPart(ABC):
    """Runs a mode inside verl or SkyRL. The engine appends the mode's token to each row that ended.

    The appended `token` is outside the loss mask, but inside the forward passes. In its column, the advantage
    holds the weight from `lesson`, and the old log-probability holds the target. The engine's loss
    `spanwise_<mode>_<loss>` removes both with `parted`, and adds the weighted squared error.
    """

    mode: Any
    token: int

    @staticmethod
    @abstractmethod
    def check(mode: Any, engine: str, config: Any) -> None:
        """Raise a `RecipeError` for settings of the engine under which the mode cannot work."""

    @abstractmethod
    def ended(self, ids: Sequence[int], mask: Sequence[Any]) -> bool:
        """Return whether the model ended a row itself. If so, the engine appends the mode's extra token to the row."""

    @abstractmethod
    def fields(self, logp_n: Tensor, number: int) -> dict[str, Tensor]:
        """Compute `Batch` fields from log-probabilities of the token that the mode appends. Batch `number` counts from 0."""

    @abstractmethod
    def lesson(self, reading: Reading, scheme: Scheme, number: int, *, rows: int) -> tuple[Tensor, Tensor, dict[str, float]]:
        """Return (weights, targets, metrics) of a squared error at the mode's extra token. The loss averages `rows` rows."""

    @staticmethod
    @abstractmethod
    def parted(logp_nt: Tensor, old_nt: Tensor, adv_nt: Tensor, mask_nt: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return `old_nt` and `adv_nt` changed so that the mode's token has no policy loss, and the mode's loss by token."""


def token_logp(logp_nt: Tensor, column_n: Tensor) -> Tensor:
    """Return each row's log-probability in the column that `column_n` gives. NaN where `column_n` is -1."""
    logp_n = logp_nt.gather(1, column_n.clamp(min=0)[:, None])[:, 0]
    return torch.where(column_n >= 0, logp_n, torch.nan)


def with_token(value_nt: Tensor, column_n: Tensor, value_n: Tensor) -> Tensor:
    """Return a copy of `value_nt` with `value_n` at column `column_n` of each row. Rows with column -1 stay unchanged."""
    value_nt = value_nt.clone()
    written_row_r = (column_n >= 0).nonzero()[:, 0]
    value_nt[written_row_r, column_n[written_row_r]] = value_n[written_row_r].to(value_nt.dtype)
    return value_nt
