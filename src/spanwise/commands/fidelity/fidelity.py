"""`spanwise fidelity`: re-roll the last block at fixed prefixes of a checkpoint, and hold the baselines against it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from spanwise.commands.eval.evaluate import confidences
from spanwise.commands.report.report import report_folder
from spanwise.commands.shared.files import fixed_point_rows, write_fidelity
from spanwise.commands.shared.fitted import Fitted
from spanwise.commands.shared.task import model_and_task
from spanwise.engines.sample import continue_ids, prompt_ids, sample
from spanwise.errors import DataError, RecipeError
from spanwise.layout import Layout
from spanwise.measure.fidelity import FIGURES, Fidelity, Rerolls, fidelity
from spanwise.objective import Objective
from spanwise.recipe import Recipe, answer_layout, calibration_of
from spanwise.score import score_all
from spanwise.segment import Vocabulary, find_blocks
from spanwise.tasks import Task, task_layout

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
    if not states_confidence(task.layout):
        raise RecipeError(f"Fidelity re-rolls stated confidences, but the last block '{last}' has no tag 'confidence'.")
    rows = task.evaluation.select(range(min(prompts, len(task.evaluation))))
    limit = max_new_tokens or task.max_completion_length
    options = {"max_new_tokens": limit, "temperature": temperature}
    ids_nt, mask_nt = sample(model, tokenizer, rows["prompt"][:], samples=samples, seed=seed, **options)
    vocabulary = Vocabulary.of(tokenizer, model)
    spans, text = find_blocks(ids_nt, mask_nt, layout=task.layout, vocabulary=vocabulary)
    columns = {name: [v for v in rows[name] for _ in range(samples)] for name in rows.column_names if name != "prompt"}
    outcome_n = score_all([Objective("correct", pays=(solution,))], text, columns=columns).reward_nm[:, 0]
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
    again_nt, again_mask_nt = joined(befores, more_nt, more_mask_nt, limit)
    again_text = find_blocks(again_nt, again_mask_nt, layout=task.layout, vocabulary=vocabulary)[1]
    return Rerolls(
        confidence_xs=confidences(text, last, task.layout).reshape(-1, samples),
        outcome_xs=outcome_n.reshape(-1, samples),
        prefix_xs=prefix_n.reshape(-1, samples),
        again_dm=confidences(again_text, last, task.layout).reshape(-1, rerolls),
    )


def states_confidence(layout: Layout) -> bool:
    """Whether the last block of a layout holds a confidence, which is what the baselines are compared on."""
    return "confidence" in layout.keys[layout.names[-1]]


def joined(
    befores: list[tuple[int, ...]], more_nt: torch.Tensor, more_mask_nt: torch.Tensor, limit: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Prefix and continuation of each completion as one row, cut to the length a completion may have."""
    ids_nt, mask_nt = torch.zeros(len(befores), limit, dtype=torch.long), torch.zeros(len(befores), limit, dtype=torch.bool)
    for n, before in enumerate(befores):
        whole = [*before, *more_nt[n][more_mask_nt[n]].tolist()][:limit]
        ids_nt[n, : len(whole)] = torch.tensor(whole)
        mask_nt[n, : len(whole)] = True
    return ids_nt, mask_nt


class Sizes(TypedDict, total=False):
    """How much is sampled: keywords of `collect`, with its defaults."""

    prompts: int
    samples: int
    rerolls: int
    seed: int


def fidelity_folder(
    model_folder: Path, recipe: Recipe, *, console: Console | None = None, **sizes: Unpack[Sizes]
) -> tuple[Fidelity, Rerolls]:
    """Fidelity of the baselines on a saved model; `recipe` says the task, the score of the confidence and the temperature.

    Group sizes are those of 4, 8, 16 and 32 that the samples of a prompt allow.

    Raises:
        DataError: the folder holds no readable model.
    """
    torch.set_num_threads(recipe.threads)
    model, tokenizer, task = model_and_task(model_folder, recipe, console or Console())
    rolled = collect(
        model, tokenizer, task, temperature=recipe.temperature, max_new_tokens=recipe.max_completion_length, **sizes
    )
    samples = rolled.prefix_xs.shape[1]
    group_sizes = [size for size in GROUP_SIZES if size <= samples] or [samples]
    return fidelity(rolled, group_sizes=group_sizes, rule=calibration_of(recipe), seed=sizes.get("seed", 0)), rolled


