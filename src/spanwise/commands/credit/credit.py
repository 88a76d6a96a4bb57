"""`credit`: what several methods would have credited to every token of rollouts that exist already. Nothing is trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from spanwise.commands.credit.apply import Applied, CreditResult, apply_arm, apply_recorded
from spanwise.commands.credit.arms import Arm, choose_arms, left_out
from spanwise.commands.credit.blocks import blocks_of, compared_groups, sampled_texts
from spanwise.commands.credit.own_score import score_figures, score_note, warm_up_note
from spanwise.commands.credit.score import fitting, score_file
from spanwise.commands.credit.write import EXPORT, remembered, write_credit
from spanwise.commands.shared.again import MOST
from spanwise.commands.shared.fitted import Fitted
from spanwise.commands.shared.folder import check_no_run, write_page
from spanwise.errors import DataError, RecipeError, lacking
from spanwise.explain import setup_warnings
from spanwise.pipeline import Reading
from spanwise.recipe import load
from spanwise.rollouts import RolloutTable, read_rollouts
from spanwise.rollouts.folder import RunFolder, sole_writer
from spanwise.rollouts.rows import credit_figures
from spanwise.rollouts.schema import RECORDED
from spanwise.types import Scores, Status


def credit_rollouts(
    rollouts: str | Path,
    *,
    recipe: str | Path | None = None,
    methods: Sequence[str] = (),
    tokenizer: str | Path | None = None,
    columns: Mapping[str, str] | None = None,
    reward: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> CreditResult:
    """Read rollouts and apply methods to them.

    Args:
        rollouts: a file or folder that `read_rollouts` knows.
        recipe: YAML file with layout and objectives; default: the one of the run that the file lies in, else the layout of
            the confidence task, or the file's own where it has other tags (`blocks_of`).
        methods: `method`, `method:baseline`, `recipe`, or `recorded` for what the trainer has recorded; default: those of grpo,
            rlcr, bae and the recipe's own that fit, and of another trainer's file what it has recorded.
        tokenizer: folder of the tokenizer that the completions were sampled with.
        columns: role -> column of a table, see `read_rollouts`.
        reward: objective -> the recorded reward it is taken from, "text" to compute it; see `taken_rewards`.
        overrides: recipe fields; `group_size` cuts the groups of a file that does not say where a prompt was drawn twice.

    Raises:
        DataError: the file cannot be read or lacks what a reward needs.
        RecipeError: a method, an objective or a layout that does not fit the file.
    """
    table = read_rollouts(rollouts, tokenizer=tokenizer, columns=columns)
    if not table.trainable.any():
        raise DataError(f"None of the {len(table)} completions of '{rollouts}' says anything. {table.note}".strip())
    own = None if table.folder is None else table.folder / "recipe.yaml"
    loaded = load(recipe or own, overrides)
    given = recipe is not None or not {"method", "objectives"}.isdisjoint(overrides or {})  # then it must fit
    texts = sampled_texts(table) if given or own is None else []
    blocks = blocks_of(loaded, table, texts)
    group_n, counted = compared_groups(table, loaded, own, overrides or {})
    named = [name for name in methods if name != RECORDED]
    trusted = recipe is not None or "objectives" in (overrides or {})  # what the user named, not what lies in the folder
    arms, notes = choose_arms(
        loaded, named if methods else None, table, reward, blocks=blocks, given=given, run_code=trusted
    )
    recorded = RECORDED in methods if methods else own is None and table.as_recorded is not None
    marked_by, readings = score_file(table, arms, also=[blocks.layout] if recorded else [])
    if arms and (given or own is None):  # a run of ours may babble, and have no tags at first
        must = [arm.name for arm in arms if methods or (given and arm.own)]
        arms, untagged = fitting(table, arms, texts, asked=must)
        notes += untagged
    told = {text: None for arm in arms for text in setup_warnings(readings[arm.name], arm.scheme).values()}
    applied = [apply_arm(table, arm, readings[arm.name], marked_by[arm.scheme.layout], group_n) for arm in arms]
    if recorded:
        try:
            one, note = apply_recorded(table, marked_by[blocks.layout])
            applied.append(one)
            notes.append(note)
        except RecipeError as error:
            if methods:
                raise
            notes.append(left_out([RECORDED], str(error)))
    shown = max((one.marked for one in applied), key=lambda marked: len(marked.names))
    marked = marked_by.get(blocks.layout, shown)
    scores = _scores(table, arms, readings)
    own_score = score_figures(table, arms, scores)
    of_score = (score_note(own_score), warm_up_note(table, arms))
    said = (blocks.note, *notes, *told, table.note, *counted, _origins(arms), *of_score)
    kept = tuple(part for part in said if part)
    return CreditResult(table, group_n, tuple(arms), tuple(applied), scores, marked, kept, own_score)


def credit(
    rollouts: str | Path,
    *,
    output: str | Path = "runs/credit",
    rows: int = MOST,
    console: Console | None = None,
    **options: Any,
) -> CreditResult:
    """Credit as `credit_rollouts`, write what comes of it and a report of at most `rows` completions, print a short table."""
    console, folder = console or Console(), Path(output)
    if rows < 1:
        raise RecipeError(f"--rows is {rows}; the report needs at least 1 completion.")
    check_no_run(output)
    with sole_writer(output):
        result = credit_rollouts(rollouts, **options)
        write_credit(folder / EXPORT, result)
        RunFolder(folder).write_summary({**summary(result), **remembered(result.arms, {**options, "rows": rows})})
        console.print(Fitted(figures_table(result), keep=2))
        for note in result.notes:
            console.print(note, highlight=False, soft_wrap=True, markup=False)
        written = ", ".join([str(folder / EXPORT), *_report(folder, console)])
        console.print(f"Written: {written}", highlight=False, soft_wrap=True, markup=False)
    return result


def figures(one: Applied) -> dict[str, dict[str, float | None]]:
    """Per block of a method: the completions that have it, their mean |credit|, the share of exactly 0."""
    by_block = {name: credit_figures(credit_n) for name, credit_n in one.by_block.items()}
    return {
        name: {"completions": float(found["completions"]), "mean_abs": found["mean_abs"], "zero_share": found["zero_share"]}
        for name, found in by_block.items()
    }


def summary(result: CreditResult) -> dict[str, Any]:
    """The figures of every method as plain data."""
    table = result.table
    return {
        "source": str(table.path),
        "format": table.source,
        "note": result.note,
        "completions": len(table),
        "groups": int(result.group_n.unique().numel()),
        "steps": int(table.step_n.unique().numel()),
        "tokens": int(table.trainable.sum()),
        "statuses": statuses(result.scores),
        **({} if result.score is None else {"score": result.score}),
        "methods": {
            one.name: {
                "blocks": figures(one),
                "no_signal_share": float(one.silent_n.double().mean()),
                "stop_mean_abs": float(one.credit.stop_n.abs().mean()),
                "dead_strata": one.dead,
            }
            for one in result.applied
        },
    }


def statuses(scores: Scores) -> dict[str, dict[str, int]]:
    """Objective -> status -> how many completions."""
    return {
        name: {status.name.lower(): n for status in Status if (n := int((scores.status_nm[:, m] == int(status)).sum()))}
        for m, name in enumerate(scores.names)
    }


def figures_table(result: CreditResult) -> Table:
    """The short table of the terminal: a row per method and block."""
    size = f"{len(result.table)} completions in {int(result.group_n.unique().numel())} groups"
    table = Table(
        "method", "block", "mean |credit|", "exactly 0", "no signal", "dead strata",
        title=Text(f"{result.table.path} ({result.table.source}): {size}", style="table.title"),  # a path is no markup
        title_justify="left", box=box.SIMPLE_HEAD,
    )  # fmt: skip
    for column in table.columns[2:5]:
        column.justify = "right"
    for one in result.applied:
        rows = [(block, _short(f["mean_abs"]), _share(f["zero_share"])) for block, f in figures(one).items()]
        dead = [f"{name} {share:.0%}" for name, share in one.dead.items()]
        for position, (row, strata) in enumerate(zip_longest(rows, dead)):
            whole = (one.name, _share(float(one.silent_n.double().mean()))) if position == 0 else ("", "")
            table.add_row(whole[0], *(row or ("", "", "")), whole[1], strata or "")
    table.caption = (
        "Exactly 0: of the completions that have the block. No signal: no token of a completion gets any credit. "
        "Dead strata: comparisons in which nobody gets any."
    )
    table.caption_justify = "left"
    return table


def _report(folder: Path, console: Console) -> list[str]:
    """Write the report where the packages for it are installed."""
    try:
        from spanwise.commands.credit.page import credit_page
    except ModuleNotFoundError as error:
        console.print(f"No report: {lacking('it', error)}", highlight=False)
        return []
    return [str(write_page(folder, credit_page(folder)))]


def _scores(table: RolloutTable, arms: Sequence[Arm], readings: Mapping[str, Reading]) -> Scores:
    """The rewards of all objectives; the method with the most blocks speaks first."""
    n = len(table)
    first: dict[str, list[Tensor]] = {}
    for arm in sorted(arms, key=lambda arm: -len(arm.scheme.layout.names)):
        scores = readings[arm.name].scores
        stated_nm = torch.full_like(scores.reward_nm, torch.nan) if scores.stated_nm is None else scores.stated_nm
        for m, name in enumerate(scores.names):
            first.setdefault(
                name, [scores.reward_nm[:, m], scores.status_nm[:, m], scores.by_outcome_nmo[:, m], stated_nm[:, m].double()]
            )
    if not first:  # nothing but what the file records
        return Scores((), torch.zeros(n, 0), torch.zeros(n, 0).long(), torch.zeros(n, 0, 2))
    reward_nm, status_nm, by_outcome_nmo, stated_nm = (torch.stack(one, dim=1) for one in zip(*first.values(), strict=True))
    return Scores(tuple(first), reward_nm, status_nm, by_outcome_nmo, stated_nm=stated_nm)


def _origins(arms: Sequence[Arm]) -> str:
    """Where each reward comes from."""
    taken = {o.name: arm.taken.get(o.name) for arm in arms for o in arm.scheme.objectives}
    places = {
        name: "the text" if column is None else "the file" if column == name else f"the file's '{column}'"
        for name, column in taken.items()
    }
    return "Rewards: " + ", ".join(f"{name} from {place}" for name, place in places.items()) + "." if places else ""


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
