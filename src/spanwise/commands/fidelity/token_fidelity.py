"""`spanwise fidelity --tokens`: GAE, SAE and GRPO's broadcast against Monte Carlo at every token of a checkpoint's first block."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
from rich.console import Console
from rich.table import Table

from spanwise.commands.fidelity.fidelity import decimals, plain_table
from spanwise.commands.fidelity.token_critics import (
    CRITIC_BATCH,
    CRITIC_STEPS,
    fitted_critics,
    own_critic,
    own_critic_folder,
    values,
)
from spanwise.commands.fidelity.token_rollouts import MOST, Roller, collect_tokens
from spanwise.commands.shared.fitted import Fitted
from spanwise.commands.shared.task import model_and_task
from spanwise.engines.value_model import ABOUT
from spanwise.errors import DataError, RecipeError, unknown
from spanwise.measure.intervals import Interval
from spanwise.measure.token_fidelity import TOKEN_KINDS, TokenFidelity, token_fidelity
from spanwise.measure.token_reference import Segments
from spanwise.measure.trajectories import Trajectories
from spanwise.recipe import Recipe, scheme_of

#: The setting of SAE that is held against the best GAE; not chosen on the samples it is judged by.
SAE = "SAE start 0.5, 0"
GROUP_MEAN = "GRPO c - group mean"
#: Re-rolls of a Monte Carlo critic that somebody might pay for.
FEW = 4
#: The critics there can be: the run's own, one fitted here for a number of steps, means of further re-rolls.
CRITICS = ("own", "fitted", "mc")


class TokenOptions(TypedDict, total=False):
    """What is sampled and which critics are asked: keywords of `rolled_tokens`.

    Attributes:
        prompts: held-out prompts, drawn by seed; 48.
        samples: completions of each; 4.
        rerolls: fresh continuations of each distinct prefix, in each set of them; 32.
        most: tokens of each completion that are re-rolled, see `token_rollouts.picked`.
        critics: some of `CRITICS`; default: all there are. Without "mc" there is one set of re-rolls instead of two.
        steps: how long the fitted critic is fitted.
        seed: of prompts, sampling and the bootstrap; 0.
        console: for the progress of a warm start.
    """

    prompts: int
    samples: int
    rerolls: int
    most: int
    critics: Sequence[str] | None
    steps: Sequence[int]
    seed: int
    console: Console | None


def token_fidelity_folder(
    model_folder: Path, recipe: Recipe, *, segments: Segments | None = None, **options: Unpack[TokenOptions]
) -> TokenFidelity:
    """Token fidelity on a saved model; `recipe` says the task and the temperature.

    Args:
        model_folder: model and tokenizer, perhaps with a critic: of a checkpoint, or of a run that has ended.
        recipe: of the run, or any for the task.
        segments: see `measure.token_fidelity`.
        options: see `rolled_tokens`.

    Raises:
        DataError: see `rolled_tokens`, or nothing to compare.
    """
    trajectories, critics = rolled_tokens(model_folder, recipe, **options)
    return token_fidelity(trajectories, critics, segments=segments, seed=options.get("seed", 0))


def rolled_tokens(
    model_folder: Path, recipe: Recipe, **options: Unpack[TokenOptions]
) -> tuple[Trajectories, dict[str, torch.Tensor]]:
    """Completions with Monte Carlo values, and what critics say before each of their tokens.

    The critics are the run's own where one was saved with the model ("own"); one critic after different numbers of fitting steps
    on training prompts ("80 steps"); and the means of a second set of re-rolls, all of them and few of them ("MC 32", as good as
    critics get, and "MC 4").

    Args:
        model_folder, recipe: see `token_fidelity_folder`.
        options: see `TokenOptions`.

    Raises:
        DataError: the folder holds no readable model, fewer than 2 re-rolls, a critic is asked for by name that is not there, or
            means of re-rolls where completions are so long that a sample of their tokens is re-rolled.
    """
    rerolls, seed, steps = options.get("rerolls", 32), options.get("seed", 0), options.get("steps", CRITIC_STEPS)
    if rerolls < 2:
        raise DataError(f"Monte Carlo values know their noise from 2 re-rolls on; {rerolls} were asked for.")
    place = own_critic_folder(model_folder)
    kinds = options.get("critics") or [kind for kind in CRITICS if kind != "own" or place]
    _check_kinds(kinds, model_folder, place)
    torch.set_num_threads(recipe.threads)
    asked = recipe
    if "fitted" in kinds:  # as many training prompts as it reads completions, so that it has no prompt to learn by heart
        recipe = recipe.model_copy(update={"steps": max(steps, default=1), "prompts": CRITIC_BATCH})
    model, tokenizer, task = model_and_task(model_folder, recipe, options.get("console") or Console())
    limit = recipe.max_completion_length or task.max_completion_length
    roller = Roller(model, tokenizer, task, recipe.temperature, limit)
    order = torch.randperm(len(task.evaluation), generator=torch.Generator().manual_seed(seed)).tolist()
    blocks, trajectories, again_ntm = collect_tokens(
        roller, task.evaluation.select(order[: options.get("prompts", 48)]), samples=options.get("samples", 4),
        rerolls=rerolls, sets=2 if "mc" in kinds else 1, most=options.get("most", MOST), seed=seed,
    )  # fmt: skip
    critics: dict[str, torch.Tensor] = {}
    if "own" in kinds and place is not None:
        scheme = scheme_of(asked, task.layout, limit)
        critic, stream = own_critic(place, tokenizer, [objective.name for objective in scheme.objectives])
        critics["own"] = values(critic, blocks, stream=stream)
    if "fitted" in kinds:
        for step, critic in fitted_critics(roller, task.train, steps=steps, seed=seed + 1):
            critics[f"{step} steps"] = values(critic, blocks)
    if "mc" in kinds:
        critics |= {f"MC {few}": again_ntm[..., :few].nanmean(dim=2) for few in sorted({min(FEW, rerolls), rerolls})}
    return trajectories, critics


def _check_kinds(kinds: Sequence[str], model_folder: Path, place: Path | None) -> None:
    for kind in kinds:
        if kind not in CRITICS:
            raise RecipeError(unknown("kind of critic", kind, CRITICS))
    if "own" in kinds and place is None:
        raise DataError(
            f"There is no critic with the model in '{model_folder}' (a folder 'critic' with {ABOUT}). Leave own out, or look at a "
            "run whose recipe has a critic."
        )


def token_rows(found: TokenFidelity) -> list[dict[str, Any]]:
    """Correlations with Monte Carlo over the decision tokens, as `report.fidelity_report` takes them."""
    rows = []
    for critic in found.critics:
        for name in found.estimators:
            i = found.interval(critic, name, "correlation", kind="decision")
            rows.append({"critic": critic, "estimator": name, "value": i.value, "low": i.low, "high": i.high})
    return rows


def show_tokens(found: TokenFidelity, *, segments: Segments | None = None, console: Console | None = None) -> None:
    """Print correlations by critic, and how far SAE is ahead of GAE and of GRPO."""
    console = console or Console()
    prompts = len(found.prompt_n.unique())
    tokens, decisions = (found.count(kind) for kind in TOKEN_KINDS)
    console.print(
        f"{tokens} tokens of the first blocks of {len(found.prompt_n)} completions of {prompts} prompts; {decisions} of the tokens "
        f"are decisions (p < .97). {reference_words(segments)}",
        highlight=False,
    )
    for kind in TOKEN_KINDS:
        console.print(Fitted(correlation_table(found, kind=kind)))
    for kind in TOKEN_KINDS:
        for other in ("GAE", GROUP_MEAN):
            console.print(Fitted(lead_table(found, kind=kind, other=other)))


def reference_words(segments: Segments | None) -> str:
    """A sentence on what the advantages are held against."""
    if segments is None:
        return "The reference is the change of the Monte Carlo value over each token."
    return (
        f"The reference is the change over each segment ({segments.boundary}, p < {segments.threshold:g}), broadcast to its "
        "tokens; it favours the SAE of these segments."
    )


def correlation_table(found: TokenFidelity, *, kind: str = "all") -> Table:
    """Correlation with Monte Carlo, a row per estimator and a column per critic; first the error of the critic's own values."""
    ceiling = found.interval(found.critics[0], found.estimators[0], "ceiling", kind=kind)
    title = f"{kind} tokens: correlation (of the exact advantage: {decimals(ceiling.value)})"
    table = plain_table(title, "", *found.critics)
    own = (found.critic_interval(critic, "rmse", kind=kind).value for critic in found.critics)
    table.add_row("RMSE of the values", *map(decimals, own), end_section=True)
    for name in found.estimators:
        values = (found.interval(critic, name, "correlation", kind=kind).value for critic in found.critics)
        table.add_row(name, *map(decimals, values))
    return table


