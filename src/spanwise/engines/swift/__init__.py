"""Train with ms-swift (`swift rlhf --rlhf_type grpo`) by a recipe of spanwise; written for and run with ms-swift 4.6.0."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spanwise.engines.swift import settings

__all__ = ["install"]


def install(recipe: str | Path) -> None:
    """Let `swift rlhf --rlhf_type grpo` train by a recipe; call it in a file for `--external_plugins`.

    Args:
        recipe: a YAML file with a layout.

    Example:
        In `plugin.py`, for `swift rlhf --rlhf_type grpo --external_plugins plugin.py --reward_funcs spanwise ...`::

            from spanwise.engines.swift import install
            install("recipe.yaml")
    """
    from swift.rewards import orms  # pyright: ignore[reportMissingImports]
    from swift.trainers import TrainerFactory  # pyright: ignore[reportMissingImports]

    settings.installed_recipe = Path(recipe).absolute()
    orms["spanwise"] = NoReward
    TrainerFactory.TRAINER_MAPPING["grpo"] = f"{__name__}.trainer.SwiftSpanTrainer"


class NoReward:
    """The reward function `spanwise` for runs whose rewards are all in the recipe, as ms-swift needs at least one function."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Accept and ignore the arguments that ms-swift gives to every reward function."""

    def __call__(self, completions: Sequence[str], **columns: Any) -> list[float]:
        """Return reward 0 for each completion."""
        return [0.0] * len(completions)
