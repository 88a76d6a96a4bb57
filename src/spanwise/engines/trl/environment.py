"""The rewards of TRL's environments (`get_reward`), which an objective `environment` pays to blocks."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from spanwise.errors import RecipeError
from spanwise.objective import Objective
from spanwise.score.event_loop import run


def taken_from(trainer: Any, objectives: Sequence[Objective]) -> list[Any]:
    """Take the rewards of environments out of the trainer's own list; refuse them if no objective pays them."""
    first = len(objectives)
    names, rewards = trainer.reward_func_names[first:], trainer.reward_funcs[first:]
    if rewards and not any(objective.reward == "environment" for objective in objectives):
        raise RecipeError(
            f"The environment {', '.join(names)} has a get_reward method, and no block is paid by it. Add "
            "Objective('environment', pays=...) with the blocks that it pays."
        )
    for parts in (trainer.reward_funcs, trainer.reward_func_names, trainer.reward_processing_classes):
        del parts[first:]
    return rewards


def environment_rewards(rewards: Sequence[Any], environments: Sequence[Any]) -> list[float | None]:
    """Return the reward that each rollout's environment gives it; None if its environment has none."""
    columns = [reward(environments=environments) for reward in rewards]
    awaited = [run(column) if inspect.iscoroutine(column) else column for column in columns]
    return [next((value for value in row if value is not None), None) for row in zip(*awaited, strict=True)]
