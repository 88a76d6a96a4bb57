"""`SpanGRPOConfig`: TRL's `GRPOConfig` with the few options that span credit adds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

from trl.trainer.grpo_config import GRPOConfig

from spanwise.engines.trl.fold import check_loss_type
from spanwise.errors import RecipeError

_Class = TypeVar("_Class", bound=type)


def no_type_check(cls: _Class) -> _Class:
    """Leave a class as it is; jaxtyping's import hook goes by the name and adds no run-time check to it.

    TRL's annotations come with its fields and are not strict (`logging_steps=1` for a float). `typing.no_type_check` would
    empty the type hints, which TRL's argument parser reads.
    """
    return cls


def parse_per(per: str | float) -> str | float:
    """Read the `per` option: "block", "completion" or a positive number of tokens.

    Args:
        per: as written in a config file or on a command line.

    Returns:
        The word, or the number as a float.

    Raises:
        RecipeError: it is neither of the words nor a positive finite number.

    Example:
        >>> parse_per("block"), parse_per("512")
        ('block', 512.0)
    """
    if per in ("block", "completion"):
        return str(per)
    try:
        number = float(per)
    except ValueError:
        number = float("nan")
    if not 0 < number < float("inf"):
        raise RecipeError(f"per is '{per}'; write 'block', 'completion' or a positive number of tokens, for example 512.")
    return number


@no_type_check
@dataclass
class SpanGRPOConfig(GRPOConfig):
    """Everything `GRPOConfig` has, with `loss_type="dr_grpo"` as default, and how rewards become credit.

    `scale_rewards` and `multi_objective_aggregation` only shape the scalar advantage that TRL logs: the training signal comes
    from the objectives (`scale`, `weight`) and from `sum_first`.

    Raises:
        RecipeError: a value that cannot work, `reward_weights`, or a `loss_type` whose normaliser cannot be undone.

    Example:
        >>> config = SpanGRPOConfig("out", use_cpu=True, bf16=False, gradient_checkpointing=None, per="512")
        >>> config.loss_type, config.per, config.beta
        ('dr_grpo', '512', 0.0)
    """

    loss_type: str = field(
        default="dr_grpo",
        metadata={"help": "Policy loss of TRL: dr_grpo, grpo, bnpo, dapo, cispo, sapo or luspo; its normaliser is undone."},
    )
    sum_first: bool = field(
        default=False,
        metadata={"help": "Add the rewards up before the baseline and pay every block with the total, as RLCR does."},
    )
    leave_one_out: bool = field(
        default=False,
        metadata={"help": "Leave a completion's own reward out of the baseline it is compared with."},
    )
    min_stratum: int = field(
        default=2,
        metadata={"help": "The fewest completions a baseline may be a mean of; smaller strata get a credit of exactly 0."},
    )
    per: str = field(
        default="block",
        metadata={"help": "What a block's credit is divided by: 'block' or 'completion' (their tokens), or a number."},
    )
    ddof: int = field(
        default=1,
        metadata={"help": "Degrees of freedom taken off the standard deviation of an objective with scale: std."},
    )
    scale_eps: float = field(
        default=1e-6,
        metadata={"help": "Added to the standard deviation of an objective with scale: std."},
    )
    canary: bool = field(
        default=True,
        metadata={"help": "On the first micro-batch, check that TRL weighs every token with its own advantage."},
    )

    def __post_init__(self) -> None:
        self._check_before()
        super().__post_init__()
        check_loss_type(self.loss_type)

    def _check_before(self) -> None:
        # TRL's own message for a group of one is a bare ValueError after the distributed set-up; say it first.
        if self.num_generations is not None and self.num_generations < 2:
            raise RecipeError(
                f"num_generations is {self.num_generations}: a completion that is alone in its group has nobody to be "
                "compared with, so its credit is always 0. Set num_generations to 2 or more."
            )
        self.per = str(self.per)
        parse_per(self.per)
        if self.min_stratum < 2:
            raise RecipeError(f"min_stratum is {self.min_stratum}; a baseline needs at least 2 completions.")
        if self.ddof not in (0, 1):
            raise RecipeError(f"ddof is {self.ddof}; write 0 (population) or 1 (sample).")
        if not self.scale_eps >= 0:
            raise RecipeError(f"scale_eps is {self.scale_eps}; it must not be negative.")


def credit_options(args: GRPOConfig) -> dict[str, Any]:
    """The keyword arguments of `spanwise.credit.assign` that a config holds; a plain `GRPOConfig` gives the defaults.

    Args:
        args: the trainer's config.

    Returns:
        `sum_first`, `leave_one_out`, `min_stratum`, `ddof` and `eps`.

    Example:
        >>> credit_options(GRPOConfig("out", use_cpu=True, bf16=False, gradient_checkpointing=None))["min_stratum"]
        2
    """
    return {
        "sum_first": getattr(args, "sum_first", False),
        "leave_one_out": getattr(args, "leave_one_out", False),
        "min_stratum": getattr(args, "min_stratum", 2),
        "ddof": getattr(args, "ddof", 1),
        "eps": getattr(args, "scale_eps", 1e-6),
    }
