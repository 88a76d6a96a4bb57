"""The part of a mode in an engine: calls that change nothing, of which a part replaces those that it needs."""

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
    """A mode in TRL's trainer, which is complete by then: a part reads the trainer's attributes and sets none."""

    def __init__(self, mode: Any, trainer: Any) -> None:
        self.mode: Any = mode
        self.trainer = trainer

    def gather(self, table_nc: Tensor) -> Tensor:
        """Gather a table from all processes, with the same number of rows in each."""
        gathered: Any = self.trainer.accelerator.gather(table_nc.to(self.trainer.accelerator.device))
        return gathered.cpu()

    def generating(self) -> AbstractContextManager[Any]:
        """Wrap the generation of completions."""
        return nullcontext()

    def forward(self, score: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Wrap a pass over prompts and completions: `score` is TRL's `_get_per_token_logps_and_entropies`, with its arguments."""
        return score(*args, **kwargs)

    def fill(self, own: Any, output: dict[str, Any]) -> tuple[Any, dict[str, float]]:
        """Add the mode's fields to a `step.ReadBatch` before the credit, and return it with metrics."""
        return own, {}  # fields added to TRL's `output` come back in `loss`, cut into micro-batches

    def loss(self, inputs: Mapping[str, Any]) -> tuple[Tensor | float, dict[str, float]]:
        """Return the mode's term in the loss of a micro-batch, and metrics of it."""
        return 0.0, {}

    @property
    def waits(self) -> bool:
        """True while the mode is fitted alone and the policy is not trained yet."""
        return False

    @property
    def files(self) -> dict[str, str]:
        """The files of the mode in checkpoints and in the folder of a run: name -> text."""
        return {}

    def save(self, folder: Path) -> None:
        """Write the mode's files into a checkpoint."""
        for name, text in self.files.items():
            write_text(folder / name, text)

    def restore(self, folder: Path) -> None:
        """Restore the mode from the files of a checkpoint."""


class RowPart(ABC):
    """A mode in a trainer that knows rows alone (verl, SkyRL): the policy's passes see one more token in each row."""

    # The engine puts `token` behind each row that `ended`, outside the loss mask, so that every pass gives its log-probability.
    # There, the advantage holds a weight and the old log-probability a target (`lesson`); a policy loss that the engine registers
    # as `spanwise_<mode>_<loss>` takes both out again (`parted`) and adds the squared error.
    mode: Any
    token: int

    @staticmethod
    @abstractmethod
    def check(mode: Any, engine: str, config: Any) -> None:
        """Refuse settings of an engine under which the mode would not work, with a `RecipeError`."""

    @abstractmethod
    def ended(self, ids: Sequence[int], mask: Sequence[Any]) -> bool:
        """Return whether the token belongs behind a row."""

    @abstractmethod
    def fields(self, logp_n: Tensor, number: int) -> dict[str, Tensor]:
        """Return the mode's fields of `Batch`, given the token's log-probability in each row (NaN: none); batches count from 0."""

    @abstractmethod
    def lesson(self, reading: Reading, scheme: Scheme, number: int, *, rows: int) -> tuple[Tensor, Tensor, dict[str, float]]:
        """Return, after the credit, a weight and a target for each row, and metrics; the trainer's mean is over `rows` rows."""

    @staticmethod
    @abstractmethod
    def parted(logp_nt: Tensor, old_nt: Tensor, adv_nt: Tensor, mask_nt: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return old log-probabilities and advantages without the mode's weights and targets, and its error at each token."""


def token_logp(logp_nt: Tensor, column_n: Tensor) -> Tensor:
    """Return the log-probability at a column of each row, NaN if the column is -1."""
    logp_n = logp_nt.gather(1, column_n.clamp(min=0)[:, None])[:, 0]
    return torch.where(column_n >= 0, logp_n, torch.nan)


def with_token(value_nt: Tensor, column_n: Tensor, value_n: Tensor) -> Tensor:
    """Return a table with a value set at a column of each row, except where the column is -1."""
    value_nt, at = value_nt.clone(), (column_n >= 0).nonzero()[:, 0]
    value_nt[at, column_n[at]] = value_n[at].to(value_nt.dtype)
    return value_nt
