"""Beside verl's agent loop: the reward workers are told which tokens the model sampled, and what modes need is appended."""

from __future__ import annotations

from typing import Any

from spanwise.engines.verl.plugin import around
from spanwise.engines.verl.settings import scheme_in
from spanwise.mode import parts_of

#: Name under which an agent loop's outputs carry their response mask to the reward worker.
KEY = "spanwise_mask"


def attach(agent_loop: Any) -> None:
    """Let every output carry its mask while it is scored, and no longer; then what its modes append."""

    @around(agent_loop.AgentLoopWorker, "_compute_score")
    async def _(stock: Any, self: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        for output in outputs:
            output.extra_fields[KEY] = list(output.response_mask)
        try:
            return await stock(self, outputs, *args, **kwargs)
        finally:
            for output in outputs:
                output.extra_fields.pop(KEY, None)

    @around(agent_loop.AgentLoopWorker, "_compute_teacher_logprobs")
    async def _(stock: Any, self: Any, output: Any, *args: Any, validate: bool, **kwargs: Any) -> Any:
        logprobs = await stock(self, output, *args, validate=validate, **kwargs)
        for part in [] if validate else _parts(self).values():  # what comes next is to store the output
            part.append(output)
        return logprobs


def _parts(worker: Any) -> dict[str, Any]:
    """What the modes of the recipe that a worker's rollouts are trained with do here."""
    if worker.config.algorithm.adv_estimator != "spanwise":
        return {}
    if not hasattr(worker, KEY):
        modes = scheme_in(worker.config).modes
        setattr(worker, KEY, parts_of(modes, "verl", worker.config, lambda: worker.model_config))
    return getattr(worker, KEY)
