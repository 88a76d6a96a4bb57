"""Tables that anybody made: CSV, TSV, JSON, JSON lines and parquet with a prompt and a completion, or several, in each row.

Which column holds what is as the user says, else as its name says; what is not clear is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from spanwise.errors import DataError, RecipeError, unknown
from spanwise.rollouts import cells, schema
from spanwise.rollouts.files import SUFFIXES, holds_json, joined, read_delimited, record_columns
from spanwise.rollouts.table import RolloutTable, cut_text

#: What can be read, in words for messages.
FORMATS = (
    "spanwise's rollouts (parquet with prompt, trainable, completion_ids or tokens), TRL's completions (parquet with prompt, "
    "completion), verl's rollout dump (jsonl with input, output), verifiers' traces (jsonl with traces) and tables (csv, tsv, "
    "json, jsonl, parquet) with prompt, question or messages, and completion(s) or response(s)"
)
#: Role -> the names that a column of it may have. A column that is called like the role itself goes before the others.
NAMES: Mapping[str, tuple[str, ...]] = {
    "prompt": ("prompt", "question", "messages", "input", "instruction"),
    "completion": ("completion", "response", "output"),
    "completions": ("completions", "responses"),
    "answer": ("answer", "ground_truth", "gold", "gts", "target"),
    "group": ("group", "group_id", "prompt_id", "example_id"),
    "step": ("step",),
}
#: Before the name of a reward.
REWARD_STARTS = ("rewards/", schema.column("reward", ""))
_HOW = "--columns {role}=NAME, in Python columns={{'{role}': 'NAME'}}"
#: What pandas calls an index that was written as a column.
_INDEX = ("", "__index_level_0__", "Unnamed: 0")
#: Columns that hold rewards, by name or by the beginning of it: a list in them must have one for each completion.
_REWARD = ("reward", "rewards", "score", "scores", "advantage")


class Said(NamedTuple):
    """One completion: the row that it stands in, its place in the list there, how long that is, and its prompt."""

    row: int
    place: int
    size: int
    prompt: str


def read_plain(
    path: Path, files: Sequence[Path], tokenizer: str | Path | None, columns: Mapping[str, str] | None = None
) -> RolloutTable:
    """Read a table with a completion in each row, or a list of completions of one prompt.

    Every numeric column without a role is taken for a reward, `rewards/NAME` under the name NAME; a list of numbers beside a list
    of completions has one for each of them. Rows without a completion are left out and counted: null is no empty text. A
    conversation in `messages`, without a completion beside it, ends with what the model said.

    TRL's `completions/completions_*.parquet` are such tables. TRL logs the last generation batch, so a batch that serves several
    optimiser steps is written several times; repetitions are left out. What was said in JSON lines is cut as it is read.
    """
    asked = _check_roles(columns or {})
    source, table, repeated = _read(path, files, asked)
    table = {name: column for name, column in table.items() if name not in _INDEX or name in asked.values()}
    size = max(map(len, table.values()), default=0)
    if not size:
        raise DataError(f"'{path}' holds no completions.")
    roles = _find_roles(path, list(table), asked)
    spoken = roles.get("completion") or roles.get("completions") or "messages"
    streamed = None if roles.get("group") == spoken else spoken
    own = _Plain(path, {name: column if name == streamed else list(column) for name, column in table.items()}, roles)
    cut = cut_text(own.parts(), tokenizer)
    absent = size - len({one.row for one in own.said})
    prompts = [one.prompt for one in own.said]
    spread = own.spread()
    step_column = cells.typed(own.table[roles["step"]]) if "step" in roles else [None] * size
    steps = cells.steps_of(path, (None if cells.empty(step) else step for step in step_column))
    rewards = _rewards(path, {name: column for name, column in spread.items() if name not in roles.values()})
    pairs = [(role, roles[role]) for role in ("prompt", "completion", "completions", "answer", "group") if role in roles]
    taken = [f"{role.removesuffix('s')} from '{name}'" for role, name in pairs if name != role.removesuffix("s")]
    read_as = f"Columns: {', '.join(taken)}." if taken else ""
    if not roles.keys() & {"completion", "completions"}:
        read_as = "The conversations of 'messages' end with what the model said; what comes before is the prompt."
    return RolloutTable.of(
        source,
        path,
        cut,
        prompts=prompts,
        steps=[steps[one.row] for one in own.said],
        keys=own.keys(asked),
        columns=spread if "answer" not in roles else {**spread, "answer": spread[roles["answer"]]},
        rewards=rewards,
        trained=[name for name in rewards if source == "TRL" or name not in spread],
        notes=[repeated, read_as, f"{absent} of {size} rows hold no completion and are left out." if absent else ""],
    )


def _read(path: Path, files: Sequence[Path], asked: Mapping[str, str]) -> tuple[str, dict[str, Any], str]:
    """What kind of files these are, their columns under each other, and the sentence on files that are left out."""
    suffix, note = files[0].suffix.lower(), ""
    if suffix in SUFFIXES:
        return suffix[1:].upper(), joined(path, map(read_delimited, files)).to_pydict(), note
    if holds_json(files[0]):
        long = {*NAMES["completion"], *NAMES["completions"], "messages", asked.get("completion"), asked.get("completions")}
        return "JSON" if suffix == ".json" else "JSONL", record_columns(files, long), note
    tables: list[pa.Table] = []
    trl = all(_is_trl(pq.read_schema(file)) for file in files)
    for table in map(pq.read_table, files):
        if not (trl and tables and table.drop_columns(["step"]).equals(tables[-1].drop_columns(["step"]))):
            tables.append(table)
    if repeated := len(files) - len(tables):
        note = f"{repeated} of {len(files)} files repeat the batch before them and are left out."
    return "TRL" if trl else "parquet", joined(path, tables).to_pydict(), note


def _is_trl(found: pa.Schema) -> bool:
    """Whether a parquet file is TRL's: a prompt, a completion and a step in each row, and its advantage, as all but old ones have.

    >>> own = {"step": pa.int64(), "prompt": pa.string(), "completion": pa.string()}
    >>> [_is_trl(pa.schema(columns)) for columns in (own, {**own, "group_id": pa.int64()}, {"prompt": pa.string()})]
    [True, False, False]
    """
    if not {"step", "prompt", "completion"} <= set(found.names):
        return False
    kind = found.field("completion").type
    listed = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if listed and not pa.types.is_struct(kind.value_type):  # a list of completions
        return False
    others = (name in ("rewards", *NAMES["group"]) or name.startswith(REWARD_STARTS) for name in found.names)
    return "advantage" in found.names or not any(others)


def _check_roles(asked: Mapping[str, str]) -> Mapping[str, str]:
    """What the user has said of columns, checked.

    >>> _check_roles({"completoin": "output"})
    Traceback (most recent call last):
    spanwise.errors.RecipeError: There is no role of --columns 'completoin'. Did you mean 'completion'? Known: answer, ...
    """
    by_name: dict[str, str] = {}
    for role, name in asked.items():
        if role not in NAMES:
            raise RecipeError(unknown("role of --columns", role, NAMES))
        other = by_name.setdefault(name, role)
        if other != role and {other, role} != {"prompt", "group"}:
            raise RecipeError(f"--columns takes '{name}' for both {other} and {role}; a column has one role.")
    if {"completion", "completions"} <= asked.keys():
        raise RecipeError("--columns names both completion and completions; completions is for a list in each cell.")
    return asked


def _find_roles(path: Path, names: Sequence[str], asked: Mapping[str, str]) -> dict[str, str]:
    """Role -> its column; `completions` is a list of them in each cell, and without either a prompt is a whole conversation."""
    more = f" and {len(names) - 12} more" if len(names) > 12 else ""
    has = f"'{path}' has the columns {', '.join(map(str, names[:12])) or '(none)'}{more}"
    for role, name in asked.items():
        if name not in names:
            raise DataError(f"--columns {role}={name}: {has}. {unknown('column', name, names).split(' Known: ')[0]}")
    taken = {name for role, name in asked.items() if role != "group"}  # which may be the prompt
    roles = dict(asked)
    for role in ("prompt", "completion", "answer", "group", "step"):
        several = NAMES["completions"] if role == "completion" else ()
        here = [name for name in (*NAMES[role], *several) if name in names and name not in taken]
        if role in asked or (several and "completions" in asked) or not here:
            continue
        if len(here) > 1 and (role not in here or "completions" in here):
            raise DataError(
                f"'{path}' has the columns {' and '.join(here)}, and each may hold the {role}. Say which: {_HOW.format(role=role)}."
            )
        roles["completions" if here[0] in several else role] = role if role in here else here[0]
    if not roles.keys() & {"completion", "completions"} and roles.get("prompt") != "messages":
        *others, last = (*NAMES["completion"], *NAMES["completions"])
        raise DataError(
            f"{has}, which is no rollout format known here: none of them is called {', '.join(others)} or {last}. Say which holds "
            f"the completions: {_HOW.format(role='completion')}. Known here: {FORMATS}."
        )
    if not roles.keys() & {"prompt", "group"}:
        raise DataError(
            f"{has}, which is no rollout format known here: nothing says which completions are of one prompt. Say which column "
            f"holds the prompts: {_HOW.format(role='prompt')}; or an id that those of one prompt share: --columns group=NAME."
        )
    return roles


def _listed(cell: Any) -> list[Any]:
    """The completions of a cell: one, or a list of them; a chat is one.

    >>> _listed("4"), _listed(["4", None]), len(_listed([{"role": "assistant", "content": "4"}]))
    (['4'], ['4', None], 1)
    """
    if cells.is_chat(cell):
        if len(cell) > 1 and all(message["role"] == "assistant" for message in cell):
            raise cells.FieldError(
                "that may be one conversation or several completions; for one, write its text; for several, a list of "
                "texts or of lists of messages"
            )
        return [cell]
    entries = [[one] if cells.is_message(one) else one for one in (cell if isinstance(cell, (list, tuple)) else [cell])]
    if any(isinstance(one, (list, tuple, dict)) and not cells.is_chat(one) for one in entries):
        raise cells.FieldError(
            "a completion is a text, or a list of messages such as {'role': 'assistant', 'content': '...'}"
        )
    return entries


def _parted(cell: Any) -> tuple[Any, list[Any]]:
    """A whole conversation as a prompt and what the model said last, if there is one.

    >>> _parted([{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}])[1]
    [[{'role': 'assistant', 'content': '4'}]]
    """
    if cells.empty(cell):
        return None, []
    if not cells.is_chat(cell):
        raise cells.FieldError(
            "without a column of completions it must hold a list of messages that ends with the assistant's"
        )
    spoken = [n for n, message in enumerate(cell) if message["role"] == "assistant"]
    if spoken != [len(cell) - 1]:
        raise cells.FieldError(
            f"{len(spoken)} of its {len(cell)} messages are the assistant's, where the last one alone may be; write what was "
            "sampled into a column 'completion', and what came before it into 'prompt'"
        )
    return cell[:-1], [cell[-1:]]


@dataclass(frozen=True)
class _Plain:
    """A table whose columns have roles; what is known of its completions is there once their `parts` were gone through."""

    path: Path
    table: Mapping[str, Any]
    roles: Mapping[str, str]
    said: list[Said] = field(default_factory=list)

    def parts(self) -> Iterator[cells.Parts]:
        """What was said in every completion, of which `said` keeps the rest; each prompt is kept once."""
        table, roles, shared = self.table, self.roles, dict[str, str]()
        column = roles.get("completion") or roles.get("completions") or "messages"
        whole = roles.get("prompt") == column  # a conversation, which the prompt begins
        prompts = repeat(None) if whole or "prompt" not in roles else cells.chats(table[roles["prompt"]])
        spoken = cells.spelled(table[column], cells.is_list if "completions" in roles else cells.is_talk)
        for n, (prompt, cell) in enumerate(zip(prompts, spoken, strict=False)):
            with cells.at_place(f"Row {n} of '{self.path}' has {cell!r:.80} in column '{column}';"):
                prompt, listed = _parted(cell) if whole else (prompt, _listed(cell))
            here = [(place, one) for place, one in enumerate(listed) if not cells.empty(one)]
            if here and cells.empty(prompt) and "group" not in roles:
                raise DataError(
                    f"Row {n} of '{self.path}' has nothing in column '{roles['prompt']}'; fill it in or remove the row."
                )
            text = cells.prompt_text(prompt) if here else ""
            for place, one in here:
                self.said.append(Said(n, place, len(listed), shared.setdefault(text, text)))
                yield cells.completion_parts(one)

    def spread(self) -> dict[str, list[Any]]:
        """The columns beside prompts and completions, with a value for each completion: its row's, or its own of a list as long."""
        answer, group = self.roles.get("answer"), self.roles.get("group")
        consumed = {self.roles.get(role) for role in ("prompt", "completion", "completions", "step")}
        several = "completions" in self.roles or any(one.size > 1 for one in self.said)
        spread: dict[str, list[Any]] = {}
        for name, column in self.table.items():
            if name in (answer, group):
                values = [column[one.row] for one in self.said]
                spread[name] = [cells.as_text(value) for value in values] if name == answer else cells.typed(values)
                continue
            if name in consumed:
                continue
            if several:
                column = list(cells.spelled(column, cells.is_list))
            elif name in _REWARD:
                column = [cells.spelled_out(cell) for cell in column]
            values = [column[one.row] for one in self.said]
            if several and self.one_each(name, column):
                pairs = zip(values, self.said, strict=True)
                values = [value[one.place] if isinstance(value, list) else value for value, one in pairs]
            objects = [value if isinstance(value, dict) else {} for value in values] if name in _REWARD else []
            inside = {f"rewards/{key}": own for key, own in cells.by_column(objects).items()}
            spread |= {key: cells.typed(own) for key, own in (inside or {name: values}).items()}
        return spread

    def one_each(self, name: str, column: Sequence[Any]) -> bool:
        """Whether the lists of a column hold one number, or one object of rewards, for each completion of their row."""
        rows = {one.row: one.size for one in self.said if isinstance(column[one.row], list)}
        reward = name in _REWARD or name.startswith(REWARD_STARTS)
        kinds = (bool, int, float, type(None), *((dict,) if reward else ()))
        if not all(isinstance(value, kinds) for row in rows for value in column[row]):
            return False
        wrong = next((row for row, size in rows.items() if len(column[row]) != size), None)
        if wrong is not None and reward:
            raise DataError(
                f"Row {wrong} of '{self.path}' has {rows[wrong]} completions and {len(column[wrong])} values of '{name}'; give one "
                "for each, null where there is none."
            )
        return wrong is None

    def keys(self, asked: Mapping[str, str]) -> list[str] | None:
        """What the completions of a group share, where it is not the prompt: an id, or the row that lists them."""
        if "group" not in self.roles:
            return [f"{one.row}" for one in self.said] if any(one.size > 1 for one in self.said) else None
        name, prompts = self.roles["group"], len({one.prompt for one in self.said})
        ids = [self.table[name][one.row] for one in self.said]
        lacking = sum(map(cells.empty, ids))
        if lacking:
            lack = f"{lacking} of {len(ids)} completions of '{self.path}' have no '{name}'"
            raise DataError(f"{lack}; say it of all of them, or group by prompt with --columns group=PROMPT_COLUMN.")
        keys = [str(one) for one in ids]
        if len(set(keys)) == len(keys) > prompts and "group" not in asked:
            raise DataError(
                f"The column '{name}' of '{self.path}' has another value in each of {len(keys)} rows, and these have {prompts} "
                "prompts, so nothing would be compared. Say what the completions of one prompt share: "
                f"{_HOW.format(role='group')}, such as group={self.roles.get('prompt', 'NAME')}."
            )
        return keys


def _rewards(path: Path, columns: Mapping[str, Sequence[Any]]) -> dict[str, Sequence[Any]]:
    """The columns that may be rewards, `rewards/NAME` as NAME."""
    rewards: dict[str, Sequence[Any]] = {}
    for name, values in columns.items():
        start = next((start for start in REWARD_STARTS if name.startswith(start) and name != start), "")
        short = name.removeprefix(start)
        if short in rewards or (start and short in columns):
            raise DataError(f"'{path}' has two columns for the reward '{short}', '{name}' is one of them; leave one out.")
        rewards[short] = values
    return rewards
