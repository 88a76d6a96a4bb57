"""What `spanwise credit` leaves behind: the parquet with every token's advantage, and the rows of the token view."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from jaxtyping import Int
from torch import Tensor

from spanwise.commands.credit.apply import Applied
from spanwise.commands.credit.score import AT_A_TIME, Marked
from spanwise.errors import DataError
from spanwise.rollouts import RolloutTable
from spanwise.score import judge_of
from spanwise.types import Fault, Scores, Status

if TYPE_CHECKING:
    from spanwise.report import TokenRow
else:
    TokenRow = Any  # the name must exist for runtime type checkers; the report is optional

#: What a file may hold per token, and the column of the export.
PER_TOKEN = {"value": "values", "logp": "logprobs"}


def write_credit(
    file: Path, table: RolloutTable, applied: Sequence[Applied], scores: Scores, marked: Marked, group_n: Int[Tensor, " n"]
) -> None:
    """Write a row per completion: where it stands, its spans, rewards, and credit and advantages under every method.

    Columns: row, step, group, prompt, `completion_ids` (`tokens` where the file held text), trainable, `values` and `logprobs` if
    the file has them, fault, `start/<block>`, `end/<block>`, `reward/<objective>` (null where there is none),
    `status/<objective>`, then for every method `credit/<method>/<block>` (null where the completion does not have the block),
    `credit/<method>/stop` and `advantages/<method>`, a list with a number for each token (null where the completion was left out
    of the loss).

    Args:
        file: written anew.
        table: N completions.
        applied: the methods, in order.
        scores, marked: of the first layout.
        group_n: the groups as they were compared.

    Raises:
        DataError: the file cannot be written.
    """
    pieces = None if table.has_ids else _texts(table.vocabulary.pieces)
    writer: pq.ParquetWriter | None = None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        for first, last in table.tokens.chunks(AT_A_TIME):
            columns = _whole(table, scores, marked, group_n, first, last)
            columns |= _tokens(table, pieces, first, last)
            for one in applied:
                columns |= _credit(one, table, first, last)
            part = pa.table(columns)
            writer = writer or pq.ParquetWriter(file, part.schema, compression="zstd")
            writer.write_table(part)
    except OSError as error:
        raise DataError(f"'{file}' cannot be written: {error.strerror or error}.") from error
    finally:
        if writer is not None:
            writer.close()


def _texts(pieces: Sequence[bytes]) -> pa.Array:
    """Texts, or bytes where a tokenizer cuts characters."""
    try:
        return pa.array([piece.decode() for piece in pieces])
    except UnicodeDecodeError:
        return pa.array(pieces, pa.binary())


def _whole(
    table: RolloutTable, scores: Scores, marked: Marked, group_n: Tensor, first: int, last: int
) -> dict[str, pa.Array]:
    rows = slice(first, last)
    columns: dict[str, Any] = {
        "row": np.arange(first, last),
        "step": table.step_n[rows].numpy(),
        "group": group_n[rows].numpy(),
        "prompt": list(table.prompts[rows]),
        "fault": marked.fault_n[rows].numpy(),
    }
    for k, name in enumerate(marked.names):
        columns[f"start/{name}"] = marked.start_nk[rows, k].numpy()
        columns[f"end/{name}"] = marked.end_nk[rows, k].numpy()
    for m, name in enumerate(scores.names):
        reward = scores.reward_nm[rows, m].numpy()
        columns[f"reward/{name}"] = pa.array(reward, mask=np.isnan(reward))
        columns[f"status/{name}"] = [Status(value).name.lower() for value in scores.status_nm[rows, m].tolist()]
    return {name: pa.array(values) for name, values in columns.items()}


def _tokens(table: RolloutTable, pieces: pa.Array | None, first: int, last: int) -> dict[str, pa.Array]:
    ids = pa.array(table.tokens.slice(first, last))
    shown = {"completion_ids": ids} if pieces is None else {"tokens": pieces.take(ids)}
    shown["trainable"] = pa.array(table.tokens.with_values(table.trainable).slice(first, last))
    for name, values in table.token_values.items():
        shown[PER_TOKEN[name]] = pa.array(table.tokens.with_values(values).slice(first, last))
    return {name: _lists(values, table, first, last) for name, values in shown.items()}


def _credit(one: Applied, table: RolloutTable, first: int, last: int) -> dict[str, pa.Array]:
    rows, method = slice(first, last), one.arm.name
    absent_nk = (one.marked.length_nk[rows] == 0).numpy()
    columns = {
        f"credit/{method}/{name}": pa.array(one.credit.block_nk[rows, k].numpy(), mask=absent_nk[:, k])
        for k, name in enumerate(one.marked.names)
    }
    columns[f"credit/{method}/stop"] = pa.array(one.credit.stop_n[rows].numpy())
    left_out = None if table.learned_n is None else np.repeat(~table.learned_n[rows].numpy(), table.tokens.lengths[rows])
    columns[f"advantages/{method}"] = _lists(pa.array(one.advantages(table, first, last), mask=left_out), table, first, last)
    return columns


def _lists(values: pa.Array, table: RolloutTable, first: int, last: int) -> pa.Array:
    offsets = table.tokens.offsets[first : last + 1]
    return pa.ListArray.from_arrays(pa.array((offsets - offsets[0]).astype(np.int32)), values)


def remembered(table: RolloutTable, applied: Sequence[Applied], options: Mapping[str, Any]) -> dict[str, Any]:
    """What `spanwise report` needs to write the page of an export again, for its `summary.json`.

    Args:
        table: the rollouts.
        applied: the methods.
        options: of `credit_rollouts`, and `rows`.

    Returns:
        `options` as plain data; `tokenizer`, the folder that the ids of the export are of (None where it holds texts);
        `outcome`, the objective that says what is right, if there is one.
    """
    folder = options.get("tokenizer") or (None if table.folder is None else table.folder / "model")
    given = (judge_of(o) or next(iter(o.outcomes), None) for one in applied for o in one.arm.scheme.objectives)
    return {
        "options": json.loads(json.dumps({name: value for name, value in options.items() if value}, default=str)),
        "tokenizer": str(Path(folder).resolve()) if table.has_ids and folder else None,
        "outcome": outcome_of([o.name for one in applied for o in one.arm.scheme.objectives], given),
    }


def outcome_of(names: Collection[str], given: Iterable[str | None]) -> str | None:
    """The objective that says what is right: the one that others are given or judged by, else `correct`, else none.

    Args:
        names: of all objectives.
        given: what each is given or judged by.

    Example:
        >>> outcome_of(["format", "right", "brier"], [None, None, "right"]), outcome_of(["format"], [None])
        ('right', None)
    """
    return next((name for name in given if name in names), "correct" if "correct" in names else None)


def choose_rows(group_n: Int[Tensor, " n"], count: int) -> list[int]:
    """At most `count` rows, evenly from the file, whole groups.

    >>> choose_rows(torch.tensor([0, 0, 1, 1, 2, 2]), 4)
    [0, 1, 4, 5]
    """
    if len(group_n) <= count:
        return list(range(len(group_n)))
    order = torch.argsort(group_n, stable=True)
    members = torch.split(order, torch.unique_consecutive(group_n[order], return_counts=True)[1].tolist())
    members = sorted(members, key=lambda rows: int(rows[0]))
    wanted = max(1, int(count * len(members) / len(group_n)))
    while wanted >= 1:
        chosen = [members[int(place)] for place in np.linspace(0, len(members) - 1, wanted)]
        if sum(map(len, chosen)) <= count or wanted == 1:
            return sorted(int(row) for rows in chosen for row in rows)[:count]
        wanted -= 1
    return []


def rows_note(note: str, chosen: int, total: int) -> str:
    """The note of an export with what its token view leaves out.

    >>> rows_note("Rewards: correct from the file.", 2, 4)
    'Rewards: correct from the file. 2 of 4 completions are shown, evenly from the file.'
    """
    left_out = f" {chosen} of {total} completions are shown, evenly from the file." if chosen < total else ""
    return f"{note}{left_out}".strip()


def applied_rows(
    table: RolloutTable, applied: Sequence[Applied], scores: Scores, marked: Marked, rows: Sequence[int]
) -> list[TokenRow]:
    """The completions `rows` as the token view takes them; a token that is not trained has NaN."""
    from spanwise.report import TokenRow as Row

    return [
        Row(
            prompt=shown_prompt(table.prompts[n]),
            tokens=[table.vocabulary.pieces[i].decode(errors="surrogateescape") for i in table.tokens.slice(n, n + 1)],
            advantages={one.arm.name: _shown(one, table, n) for one in applied},
            spans={name: (int(marked.start_nk[n, k]), int(marked.end_nk[n, k])) for k, name in enumerate(marked.names)},
            rewards={
                name: None if value != value else value
                for name, value in zip(scores.names, scores.reward_nm[n].tolist(), strict=True)
            },
            statuses={
                name: Status(value).name.lower()
                for name, value in zip(scores.names, scores.status_nm[n].tolist(), strict=True)
            },
            fault=", ".join(fault.name.lower() for fault in Fault(int(marked.fault_n[n])) if fault.name),
            values=_listed(table, "value", n),
            probabilities=_listed(table, "logp", n),
            step=int(table.step_n[n]),
            stop={one.arm.name: stop for one in applied if (stop := float(one.credit.stop_n[n]))},
        )
        for n in rows
    ]


def shown_prompt(text: str) -> str:
    r"""The text of a prompt; a conversation, kept as JSON, is written role by role.

    >>> shown_prompt('[{"role": "user", "content": "1+1="}]')
    'user: 1+1='
    """
    try:
        messages = json.loads(text) if text.startswith("[{") else None
        return text if messages is None else "\n\n".join(f"{entry['role']}: {entry['content']}" for entry in messages)
    except (ValueError, KeyError, TypeError):
        return text


def _shown(one: Applied, table: RolloutTable, n: int) -> list[float]:
    trained = table.tokens.with_values(table.trainable).slice(n, n + 1)
    if table.learned_n is not None and not bool(table.learned_n[n]):
        trained = np.zeros_like(trained)
    return np.where(trained, one.advantages(table, n, n + 1), np.nan).tolist()


def _listed(table: RolloutTable, name: str, n: int) -> list[float] | None:
    if name not in table.token_values:
        return None
    values = table.tokens.with_values(table.token_values[name]).slice(n, n + 1)
    return (np.exp(values) if name == "logp" else values).tolist()
