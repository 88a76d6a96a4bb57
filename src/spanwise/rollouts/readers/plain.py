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
from spanwise.rollouts.files import SUFFIXES, concatenate_tables, holds_json, read_delimited, record_columns
from spanwise.rollouts.table import RolloutTable, tokenize

#: The formats that `read_rollouts` reads, for error messages.
FORMATS = (
    "spanwise's rollouts (parquet with prompt, trainable, completion_ids or tokens), TRL's completions (parquet with prompt, "
    "completion), verl's rollout dump (jsonl with input, output), verifiers' traces (jsonl with traces) and tables (csv, tsv, "
    "json, jsonl, parquet) with prompt, question or messages, and completion(s) or response(s)"
)
#: The column names that are recognised for each role. A column named like the role wins over the others.
NAMES: Mapping[str, tuple[str, ...]] = {
    "prompt": ("prompt", "question", "messages", "input", "instruction"),
    "completion": ("completion", "response", "output"),
    "completions": ("completions", "responses"),
    "answer": ("answer", "ground_truth", "gold", "gts", "target"),
    "group": ("group", "group_id", "prompt_id", "example_id"),
    "step": ("step",),
}
#: Prefixes that mark a column as a reward.
REWARD_STARTS = ("rewards/", schema.column("reward", ""))
_HOW = "--columns {role}=NAME, in Python columns={{'{role}': 'NAME'}}"
#: The names that pandas gives an index column.
_INDEX = ("", "__index_level_0__", "Unnamed: 0")
#: Names of reward columns; a list in such a column must have one entry for each completion.
_REWARD = ("reward", "rewards", "score", "scores", "advantage")


class Said(NamedTuple):
    """One completion: its row in the table, its index in the row's list, the length of that list, and the prompt."""

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
    role_columns = _check_roles(columns or {})
    source, table, repeated = _read(path, files, role_columns)
    table = {name: column for name, column in table.items() if name not in _INDEX or name in role_columns.values()}
    size = max(map(len, table.values()), default=0)
    if not size:
        raise DataError(f"'{path}' holds no completions.")
    roles = _find_roles(path, list(table), role_columns)
    completion_column = roles.get("completion") or roles.get("completions") or "messages"
    streamed = None if roles.get("group") == completion_column else completion_column
    plain_table = _Plain(path, {name: column if name == streamed else list(column) for name, column in table.items()}, roles)
    tokens = tokenize(plain_table.parts(), tokenizer)
    empty_rows = size - len({completion.row for completion in plain_table.said})
    prompts = [completion.prompt for completion in plain_table.said]
    columns_n = plain_table.spread()
    step_column = cells.parse_numbers(plain_table.table[roles["step"]]) if "step" in roles else [None] * size
    steps = cells.read_steps(path, (None if cells.is_empty(step) else step for step in step_column))
    rewards = _rewards(path, {name: column for name, column in columns_n.items() if name not in roles.values()})
    pairs = [(role, roles[role]) for role in ("prompt", "completion", "completions", "answer", "group") if role in roles]
    role_notes = [f"{role.removesuffix('s')} from '{name}'" for role, name in pairs if name != role.removesuffix("s")]
    note = f"Columns: {', '.join(role_notes)}." if role_notes else ""
    if not roles.keys() & {"completion", "completions"}:
        note = "What follows the last user message of 'messages' is the completion; what tools said in it is masked."
    return RolloutTable.of(
        source,
        path,
        tokens,
        prompts=prompts,
        steps=[steps[completion.row] for completion in plain_table.said],
        keys=plain_table.keys(role_columns),
        columns=columns_n if "answer" not in roles else {**columns_n, "answer": columns_n[roles["answer"]]},
        rewards=rewards,
        trained=[name for name in rewards if source == "TRL" or name not in columns_n],
        notes=[repeated, note, f"{empty_rows} of {size} rows hold no completion and are left out." if empty_rows else ""],
    )


