"""Tells the reward workers which tokens the model sampled: verl's agent loop keeps that to itself."""

from __future__ import annotations

from functools import wraps
from typing import Any

#: Name under which an agent loop's outputs carry their response mask to the reward worker.
KEY = "spanwise_mask"


def attach(agent_loop: Any) -> None:
    """Let every output carry its mask while it is scored, and no longer."""
    worker = agent_loop.AgentLoopWorker
    score = worker._compute_score
    if getattr(score, "by_spanwise", False):
        return

    @wraps(score)
    async def with_masks(self: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        for output in outputs:
            output.extra_fields[KEY] = list(output.response_mask)
        try:
            return await score(self, outputs, *args, **kwargs)
        finally:
            for output in outputs:
                output.extra_fields.pop(KEY, None)

    with_masks.by_spanwise = True  # type: ignore[attr-defined]
    worker._compute_score = with_masks