def show(
    checkpoint: Path,
    recipe: Recipe,
    *,
    output: str | Path,
    tokens: Sequence[Mapping[str, Any]] = (),
    counts: Mapping[str, int] | None = None,
    options: Mapping[str, Any] | None = None,
    console: Console | None = None,
    **sizes: Unpack[Sizes],
) -> Fidelity | None:
    """What `spanwise fidelity CHECKPOINT` does: the fidelity tables of a model folder, the q* table, `fidelity.json`, the report.

    Args:
        checkpoint: the model folder.
        recipe: says the task, the score of the confidence and the temperature.
        output: folder for what is written.
        tokens: what `run.token_fidelity.token_rows` gives, for the report; all there is where no confidence is stated (None).
        counts: completions and prompts of the tokens.
        options: further options of the command, which the report prints.
        console: where the tables go.
        sizes: see `collect`.
    """
    console = console or Console()
    about = {"source": str(checkpoint), "recipe": recipe.model_dump(mode="json"), "tokens": tokens}
    options = {**sizes, **(options or {})}
    if tokens and not states_confidence(answer_layout(recipe, task_layout(recipe))):
        console.print("The last block states no confidence, so there is nothing else to compare.", highlight=False)
        write_fidelity(output, **about, counts=counts, options=options)
        console.print(f"Report: {report_folder(output)}", highlight=False, soft_wrap=True)
        return None
    found, rolled = fidelity_folder(checkpoint, recipe, console=console, **sizes)
    console.print(
        f"{rolled.prefix_xs.numel()} completions of {len(rolled.prefix_xs)} prompts, {rolled.again_dm.numel()} re-rolls of "
        f"{len(rolled.again_dm)} distinct prefixes; {found.share:.1%} of the completions could be used.",
        highlight=False,
    )
    for table in fidelity_tables(found):
        console.print(Fitted(table))
    console.print(Fitted(difference_table(found)))
    points = fixed_point_rows(rule=calibration_of(recipe), seed=sizes.get("seed", 0))
    console.print(Fitted(fixed_point_table(points), keep=2))
    write_fidelity(output, **about, found=found, rolled=rolled, points=points, options=options)
    console.print(f"Report: {report_folder(output)}", highlight=False, soft_wrap=True)
    return found


def fidelity_tables(found: Fidelity) -> list[Table]:
    """A table per group size: rmse with its interval over prompts, by outcome and alone; then what does not depend on scale."""
    tables = []
    for size in found.group_sizes:
        ceiling = found.value(found.baselines[0], size, "ceiling")
        title = f"G = {size}: advantages against Monte Carlo (the exact ones would correlate {ceiling:.3f})"
        table = plain_table(title, "", "RMSE", "95 %", "wrong", "right", "alone", "corr", "scaled", "noise")
        for name in found.baselines:
            low, high = found.interval(name, size, "rmse")
            first, *rest = (decimals(found.value(name, size, figure)) for figure in FIGURES if figure != "ceiling")
            table.add_row(name, first, f"{decimals(low)}-{decimals(high)}", *rest)
        tables.append(table)
    return tables


def difference_table(found: Fidelity, one: str = "blended", other: str = "outcome") -> Table:
    """One baseline's figures minus another's, with paired intervals over prompts."""
    figures = ("correlation", "rmse_scaled", "gradient_noise")
    table = plain_table(f"{one} minus {other}, paired over prompts", "G", *(figure.replace("_", " ") for figure in figures))
    for size in found.group_sizes:
        cells = []
        for figure in figures:
            value, low, high = found.difference(one, other, size, figure)
            cells.append(f"{value:+.3f} [{low:+.3f}, {high:+.3f}]")
        table.add_row(str(size), *cells)
    return table


def fixed_point_table(points: Sequence[Mapping[str, Any]]) -> Table:
    """The q* table of `fixed_point_rows`: what each baseline drives a confidence to."""
    p_b = list(dict.fromkeys(row["p"] for row in points))
    table = plain_table("q*: the confidence a policy is driven to, by p", "", "G", *(f"{p:g}" for p in p_b))
    table.add_row("none, batch, group", "any", *map(decimals, p_b))
    for name in dict.fromkeys(row["baseline"] for row in points):
        for size in dict.fromkeys(row["group_size"] for row in points):
            q_b = [row["q"] for row in points if (row["baseline"], row["group_size"]) == (name, size)]
            if name not in ("none", "batch", "group"):
                table.add_row(name, str(size), *map(decimals, q_b))
    worst = max(row["error"] or 0.0 for row in points)
    table.caption = f"outcome: exact; blended: simulated, standard error at most {worst:.4f}"
    return table


def plain_table(title: str, first: str, *columns: str) -> Table:
    """An empty table without borders; every column but the first is of numbers."""
    table = Table(first, title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def decimals(number: float) -> str:
    """Three decimals, "-" for NaN."""
    return "-" if number != number else f"{number:.3f}"
