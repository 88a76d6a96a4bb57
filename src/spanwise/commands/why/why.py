"""`why`: the reason for every token that trains with 0, under the methods of `spanwise credit`. Nothing is trained or written."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from torch import Tensor

from spanwise.commands.credit.apply import Applied, CreditResult
from spanwise.commands.credit.arms import taken_rewards
from spanwise.commands.credit.credit import credit_rollouts
from spanwise.commands.credit.score import AT_A_TIME
from spanwise.commands.credit.write import outcome_of
from spanwise.commands.shared.fitted import Fitted
from spanwise.errors import RecipeError
from spanwise.rollouts import RolloutTable
from spanwise.types import Fault, Status
from spanwise.zeros import Zero, Zeros, recorded_reasons, tally_zeros, zero_reasons


def why(
    rollouts: str | Path,
    *,
    completion: int | None = None,
    examples: int = 3,
    console: Console | None = None,
    **options: Any,
) -> dict[str, Zeros]:
    """Say for every method why tokens train with 0: counts first, then examples, or one completion token by token."""
    console = console or Console()
    result = _narrowed(credit_rollouts(rollouts, **options), asked=bool(options.get("methods")))
    if completion is not None and not 0 <= completion < len(result.table):
        last = len(result.table) - 1
        raise RecipeError(f"--completion is {completion}, and '{result.table.path}' holds the completions 0 to {last}.")
    found = reasons(result)
    lines = _one(result, found, completion) if completion is not None else [_counts(result, found, examples)]
    lines += [] if completion is not None else _sentences(result, found)
    for line in [*lines, *result.notes]:
        if isinstance(line, Table):
            console.print(Fitted(line, keep=2))
        else:
            console.print(line, highlight=False, soft_wrap=True, markup=False)
    return found


def reasons(result: CreditResult) -> dict[str, Zeros]:
    """The reason of every token of a file under each of its methods."""
    table = result.table
    schemes = {arm.name: arm.scheme for arm in result.arms}
    row_v = torch.from_numpy(np.repeat(np.arange(len(table)), table.tokens.lengths))
    name, reward_n = _verdict(result)
    found = {}
    for one in result.applied:
        if one.credit.comparison is None:
            names = (name,)
            keys_nk = recorded_reasons(one.credit.block_nk, result.group_n, reward_n=reward_n, rollout_n=table.rollout_n)
        else:
            scheme = schemes[one.name]
            names = scheme.names
            keys_nk = zero_reasons(one.credit, scheme)
        found[one.name] = tally_zeros(
            keys_nk,
            _advantages(table, one),
            torch.from_numpy(one.marked.block),
            row_v,
            names=names,
            trainable_v=torch.from_numpy(table.trainable),
            learned_n=table.learned_n,
        )
    return found


def _narrowed(result: CreditResult, *, asked: bool) -> CreditResult:
    """Where nothing was asked for, the recipe's own method alone speaks for a run or a recipe that names one."""
    own = [arm.name for arm in result.arms if arm.own]
    if asked or not own or result.table.folder is None:
        return result
    return CreditResult(**{**vars(result), "applied": tuple(one for one in result.applied if one.name in own)})


def _advantages(table: RolloutTable, one: Applied) -> Tensor:
    parts = [one.advantages(table, first, last) for first, last in table.tokens.chunks(AT_A_TIME)]
    return torch.from_numpy(np.concatenate(parts)) if parts else torch.zeros(0)


def _verdict(result: CreditResult) -> tuple[str, Tensor | None]:
    """The reward that says what is right, if the file or a method has one."""
    names = result.scores.names
    name = outcome_of(names, [])
    if name is not None:
        return name, result.scores.reward_nm[:, names.index(name)]
    column = taken_rewards(result.table, {}).get("correct")
    return ("", None) if column is None else (column, result.table.rewards[column].value_n)


def _counts(result: CreditResult, found: Mapping[str, Zeros], examples: int) -> Table:
    """A row per method and reason; tokens and completions add up to those of the file."""
    source, groups = result.table, int(result.group_n.unique().numel())
    table = Table(
        "method", "why a token gets nothing", "completions", "tokens", "share", "rows",
        title=Text(f"{source.path} ({source.source}): {len(source)} completions in {groups} groups", style="table.title"),
        title_justify="left", box=box.SIMPLE_HEAD,
    )  # fmt: skip
    for column in table.columns[2:5]:
        column.justify = "right"
    for name, told in found.items():
        total = max(len(told.key_v), 1)
        shown = name
        for count in told.counts(examples):
            words = count.reason.words + (f" ({count.objective})" if count.objective else "")
            rows = ", ".join(map(str, count.rows)) + (", ..." if len(count.rows) < count.completions else "")
            share = f"{count.tokens / total:.1%}"
            table.add_row(escape(shown), escape(words), str(count.completions), str(count.tokens), share, rows)
            shown = ""
        table.add_row("", "all", str(len(told.key_n)), str(len(told.key_v)), "100.0%", "", style="bold", end_section=True)
    table.caption = (
        "Tokens: each has one reason. Completions: none of whose tokens gets anything, and most of them for this reason. "
        "Rows: the first of these, or the first with such a token; see one with --completion ROW."
    )
    table.caption_justify = "left"
    return table


