"""The settings of the value model (critic) of `gae` and `sae`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from spanwise.batch import Batch
from spanwise.credit import value_target
from spanwise.errors import RecipeError, check_number, refuse
from spanwise.losses import critic_error
from spanwise.metric import Alarm, Metric
from spanwise.mode import Chart, Mode, Page, setting
from spanwise.pipeline import Reading, streams
from spanwise.registry import register
from spanwise.scheme import Scheme

#: The name of the critic's folder in a run folder or checkpoint.
CRITIC = "critic"

#: Warns if the critic explains nothing at the end of a run.
_EXPLAINED = Metric(
    "critic/[value/]explained_variance",
    at_end=Alarm(
        "at most",
        0.0,
        "The critic{of} knows nothing: its explained variance is {value:.2f} at the end (mean of {over}).",
        unknown="The critic{of} cannot be judged: no batch has an explained variance, because all returns are equal.",
    ),
)
#: The critic's section on the report page of a run.
_PAGE = Page(
    "Critic",
    "GAE and SAE credit a token with the critic's value after the token minus the value before it. So both methods are "
    "only as good as the critic's values.",
    "How well does the critic predict rewards?",
    (
        Chart(
            "Explained variance",
            {"explained_variance": "critic"},
            "share of the variance",
            "This number says how well the critic predicts what tokens earn (their returns): 1 is perfect, 0 is as good as "
            "a constant, and a negative number is worse than a constant. It is computed over the tokens of a batch, as "
            "1 - variance of (earned - expected) / variance of earned.",
            floor=-1.0,  # a new critic's explained variance of -1,000 would flatten the curve
        ),
        Chart(
            "Error of the critic",
            {"error_mean": "of a completion's mean", "error_within": "within a completion"},
            "squared error",
            "The curve 'of a completion's mean' is the squared error of a completion's mean value. The curve 'within a completion' "
            "is the rest of the squared error. A small rest does not show a good critic. For example, all reward may come at the "
            "end of completions. Then a critic with one value for all tokens of a completion has no error within the completion.",
        ),
        Chart(
            "Expected and earned",
            {"value_mean": "expected", "target_mean": "earned"},
            "mean",
            "The curves show what the critic expected of a batch's tokens, and what these tokens earned. Both are means over "
            "the batch. While the curves differ, the critic lags behind the policy.",
        ),
    ),
    headline=("explained_variance", "explained variance", "the critic knows nothing"),
)


@register("critic", kind="mode")
@dataclass(frozen=True)
class CriticConfig(Mode):
    """The settings of a value model (critic) beside the policy.

    Attributes:
        model: a folder or hub name that `AutoModelForTokenClassification` reads, such as a critic that a run saved; None: a copy
            of the policy's trunk with a new head that returns 0 (or the middle of `value_range`) everywhere.
        head: "scalar" is fitted by squared error; "hl_gauss" predicts a distribution over `bins` and is fitted by cross entropy.
        bins, value_range: of the categorical head. Every return must lie in the range. If lambda is below 1, targets are cut to it.
        learning_rate, weight_decay, warmup_steps, max_grad_norm: of the critic's own AdamW; constant after a linear warm-up.
        epochs: passes over each generation batch.
        mini_batches: optimizer steps per pass.
        micro_batch: completions per forward pass; None: as many as in the trainer's.
        value_clip: PPO's clip range around the old value; None: no clipping.
        gae_lambda_value: lambda of the target; 1: the return itself.
        policy_training_start_step: generation batches on which only the critic trains, before the policy does.
        truncated: how a completion that ran out of tokens is treated, see `bootstrap_values`.
        gradient_checkpointing: saves memory at the cost of one more forward pass.
        offload: keep the critic and its optimizer in main memory between fits.

    Raises:
        RecipeError: a value cannot work, or would change nothing.

    Example:
        >>> CriticConfig(learning_rate=1e-3, policy_training_start_step=20).gae_lambda_value
        1.0
        >>> CriticConfig(value_clip=0.2)
        Traceback (most recent call last):
        spanwise.errors.RecipeError: critic.value_clip is 0.2, but critic.epochs is 1, ... remove value_clip.
    """

    about: ClassVar[str] = (
        "the critic, a value model that methods such as gae and sae need; its fields are those of `CriticConfig`, such as model"
    )
    metrics: ClassVar[tuple[Metric, ...]] = (_EXPLAINED,)
    page: ClassVar[Page | None] = _PAGE
    elsewhere: ClassVar[tuple[str, ...]] = ("gae_lambda_value", "policy_training_start_step", "truncated")
    in_scheme: ClassVar[bool] = False
    adds: ClassVar[frozenset[str]] = frozenset({"value_nt", "bootstrap_n"})
    parts: ClassVar[Mapping[str, str]] = {"trl": "spanwise.modes.critic.critic:CriticInTrl"}

    model: str | None = None
    head: Literal["scalar", "hl_gauss"] = "scalar"
    bins: int = setting(51, least=2.0)
    value_range: tuple[float, float] = (0.0, 1.0)
    learning_rate: float = setting(1e-5, above=0.0)
    weight_decay: float = setting(0.0, least=0.0)
    warmup_steps: int = setting(0, least=0.0)
    max_grad_norm: float = setting(1.0, above=0.0)
    epochs: int = setting(1, least=1.0)
    mini_batches: int = setting(1, least=1.0)
    micro_batch: int | None = setting(None, least=1.0)
    value_clip: float | None = setting(None, above=0.0)
    gae_lambda_value: float = setting(1.0, least=0.0, most=1.0)
    policy_training_start_step: int = setting(0, least=0.0)
    truncated: Literal["terminal", "bootstrap", "mask"] = "terminal"
    gradient_checkpointing: bool = False
    offload: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.value_range, list | tuple) or len(self.value_range) != 2:
            raise RecipeError(f"critic.value_range is {self.value_range!r}; write two numbers, such as [0, 1].")
        value_min, value_max = self.value_range
        for value_bound in (value_min, value_max):
            check_number("critic.value_range", value_bound)
        if not value_min < value_max:
            raise RecipeError(f"critic.value_range is [{value_min}, {value_max}]; the first number must be the smaller one.")
        object.__setattr__(self, "value_range", (float(value_min), float(value_max)))
        for name in ("bins", "value_range"):
            if self.head == "scalar" and getattr(self, name) != getattr(CriticConfig, name):
                raise RecipeError(
                    f"critic.{name} is {getattr(self, name)}, but the scalar head has no bins. Set head to hl_gauss, or remove "
                    f"critic.{name}."
                )
        refuse(
            {
                f"critic.value_clip is {self.value_clip}, but the categorical head hl_gauss has no clipped loss. Remove "
                "value_clip.": self.value_clip and self.head == "hl_gauss",
                f"critic.value_clip is {self.value_clip}, but critic.epochs is 1, and value_clip only limits epochs after "
                "the first. Raise critic.epochs, or remove value_clip.": self.value_clip and self.epochs == 1,
            }
        )

    def check_scheme(self, scheme: Scheme) -> None:
        """Refuse a scheme whose method, such as `grpo`, does not use a critic's values."""
        if not scheme.value_names:
            raise RecipeError(
                f"Method '{scheme.method}' needs no critic. Leave the critic out, or use method 'gae' or 'sae'."
            )

    def check_steps(self, steps: int) -> None:
        """Warn if a run ends before the policy trains."""
        if 0 < self.policy_training_start_step >= steps:
            warning_sentence = (
                "This run would train only the critic. The policy starts after "
                f"{self.policy_training_start_step} generation batches, but the run has {steps}. To train the policy, too, "
                "lower critic.policy_training_start_step or train longer."
            )
            warnings.warn(warning_sentence, UserWarning, stacklevel=2)

    @classmethod
    def of(cls, section: Mapping[str, Any]) -> Any:
        """Build the critic's settings from the section `critic:` of a recipe."""
        for name, value in section.items():
            if name in ("gae_lambda_policy", "length_adaptive_alpha"):
                raise RecipeError(
                    f"critic.{name} is an option of the method, not of the critic: write options: {{{name}: {value}}}."
                )
        return super().of(section)


