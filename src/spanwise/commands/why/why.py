"""`why`: the reason for every token that trains with 0, under the methods of `spanwise credit`. Nothing is trained or written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from spanwise.commands.credit.apply import AT_A_TIME, Applied, CreditResult
from spanwise.commands.credit.credit import credit_rollouts
from spanwise.commands.shared.fitted import plain_table, say
from spanwise.commands.why.decisions import decision_notes
from spanwise.errors import RecipeError
from spanwise.explain.remarks import cut_off
from spanwise.report.words import SHARING
from spanwise.rollouts import RolloutTable
from spanwise.rollouts.table import fitting_runs
from spanwise.types import Fault, Status
from spanwise.zeros import Zero, Zeros, reason_of, recorded_reasons, tally_zeros, zero_reasons

#: How many of the compared completions are shown with their rows and rewards.
_MATES = 16
#: The largest number of missing blocks that have a sentence each.
_NAMED = 4


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
    result = credit_rollouts(rollouts, **options)
    own_method = result.arms.own
    # A spanwise run is explained by its own method alone.
    if not options.get("methods") and own_method is not None and result.table.folder is not None:
        result = replace(result, applied=tuple(arm for arm in result.applied if arm.name == own_method))
    if completion is not None and not 0 <= completion < len(result.table):
        last = len(result.table) - 1
        raise RecipeError(f"--completion is {completion}, but '{result.table.path}' holds the completions 0 to {last}.")
    zeros = reasons(result)
    lines = _all(result, zeros, examples) if completion is None else _one(result, zeros, completion)
    notes = decision_notes(result) if completion is None else ()
    say(console, *lines, *notes, *result.notes, keep=2)
    return zeros


def reasons(result: CreditResult) -> dict[str, Zeros]:
    """Return the reason of every token of a file under each of its methods."""
    table, schemes = result.table, result.arms.schemes
    row_v = torch.from_numpy(np.repeat(np.arange(len(table)), table.tokens.lengths))
    column = result.arms.taken.get("correct", "")  # the reward that tells right from wrong, if there is one
    name, reward_n = column, table.rewards[column].value_n if column else None
    if "correct" in result.scores.names:
        name, reward_n = "correct", result.scores.outcome("correct")

    def by_runs(numbers: Callable[[int, int], np.ndarray]) -> torch.Tensor:
        """Compute the numbers of all tokens, for as many completions at a time as fit."""
        return torch.from_numpy(np.concatenate([numbers(*run) for run in fitting_runs(table.tokens.lengths, AT_A_TIME)]))

    zeros = {}
    for arm in result.applied:
        if arm.credit.comparison is None:
            keys_nk = recorded_reasons(arm.credit.block_nk, result.group_n, reward_n=reward_n, rollout_n=table.rollout_n)
        else:
            keys_nk = zero_reasons(arm.credit, schemes[arm.name])
        zeros[arm.name] = tally_zeros(
            keys_nk,
            by_runs(partial(arm.advantages, table)),
            by_runs(arm.marked.blocks),
            row_v,
            names=(name,) if arm.credit.comparison is None else schemes[arm.name].names,
            trainable_v=torch.tensor(table.trainable),
            learned_n=table.learned_n,
        )
    return zeros


def _counts(result: CreditResult, zeros: Mapping[str, Zeros], examples: int) -> Table:
    """Build the table of reasons by method; tokens and completions add up to those of the file."""
    table = plain_table(
        "method", "why a token gets nothing", "completions", "tokens", "share", "rows", rows=(), right=(2, 3, 4),
        title=result.title,
        caption="Tokens: each counts under one reason. Completions: those without any credit, mostly for this reason. "
        "Rows: the first such completions, or the first with such a token; show one with --completion ROW.",
    )  # fmt: skip
    for name, tally in zeros.items():
        for place, count in enumerate(tally.counts(examples)):
            words = _words(count.reason, count.objective)
            share = f"{count.tokens / max(len(tally.key_v), 1):.1%}"
            rows = _listed(count.rows, more=len(count.rows) < count.completions)
            method = escape(name) if place == 0 else ""
            table.add_row(method, words, str(count.completions), str(count.tokens), share, rows)
        table.add_row("", "all", str(len(tally.key_n)), str(len(tally.key_v)), "100.0%", "", style="bold", end_section=True)
    return table


def _all(result: CreditResult, zeros: Mapping[str, Zeros], examples: int) -> list[Table | str]:
    """Return the counts, and sentences on wrong completions that are malformed and on missing blocks."""
    lines: list[Table | str] = [_counts(result, zeros, examples)]
    fault_n, present_nk = result.marked.fault_n, result.marked.length_nk > 0
    wrong_n = torch.zeros(len(result.table), dtype=torch.bool)
    for tally in zeros.values():
        wrong_n |= torch.tensor([reason_of(key) is Zero.ALL_WRONG for key in tally.key_n.tolist()])
    faulty_n = wrong_n & (fault_n != 0)
    if bool(faulty_n.any()):
        tokens, length_n = result.table.tokens, result.marked.length_nk.sum(dim=1)
        count, where = cut_off(fault_n, length_n, lambda n: tokens.slice(n, n + 1).tobytes(), among_n=faulty_n)
        inside = f"; {count} of them {where}" if count else ""
        lines.append(
            f"Of the {int(wrong_n.sum())} completions whose group is all wrong {int(faulty_n.sum())} are malformed{inside}."
        )
    lacking_nk = present_nk.any(dim=1, keepdim=True) & ~present_nk
    counts = {name: count for name, count in zip(result.marked.names, lacking_nk.sum(dim=0).tolist(), strict=True) if count}
    listed = [
        f"Block '{name}' is missing in {count} of {len(lacking_nk)} completions (row {_listed(rows)})"
        for name, count in counts.items()
        for rows in [lacking_nk[:, result.marked.names.index(name)].nonzero().flatten()[:3].tolist()]
    ]
    if len(counts) > _NAMED:
        named = ", ".join(f"{name} in {count}" for name, count in counts.items())
        listed = [f"Of {len(lacking_nk)} completions some lack a block ({named})"]
    return [*lines, *(f"{lack}, so there is no token that its objectives could pay." for lack in listed)]


def _one(result: CreditResult, zeros: Mapping[str, Zeros], n: int) -> list[Table | str]:
    """Describe one completion: the rows it is compared with, and its tokens run by run."""
    table, scores = result.table, result.scores
    mates = (result.group_n == result.group_n[n]).nonzero().flatten().tolist()
    place = f"Completion {n} of '{table.path}': step {int(table.step_n[n])}"
    rows = _listed(mates[:_MATES], more=len(mates) > _MATES)
    lines: list[Table | str] = [f"{place}, compared with rows {rows}; prompt {table.prompts[n]!r:.200}"]
    faults = [fault.name.lower() for fault in Fault if fault.name and int(result.marked.fault_n[n]) & fault]
    if faults:
        lines.append(f"Its tags: {', '.join(faults)}.")
    for m, name in enumerate(scores.names):
        own, *others = scores.reward_nm[[n, *mates[:_MATES]], m].tolist()
        reward = f"{own:g}" if own == own else Status(int(scores.status_nm[n, m])).name.lower()
        listed = " ".join(f"{value:g}" if value == value else "-" for value in others)
        lines.append(f"Reward {name}: {reward}; of all rows compared: {listed}{' ...' if len(mates) > _MATES else ''}")
    return [*lines, *(_runs(table, arm, zeros[arm.name], n) for arm in result.applied), SHARING]


def _runs(table: RolloutTable, arm: Applied, tally: Zeros, n: int) -> Table:
    """Build the table of a completion's tokens under one method; neighbours of one block, advantage and reason share a row."""
    first, last = int(table.tokens.offsets[n]), int(table.tokens.offsets[n + 1])
    ids = table.tokens.slice(n, n + 1).astype(np.int64)
    advantages = arm.advantages(table, n, n + 1).tolist()
    blocks, keys = arm.marked.blocks(n, n + 1).tolist(), tally.key_v[first:last].tolist()
    credits = [f"{credit:.4g}" for credit in arm.credit.block_nk[n].tolist()]
    rows = []
    for (block, key, _), places in groupby(range(last - first), key=lambda t: (blocks[t], keys[t], f"{advantages[t]:.6g}")):
        run = list(places)
        text = table.vocabulary.join(ids[run])[0].decode(errors="replace")
        cell = repr(text) if len(text) <= 60 else f"{text[:28]!r} ... {text[-28:]!r}"
        rows.append([
            f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}", escape(cell),
            escape(arm.marked.names[block]) if block >= 0 else "-", credits[block] if block >= 0 else "-",
            f"{advantages[run[0]]:.4g}",
            _words(reason_of(key), tally.objective(key)),
        ])  # fmt: skip
    headings = ("tokens", "text", "block", "credit", "per token", "why")
    return plain_table(*headings, rows=rows, right=[3, 4], title=Text(arm.name))


def _words(reason: Zero, objective: str) -> str:
    return escape(reason.words + (f" ({objective})" if objective else ""))


def _listed(rows: Sequence[int], *, more: bool = False) -> str:
    return ", ".join(map(str, rows)) + (", ..." if more else "")
