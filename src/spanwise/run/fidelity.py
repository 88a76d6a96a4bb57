"""`spanwise fidelity`: re-roll the last block at fixed prefixes of a checkpoint, and hold the baselines against it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from spanwise.engines.sample import continue_ids, prompt_ids, sample
from spanwise.errors import DataError, RecipeError
from spanwise.measure.fidelity import FIGURES, Fidelity, Rerolls, fidelity
from spanwise.measure.fixed_point import fixed_point, simulated_fixed_point
from spanwise.measure.proper_score import ScoreName
from spanwise.recipe import Recipe
from spanwise.run.evaluate import confidences, load_model
from spanwise.score import Objective, score
from spanwise.segment import Vocabulary, segment
from spanwise.tasks import Task

GROUP_SIZES = (4, 8, 16, 32)
PROBABILITIES = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 0.95)


def collect(
    model: Any,
    tokenizer: Any,
    task: Task,
    *,
    prompts: int = 128,
    samples: int = 32,
    rerolls: int = 32,
    temperature: float = 1.0,
    max_new_tokens: int | None = None,
    seed: int = 0,
) -> Rerolls:
    """Sample completions of held-out prompts, then fresh last blocks from every distinct prefix among them.

    The prefix of a completion is its prompt and every token before its last block, as sampled; a re-roll may use the tokens that
    the longest completion has left. Whatever it says is segmented together with its prefix.

    Args:
        model, tokenizer: as `from_pretrained` gives them.
        task: its layout ends with a block that states a confidence.
        prompts: how many of the held-out prompts.
        samples: completions of each.
        rerolls: of each distinct prefix.
        temperature, max_new_tokens, seed: see `evaluate`; the re-rolls take the next seed.

    Raises:
        RecipeError: the last block holds no confidence.
        DataError: no completion has a last block.
    """
    solution, last = task.layout.names[0], task.layout.names[-1]
    if "confidence" not in dict(task.layout.blocks)[last]:
        raise RecipeError(f"Fidelity re-rolls stated confidences, but the last block '{last}' has no tag 'confidence'.")
    rows = task.evaluation.select(range(min(prompts, len(task.evaluation))))
    limit = max_new_tokens or task.max_completion_length
    options = {"max_new_tokens": limit, "temperature": temperature}
    ids_nt, mask_nt = sample(model, tokenizer, rows["prompt"][:], samples=samples, seed=seed, **options)
    vocabulary = Vocabulary.from_tokenizer(tokenizer)
    spans, text = segment(ids_nt, mask_nt, layout=task.layout, vocabulary=vocabulary)
    columns = {name: [v for v in rows[name] for _ in range(samples)] for name in rows.column_names if name != "prompt"}
    outcome_n = score([Objective("correct", pays=(solution,))], text, columns=columns).reward_nm[:, 0]
    starts = prompt_ids(tokenizer, rows["prompt"][:])
    found: dict[tuple[int, tuple[int, ...]], int] = {}
    prefix_n = torch.full((len(text),), -1)
    for n in spans.present_nk[:, -1].nonzero()[:, 0].tolist():
        before = tuple(ids_nt[n, : int(spans.start_nk[n, -1])].tolist())
        prefix_n[n] = found.setdefault((n // samples, before), len(found))
    if not found:
        raise DataError(f"None of {len(text)} completions has the block '{last}'; there is nothing to re-roll.")
    heads = [starts[x] + list(before) for x, before in found]
    room = limit - min(len(before) for _, before in found)
    more_nt, more_mask_nt = continue_ids(
        model, tokenizer, heads, samples=rerolls, max_new_tokens=room, temperature=temperature, seed=seed + 1
    )
    befores = [before for _, before in found for _ in range(rerolls)]
    again_nt, again_mask_nt = _joined(befores, more_nt, more_mask_nt, limit)
    again_text = segment(again_nt, again_mask_nt, layout=task.layout, vocabulary=vocabulary)[1]
    return Rerolls(
        confidence_xs=confidences(text, last, task.layout).reshape(-1, samples),
        outcome_xs=outcome_n.reshape(-1, samples),
        prefix_xs=prefix_n.reshape(-1, samples),
        again_dm=confidences(again_text, last, task.layout).reshape(-1, rerolls),
    )


def _joined(
    befores: list[tuple[int, ...]], more_nt: torch.Tensor, more_mask_nt: torch.Tensor, limit: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Prefix and continuation of each completion as one row, cut to the length a completion may have."""
    ids_nt, mask_nt = torch.zeros(len(befores), limit, dtype=torch.long), torch.zeros(len(befores), limit, dtype=torch.bool)
    for n, before in enumerate(befores):
        whole = [*before, *more_nt[n][more_mask_nt[n]].tolist()][:limit]
        ids_nt[n, : len(whole)] = torch.tensor(whole)
        mask_nt[n, : len(whole)] = True
    return ids_nt, mask_nt


