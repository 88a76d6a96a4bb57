"""What a mode may do in an engine: calls that change nothing, for a part to replace those that it needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from spanwise.batch import Batch
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

    def read(self, batch: Batch, reading: Reading, output: dict[str, Any]) -> tuple[Batch, dict[str, float]]:
        """Once completions are read, before groups are gathered: the batch with what models say of its tokens, and metrics."""
        return batch, {}

    def fill(
        self, batch: Batch, everyone: Reading, whole: Batch, here: slice, output: dict[str, Any]
    ) -> tuple[Batch, Batch]:
        """Before the credit: the batches with the fields that the mode adds.

        `batch` is of this process, which stands at `here` in those of all, `everyone` and `whole`. What is put into TRL's `output`
        comes back in `loss`, cut into micro-batches.
        """
        return batch, whole

    def loss(self, inputs: Mapping[str, Any]) -> tuple[Tensor | float, dict[str, float]]:
        """What is added to the loss of a micro-batch, and what is logged of it."""
        return 0.0, {}

    @property
    def waits(self) -> bool:
        """Whether the policy is not trained yet, while the mode is fitted alone."""
        return False

    def logged(self, step_seconds: float) -> dict[str, float]:
        """What is logged now and then, given the seconds of the training steps since it last was."""
        return {}

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


class VerlPart:
    """A mode in verl's trainers, and in the workers beside them.

    It is made with verl's whole configuration, and with what gives its `HFModelConfig`, whose files are looked at only then.

    Attributes:
        tokens: fields of `Batch` with a number per token that it reads beside the method's.
        policy_loss: a policy loss of verl with what the mode adds to it, registered as `spanwise_<mode>_<loss>` beside every loss
            there is: `policy_loss(agg_loss, loss, **arguments)`; None: the mode adds nothing.
    """

    tokens: ClassVar[frozenset[str]] = frozenset()
    policy_loss: ClassVar[Callable[..., Any] | None] = None

    def __init__(self, mode: Any, config: Any, model: Callable[[], Any]) -> None:
        self.mode: Any = mode

    def append(self, output: Any) -> None:
        """Put what the policy's pass must see behind an `AgentLoopOutput` that is trained on, before it is stored."""

    def places(self, responses: Tensor, masks: Tensor) -> Sequence[int]:
        """The column of what was appended in each row of nested responses, -1 for a row without: `Rows.places`."""
        return ()

    def fields(self, rows: Any, number: int) -> dict[str, Tensor]:
        """The fields of `Batch` that it adds, by row of `engines.verl.carry.Rows`; `number` of the generation batch, from 0."""
        return {}

    def teach(
        self, adv_nt: Tensor, rows: Any, reading: Reading, scheme: Scheme, number: int
    ) -> tuple[Tensor, dict[str, float]]:
        """After the credit: the advantages with what its loss reads at the places, and metrics."""
        return adv_nt, {}

    def rewrite(self, old: list[Tensor], column_n: Sequence[int]) -> list[Tensor]:
        """The old log-probabilities of each row with what its loss reads at the places."""
        return old


class SkyrlPart:
    """A mode in SkyRL's trainer, made with its whole configuration, the policy's tokenizer and how many ids the policy knows."""

    def __init__(self, mode: Any, cfg: Any, tokenizer: Any, size: int | None) -> None:
        self.mode: Any = mode

    @staticmethod
    def check(mode: Any, cfg: Any) -> None:
        """Refuse settings of SkyRL under which the mode would do something else, with a `RecipeError`."""

    def loss_type(self, kind: str) -> str:
        """The name of a policy loss that has what the mode adds to another, in SkyRL's registry and its workers'."""
        return kind

    def append(self, output: Mapping[str, Any]) -> Mapping[str, Any]:
        """A generator's output with what the policy's pass must see behind the rows."""
        return output

    def fields(self, data: Any, number: int) -> dict[str, Tensor]:
        """The fields of `Batch` that it adds; `number` of the generation batch, from 0."""
        return {}

    def teach(self, data: Any, reading: Reading, scheme: Scheme, factor_n: Tensor, number: int) -> dict[str, float]:
        """After the credit: lay out in SkyRL's batch what the mode's loss reads, and say its metrics.

        `factor_n`: what advantages of each row were multiplied by for the loss reduction.
        """
        return {}