def lead_table(found: TokenFidelity, *, kind: str = "all", one: str = SAE, other: str = "GAE") -> Table:
    """How far one SAE, and the best SAE, are ahead in correlation of the best of others, or of one other; paired over prompts."""
    single = other in found.estimators
    title = f"{kind} tokens: lead over {'' if single else 'the best '}{other} in correlation (95 % over prompts)"
    table = plain_table(title, "critic", *([] if single else [f"best {other}"]), short(one, "SAE"), "best SAE", "its lead")
    for critic in found.critics:
        best_sae = found.best(critic, "SAE", kind=kind)
        best = [] if single else [short(found.best(critic, other, kind=kind), other)]
        leads = (signed(found.lead(critic, name, other, kind=kind)) for name in (one, "SAE"))
        table.add_row(critic, *best, next(leads), short(best_sae, "SAE"), next(leads))
    return table


def short(name: str, family: str) -> str:
    """An estimator's name without its family and the zeros before its points.

    >>> short("SAE start 0.5, 0.95", "SAE")
    'start .5, .95'
    """
    return name.removeprefix(f"{family} ").replace("0.", ".")


def signed(interval: Interval) -> str:
    """A difference with its interval, as in `+.046 (+.032,+.059)`."""
    value, low, high = (f"{number:+.3f}".replace("0.", ".") for number in (interval.value, interval.low, interval.high))
    return f"{value} ({low},{high})"
