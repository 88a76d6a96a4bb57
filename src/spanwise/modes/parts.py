"""What a mode may do in an engine: calls that change nothing, for a part to replace those that it needs."""

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
    """A mode in TRL's trainer, which is complete: what it holds is read, nothing of it is set."""

    def __init__(self, mode: Any, trainer: Any) -> None:
        self.mode: Any = mode
        self.trainer = trainer

    def gather(self, table_nc: Tensor) -> Tensor:
        """What all processes have of a table with as many rows in each."""
        gathered: Any = self.trainer.accelerator.gather(table_nc.to(self.trainer.accelerator.device))
        return gathered.cpu()

    def generating(self) -> AbstractContextManager[Any]:
        """Around what generates completions."""
        return nullcontext()

    def forward(self, score: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Around a pass over prompts and completions: `score` is TRL's `_get_per_token_logps_and_entropies`, with its arguments."""
        return score(*args, **kwargs)

    def fill(self, own: Any, output: dict[str, Any]) -> tuple[Any, dict[str, float]]:
        """Before the credit: what was read, a `step.ReadBatch`, with the fields of `Batch` that the mode adds; and metrics.

        What is put into TRL's `output` comes back in `loss`, cut into micro-batches.
        """
        return own, {}

    def loss(self, inputs: Mapping[str, Any]) -> tuple[Tensor | float, dict[str, float]]:
        """What is added to the loss of a micro-batch, and what is logged of it."""
        return 0.0, {}

    @property
    def waits(self) -> bool:
        """Whether the policy is not trained yet, while the mode is fitted alone."""
        return False

    @property
    def files(self) -> dict[str, str]:
        """What checkpoints and the folder of a run keep of it: name -> text."""
        return {}

    def save(self, folder: Path) -> None:
        """Write its files into a checkpoint."""
        for name, text in self.files.items():
            write_text(folder / name, text)

    def restore(self, folder: Path) -> None:
        """Go on with the files of a checkpoint."""


class RowPart(ABC):
    """A mode in a trainer that knows rows alone (verl, SkyRL): all that the policy's passes must see is one more token.

    The engine puts `token` behind each row that `ended`, outside the loss mask, so that every pass gives its log-probability. There
    the advantage is a weight and the old log-probability a target (`lesson`); a policy loss that the engine registers as
    `spanwise_<mode>_<loss>` takes both out again (`parted`) and adds what they teach.

    Made with the policy's tokenizer, how many ids it knows, its generation configuration and the trainer's temperature.
    """

    mode: Any
    token: int

    @staticmethod
    @abstractmethod
    def check(mode: Any, engine: str, config: Any) -> None:
        """Refuse settings of an engine under which the mode would do something else, with a `RecipeError`."""

    @abstractmethod
    def ended(self, ids: Sequence[int], mask: Sequence[Any]) -> bool:
        """Whether the token belongs behind a row."""

    @abstractmethod
    def fields(self, logp_n: Tensor, number: int) -> dict[str, Tensor]:
        """The fields of `Batch` that it adds, given the token's log-probability in each row (NaN: none); batches count from 0."""

    @abstractmethod
    def lesson(self, reading: Reading, scheme: Scheme, number: int, *, rows: int) -> tuple[Tensor, Tensor, dict[str, float]]:
        """After the credit: a weight and a target for each row, and metrics; the trainer's mean is over so many `rows`."""

    @staticmethod
    @abstractmethod
    def parted(logp_nt: Tensor, old_nt: Tensor, adv_nt: Tensor, mask_nt: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Old log-probabilities and advantages without the lesson, and its error at each token."""


def token_logp(logp_nt: Tensor, column_n: Tensor) -> Tensor:
    """The log-probability at a column of each row, NaN where that is -1.

    >>> token_logp(torch.tensor([[-1.0, -2.0], [-3.0, -4.0]]), torch.tensor([1, -1]))
    tensor([-2., nan])
    """
    found_n = logp_nt.gather(1, column_n.clamp(min=0)[:, None])[:, 0]
    return torch.where(column_n >= 0, found_n, torch.nan)


def with_token(value_nt: Tensor, column_n: Tensor, value_n: Tensor) -> Tensor:
    """A table with a value at a column of each row, where that is not -1.

    >>> with_token(torch.zeros(2, 2), torch.tensor([1, -1]), torch.tensor([3.0, 4.0])).tolist()
    [[0.0, 3.0], [0.0, 0.0]]
    """
    value_nt, at = value_nt.clone(), (column_n >= 0).nonzero()[:, 0]
    value_nt[at, column_n[at]] = value_n[at].to(value_nt.dtype)
    return value_nt
