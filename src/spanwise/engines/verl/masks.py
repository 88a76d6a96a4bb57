"""Patch verl's agent loop to send response masks to reward workers, and to append LaSeR's reserved token to responses."""

from __future__ import annotations

from typing import Any

from spanwise.engines.verl.plugin import around
from spanwise.engines.verl.settings import parts_in, scheme_in

#: The key under which an agent loop sends its response mask.
KEY = "spanwise_mask"


def attach(agent_loop: Any) -> None:
    """Let verl send response masks to reward workers. Then append the token of a mode such as laser."""

    @around(agent_loop.AgentLoopWorker, "_compute_score")
    async def compute_score(original: Any, self: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if self.config.algorithm.adv_estimator != "spanwise":
            return await original(self, outputs, *args, **kwargs)
        for output in outputs:
            output.extra_fields[KEY] = list(output.response_mask)
        try:
            return await original(self, outputs, *args, **kwargs)
        finally:
            for output in outputs:
                output.extra_fields.pop(KEY, None)

    @around(agent_loop.AgentLoopWorker, "_compute_teacher_logprobs")
    async def append(original: Any, self: Any, output: Any, *args: Any, validate: bool, **kwargs: Any) -> Any:
        teacher_logprobs = await original(self, output, *args, validate=validate, **kwargs)
        if validate or self.config.algorithm.adv_estimator != "spanwise":
            return teacher_logprobs
        if not hasattr(self, KEY):
            setattr(self, KEY, parts_in(self.config, scheme_in(self.config)))
        for part in getattr(self, KEY).values():  # append a mode's reserved token (LaSeR's) before verl stores the output
            if part.ended(output.response_ids, output.response_mask):
                output.response_ids = [*output.response_ids, part.token]
                output.response_mask = [*output.response_mask, 0]
                if output.response_logprobs is not None:
                    output.response_logprobs = [*output.response_logprobs, 0.0]
        return teacher_logprobs
