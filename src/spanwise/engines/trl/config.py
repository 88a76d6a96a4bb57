"""`SpanGRPOConfig`: TRL's `GRPOConfig` with the few options that span credit adds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

from trl.trainer.grpo_config import GRPOConfig

from spanwise.engines.keep import check_keeping
from spanwise.engines.trl.checks import check_args
from spanwise.errors import RecipeError

_Class = TypeVar("_Class", bound=type)


def no_type_check(cls: _Class) -> _Class:
    """Leave a class as it is; jaxtyping's import hook goes by the name and adds no run-time check to it.

    TRL's annotations come with its fields and are not strict (`logging_steps=1` for a float). `typing.no_type_check` would
    empty the type hints, which TRL's argument parser reads.
    """
    return cls


@no_type_check
@dataclass
class SpanGRPOConfig(GRPOConfig):
    """Everything `GRPOConfig` has, with `loss_type="dr_grpo"` as default; how rewards become credit is the trainer's scheme.

    `scale_rewards` and `multi_objective_aggregation` shape a scalar advantage of TRL's that nothing is trained on.

    Raises:
        RecipeError: a value that cannot work, `reward_weights`, a `loss_type` whose normaliser cannot be undone, or `report`
            without the packages that draw it.

    Example:
        >>> config = SpanGRPOConfig("out", use_cpu=True, bf16=False, gradient_checkpointing=None)
        >>> config.loss_type, config.beta
        ('dr_grpo', 0.0)
    """

    loss_type: str = field(
        default="dr_grpo",
        metadata={
            "help": "Policy loss: dr_grpo, grpo, bnpo, dapo, cispo, sapo or luspo, its normaliser undone; dppo_tv or dppo_kl."
        },
    )
    canary: bool = field(
        default=True,
        metadata={"help": "On the first micro-batch, check that TRL weighs every token with its own advantage."},
    )
    keep_rollouts: int = field(
        default=0,
        metadata={
            "help": "Write a run folder into output_dir: recipe.yaml, metrics.jsonl and the rollouts of every k-th generation "
            "batch. `spanwise report`, `why` and `credit` read it. 0: no rollouts."
        },
    )
    report: bool = field(
        default=False,
        metadata={"help": "Write the run folder and, when training ends or is interrupted, its report.html."},
    )

    def __post_init__(self) -> None:
        # TRL's own message for a group of one is a bare ValueError after the distributed set-up; say it first.
        if self.num_generations is not None and self.num_generations < 2:
            raise RecipeError(
                f"num_generations is {self.num_generations}: a completion that is alone in its group has nobody to be "
                "compared with, so its credit is always 0. Set num_generations to 2 or more."
            )
        try:
            super().__post_init__()
        except ValueError as error:  # a sentence of TRL's or transformers', which the command line prints as ours
            raise RecipeError(str(error)) from error
        check_args(self)
        check_keeping(self.keep_rollouts, self.report)