def critic_faults(
    critic_config: CriticConfig, scheme: Scheme, *, engine: str, has_critic: Any, option: str, instead: str = ""
) -> dict[str, Any]:
    """Check that an engine has the critic that the recipe needs. Return {error message: a true value if it applies}."""
    value_names = scheme.value_names
    setting_name = option.split("=")[0]
    return {
        f"Method '{scheme.method}' needs the values of {engine}'s critic. Add {option}, or use a method that compares completions, "
        f"such as 'bae' or 'grpo'.": value_names and not has_critic,
        f"{setting_name} asks for a critic, but method '{scheme.method}' needs no critic. Remove {setting_name}, or "
        "use method 'gae' or 'sae'.": has_critic and not value_names,
        f"The recipe has a critic section, but method '{scheme.method}' needs no critic. Remove the section, or "
        "use method 'gae' or 'sae'.": critic_config != CriticConfig() and not value_names,
        f"The method needs a value for each objective ({', '.join(value_names)}), but {engine}'s critic gives each token only "
        f"one value. Write values: shared in the recipe.": len(value_names) > 1,
        f"critic.truncated is '{critic_config.truncated}', but {engine} can only treat a cut-off completion like one that "
        f"ended. Remove critic.truncated.{instead}": (critic_config.truncated != "terminal"),
    }


def returns(reading: Reading, batch: Batch, scheme: Scheme, *, lam: float) -> tuple[Float[Tensor, "n t"], dict[str, float]]:
    """Compute the targets and errors of a critic in verl or SkyRL. It has one value per token."""
    (target_inputs,) = streams(reading, batch, scheme).inputs(batch.value_nt)
    value_nt, mask_nt = target_inputs["value_nt"], target_inputs["mask_nt"]
    target_nt = value_target(**target_inputs, gamma=scheme.gamma, lam=lam)
    error_metrics = critic_error(value_nt, target_nt, mask_nt)
    return torch.where(mask_nt, target_nt, value_nt), {f"critic/{name}": number for name, number in error_metrics.items()}
