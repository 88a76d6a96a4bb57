"""Credit for every span in prime-rl, whose traces hold one advantage per sampled token; in the place of its algorithm `grpo`.

    python -m spanwise.engines.prime_rl recipe.yaml TOKENS @ orchestrator.toml    # instead of: orchestrator @ orchestrator.toml

Nothing of prime_rl is imported before `attach`. Read at PrimeIntellect-ai/prime-rl 559b4477, not run.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import compress
from typing import Any

from transformers import AutoTokenizer

from spanwise.credit import Trajectory, Turn
from spanwise.engines.shared import columns_of, idle_fields, model_size, say
from spanwise.errors import RecipeError, refuse
from spanwise.recipe import load, scheme_at
from spanwise.scheme import Scheme
from spanwise.segment import Vocabulary
from spanwise.step import Step
from spanwise.trajectories import turn_batch


def check(recipe: str, *, tokens: int) -> Scheme:
    """Load the scheme of a recipe; refuse what needs more than the one group that prime-rl shows an algorithm."""
    refuse({f"TOKENS is {tokens}; write the usual number of tokens of a rollout, such as 2048.": tokens < 1})
    scheme = scheme_at(recipe, longest=tokens)
    wide = next((one for one in scheme.objectives if one.baseline in ("batch", "blended")), None)
    paid = next((one for one in scheme.objectives if one.scope == "turn" and one.reward == "environment"), None)
    whole = "prime-rl shows an algorithm one group at a time"
    refuse(
        {
            f"Objective '{wide and wide.name}' has the baseline '{wide and wide.baseline}', which compares groups, and {whole}. "
            "Use 'group' or 'outcome'.": wide,
            f"per is 'batch', and {whole}. Use 'block', 'completion' or a number.": scheme.per == "batch",
            f"Method '{scheme.method}' whitens over the batch, and {whole}. Use another method.": (
                {**scheme.entry.options, **scheme.options}.get("whiten")
            ),
            f"Objective '{paid and paid.name}' has scope: turn, and a trace of prime-rl has one reward. Leave it out.": paid,
            f"Method '{scheme.method}' compares turns by the state that each starts from, and a trace names none. Use an outcome "
            "method, such as 'bae' or 'grpo'.": "anchor_s" in scheme.entry.needs,
            "The recipe has a critic section, and prime-rl has no critic; leave it out.": "critic" in load(recipe).modes,
        }
    )
    scheme.check_forgets("prime-rl")
    scheme.check_loads("prime-rl")
    scheme.check({"group_n", "ids_nt", "mask_nt", "columns", "steps"})
    say(idle_fields(recipe, engine="prime-rl"))
    return scheme


async def credit_traces(traces: Sequence[Any], step: Step, *, tokens: int) -> list[list[float]]:
    """Return the advantages of a group's traces: of each sampled token, in the order of the graph's nodes, times `tokens`."""
    nodes = [[node for node in trace.nodes if any(node.mask)] for trace in traces]
    columns = columns_of([_facts(trace) for trace in traces])
    turns = [tuple(Turn((), node.token_ids, [int(flag) for flag in node.mask]) for node in own) for own in nodes]
    trajectories = [Trajectory(n, 0, own, {}) for n, own in enumerate(turns)]
    batch, _ = turn_batch(trajectories, columns=columns)
    if all(len(own) == 1 for own in nodes):
        batch = replace(batch, steps=None)  # rows are whole rollouts, so methods over tokens can run
    own = await step.read_waiting(batch, asyncio.to_thread)
    result = step.finish(own)
    say(*result.warnings)
    assert batch.ids_nt is not None
    rows = iter((own.put(result.advantages_nt, width=batch.ids_nt.shape[1]) * tokens).tolist())
    return [[value for node in of_trace for value in compress(next(rows), node.mask)] for of_trace in nodes]


def attach(recipe: str, *, tokens: int) -> None:
    """Let prime-rl's algorithm `grpo` pay by a recipe, because its configuration takes no other name."""
    from prime_rl.orchestrator import algo  # pyright: ignore[reportMissingImports]
    from prime_rl.orchestrator.algo.base import iter_trainable_traces  # pyright: ignore[reportMissingImports]

    scheme = check(recipe, tokens=tokens)

    class SpanAlgorithm(algo.Algorithm):
        """The credit of a recipe for the traces of a group."""

        def __init__(self, config: Any, policy_pool: Any) -> None:
            if config.length_penalty is not None:
                raise RecipeError(
                    "algo.length_penalty changes a reward that pays no block; leave it out, or use reward overlong."
                )
            super().__init__(config, policy_pool)
            name = policy_pool.model_name
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=True)
            self.step = Step(scheme, Vocabulary.from_tokenizer(tokenizer, size=model_size(name)))

        async def score_group(self, episodes: list[Any]) -> None:
            """Assign the credit of every sampled token."""
            traces = [trace for _, trace in iter_trainable_traces(episodes)]
            credit = await credit_traces(traces, self.step, tokens=tokens)
            for trace, values in zip(traces, credit, strict=True):
                algo.assign_advantages(trace, values)

    algo.ALGORITHM_CLASSES["grpo"] = SpanAlgorithm


def _facts(trace: Any) -> dict[str, Any]:
    """Return what rewards may read of a trace: the task's data, its info, and the environment's reward."""
    data = trace.task.data
    facts = data if isinstance(data, Mapping) else data.model_dump()
    return {**facts, **(trace.info or {}), "environment": trace.reward}


if __name__ == "__main__":
    attach(sys.argv[1], tokens=int(sys.argv[2]))
    sys.argv[1:3] = []
    from prime_rl.entrypoints.orchestrator import main  # pyright: ignore[reportMissingImports]

    main()
