"""`spanwise fidelity`: sample again at fixed prefixes of a checkpoint, and hold baselines and token estimators against it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from spanwise.commands.fidelity.tables import (
    difference_table,
    fidelity_tables,
    fixed_point_table,
    reference_words,
    token_tables,
)
from spanwise.commands.report.report import report_folder
from spanwise.commands.shared.files import FIDELITY, without_nan
from spanwise.commands.shared.fitted import say
from spanwise.commands.shared.task import model_and_task
from spanwise.disk import write_text
from spanwise.errors import DataError, RecipeError, unknown
from spanwise.fidelity import Fidelity, Rerolls, SaeSegments, TokenFidelity, Trajectories, measure_fidelity, token_fidelity
from spanwise.fidelity.critics import CRITIC_BATCH, CRITIC_STEPS, fitted_critics, own_critic, own_critic_folder, values
from spanwise.fidelity.fixed_point_simulated import fixed_point_rows
from spanwise.fidelity.page import difference_rows, fidelity_rows, token_rows
from spanwise.fidelity.rerolls import MOST, Roller, collect_last_blocks, collect_tokens, states_confidence
from spanwise.fidelity.tokens import TOKEN_KINDS
from spanwise.modes.critic.value_model import ABOUT
from spanwise.recipe import Recipe, answer_layout, scheme_of
from spanwise.tasks import task_layout

GROUP_SIZES = (4, 8, 16, 32)
#: Re-rolls of a Monte Carlo critic that somebody might pay for.
FEW = 4
#: The critics there can be: the run's own, one fitted here for a number of steps, means of further re-rolls.
CRITICS = ("own", "fitted", "mc")
#: What `fidelity.json` holds of what was measured, where nothing was.
_NOTHING: Mapping[str, Any] = {
    "counts": {}, "figures": [], "differences": [], "points": [], "tokens": [], "options": {},
}  # fmt: skip


def show(
    checkpoint: Path,
    recipe: Recipe,
    *,
    output: str | Path,
    console: Console,
    tokens: Mapping[str, Any] | None = None,
    given: Mapping[str, Any] | None = None,
    **options: Any,
) -> None:
    """Print the tables of a model folder, write `fidelity.json` and the report.

    `options`: prompts, samples, rerolls and seed; `tokens`: the options of `--tokens`; `given`: the file and fields that the recipe
    came from.
    """
    measured: dict[str, Any] = {
        "options": {**options, **({} if tokens is None else {"tokens": True, **tokens}), **(given or {})}
    }
    if tokens is not None:
        measured |= show_tokens(*_tokens(checkpoint, recipe, console, options, tokens), console=console)
    if tokens is not None and not states_confidence(answer_layout(recipe, task_layout(recipe))):
        say(console, "The last block states no confidence, so there is nothing else to compare.")
    else:
        measured |= show_baselines(checkpoint, recipe, console, **options)
    write_fidelity(output, source=str(checkpoint), recipe=recipe.model_dump(mode="json"), **measured)
    say(console, f"Report: {report_folder(output)}")


def _tokens(
    checkpoint: Path, recipe: Recipe, console: Console, options: Mapping[str, Any], asked: Mapping[str, Any]
) -> tuple[TokenFidelity, SaeSegments | None]:
    last, critics, seed = asked["critic_steps"], asked["critics"], options["seed"]
    segments = SaeSegments() if asked["reference"] == "segment" else None
    trajectories, critic_values = rolled_tokens(
        checkpoint, recipe, prompts=asked["token_prompts"], rerolls=options["rerolls"], seed=seed, console=console,
        critics=critics and critics.split(","), steps=sorted({last, *(step for step in CRITIC_STEPS if step < last)}),
    )  # fmt: skip
    return token_fidelity(trajectories, critic_values, segments=segments, seed=seed), segments


def show_tokens(fidelity: TokenFidelity, segments: SaeSegments | None = None, *, console: Console) -> dict[str, Any]:
    """Print correlations by critic, and how far SAE is ahead of GAE and of GRPO; what is written of them."""
    tokens, decisions = (fidelity.count(kind) for kind in TOKEN_KINDS)
    console.print(
        f"{tokens} tokens of the first blocks of {fidelity.counts['completions']} completions of {fidelity.counts['prompts']} "
        f"prompts; {decisions} of the tokens are decisions (p < .97). {reference_words(segments)}",
        highlight=False,
    )
    say(console, *token_tables(fidelity))
    return {"tokens": token_rows(fidelity), "counts": fidelity.counts}


def show_baselines(
    checkpoint: Path, recipe: Recipe, console: Console, *, prompts: int, samples: int, rerolls: int, seed: int
) -> dict[str, Any]:
    """Print how close the baselines come to Monte Carlo, and the q* table; what is written of them."""
    roller = roller_of(checkpoint, recipe, console)
    rows = roller.task.evaluation.select(range(min(prompts, len(roller.task.evaluation))))
    rolled = collect_last_blocks(roller, rows, samples=samples, rerolls=rerolls, seed=seed)
    group_sizes = [size for size in GROUP_SIZES if size <= samples] or [samples]
    fidelity = measure_fidelity(rolled, group_sizes=group_sizes, rule=recipe.rule, seed=seed)
    points = fixed_point_rows(rule=recipe.rule, seed=seed)
    measured = written_baselines(fidelity, rolled)
    counts = measured["counts"]
    console.print(
        f"{counts['completions']} completions of {counts['prompts']} prompts, {counts['rerolls']} re-rolls of "
        f"{counts['prefixes']} distinct prefixes; {fidelity.share:.1%} of the completions could be used.",
        highlight=False,
    )
    say(console, *fidelity_tables(fidelity), difference_table(fidelity))
    say(console, fixed_point_table(points), keep=2)
    return {**measured, "points": points}


def roller_of(folder: Path, recipe: Recipe, console: Console | None = None) -> Roller:
    """What samples a saved model on the task of a recipe."""
    torch.set_num_threads(recipe.threads)
    model, tokenizer, task = model_and_task(folder, recipe, console or Console())
    return Roller(model, tokenizer, task, recipe.temperature, recipe.max_completion_length or task.max_completion_length)


def rolled_tokens(
    model_folder: Path,
    recipe: Recipe,
    *,
    prompts: int = 48,
    samples: int = 4,
    rerolls: int = 32,
    most: int = MOST,
    critics: Sequence[str] | None = None,
    steps: Sequence[int] = CRITIC_STEPS,
    seed: int = 0,
    console: Console | None = None,
) -> tuple[Trajectories, dict[str, torch.Tensor]]:
    """Completions of held-out prompts with Monte Carlo values, and what critics say before each of their tokens.

    The critics are some of `CRITICS`, by default all there are: the run's own where one was saved with the model ("own"); one
    critic after different numbers of fitting steps on training prompts ("80 steps"); and the means of a second set of re-rolls,
    all of them and few of them ("MC 32", as good as critics get, and "MC 4").
    """
    if rerolls < 2:
        raise DataError(f"Monte Carlo values know their noise from 2 re-rolls on; {rerolls} were asked for.")
    place = own_critic_folder(model_folder)
    kinds = critics or [kind for kind in CRITICS if kind != "own" or place]
    for kind in kinds:
        if kind not in CRITICS:
            raise RecipeError(unknown("kind of critic", kind, CRITICS))
    if "own" in kinds and place is None:
        raise DataError(
            f"There is no critic with the model in '{model_folder}' (a folder 'critic' with {ABOUT}). Leave own out, or look at a "
            "run whose recipe has a critic."
        )
    # As many training prompts as the fitted critic reads completions, so that it has no prompt to learn by heart.
    fitted = {"steps": max(steps, default=1), "prompts": CRITIC_BATCH} if "fitted" in kinds else {}
    roller = roller_of(model_folder, recipe.model_copy(update=fitted), console)
    task = roller.task
    order = torch.randperm(len(task.evaluation), generator=torch.Generator().manual_seed(seed)).tolist()
    blocks, trajectories, again_ntm = collect_tokens(
        roller, task.evaluation.select(order[:prompts]), samples=samples, rerolls=rerolls, sets=2 if "mc" in kinds else 1,
        most=most, seed=seed,
    )  # fmt: skip
    critic_values: dict[str, torch.Tensor] = {}
    if "own" in kinds and place is not None:
        objectives = [objective.name for objective in scheme_of(recipe, task.layout, roller.limit).objectives]
        critic, stream = own_critic(place, roller.tokenizer, objectives)
        critic_values["own"] = values(critic, blocks, stream=stream)
    if "fitted" in kinds:
        for step, critic in fitted_critics(roller, task.train, steps=steps, seed=seed + 1):
            critic_values[f"{step} steps"] = values(critic, blocks)
    if "mc" in kinds:
        critic_values |= {f"MC {few}": again_ntm[..., :few].nanmean(dim=2) for few in sorted({min(FEW, rerolls), rerolls})}
    return trajectories, critic_values


def written_baselines(fidelity: Fidelity, rolled: Rerolls) -> dict[str, Any]:
    """What `fidelity.json` holds of the baselines."""
    counts = {
        "completions": rolled.prefix_xs.numel(), "prompts": len(rolled.prefix_xs), "rerolls": rolled.again_dm.numel(),
        "prefixes": len(rolled.again_dm), "share": fidelity.share,
    }  # fmt: skip
    return {"counts": counts, "figures": fidelity_rows(fidelity), "differences": difference_rows(fidelity)}


def write_fidelity(folder: str | Path, *, source: str, recipe: Mapping[str, Any], **measured: Any) -> None:
    """Write `fidelity.json`: what `fidelity_report` takes, and the options, which the report prints."""
    data = {"source": source, "recipe": dict(recipe), **_NOTHING, **measured}
    write_text(Path(folder) / FIDELITY, json.dumps(without_nan(data), indent=1) + "\n")