def _read(path: Path, files: Sequence[Path], roles: Mapping[str, str]) -> tuple[str, dict[str, Any], str]:
    """Return the format of the files, their joined columns, and a note if some files are left out."""
    suffix, note = files[0].suffix.lower(), ""
    if suffix in SUFFIXES:
        return suffix[1:].upper(), concatenate_tables(path, map(read_delimited, files)).to_pydict(), note
    if holds_json(files[0]):
        long = {*NAMES["completion"], *NAMES["completions"], "messages", roles.get("completion"), roles.get("completions")}
        return "JSON" if suffix == ".json" else "JSONL", record_columns(files, long), note
    tables: list[pa.Table] = []
    is_trl = all(_is_trl(pq.read_schema(file)) for file in files)
    for table in map(pq.read_table, files):
        if not (is_trl and tables and table.drop_columns(["step"]).equals(tables[-1].drop_columns(["step"]))):
            tables.append(table)
    if repeated_count := len(files) - len(tables):
        note = f"{repeated_count} of {len(files)} files repeat the batch before them and are left out."
    return "TRL" if is_trl else "parquet", concatenate_tables(path, tables).to_pydict(), note


def _is_trl(schema: pa.Schema) -> bool:
    """Return whether a parquet schema is TRL's: prompt, completion, step and, except in old files, advantage.

    >>> own = {"step": pa.int64(), "prompt": pa.string(), "completion": pa.string()}
    >>> [_is_trl(pa.schema(columns)) for columns in (own, {**own, "group_id": pa.int64()}, {"prompt": pa.string()})]
    [True, False, False]
    """
    if not {"step", "prompt", "completion"} <= set(schema.names):
        return False
    kind = schema.field("completion").type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if is_list and not pa.types.is_struct(kind.value_type):  # a list of completions
        return False
    has_other_columns = (name in ("rewards", *NAMES["group"]) or name.startswith(REWARD_STARTS) for name in schema.names)
    return "advantage" in schema.names or not any(has_other_columns)


def _check_roles(role_columns: Mapping[str, str]) -> Mapping[str, str]:
    """Check the roles that the user gave to columns, and return them."""
    role_of_column: dict[str, str] = {}
    for role, name in role_columns.items():
        if role not in NAMES:
            raise RecipeError(unknown("role of --columns", role, NAMES))
        other_role = role_of_column.setdefault(name, role)
        if other_role != role and {other_role, role} != {"prompt", "group"}:
            raise RecipeError(f"--columns takes '{name}' for both {other_role} and {role}; a column has one role.")
    if {"completion", "completions"} <= role_columns.keys():
        raise RecipeError("--columns names both completion and completions; completions is for a list in each cell.")
    return role_columns


def _find_roles(path: Path, names: Sequence[str], role_columns: Mapping[str, str]) -> dict[str, str]:
    """Map each role to its column; without a column of completions, each prompt cell is a whole conversation."""
    ending = f" and {len(names) - 12} more" if len(names) > 12 else ""
    problem = f"'{path}' has the columns {', '.join(map(str, names[:12])) or '(none)'}{ending}"
    for role, name in role_columns.items():
        if name not in names:
            raise DataError(f"--columns {role}={name}: {problem}. {unknown('column', name, names).split(' Known: ')[0]}")
    used = {name for role, name in role_columns.items() if role != "group"}  # the group may be the prompt
    roles = dict(role_columns)
    for role in ("prompt", "completion", "answer", "group", "step"):
        list_names = NAMES["completions"] if role == "completion" else ()
        here = [name for name in (*NAMES[role], *list_names) if name in names and name not in used]
        if role in role_columns or (list_names and "completions" in role_columns) or not here:
            continue
        if len(here) > 1 and (role not in here or "completions" in here):
            raise DataError(
                f"'{path}' has the columns {' and '.join(here)}, and each may hold the {role}. Choose one: "
                f"{_HOW.format(role=role)}."
            )
        roles["completions" if here[0] in list_names else role] = role if role in here else here[0]
    if not roles.keys() & {"completion", "completions"} and roles.get("prompt") != "messages":
        *usual, last = (*NAMES["completion"], *NAMES["completions"])
        raise DataError(
            f"{problem}, which is no rollout format known here: none of them is called {', '.join(usual)} or {last}. Say "
            f"which holds the completions: {_HOW.format(role='completion')}. Known here: {FORMATS}."
        )
    if not roles.keys() & {"prompt", "group"}:
        raise DataError(
            f"{problem}, which is no rollout format known here: nothing says which completions are of one prompt. Say which column "
            f"holds the prompts: {_HOW.format(role='prompt')}; or an id that a prompt's completions share: --columns group=NAME."
        )
    return roles


