"""Let prime-rl train with a spanwise recipe. The recipe's credit replaces the advantages of prime-rl's `grpo`.

    python -m spanwise.engines.prime_rl recipe.yaml TOKENS @ orchestrator.toml    # instead of: orchestrator @ orchestrator.toml

`attach` is the first to import prime_rl. Written for PrimeIntellect-ai/prime-rl 559b4477, not run.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain, compress, takewhile
from typing import Any

from spanwise.credit import Trajectory, Turn
from spanwise.engines.recipe_run import RecipeRun
from spanwise.engines.rule import PROVIDES, check_rule, compares_groups
from spanwise.engines.shared import columns_of
from spanwise.errors import RecipeError, refuse
from spanwise.recipe import RecipeRule, rule_at
from spanwise.trajectories import turn_batch


def check(recipe: str, *, tokens: int | str) -> RecipeRule:
    """Load a recipe, and refuse it if it compares prompt groups, because prime-rl passes one group at a time."""
    is_token_count = str(tokens).isdecimal() and int(tokens) > 0
    refuse({f"TOKENS is {tokens}. Write the usual number of tokens of a rollout, such as 2048.": not is_token_count})
    rule = rule_at(recipe, longest=int(tokens))
    scheme = rule.scheme
    scheme_faults = {
        **{
            f"Objective '{objective.name}' has the baseline '{objective.baseline}', which compares groups, but prime-rl "
            "passes one group at a time. Use the baseline 'group' or 'outcome'.": objective.baseline in ("batch", "blended")
            for objective in scheme.objectives
        },
        "per: batch needs several groups, but prime-rl passes one group at a time. Use per: block, per: completion or per: "
        "NUMBER.": (scheme.per == "batch"),
        f"Method '{scheme.method}' standardises credit over several groups, but prime-rl passes one group at a time. Use "
        "another method.": (compares_groups(scheme)),
        **{
            f"Objective '{objective.name}' has scope: turn, but a trace of prime-rl has one reward for all turns. Remove the "
            "scope.": objective.scope == "turn" and objective.reward == "environment"
            for objective in scheme.objectives
        },
        f"Method '{scheme.method}' compares turns that start from the same state, but prime-rl records no states. "
        "Use a method that compares whole rollouts, such as 'bae' or 'grpo'.": "anchor_s" in scheme.entry.needs,
    }
    return check_rule(recipe, rule, engine="prime-rl", provides=set(PROVIDES) - {"logp_nt"}, faults=scheme_faults)


async def credit_traces(traces: Sequence[Any], run: RecipeRun, *, tokens: int) -> list[list[float]]:
    """Return each rollout's token advantages times `tokens`, the usual number of tokens of a rollout."""
    nodes_by_trace = [[node for node in trace.nodes if any(node.mask)] for trace in traces]
    reward_columns = columns_of([_reward_inputs(trace, run.tokenizer) for trace in traces])
    trajectories = [
        Trajectory(n, 0, tuple(Turn((), node.token_ids, [int(flag) for flag in node.mask]) for node in nodes), {})
        for n, nodes in enumerate(nodes_by_trace)
    ]
    batch, _ = turn_batch(trajectories, columns=reward_columns)
    if all(len(nodes) == 1 for nodes in nodes_by_trace):
        batch = replace(batch, steps=None)  # each row is a whole rollout, so rows need no step numbers
    adv_nt, _ = run.finish(await run.step.read_waiting(batch, asyncio.to_thread), whole_batch=False)
    advantage_rows = iter((adv_nt * tokens).tolist())
    return [[adv for node in nodes for adv in compress(next(advantage_rows), node.mask)] for nodes in nodes_by_trace]


def attach(recipe: str, *, tokens: int | str) -> None:
    """Put a recipe's credit in place of `grpo`, because prime-rl accepts no new algorithm."""
    rule = check(recipe, tokens=tokens)
    from prime_rl.orchestrator import algo  # pyright: ignore[reportMissingImports]
    from prime_rl.orchestrator.algo.base import iter_trainable_traces  # pyright: ignore[reportMissingImports]

    @cache  # cached, so that all environments share one run
    def run_of(model_name: str) -> RecipeRun:
        return RecipeRun.of(rule, model=model_name)

    class SpanAlgorithm(algo.Algorithm):
        """A prime-rl algorithm that credits the tokens of traces (rollouts) by a recipe."""

        def __init__(self, config: Any, policy_pool: Any) -> None:
            if config.length_penalty is not None:
                raise RecipeError(
                    "algo.length_penalty changes a reward that spanwise does not use. Remove this setting. To penalise long "
                    "completions, add an objective with reward: overlong to the recipe."
                )
            super().__init__(config, policy_pool)
            self.run = run_of(policy_pool.model_name)

        async def score_group(self, episodes: list[Any]) -> None:
            """Assign an advantage to every sampled token of a group's traces (rollouts)."""
            traces = [trace for _, trace in iter_trainable_traces(episodes)]
            advantages_by_trace = await credit_traces(traces, self.run, tokens=int(tokens))
            for trace, trace_advantages in zip(traces, advantages_by_trace, strict=True):
                algo.assign_advantages(trace, trace_advantages)

    algo.ALGORITHM_CLASSES["grpo"] = SpanAlgorithm


def _reward_inputs(trace: Any, tokenizer: Any) -> dict[str, Any]:
    """Return the data of a prime-rl trace for reward functions."""
    task_data = trace.task.data
    task_fields = task_data if isinstance(task_data, Mapping) else task_data.model_dump()
    prompt_nodes = takewhile(lambda node: not any(node.mask), trace.nodes)
    prompt_text = tokenizer.decode(list(chain.from_iterable(node.token_ids for node in prompt_nodes)))
    return {**task_fields, **(trace.info or {}), "environment": trace.reward, "prompts": prompt_text}


def main(arguments: Sequence[str]) -> None:
    """Run prime-rl's orchestrator with the credit of a recipe. Arguments: RECIPE, TOKENS, and those of the orchestrator."""
    usage = (
        "Run python -m spanwise.engines.prime_rl recipe.yaml TOKENS @ orchestrator.toml. For TOKENS, write the mean number of "
        "tokens of a rollout. prime-rl reads everything after TOKENS, here '@ orchestrator.toml'."
    )
    refuse({usage: len(arguments) < 2})
    attach(arguments[0], tokens=arguments[1])
    sys.argv[1:] = arguments[2:]
    from prime_rl.entrypoints.orchestrator import main as run_orchestrator  # pyright: ignore[reportMissingImports]

    run_orchestrator()


if __name__ == "__main__":
    main(sys.argv[1:])
