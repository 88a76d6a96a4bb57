"""Train with prime-rl by a recipe of spanwise, whose credit replaces the advantages of prime-rl's algorithm `grpo`.

    python -m spanwise.engines.prime_rl recipe.yaml TOKENS @ orchestrator.toml    # instead of: orchestrator @ orchestrator.toml

`attach` is the first to import prime_rl. Written for PrimeIntellect-ai/prime-rl 559b4477, not run.
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
    """Load a recipe's rule of credit; refuse rules that compare prompt groups, because prime-rl passes one group at a time."""
    refuse({f"TOKENS is {tokens}; write the usual number of tokens of a rollout, such as 2048.": tokens < 1})
    scheme = scheme_at(recipe, longest=tokens)
    group_limit = "prime-rl passes one group at a time"
    refuse(
        {
            **{
                f"Objective '{objective.name}' has the baseline '{objective.baseline}', which compares groups, but {group_limit}. "
                "Use 'group' or 'outcome'.": objective.baseline in ("batch", "blended")
                for objective in scheme.objectives
            },
            f"per is 'batch', but {group_limit}. Use 'block', 'completion' or a number.": scheme.per == "batch",
            f"Method '{scheme.method}' whitens over the batch, but {group_limit}. Use another method.": (
                {**scheme.entry.options, **scheme.options}.get("whiten")
            ),
            **{
                f"Objective '{objective.name}' has scope: turn, but a trace of prime-rl has one reward for all turns. Remove the "
                "scope.": objective.scope == "turn" and objective.reward == "environment"
                for objective in scheme.objectives
            },
            f"Method '{scheme.method}' compares turns that start from the same state, but a trace of prime-rl names no states. "
            "Use an outcome method, such as 'bae' or 'grpo'.": "anchor_s" in scheme.entry.needs,
            "The recipe has a critic section, but prime-rl has no critic. Remove the section.": "critic"
            in load(recipe).modes,
        }
    )
    scheme.check_forgets("prime-rl")
    scheme.check_loads("prime-rl")
    scheme.check({"group_n", "ids_nt", "mask_nt", "columns", "steps"})
    say(idle_fields(recipe, engine="prime-rl"))
    return scheme


async def credit_traces(traces: Sequence[Any], step: Step, *, tokens: int) -> list[list[float]]:
    """Compute the advantages, times `tokens`, of the sampled tokens of a group's rollouts (traces), in the order of their nodes."""
    nodes_by_trace = [[node for node in trace.nodes if any(node.mask)] for trace in traces]
    fact_columns = columns_of([_facts(trace) for trace in traces])
    trajectories = [
        Trajectory(n, 0, tuple(Turn((), node.token_ids, [int(flag) for flag in node.mask]) for node in nodes), {})
        for n, nodes in enumerate(nodes_by_trace)
    ]
    batch, _ = turn_batch(trajectories, columns=fact_columns)
    if all(len(nodes) == 1 for nodes in nodes_by_trace):
        batch = replace(batch, steps=None)  # each row is a whole rollout, so rows need no step numbers
    scored_batch = await step.read_waiting(batch, asyncio.to_thread)
    step_result = step.finish(scored_batch)
    say(*step_result.warnings)
    assert batch.ids_nt is not None
    advantage_rows = iter((scored_batch.put(step_result.advantages_nt, width=batch.ids_nt.shape[1]) * tokens).tolist())
    return [[adv for node in nodes for adv in compress(next(advantage_rows), node.mask)] for nodes in nodes_by_trace]


def attach(recipe: str, *, tokens: int) -> None:
    """Replace prime-rl's algorithm `grpo` by a recipe's credit, because its configuration accepts no new algorithm."""
    from prime_rl.orchestrator import algo  # pyright: ignore[reportMissingImports]
    from prime_rl.orchestrator.algo.base import iter_trainable_traces  # pyright: ignore[reportMissingImports]

    scheme = check(recipe, tokens=tokens)

    class SpanAlgorithm(algo.Algorithm):
        """An algorithm of prime-rl that assigns the credit of a recipe to the tokens of a group's traces (rollouts)."""

        def __init__(self, config: Any, policy_pool: Any) -> None:
            if config.length_penalty is not None:
                raise RecipeError(
                    "algo.length_penalty changes a reward that spanwise does not use. Remove it, or add an objective with reward "
                    "overlong."
                )
            super().__init__(config, policy_pool)
            model_name = policy_pool.model_name
            tokenizer = AutoTokenizer.from_pretrained(model_name, trust_remote_code=True)
            self.step = Step(scheme, Vocabulary.from_tokenizer(tokenizer, size=model_size(model_name)))

        async def score_group(self, episodes: list[Any]) -> None:
            """Assign an advantage to every sampled token of a group's traces (rollouts)."""
            traces = [trace for _, trace in iter_trainable_traces(episodes)]
            advantages_by_trace = await credit_traces(traces, self.step, tokens=tokens)
            for trace, trace_advantages in zip(traces, advantages_by_trace, strict=True):
                algo.assign_advantages(trace, trace_advantages)

    algo.ALGORITHM_CLASSES["grpo"] = SpanAlgorithm


def _facts(trace: Any) -> dict[str, Any]:
    """Return what reward functions read of a prime-rl trace: the task's data, the trace's info, and its reward."""
    task_data = trace.task.data
    task_facts = task_data if isinstance(task_data, Mapping) else task_data.model_dump()
    return {**task_facts, **(trace.info or {}), "environment": trace.reward}


if __name__ == "__main__":
    attach(sys.argv[1], tokens=int(sys.argv[2]))
    sys.argv[1:3] = []
    from prime_rl.entrypoints.orchestrator import main  # pyright: ignore[reportMissingImports]

    main()