def _listed(cell: Any) -> list[Any]:
    """Return the completions of a cell as a list; a chat is a single completion."""
    if cells.is_chat(cell):
        if len(cell) > 1 and all(message["role"] == "assistant" for message in cell):
            raise cells.FieldError(
                "that may be one conversation or several completions; for one, write its text; for several, a list of "
                "texts or of lists of messages"
            )
        return [cell]
    entries = [[item] if cells.is_message(item) else item for item in (cell if isinstance(cell, (list, tuple)) else [cell])]
    if any(isinstance(item, (list, tuple, dict)) and not cells.is_chat(item) for item in entries):
        raise cells.FieldError(
            "a completion is a text, or a list of messages such as {'role': 'assistant', 'content': '...'}"
        )
    return entries


def _parted(cell: Any) -> tuple[Any, list[Any]]:
    """Split a conversation into the prompt and a list with its completion."""
    if cells.is_empty(cell):
        return None, []
    if not cells.is_chat(cell):
        raise cells.FieldError(
            "without a column of completions it must hold a list of messages that ends with the assistant's"
        )
    prompt, completion = cells.split_chat(cell)
    return prompt, [completion]


@dataclass(frozen=True)
class _Plain:
    """A table whose columns have roles; iterate over `parts` first, which fills `said`."""

    path: Path
    table: Mapping[str, Any]
    roles: Mapping[str, str]
    said: list[Said] = field(default_factory=list)

    def parts(self) -> Iterator[cells.Parts]:
        """Yield the text parts of every completion and record its row and prompt in `said`."""
        table, roles, prompt_texts = self.table, self.roles, dict[str, str]()
        column = roles.get("completion") or roles.get("completions") or "messages"
        is_conversation = roles.get("prompt") == column  # the column holds whole conversations, which begin with the prompt
        prompts = repeat(None) if is_conversation or "prompt" not in roles else cells.parse_chats(table[roles["prompt"]])
        completion_cells = cells.parse_literals(
            table[column], cells.is_list if "completions" in roles else cells.is_chat_or_message
        )
        for n, (prompt, cell) in enumerate(zip(prompts, completion_cells, strict=False)):
            with cells.at_place(f"Row {n} of '{self.path}' has {cell!r:.80} in column '{column}';"):
                prompt, completions = _parted(cell) if is_conversation else (prompt, _listed(cell))
            filled = [(place, completion) for place, completion in enumerate(completions) if not cells.is_empty(completion)]
            if filled and cells.is_empty(prompt) and "group" not in roles:
                raise DataError(
                    f"Row {n} of '{self.path}' has nothing in column '{roles['prompt']}'; fill it in or remove the row."
                )
            text = cells.prompt_text(prompt) if filled else ""
            for place, completion in filled:
                self.said.append(Said(n, place, len(completions), prompt_texts.setdefault(text, text)))
                yield cells.completion_parts(completion)

    def spread(self) -> dict[str, list[Any]]:
        """Return the other columns with a value per completion: the row's, or the completion's entry in the row's list."""
        answer, group = self.roles.get("answer"), self.roles.get("group")
        role_names = {self.roles.get(role) for role in ("prompt", "completion", "completions", "step")}
        has_lists = "completions" in self.roles or any(item.size > 1 for item in self.said)
        spread: dict[str, list[Any]] = {}
        for name, column in self.table.items():
            if name in (answer, group):
                values = [column[item.row] for item in self.said]
                spread[name] = (
                    [cells.answer_text(value) for value in values] if name == answer else cells.parse_numbers(values)
                )
                continue
            if name in role_names:
                continue
            if has_lists:
                column = list(cells.parse_literals(column, cells.is_list))
            elif name in _REWARD:
                column = [cells.parse_literal(cell) for cell in column]
            values = [column[item.row] for item in self.said]
            if has_lists and self.one_each(name, column):
                value_pairs = zip(values, self.said, strict=True)
                values = [value[item.place] if isinstance(value, list) else value for value, item in value_pairs]
            objects = [value if isinstance(value, dict) else {} for value in values] if name in _REWARD else []
            reward_columns = {f"rewards/{key}": inner_values for key, inner_values in cells.by_column(objects).items()}
            spread |= {
                key: cells.parse_numbers(inner_values) for key, inner_values in (reward_columns or {name: values}).items()
            }
        return spread

    def one_each(self, name: str, column: Sequence[Any]) -> bool:
        """Return whether every list of a column has one number or object of rewards per completion of the row."""
        rows = {item.row: item.size for item in self.said if isinstance(column[item.row], list)}
        is_reward = name in _REWARD or name.startswith(REWARD_STARTS)
        kinds = (bool, int, float, type(None), *((dict,) if is_reward else ()))
        if not all(isinstance(value, kinds) for row in rows for value in column[row]):
            return False
        bad = next((row for row, size in rows.items() if len(column[row]) != size), None)
        if bad is not None and is_reward:
            raise DataError(
                f"Row {bad} of '{self.path}' has {rows[bad]} completions and {len(column[bad])} values of '{name}'; give one "
                "for each, null where there is none."
            )
        return bad is None

    def keys(self, asked: Mapping[str, str]) -> list[str] | None:
        """Return the group id of every completion, from the group column or the row; None if the prompt defines the group."""
        if "group" not in self.roles:
            return [f"{row.row}" for row in self.said] if any(row.size > 1 for row in self.said) else None
        name, prompts = self.roles["group"], len({row.prompt for row in self.said})
        ids = [self.table[name][row.row] for row in self.said]
        missing_count = sum(map(cells.is_empty, ids))
        if missing_count:
            problem = f"{missing_count} of {len(ids)} completions of '{self.path}' have no '{name}'"
            raise DataError(f"{problem}; fill in every row, or group by prompt with --columns group=PROMPT_COLUMN.")
        keys = [str(key) for key in ids]
        if len(set(keys)) == len(keys) > prompts and "group" not in asked:
            raise DataError(
                f"The column '{name}' of '{self.path}' has another value in each of {len(keys)} rows, and these have {prompts} "
                "prompts, so nothing would be compared. Say what the completions of one prompt share: "
                f"{_HOW.format(role='group')}, such as group={self.roles.get('prompt', 'NAME')}."
            )
        return keys


def _rewards(path: Path, columns: Mapping[str, Sequence[Any]]) -> dict[str, Sequence[Any]]:
    """Return the columns that may be rewards; `rewards/NAME` becomes NAME."""
    rewards: dict[str, Sequence[Any]] = {}
    for name, values in columns.items():
        prefix = next((prefix for prefix in REWARD_STARTS if name.startswith(prefix) and name != prefix), "")
        reward = name.removeprefix(prefix)
        if reward in rewards or (prefix and reward in columns):
            raise DataError(f"'{path}' has two columns for the reward '{reward}', '{name}' is one of them; leave one out.")
        rewards[reward] = values
    return rewards