def _sentences(result: CreditResult, found: Mapping[str, Zeros]) -> list[str]:
    """What the counts alone do not say: how many of the wrong are malformed, and blocks that are not there."""
    said = []
    fault_n, present_nk = result.marked.fault_n, result.marked.length_nk > 0
    wrong_n = torch.zeros(len(result.table), dtype=torch.bool)
    for told in found.values():
        wrong_n |= torch.tensor([told.reason(key) is Zero.ALL_WRONG for key in told.key_n.tolist()])
    faulty_n = wrong_n & (fault_n != 0)
    if bool(faulty_n.any()):
        cut = int((faulty_n & ((fault_n & int(Fault.TRUNCATED)) != 0)).sum())
        inside = f", {cut} of them because a tag never closes" if cut else ""
        said.append(
            f"Of the {int(wrong_n.sum())} completions whose group is all wrong {int(faulty_n.sum())} are malformed{inside}."
        )
    for k, name in enumerate(result.marked.names):
        lacking_n = present_nk.any(dim=1) & ~present_nk[:, k]
        if bool(lacking_n.any()):
            rows = ", ".join(map(str, lacking_n.nonzero().flatten()[:3].tolist()))
            lack = f"Block '{name}' is not there in {int(lacking_n.sum())} of {len(lacking_n)} completions (row {rows})"
            said.append(f"{lack}, so there is no token that its objectives could pay.")
    return said


def _one(result: CreditResult, found: Mapping[str, Zeros], n: int) -> list[Table | str]:
    """One completion: what it is compared with, and its tokens run by run."""
    table, scores = result.table, result.scores
    mates = (result.group_n == result.group_n[n]).nonzero().flatten().tolist()
    shown = ", ".join(map(str, mates[:16])) + (", ..." if len(mates) > 16 else "")
    place = f"Completion {n} of '{table.path}': step {int(table.step_n[n])}, compared with rows {shown}"
    lines: list[Table | str] = [f"{place}; prompt {table.prompts[n]!r:.200}"]
    faults = [fault.name.lower() for fault in Fault if fault.name and int(result.marked.fault_n[n]) & fault]
    if faults:
        lines.append(f"Its tags: {', '.join(faults)}.")
    for m, name in enumerate(scores.names):
        own, status = float(scores.reward_nm[n, m]), Status(int(scores.status_nm[n, m])).name.lower()
        said = f"{own:g}" if own == own else status
        others = " ".join(f"{value:g}" if value == value else "-" for value in scores.reward_nm[mates[:16], m].tolist())
        lines.append(f"Reward {name}: {said}; of all rows compared: {others}{' ...' if len(mates) > 16 else ''}")
    for one in result.applied:
        lines.append(_runs(table, one, found[one.name], n))
    return lines


def _runs(table: RolloutTable, one: Applied, told: Zeros, n: int) -> Table:
    """The tokens of a completion under one method, those side by side that share block, advantage and reason as one row."""
    first, last = int(table.tokens.offsets[n]), int(table.tokens.offsets[n + 1])
    ids = table.tokens.slice(n, n + 1).astype(np.int64)
    advantages, keys = one.advantages(table, n, n + 1).tolist(), told.key_v[first:last].tolist()
    blocks = one.marked.block[first:last].tolist()
    shown = Table(
        "tokens", "text", "block", "advantage", "why", title=Text(one.name), title_justify="left", box=box.SIMPLE_HEAD
    )
    shown.columns[3].justify = "right"
    for _, places in groupby(range(last - first), key=lambda t: (blocks[t], keys[t], f"{advantages[t]:.6g}")):
        run = list(places)
        text = table.vocabulary.join(ids[run])[0].decode(errors="replace")
        block = one.marked.names[blocks[run[0]]] if blocks[run[0]] >= 0 else "-"
        key = keys[run[0]]
        reason = told.reason(key).words + (f" ({told.objective(key)})" if told.objective(key) else "")
        where = f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}"
        cell = repr(text) if len(text) <= 60 else f"{text[:28]!r} ... {text[-28:]!r}"
        shown.add_row(where, escape(cell), escape(block), f"{advantages[run[0]]:.4g}", escape(reason))
    return shown
