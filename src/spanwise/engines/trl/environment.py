"""Get the rewards that TRL's environments return from `get_reward`."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from spanwise.errors import RecipeError
from spanwise.objective import Objective
from spanwise.score.event_loop import run


def taken_from(trainer: Any, objectives: Sequence[Objective]) -> list[Any]:
    """Take the environments' reward functions from TRL's trainer. Refuse rewards that no objective uses."""
    objective_count = len(objectives)
    reward_functions = trainer.reward_funcs[objective_count:]
    environment_names = trainer.reward_func_names[objective_count:]
    if reward_functions and not any(objective.reward == "environment" for objective in objectives):
        raise RecipeError(
            f"The environment {', '.join(environment_names)} has a get_reward method, but no objective uses its reward. Add "
            "an objective, with the blocks that the reward pays: Objective('environment', pays=[...])."
        )
    for trainer_list in (trainer.reward_funcs, trainer.reward_func_names, trainer.reward_processing_classes):
        del trainer_list[objective_count:]
    return reward_functions


def environment_rewards(rewards: Sequence[Any], environments: Sequence[Any], loop: Any) -> list[float | None]:
    """Return the reward of each rollout's environment, or None. `loop` is the event loop of the environments' async tools."""
    reward_columns = [reward(environments=environments) for reward in rewards]
    awaited_columns = [run(column, loop) if inspect.iscoroutine(column) else column for column in reward_columns]
    return [next((value for value in row if value is not None), None) for row in zip(*awaited_columns, strict=True)]
