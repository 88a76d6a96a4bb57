"""A rollout function for TRL that plays conversations: completions that hold several turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from spanwise.engines.play import Environment, play
from spanwise.step import TURNS


@runtime_checkable
class TurnEnvironment(Environment, Protocol):
    """An environment that says of every turn what credit needs."""

    @property
    def turns(self) -> Sequence[Mapping[str, Any]]:
        """One mapping per turn: its `anchor` (the state it started from), and whatever rewards read of it."""
        ...


def conversations(
    environment: Callable[[Any], TurnEnvironment], *, max_turn_tokens: int
) -> Callable[[list[Any], Any], dict[str, Any]]:
    """A rollout function for TRL that plays one conversation for each prompt.

    Args:
        environment: makes the environment of a prompt, such as the class `spanwise.tasks.agent.Episode`.
        max_turn_tokens: longest turn of the model.

    Returns:
        The `rollout_func` of `SpanGRPOTrainer`.
    """

    def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        environments = [environment(prompt) for prompt in prompts]
        model = trainer.accelerator.unwrap_model(trainer.model)
        options = {"max_turn_tokens": max_turn_tokens, "temperature": trainer.temperature}
        played = play(model, trainer.processing_class, environments, **options)
        return {
            "prompt_ids": [one.prompt_ids for one in played],
            "completion_ids": [one.completion_ids for one in played],
            "logprobs": None,
            "env_mask": [one.env_mask for one in played],
            TURNS: [list(one.turns) for one in environments],
        }

    return rollout