def fidelity_folder(
    model_folder: Path,
    recipe: Recipe,
    *,
    prompts: int = 128,
    samples: int = 32,
    rerolls: int = 32,
    seed: int = 0,
    console: Console | None = None,
) -> tuple[Fidelity, Rerolls]:
    """Fidelity of the baselines on a saved model; `recipe` says the task, the score of the confidence and the temperature.

    Group sizes are those of 4, 8, 16 and 32 that `samples` allows.

    Raises:
        DataError: the folder holds no readable model.
    """
    from spanwise.run.train import make_task

    torch.set_num_threads(recipe.threads)
    model, tokenizer = load_model(model_folder)
    task = make_task(recipe, console or Console())
    rolled = collect(
        model, tokenizer, task, prompts=prompts, samples=samples, rerolls=rerolls, temperature=recipe.temperature,
        max_new_tokens=recipe.max_completion_length, seed=seed,
    )  # fmt: skip
    sizes = [size for size in GROUP_SIZES if size <= samples] or [samples]
    return fidelity(rolled, group_sizes=sizes, rule=recipe.calibration, seed=seed), rolled


def show(
    checkpoint: Path,
    recipe: Recipe,
    *,
    prompts: int = 128,
    samples: int = 32,
    rerolls: int = 32,
    seed: int = 0,
    console: Console | None = None,
) -> Fidelity:
    """What `spanwise fidelity CHECKPOINT` does: the fidelity tables of a model folder, and the q* table."""
    console = console or Console()
    found, rolled = fidelity_folder(
        checkpoint, recipe, prompts=prompts, samples=samples, rerolls=rerolls, seed=seed, console=console
    )
    console.print(
        f"{rolled.prefix_xs.numel()} completions of {len(rolled.prefix_xs)} prompts, {rolled.again_dm.numel()} re-rolls of "
        f"{len(rolled.again_dm)} distinct prefixes; {found.share:.1%} of the completions could be used.",
        highlight=False,
    )
    for table in fidelity_tables(found):
        console.print(table)
    console.print(difference_table(found))
    console.print(fixed_point_table(rule=recipe.calibration, seed=seed))
    return found


def fidelity_tables(found: Fidelity) -> list[Table]:
    """A table per group size: rmse with its interval over prompts, by outcome and alone; then what does not depend on scale."""
    tables = []
    for size in found.group_sizes:
        ceiling = found.value(found.baselines[0], size, "ceiling")
        title = f"G = {size}: advantages against Monte Carlo (the exact ones would correlate {ceiling:.3f})"
        table = _table(title, "", "RMSE", "95 %", "wrong", "right", "alone", "corr", "scaled", "noise")
        for name in found.baselines:
            low, high = found.interval(name, size, "rmse")
            first, *rest = (_decimals(found.value(name, size, figure)) for figure in FIGURES if figure != "ceiling")
            table.add_row(name, first, f"{_decimals(low)}-{_decimals(high)}", *rest)
        tables.append(table)
    return tables


def difference_table(found: Fidelity, one: str = "blended", other: str = "outcome") -> Table:
    """One baseline's figures minus another's, with paired intervals over prompts."""
    figures = ("correlation", "rmse_scaled", "gradient_noise")
    table = _table(f"{one} minus {other}, paired over prompts", "G", *(figure.replace("_", " ") for figure in figures))
    for size in found.group_sizes:
        cells = []
        for figure in figures:
            value, low, high = found.difference(one, other, size, figure)
            cells.append(f"{value:+.3f} [{low:+.3f}, {high:+.3f}]")
        table.add_row(str(size), *cells)
    return table


def fixed_point_table(
    *, rule: ScoreName = "brier", group_sizes: tuple[int, ...] = (*GROUP_SIZES, 64), batches: int = 100, seed: int = 0
) -> Table:
    """The q* table: what each baseline drives a confidence to. Blended is simulated in batches of 512 completions."""
    p_b = torch.tensor(PROBABILITIES, dtype=torch.float64)
    table = _table("q*: the confidence a policy is driven to, by p", "", "G", *(f"{p:g}" for p in PROBABILITIES))
    table.add_row("none, batch, group", "any", *(_decimals(p) for p in PROBABILITIES))
    for name, alone in (("outcome", False), ("outcome (LOO)", True)):
        for size in group_sizes:
            point_b = fixed_point(p_b, group_size=size, baseline="outcome", leave_one_out=alone)
            table.add_row(name, str(size), *map(_decimals, point_b.tolist()))
    worst = 0.0
    for size in group_sizes:
        copies = max(1, 512 // (size * len(p_b)))
        simulated = simulated_fixed_point(
            p_b[:, None], group_size=size, baseline="blended", rule=rule, copies=copies, batches=batches, seed=seed
        )
        worst = max(worst, float(simulated.error_bz.max()))
        table.add_row("blended", str(size), *map(_decimals, simulated.point_bz[:, 0].tolist()))
    table.caption = f"outcome: exact; blended: simulated, standard error at most {worst:.4f}"
    return table


def _table(title: str, first: str, *columns: str) -> Table:
    table = Table(first, title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _decimals(number: float) -> str:
    return "-" if number != number else f"{number:.3f}"
