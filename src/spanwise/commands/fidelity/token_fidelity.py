"""`spanwise fidelity --tokens`: GAE, SAE and GRPO's broadcast against Monte Carlo at every token of a checkpoint's first block."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from spanwise.commands.fidelity.fidelity import decimals, plain_table
from spanwise.commands.fidelity.token_rollouts import CRITIC_BATCH, CRITIC_STEPS, Roller, collect_tokens, fitted_critics
from spanwise.commands.shared.task import model_and_task
from spanwise.errors import DataError
from spanwise.measure.intervals import Interval
from spanwise.measure.token_fidelity import TOKEN_KINDS, TokenFidelity, token_fidelity
from spanwise.recipe import Recipe

#: The setting of SAE that is held against the best GAE; not chosen on the samples it is judged by.
SAE = "SAE start 0.5, 0"
GROUP_MEAN = "GRPO c - group mean"
#: Re-rolls of a Monte Carlo critic that somebody might pay for.
FEW = 4


def token_fidelity_folder(
    model_folder: Path,
    recipe: Recipe,
    *,
    prompts: int = 48,
    samples: int = 4,
    rerolls: int = 32,
    steps: Sequence[int] = CRITIC_STEPS,
    seed: int = 0,
    console: Console | None = None,
) -> TokenFidelity:
    """Token fidelity on a saved model; `recipe` says the task and the temperature.

    The critics are one critic after different numbers of fitting steps on training prompts ("80 steps"), and the means of a
    second set of re-rolls, all of them and few of them ("MC 32", as good as critics get, and "MC 4").

    Args:
        model_folder: model and tokenizer.
        recipe: of the run, or any for the task.
        prompts: held-out prompts, drawn by seed.
        samples: completions of each.
        rerolls: fresh continuations of each distinct prefix, in each of the two sets.
        steps: how long the critic is fitted.
        seed: of prompts, sampling and the bootstrap.
        console: for the progress of a warm start.

    Raises:
        DataError: the folder holds no readable model, fewer than 2 re-rolls, or nothing to compare.
    """
    if rerolls < 2:
        raise DataError(f"Monte Carlo values know their noise from 2 re-rolls on; {rerolls} were asked for.")
    torch.set_num_threads(recipe.threads)
    # As many training prompts as the critic reads completions, so that it has no prompt to learn by heart.
    fresh = recipe.model_copy(update={"steps": max(steps, default=1), "prompts": CRITIC_BATCH})
    model, tokenizer, task = model_and_task(model_folder, fresh, console or Console())
    limit = recipe.max_completion_length or task.max_completion_length
    roller = Roller(model, tokenizer, task, recipe.temperature, limit)
    order = torch.randperm(len(task.evaluation), generator=torch.Generator().manual_seed(seed)).tolist()
    blocks, trajectories, again_ntm = collect_tokens(
        roller, task.evaluation.select(order[:prompts]), samples=samples, rerolls=rerolls, seed=seed
    )
    critics: dict[str, torch.Tensor] = {}
    for step, critic in fitted_critics(roller, task.train, steps=steps, seed=seed + 1):
        with torch.no_grad():
            critics[f"{step} steps"] = critic(blocks).cpu().double()
    critics |= {f"MC {few}": again_ntm[..., :few].nanmean(dim=2) for few in sorted({min(FEW, rerolls), rerolls})}
    return token_fidelity(trajectories, critics, seed=seed)


def token_rows(found: TokenFidelity) -> list[dict[str, Any]]:
    """Correlations with Monte Carlo over the decision tokens, as `report.fidelity_report` takes them."""
    rows = []
    for critic in found.critics:
        for name in found.estimators:
            i = found.interval(critic, name, "correlation", kind="decision")
            rows.append({"critic": critic, "estimator": name, "value": i.value, "low": i.low, "high": i.high})
    return rows


def show_tokens(found: TokenFidelity, *, console: Console | None = None) -> None:
    """Print correlations by critic, and how far SAE is ahead of GAE."""
    console = console or Console()
    prompts = len(found.prompt_n.unique())
    tokens, decisions = (found.count(kind) for kind in TOKEN_KINDS)
    console.print(
        f"{tokens} tokens of the first blocks of {len(found.prompt_n)} completions of {prompts} prompts; {decisions} of the tokens "
        "are decisions (p < .97).",
        highlight=False,
    )
    for kind in TOKEN_KINDS:
        console.print(correlation_table(found, kind=kind))
    for kind in TOKEN_KINDS:
        for other in ("GAE", GROUP_MEAN):
            console.print(lead_table(found, kind=kind, other=other))


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
    """A difference with its interval, as in `+.046 (+.032, +.059)`."""
    value, low, high = (f"{number:+.3f}".replace("0.", ".") for number in (interval.value, interval.low, interval.high))
    return f"{value} ({low}, {high})"
