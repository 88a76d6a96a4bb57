"""`CriticConfig`: the value model that methods such as `gae` and `sae` need, and how it is fitted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, get_args

from spanwise.errors import RecipeError, check_number, unknown
from spanwise.mode import Mode
from spanwise.scheme import Scheme

#: The folder of a run and of a checkpoint that holds its critic.
CRITIC = "critic"

Head = Literal["scalar", "hl_gauss"]
Truncated = Literal["terminal", "bootstrap", "mask"]


@dataclass(frozen=True)
class CriticConfig(Mode):
    """A value model beside the policy: where it comes from, how it is fitted on every generation batch, what it stands for.

    Attributes:
        model: a folder or hub name that `AutoModelForTokenClassification` reads, such as a critic that a run saved; None: a copy
            of the policy's trunk with a new head that says 0 (or the middle of `value_range`) everywhere.
        head: "scalar" is fitted by squared error, "hl_gauss" predicts a distribution over `bins` and is fitted by cross entropy.
        bins, value_range: of the categorical head; every return must lie in the range.
        learning_rate, weight_decay, warmup_steps, max_grad_norm: of the critic's own AdamW; constant after a linear warm-up.
        epochs: passes over each generation batch.
        mini_batches: optimizer steps per pass.
        micro_batch: completions per forward pass; None: the trainer's own.
        value_clip: the range around the old value outside of which a value gains nothing (PPO's); None: no clipping.
        gae_lambda_value: lambda of the target; 1: the return itself.
        policy_training_start_step: generation batches on which the critic alone is fitted before the policy trains.
        truncated: what a completion that ran out of tokens is taken for, see `bootstrap_values`.
        gradient_checkpointing: less memory, one more forward pass.
        offload: keep the critic and its optimizer in main memory between fits.

    Raises:
        RecipeError: a value that cannot work, or one that would change nothing.

    Example:
        >>> CriticConfig(learning_rate=1e-3, policy_training_start_step=20).gae_lambda_value
        1.0
        >>> CriticConfig(value_clip=0.2)
        Traceback (most recent call last):
        spanwise.errors.RecipeError: critic.value_clip is 0.2, but every value is fitted once ... set epochs up.
    """

    name: ClassVar[str] = "critic"
    adds: ClassVar[frozenset[str]] = frozenset({"value_nt", "bootstrap_n"})
    parts: ClassVar[Mapping[str, str]] = {"trl": "spanwise.modes.critic.trl:CriticInTrl"}

    model: str | None = None
    head: Head = "scalar"
    bins: int = 51
    value_range: tuple[float, float] = (0.0, 1.0)
    learning_rate: float = 1e-5
    weight_decay: float = 0.0
    warmup_steps: int = 0
    max_grad_norm: float = 1.0
    epochs: int = 1
    mini_batches: int = 1
    micro_batch: int | None = None
    value_clip: float | None = None
    gae_lambda_value: float = 1.0
    policy_training_start_step: int = 0
    truncated: Truncated = "terminal"
    gradient_checkpointing: bool = False
    offload: bool = False

    def __post_init__(self) -> None:
        for name, known in (("head", get_args(Head)), ("truncated", get_args(Truncated))):
            if getattr(self, name) not in known:
                raise RecipeError(unknown(f"critic.{name}", getattr(self, name), known))
        for name, least in (("bins", 2), ("epochs", 1), ("mini_batches", 1), ("warmup_steps", 0)):
            _check_count(name, getattr(self, name), least)
        _check_count("policy_training_start_step", self.policy_training_start_step, 0)
        if self.micro_batch is not None:
            _check_count("micro_batch", self.micro_batch, 1)
        for name in ("learning_rate", "max_grad_norm"):
            check_number(f"critic.{name}", getattr(self, name), above=0.0)
        for name in ("weight_decay", "gae_lambda_value"):
            check_number(f"critic.{name}", getattr(self, name), least=0.0)
        if self.gae_lambda_value > 1:
            raise RecipeError(f"critic.gae_lambda_value is {self.gae_lambda_value}; it must lie between 0 and 1.")
        self._check_range()
        self._check_used()

    def _check_range(self) -> None:
        if not isinstance(self.value_range, list | tuple) or len(self.value_range) != 2:
            raise RecipeError(f"critic.value_range is {self.value_range!r}; write two numbers, such as [0, 1].")
        low, high = self.value_range
        for number in (low, high):
            check_number("critic.value_range", number)
        if not low < high:
            raise RecipeError(f"critic.value_range is [{low}, {high}]; the first number must be the smaller one.")
        object.__setattr__(self, "value_range", (float(low), float(high)))

    def _check_used(self) -> None:
        """Refuse what would change nothing."""
        if self.head == "scalar":
            for name in ("bins", "value_range"):
                if getattr(self, name) != _DEFAULTS[name]:
                    raise RecipeError(
                        f"critic.{name} is {getattr(self, name)}, which the scalar head does not look at; set head to hl_gauss or "
                        "leave it out."
                    )
        if self.value_clip is None:
            return
        check_number("critic.value_clip", self.value_clip, above=0.0)
        if self.head == "hl_gauss":
            raise RecipeError(
                f"critic.value_clip is {self.value_clip}, but a categorical head (hl_gauss) has no clipped loss."
            )
        if self.epochs == 1:
            raise RecipeError(
                f"critic.value_clip is {self.value_clip}, but every value is fitted once and never differs from the old one, so it "
                "would change nothing; set epochs up."
            )

    def check_scheme(self, scheme: Scheme) -> None:
        """Refuse a method that reads no values."""
        if not scheme.value_names:
            raise RecipeError(
                f"Method '{scheme.method}' reads no values, so a critic would change nothing. Leave it out, or use 'gae' or 'sae'."
            )

    @classmethod
    def of(cls, written: Mapping[str, Any]) -> CriticConfig:
        """The configuration that a recipe's `critic:` section says.

        Raises:
            RecipeError: an unknown field, with a suggestion; see `CriticConfig`.

        Example:
            >>> CriticConfig.of({"gae_lambda_policy": 0.95})
            Traceback (most recent call last):
            spanwise.errors.RecipeError: critic.gae_lambda_policy belongs to the method... options: {gae_lambda_policy: 0.95}.
        """
        for name, value in written.items():
            if name in ("gae_lambda_policy", "length_adaptive_alpha"):
                raise RecipeError(
                    f"critic.{name} belongs to the method, which it makes the advantages of: write options: {{{name}: {value}}}."
                )
        critic = super().of(written)
        assert isinstance(critic, CriticConfig), "a mode makes itself"
        return critic


_DEFAULTS: Mapping[str, Any] = {field.name: field.default for field in fields(CriticConfig)}


def _check_count(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise RecipeError(f"critic.{name} is {value!r}; it must be a whole number, at least {least}.")
