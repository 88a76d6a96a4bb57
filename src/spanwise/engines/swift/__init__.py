"""Let ms-swift (`swift rlhf --rlhf_type grpo`) train with a recipe. Written for and run with 4.6.0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spanwise.engines.rule import check_rule, read_rule
from spanwise.engines.shared import kl_fault
from spanwise.errors import unknown
from spanwise.recipe import RecipeRule

__all__ = ["install"]

LOSS_TYPES = ("bnpo", "cispo", "dapo", "dr_grpo", "grpo", "sapo")
RATIO_LEVELS = ("token", "sequence_token")
NO_TEACHER = "ms-swift's teacher would change the advantages. Leave teacher_model and the column teacher_prompt out."
#: Maps ms-swift options to pairs: the option's required value, and a sentence that gives the reason.
_FIXED: dict[str, tuple[Any, str]] = {
    "kl_in_reward": (False, "ms-swift would subtract the KL term from its own reward, which spanwise does not use."),
    "dynamic_sample": (False, "ms-swift would choose groups by its own rewards, not by the recipe's."),
    "off_policy_sequence_mask_delta": (None, "ms-swift would mask whole completions by their mean advantage."),
    "advantage_reweight": (None, "ms-swift would let a teacher change the advantages."),
    "sdar_loss_coef": (0.0, "The option sdar_loss_coef needs a teacher model, which spanwise does not support."),
    "use_liger_kernel": (False, "Liger's loss takes one advantage per completion, not one per token."),
    "padding_free": (False, "ms-swift would pack several completions into one row, but spanwise needs one row for each."),
    "sequence_parallel_size": (1, "ms-swift would spread the tokens of a completion over several processes."),
}
#: The path of the recipe, which `install` sets.
installed_recipe = Path("recipe.yaml")


def install(recipe: str | Path) -> None:
    """Let `swift rlhf --rlhf_type grpo` train by a recipe with named blocks. Call it in a file for `--external_plugins`.

    Example:
        In `plugin.py`, for `swift rlhf --rlhf_type grpo --external_plugins plugin.py --reward_funcs spanwise ...`::

            from spanwise.engines.swift import install
            install("recipe.yaml")
    """
    global installed_recipe
    from swift.rewards import orms  # pyright: ignore[reportMissingImports]
    from swift.trainers import TrainerFactory  # pyright: ignore[reportMissingImports]

    installed_recipe = Path(recipe).absolute()
    orms["spanwise"] = NoReward
    TrainerFactory.TRAINER_MAPPING["grpo"] = f"{__name__}.trainer.SwiftSpanTrainer"


class NoReward:
    """The reward function `spanwise`, which returns 0. ms-swift needs one, even if the recipe has all rewards."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Ignore the arguments that ms-swift gives to every reward function."""

    def __call__(self, completions: Sequence[str], **columns: Any) -> list[float]:
        """Return reward 0 for each completion."""
        return [0.0] * len(completions)


def check(recipe: Path, settings: Mapping[str, Any], *, longest: int) -> RecipeRule:
    """Load a recipe, and refuse settings of ms-swift that do not work with it."""
    loss_type = settings["loss_type"]
    ratio_level = settings["importance_sampling_level"]
    faults = {
        f"Under ms-swift: {unknown('loss_type', loss_type, LOSS_TYPES)}": loss_type not in LOSS_TYPES,
        f"Under ms-swift: {unknown('importance_sampling_level', ratio_level, RATIO_LEVELS)}": ratio_level
        not in RATIO_LEVELS,
        **kl_fault(settings["beta"], loss_type, engine="ms-swift"),
        NO_TEACHER: settings["teacher"],
        "The rollout server returns more samples for some prompts than for others, as happens with several turns. Use one "
        "turn per rollout, or train with SkyRL.": settings["dynamic_num_samples"],
    }
    rule, _ = read_rule(recipe, engine="ms-swift", longest=longest, get_setting=settings.get, faults=faults, fixed=_FIXED)
    return check_rule(recipe, rule, engine="ms-swift")
