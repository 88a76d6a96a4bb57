"""`spanwise why`: say for every token why its advantage is 0. Nothing is trained or written."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from spanwise.commands.credit.apply import AT_A_TIME, CreditResult, MethodCredit
from spanwise.commands.credit.credit import credit_rollouts
from spanwise.commands.shared.fitted import plain_table, say
from spanwise.commands.why.decisions import decision_notes
from spanwise.errors import RecipeError
from spanwise.explain.remarks import SHARING, cut_off
from spanwise.rollouts import RolloutTable
from spanwise.rollouts.rows import display_prompt
from spanwise.rollouts.table import fitting_runs
from spanwise.types import Fault, Status
from spanwise.zeros import Zero, Zeros, reason_of, recorded_reasons, tally_zeros, zero_reasons

#: How many completions of the same group a description lists at most.
_MATES = 16
#: Up to this many missing blocks get a sentence each. More blocks share one sentence.
_NAMED = 4


def why(
    rollouts: str | Path, *, completion: int | None = None, examples: int = 3, console: Console | None = None, **options: Any
) -> dict[str, Zeros]:
    """Say for every method why tokens have advantage 0. `completion` shows one completion token by token."""
    console = console or Console()
    result = credit_rollouts(rollouts, own_only=True, **options)
    if completion is not None and not 0 <= completion < len(result.table):
        max_index = len(result.table) - 1
        raise RecipeError(f"--completion is {completion}, but '{result.table.path}' holds the completions 0 to {max_index}.")
    tally_by_method = reasons(result)
    if completion is None:
        printed_parts = [*_describe_file(result, tally_by_method, examples), *decision_notes(result)]
    else:
        printed_parts = describe_completion(result, tally_by_method, completion)
    say(console, *printed_parts, *result.notes, keep=2)
    return tally_by_method


def reasons(result: CreditResult) -> dict[str, Zeros]:
    """Count for each method the reasons why tokens have the advantage 0."""
    table, scheme_by_method = result.table, result.arms.schemes
    row_index_v = torch.from_numpy(np.repeat(np.arange(len(table)), table.tokens.lengths))
    if "correct" in result.scores.names:
        verdict_name = "correct"
        verdict_n = result.scores.outcome("correct")
    else:  # a column of the file may say which completions are right
        verdict_name = result.arms.recorded_columns.get("correct", "")
        verdict_n = table.rewards[verdict_name].value_n if verdict_name else None
    tally_by_method = {}
    for arm in result.applied:
        if arm.credit.comparison is None:
            reason_nk = recorded_reasons(arm.credit.block_nk, result.group_n, reward_n=verdict_n, rollout_n=table.rollout_n)
        else:
            reason_nk = zero_reasons(arm.credit, scheme_by_method[arm.name])
        advantage_parts = [arm.advantages(table, *row_range) for row_range in fitting_runs(table.tokens.lengths, AT_A_TIME)]
        adv_v, block_v = torch.from_numpy(np.concatenate(advantage_parts)), torch.from_numpy(arm.file_spans.block_v)
        tally_by_method[arm.name] = tally_zeros(
            reason_nk,
            adv_v,
            block_v,
            row_index_v,
            names=(verdict_name,) if arm.credit.comparison is None else scheme_by_method[arm.name].names,
            trainable_v=torch.tensor(table.trainable),
            learned_n=table.learned_n,
        )
    return tally_by_method


def reason_table(result: CreditResult, zeros: Mapping[str, Zeros], examples: int) -> Table:
    """Build the table that counts the reasons for zero credit by method."""
    counts_table = plain_table(
        "method", "why a token gets nothing", "completions", "tokens", "share", "rows", rows=(), right=(2, 3, 4),
        title=result.title,
        caption=("A completion without any credit counts under the most frequent reason of its tokens. 'rows' gives examples of "
            "completions with the reason. To see an example, give --completion ROW."),
    )  # fmt: skip
    for name, tally in zeros.items():
        for tally_position, count in enumerate(tally.counts(examples)):
            reason_text = _reason_words(count.reason, count.objective)
            token_share = f"{count.tokens / max(len(tally.key_v), 1):.1%}"
            rows_text = _row_list(count.rows, more=count.has_more_rows)
            method_cell = escape(name) if tally_position == 0 else ""
            counts_table.add_row(method_cell, reason_text, str(count.completions), str(count.tokens), token_share, rows_text)
        counts_table.add_row(
            "", "all", str(len(tally.key_n)), str(len(tally.key_v)), "100.0%", style="bold", end_section=True
        )
    return counts_table


def _describe_file(result: CreditResult, zeros: Mapping[str, Zeros], examples: int) -> list[Table | str]:
    """Return a table of reasons for zero credit, and notes on the completions."""
    printed_parts: list[Table | str] = [reason_table(result, zeros, examples)]
    fault_n = result.file_spans.fault_n
    present_nk = result.file_spans.length_nk > 0
    is_all_wrong_n = torch.zeros(len(result.table), dtype=torch.bool)
    for tally in zeros.values():
        is_all_wrong_n |= torch.tensor([reason_of(reason_key) is Zero.ALL_WRONG for reason_key in tally.key_n.tolist()])
    is_faulty_n = is_all_wrong_n & (fault_n != 0)
    if bool(is_faulty_n.any()):
        tokens = result.table.tokens
        length_n = result.file_spans.length_nk.sum(dim=1)
        cut_count, cut_sentence = cut_off(fault_n, length_n, lambda n: tokens.slice(n, n + 1).tobytes(), among_n=is_faulty_n)
        cut_off_text = f" {cut_sentence}" if cut_count else ""
        all_wrong_count = int(is_all_wrong_n.sum())
        faulty_count = int(is_faulty_n.sum())
        printed_parts.append(
            f"In groups without a right completion, {faulty_count} of the {all_wrong_count} completions are "
            f"malformed.{cut_off_text}"
        )
    is_missing_nk = present_nk.any(dim=1, keepdim=True) & ~present_nk
    names_and_flags = zip(result.file_spans.names, is_missing_nk.T, strict=True)
    rows_without_block = {name: is_missing_n.nonzero().flatten().tolist() for name, is_missing_n in names_and_flags}
    rows_by_missing_block = {name: rows for name, rows in rows_without_block.items() if rows}
    block_faults = [
        f"Block '{name}' is missing in {len(rows)} of {len(is_missing_nk)} completions "
        f"(row{'s' if len(rows) > 1 else ''} {_row_list(rows[:3], more=len(rows) > 3)})"
        for name, rows in rows_by_missing_block.items()
    ]
    if len(rows_by_missing_block) > _NAMED:
        missing_blocks_text = ", ".join(f"{name}: {len(rows)}" for name, rows in rows_by_missing_block.items())
        block_faults = [f"Some of {len(is_missing_nk)} completions lack a block ({missing_blocks_text})"]
    printed_parts += (f"{fault}. A missing block has no tokens that a reward could credit." for fault in block_faults)
    return printed_parts


def describe_completion(result: CreditResult, zeros: Mapping[str, Zeros], n: int) -> list[Table | str]:
    """Describe one completion with its group, rewards and tokens."""
    table, scores = result.table, result.scores
    group_rows = (result.group_n == result.group_n[n]).nonzero().flatten().tolist()
    heading_text = f"Completion {n} of '{table.path}': step {int(table.step_n[n])}"
    rows_text = _row_list(group_rows[:_MATES], more=len(group_rows) > _MATES)
    prompt_text = display_prompt(table.prompts[n])
    description: list[Table | str] = [f"{heading_text}, compared with rows {rows_text}; prompt {prompt_text!r:.200}"]
    fault_bits = int(result.file_spans.fault_n[n])
    if fault_names := [fault.name.lower() for fault in Fault if fault.name and fault_bits & fault]:
        description.append(f"Its tags: {', '.join(fault_names)}.")
    for m, name in enumerate(scores.names):
        row_reward = float(scores.reward_nm[n, m])
        group_rewards = scores.reward_nm[group_rows[:_MATES], m].tolist()
        reward_text = Status(int(scores.status_nm[n, m])).name.lower() if isnan(row_reward) else f"{row_reward:g}"
        group_rewards_text = " ".join("-" if isnan(reward) else f"{reward:g}" for reward in group_rewards)
        ellipsis = " ..." if len(group_rows) > _MATES else ""
        description.append(f"Reward {name}: {reward_text} in this row. In all compared rows: {group_rewards_text}{ellipsis}")
    return [*description, *(_token_table(table, arm, zeros[arm.name], n) for arm in result.applied), SHARING]


def _token_table(table: RolloutTable, arm: MethodCredit, tally: Zeros, n: int) -> Table:
    """Build a table of a completion's tokens under one method. Neighbours with the same facts share a row."""
    start_offset, end_offset = int(table.tokens.offsets[n]), int(table.tokens.offsets[n + 1])
    completion_ids = table.tokens.slice(n, n + 1).astype(np.int64)
    token_advantages = arm.advantages(table, n, n + 1).tolist()
    token_blocks = arm.file_spans.block_v[start_offset:end_offset].tolist()
    reason_keys = tally.key_v[start_offset:end_offset].tolist()
    credit_cells = [f"{credit:.4g}" for credit in arm.credit.block_nk[n].tolist()]
    advantage_texts = [f"{advantage:.6g}" for advantage in token_advantages]
    token_facts = list(zip(token_blocks, reason_keys, advantage_texts, strict=True))
    table_rows = []
    for (block, reason_key, _), positions in groupby(range(len(token_facts)), key=token_facts.__getitem__):
        token_indices = list(positions)
        joined_text = table.vocabulary.join(completion_ids[token_indices])[0].decode(errors="replace")
        text_cell = repr(joined_text) if len(joined_text) <= 60 else f"{joined_text[:28]!r} ... {joined_text[-28:]!r}"
        table_rows.append([
            f"{token_indices[0]}-{token_indices[-1]}" if len(token_indices) > 1 else f"{token_indices[0]}", escape(text_cell),
            escape(arm.file_spans.names[block]) if block >= 0 else "-", credit_cells[block] if block >= 0 else "-",
            f"{token_advantages[token_indices[0]]:.4g}",
            _reason_words(reason_of(reason_key), tally.objective(reason_key)),
        ])  # fmt: skip
    headings = ("tokens", "text", "block", "credit", "per token", "why")
    return plain_table(*headings, rows=table_rows, right=[3, 4], title=Text(arm.name))


def _reason_words(reason: Zero, objective: str) -> str:
    return escape(reason.words + (f" ({objective})" if objective else ""))


def _row_list(rows: Sequence[int], *, more: bool = False) -> str:
    return ", ".join(map(str, rows)) + (", ..." if more else "")
