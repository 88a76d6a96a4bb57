"""Read tables of your own: CSV, TSV, JSON, JSON lines and parquet.

The role of a column is what the user says, or else what its name says; an unclear role is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from spanwise.errors import DataError, RecipeError, unknown
from spanwise.rollouts import cells, schema
from spanwise.rollouts.columns import RereadColumn, Shared, delimited_pieces, json_pieces, parquet_pieces, read_columns
from spanwise.rollouts.files import SUFFIXES, holds_json
from spanwise.rollouts.table import COMPARED, RolloutTable, tokenize

FORMATS = (
    "spanwise's rollouts (parquet with prompt, trainable, completion_ids or tokens), TRL's completions (parquet with step, "
    "prompt, completion, advantage), verl's rollout dump (jsonl with input, output), verifiers' traces (jsonl with traces), "
    "slime's dumps (pt), logs of Inspect (eval, json) and lm-eval (samples_*.jsonl) and tables (csv, tsv, json, jsonl, parquet) "
    "with prompt, question or messages, and completion(s) or response(s)"
)
#: The column names that are recognised for each role, such as prompt. The role's own name is preferred.
NAMES: Mapping[str, tuple[str, ...]] = {
    "prompt": ("prompt", "question", "messages", "input", "instruction", "input_prompt"),
    "completion": ("completion", "response", "output", "output_response"),
    "completions": ("completions", "responses"),
    "answer": ("answer", "ground_truth", "gold", "gts", "target"),
    "group": ("group", "group_id", "prompt_id", "example_id"),
    "step": ("step",),
}
_COMPLETION_COLUMNS = {*NAMES["completion"], *NAMES["completions"], "messages"}
REWARD_PREFIXES = ("rewards/", schema.column("reward", ""))
_OF_TURNS = re.compile(r"(?:^|_)turns?(?:$|_)")
_COLUMN_HINT = "--columns {role}=NAME (in Python: columns={{'{role}': 'NAME'}})"
_PANDAS_INDEX_NAMES = ("", "__index_level_0__", "Unnamed: 0")
_REWARD_NAMES = (*COMPARED, "advantage")  # lists in these columns have an entry per completion


class CompletionSource(NamedTuple):
    """A completion's place in a table, and its prompt."""

    row: int
    position: int
    siblings: int
    prompt: str


def read_plain(
    path: Path,
    files: Sequence[Path],
    tokenizer: str | Path | None,
    columns: Mapping[str, str] | None = None,
    parts: Sequence[str] = (),
) -> RolloutTable:
    """Read a table with one or several completions in each row. Every numeric column is a reward."""
    role_columns = _check_roles(columns or {})
    format_name, table, repeats_note = _read_columns(path, files, role_columns, parts)
    index_names = {*_PANDAS_INDEX_NAMES}.difference(role_columns.values())
    table = {name: column for name, column in table.items() if name not in index_names}
    row_count = max(map(len, table.values()), default=0)
    if not row_count:
        raise DataError(f"'{path}' holds no completions.")
    # A completion may lie in several columns, one per part.
    has_completions = "completion" in role_columns or not _COMPLETION_COLUMNS.isdisjoint(table)
    if has_completions or not {*parts} <= table.keys():
        parts = ()
    if parts:
        table = _join_parts(path, table, parts)
    roles = _find_roles(path, list(table), role_columns)
    completion_column = roles.get("completion") or roles.get("completions") or "messages"
    on_disk_column = None if roles.get("group") == completion_column else completion_column
    deduplicate = Shared()
    table = {
        name: [*map(deduplicate, column)] if isinstance(column, RereadColumn) and name != on_disk_column else column
        for name, column in table.items()
    }
    plain_table = _PlainTable(path, table, roles)
    tokens = tokenize(plain_table.read_completions(), tokenizer)
    completion_sources = plain_table.sources
    list_length_by_row = {source.row: source.siblings for source in completion_sources}
    empty_row_count = row_count - len(list_length_by_row)
    null_entry_count = sum(list_length_by_row.values()) - len(completion_sources)
    all_columns = plain_table.expand_columns()
    step_numbers = cells.parse_numbers(plain_table.table[roles["step"]] if "step" in roles else [None] * row_count)
    step_of_row = cells.read_steps(path, (None if cells.is_empty(step) else step for step in step_numbers))
    other_columns = {name: column for name, column in all_columns.items() if name not in roles.values()}
    reward_columns = _name_rewards(path, other_columns)
    noun_of_role = {role: role.removesuffix("s") for role in ("prompt", "completion", "completions", "answer", "group")}
    role_notes = [f"{noun} from '{roles[role]}'" for role, noun in noun_of_role.items() if roles.get(role, noun) != noun]
    role_note = f"Columns: {', '.join(role_notes)}." if role_notes else ""
    if parts:
        role_note = f"Each completion holds the columns {', '.join(parts)}, each between tags with the column's name."
    elif not roles.keys() & {"completion", "completions"}:
        role_note = "The completion is what follows the last user message in 'messages'; tool messages get no credit."
    return RolloutTable.of(
        format_name,
        path,
        tokens,
        prompts=[source.prompt for source in completion_sources],
        steps=[step_of_row[source.row] for source in completion_sources],
        keys=plain_table.group_ids(role_columns),
        columns=all_columns if "answer" not in roles else {**all_columns, "answer": all_columns[roles["answer"]]},
        rewards=reward_columns,
        trained=[name for name in reward_columns if format_name == "TRL" or name not in all_columns],
        notes=[
            repeats_note,
            role_note,
            f"{empty_row_count} of {row_count} rows hold no completion and are left out." if empty_row_count else "",
            f"Null entries in lists of completions are left out: {null_entry_count}." if null_entry_count else "",
            _note_turns(other_columns),
        ],
    )


def _note_turns(columns: Mapping[str, Sequence[Any]]) -> str:
    """Tell the user which columns hold a number per turn. No reward reads them."""
    turn_columns = {name: values for name, values in columns.items() if _OF_TURNS.search(name)}
    names = [name for name, values in turn_columns.items() if any(map(_is_number_list, map(cells.parse_literal, values)))]
    if not names:
        return ""
    return (
        f"These columns hold a number per turn, so they are not read as rewards: {', '.join(names)}. All turns of a "
        "completion share its rewards. To give each turn rewards of its own, call spanwise.by_turn (docs/agents.md)."
    )


def _is_number_list(value: Any) -> bool:
    filled_entries = [entry for entry in value if entry is not None] if cells.is_list(value) else []
    return bool(filled_entries) and all(isinstance(entry, int | float) for entry in filled_entries)


def _join_parts(path: Path, table: Mapping[str, Any], parts: Sequence[str]) -> dict[str, Any]:
    """Join the columns of a completion's parts, with each part between tags."""
    part_tags = [tag for part in parts for tag in (f"<{part}>", f"</{part}>")]

    def join_rows() -> Iterator[str | None]:
        for row, row_cells in enumerate(zip(*(table[part] for part in parts), strict=True)):
            cell_of_part = dict(zip(parts, row_cells, strict=True))
            part_texts = {part: f"{cell}" for part, cell in cell_of_part.items() if not cells.is_empty(cell)}
            for part, text in part_texts.items():
                if any(tag in text for tag in part_tags):
                    raise DataError(
                        f"Row {row} of '{path}' has one of the tags {' '.join(part_tags)} in column '{part}'; remove the tag."
                    )
            tagged_texts = [f"<{part}>{text}</{part}>" for part, text in part_texts.items()]
            yield "\n".join(tagged_texts) if tagged_texts else None

    completion_column = RereadColumn(join_rows, len(table[parts[0]]))
    return {**{name: column for name, column in table.items() if name not in parts}, "completion": completion_column}


def _read_columns(
    path: Path, files: Sequence[Path], roles: Mapping[str, str], parts: Sequence[str]
) -> tuple[str, dict[str, Any], str]:
    """Return the format of a table's files, their columns, and a note about repeated files."""
    file_suffix = files[0].suffix.lower()
    on_disk_names = {*_COMPLETION_COLUMNS, roles.get("completion"), roles.get("completions"), *parts}
    if file_suffix in SUFFIXES:
        return file_suffix[1:].upper(), read_columns(partial(delimited_pieces, files), on_disk_names), ""
    if holds_json(files[0]):
        return "JSON" if file_suffix == ".json" else "JSONL", read_columns(partial(json_pieces, files), on_disk_names), ""
    is_trl = all(_is_trl(pq.read_schema(file)) for file in files)
    kept_files = _without_repeated(files) if is_trl else files
    repeated_count = len(files) - len(kept_files)
    repeats_note = f"{repeated_count} of {len(files)} files repeat the batch of the previous file and are left out."
    table = read_columns(partial(parquet_pieces, path, kept_files), on_disk_names)
    return "TRL" if is_trl else "parquet", table, repeats_note if repeated_count else ""


def _without_repeated(files: Sequence[Path]) -> list[Path]:
    """Drop files that repeat the previous file. TRL writes a batch again at each optimiser step that uses it."""
    kept_files = list(files[:1])
    for file in files[1:]:
        for columns in (["prompt"], None):  # the prompts alone often show that two files differ
            table = pq.read_table(file, columns=columns)
            kept_table = pq.read_table(kept_files[-1], columns=columns)
            if not (table.column_names == kept_table.column_names and _drop_step(table).equals(_drop_step(kept_table))):
                kept_files.append(file)
                break
    return kept_files


def _drop_step(table: pa.Table) -> pa.Table:
    return table.select([name for name in table.column_names if name != "step"])


def _is_trl(schema: pa.Schema) -> bool:
    """Return whether TRL wrote a parquet file, judged by its columns."""
    if not {"step", "prompt", "completion", "advantage"} <= set(schema.names):
        return False
    completion_type = schema.field("completion").type
    holds_lists = pa.types.is_list(completion_type) or pa.types.is_large_list(completion_type)
    return not holds_lists or pa.types.is_struct(completion_type.value_type)  # TRL writes a list of messages as structs


def _check_roles(role_columns: Mapping[str, str]) -> Mapping[str, str]:
    """Check the roles (prompt, completion, ...) that the user gave to columns."""
    role_of_column: dict[str, str] = {}
    for role, name in role_columns.items():
        if role not in NAMES:
            raise RecipeError(unknown("role of --columns", role, NAMES))
        earlier_role = role_of_column.setdefault(name, role)
        if earlier_role != role and {earlier_role, role} != {"prompt", "group"}:
            raise RecipeError(
                f"--columns gives column '{name}' two roles, {earlier_role} and {role}; give each role its own column."
            )
    if {"completion", "completions"} <= role_columns.keys():
        raise RecipeError(
            "--columns gives both completion and completions. Give completions alone if each cell holds a list. Otherwise give "
            "completion alone."
        )
    return role_columns


def _find_roles(path: Path, names: Sequence[str], role_columns: Mapping[str, str]) -> dict[str, str]:
    """Find the column for each role, such as prompt."""
    names_text = ", ".join(map(str, names[:12])) or "(none)"
    more_names_text = f" and {len(names) - 12} more" if len(names) > 12 else ""
    table_text = f"'{path}' has the columns {names_text}{more_names_text}"
    for role, name in role_columns.items():
        if name not in names:
            raise DataError(f"--columns {role}={name}: {table_text}. {unknown('column', name, names).split(' Known: ')[0]}")
    used_names = {name for role, name in role_columns.items() if role != "group"}  # group and prompt may be the same column
    roles = dict(role_columns)
    for role in ("prompt", "completion", "answer", "group", "step"):
        list_column_names = NAMES["completions"] if role == "completion" else ()
        known_names = (*NAMES[role], *list_column_names)
        candidate_names = [name for name in known_names if name in names and name not in used_names]
        if role in role_columns or (list_column_names and "completions" in role_columns) or not candidate_names:
            continue
        if len(candidate_names) > 1 and (role not in candidate_names or "completions" in candidate_names):
            raise DataError(
                f"'{path}' has the columns {' and '.join(candidate_names)}, and each may hold the {role}. Choose one: "
                f"{_COLUMN_HINT.format(role=role)}."
            )
        matched_role = "completions" if candidate_names[0] in list_column_names else role
        roles[matched_role] = role if role in candidate_names else candidate_names[0]
    if not roles.keys() & {"completion", "completions"} and roles.get("prompt") != "messages":
        usual_names = [*NAMES["completion"], *NAMES["completions"]]
        raise DataError(
            f"{table_text}. No column is called {', '.join(usual_names[:-1])} or {usual_names[-1]}. Say which column "
            f"holds the completions: {_COLUMN_HINT.format(role='completion')}. Known formats: {FORMATS}."
        )
    if not roles.keys() & {"prompt", "group"}:
        raise DataError(
            f"{table_text}. No column says which completions belong to one prompt. Say which column holds the prompts: "
            f"{_COLUMN_HINT.format(role='prompt')}. Or name an id that the completions of a prompt share: --columns group=NAME."
        )
    return roles


def _list_completions(cell: Any) -> list[Any]:
    """Return the completions of a cell as a list. A chat is one completion."""
    if cells.is_chat(cell):
        cells.check_speaker(cell)
        if len(cell) > 1 and all(message["role"] == "assistant" for message in cell):
            raise cells.FieldError(
                "the list of messages may be one conversation or several completions. Write one completion as a text. Write "
                "several completions as a list of texts, or as a list of lists of messages"
            )
        return [cell]
    cell_items = cell if isinstance(cell, (list, tuple)) else [cell]
    completions = [[item] if cells.is_message(item) else item for item in cell_items]
    if any(isinstance(item, (list, tuple, dict)) and not cells.is_chat(item) for item in completions):
        raise cells.FieldError(
            "a completion must be a text, or a list of messages such as {'role': 'assistant', 'content': '...'}"
        )
    for chat in filter(cells.is_chat, completions):
        cells.check_speaker(chat)
    return completions


def _split_conversation(cell: Any) -> tuple[Any, list[Any]]:
    """Split a conversation into the prompt and a list with the completion."""
    if cells.is_empty(cell):
        return None, []
    if not cells.is_chat(cell):
        raise cells.FieldError(
            "there is no column of completions, so the cell must hold a list of messages that ends with the assistant's message"
        )
    cells.check_speaker(cell)
    prompt_messages, reply_messages = cells.split_chat(cell)
    return prompt_messages, [reply_messages]


@dataclass(frozen=True)
class _PlainTable:
    """A table whose columns have roles, such as prompt. `read_completions` fills `sources` while it runs."""

    path: Path
    table: Mapping[str, Any]
    roles: Mapping[str, str]
    sources: list[CompletionSource] = field(default_factory=list)

    def read_completions(self) -> Iterator[cells.Parts]:
        """Yield the texts of every completion, and record its row and prompt in `sources`."""
        table, roles = self.table, self.roles
        prompt_texts: dict[str, str] = {}
        completion_column = roles.get("completion") or roles.get("completions") or "messages"
        is_conversation = roles.get("prompt") == completion_column
        prompts: Iterable[Any] = repeat(None)
        if "prompt" in roles and not is_conversation:
            prompts = cells.parse_literals(table[roles["prompt"]], cells.is_chat_or_message)
        is_expected_cell = cells.is_list if "completions" in roles else cells.is_chat_or_message
        completion_cells = cells.parse_literals(table[completion_column], is_expected_cell)
        for row, (prompt, cell) in enumerate(zip(prompts, completion_cells, strict=False)):
            with cells.at_place(f"Row {row} of '{self.path}' has {cell!r:.80} in column '{completion_column}'"):
                if is_conversation:
                    prompt, completions = _split_conversation(cell)
                else:
                    completions = _list_completions(cell)
            filled_entries = [(k, entry) for k, entry in enumerate(completions) if not cells.is_empty(entry)]
            if filled_entries and cells.is_empty(prompt) and "group" not in roles:
                raise DataError(
                    f"Row {row} of '{self.path}' has nothing in column '{roles['prompt']}'; fill the cell or drop the row."
                )
            text = cells.prompt_text(prompt) if filled_entries else ""
            for k, completion in filled_entries:
                self.sources.append(CompletionSource(row, k, len(completions), prompt_texts.setdefault(text, text)))
                yield cells.completion_parts(completion)

    def expand_columns(self) -> dict[str, list[Any]]:
        """Return the columns with one value per completion."""
        answer_column, group_column = self.roles.get("answer"), self.roles.get("group")
        skipped_names = {self.roles.get(role) for role in ("prompt", "completion", "completions", "step")}
        has_list_cells = "completions" in self.roles or any(source.siblings > 1 for source in self.sources)
        is_skyrl = (self.roles.get("prompt"), self.roles.get("completion")) == ("input_prompt", "output_response")
        columns: dict[str, list[Any]] = {}
        for name, column in self.table.items():
            if name in (answer_column, group_column):
                cell_n = [column[source.row] for source in self.sources]
                columns[name] = (
                    [cells.answer_text(x) for x in cell_n] if name == answer_column else cells.parse_numbers(cell_n)
                )
                continue
            if name in skipped_names:
                continue
            is_reward = name in _REWARD_NAMES
            if has_list_cells:
                column = list(cells.parse_literals(column, cells.is_list))
            elif is_reward:
                column = [cells.parse_literal(cell) for cell in column]
            cell_n = [column[source.row] for source in self.sources]
            if has_list_cells and self.has_entry_per_completion(name, column):
                source_pairs = zip(cell_n, self.sources, strict=True)
                cell_n = [value[source.position] if isinstance(value, list) else value for value, source in source_pairs]
            if is_skyrl and name == "score":  # SkyRL may write a reward per token; its metrics add them up
                cell_n = [sum(filter(None, value)) if _is_number_list(value) else value for value in cell_n]
            reward_dicts = [value if isinstance(value, dict) else {} for value in cell_n] if is_reward else []
            reward_columns = {f"rewards/{key}": value_n for key, value_n in cells.by_column(reward_dicts).items()}
            columns |= {key: cells.parse_numbers(value_n) for key, value_n in (reward_columns or {name: cell_n}).items()}
        return columns

    def has_entry_per_completion(self, name: str, column: Sequence[Any]) -> bool:
        """Return whether every list in a column has one entry for each completion of its row."""
        sibling_counts = {source.row: source.siblings for source in self.sources if isinstance(column[source.row], list)}
        is_reward = name in _REWARD_NAMES or name.startswith(REWARD_PREFIXES)
        number_types = (bool, int, float, type(None))
        entry_types = (*number_types, dict) if is_reward else number_types
        if not all(isinstance(value, entry_types) for row in sibling_counts for value in column[row]):
            return False
        shared_rows = (source.row for source in self.sources if is_reward and source.siblings > 1)
        for row in shared_rows:
            if _holds_number(column[row]) or isinstance(column[row], dict):
                raise DataError(
                    f"Row {row} of '{self.path}' has several completions, but only one value of '{name}', {column[row]}. Give a "
                    "list with one value per completion, and null for a missing value. If the column holds no rewards, rename it."
                )
        wrong_row = next((row for row, count in sibling_counts.items() if len(column[row]) != count), None)
        if wrong_row is not None and is_reward:
            raise DataError(
                f"Row {wrong_row} of '{self.path}' has {sibling_counts[wrong_row]} completions and {len(column[wrong_row])} values "
                f"of '{name}'. Give one value for each completion, and null if a value is missing."
            )
        return wrong_row is None

    def group_ids(self, asked: Mapping[str, str]) -> list[str] | None:
        """Return each completion's group id. Return None if prompts define the groups."""
        if "group" not in self.roles:
            has_completion_lists = any(source.siblings > 1 for source in self.sources)
            return [f"{source.row}" for source in self.sources] if has_completion_lists else None
        id_column = self.roles["group"]
        prompt_count = len({source.prompt for source in self.sources})
        raw_group_ids = [self.table[id_column][source.row] for source in self.sources]
        if empty_id_count := sum(map(cells.is_empty, raw_group_ids)):
            raise DataError(
                f"{empty_id_count} of {len(raw_group_ids)} completions of '{self.path}' have no '{id_column}'. Fill in every "
                "row, or group by prompt with --columns group=PROMPT_COLUMN."
            )
        # A group id may be written as 1 in some rows and as 1.0 in others.
        clean_ids = (int(cell) if isinstance(cell, float) and cell.is_integer() else cell for cell in raw_group_ids)
        group_ids = [str(group_id) for group_id in clean_ids]
        if len(set(group_ids)) == len(group_ids) > prompt_count and "group" not in asked:
            raise DataError(
                f"The column '{id_column}' of '{self.path}' has a different value in each of {len(group_ids)} rows, although the "
                f"rows have only {prompt_count} prompts. So no completions would be compared. Name a column that the completions "
                f"of one prompt share: {_COLUMN_HINT.format(role='group')}, such as group={self.roles.get('prompt', 'NAME')}."
            )
        return group_ids


def _holds_number(value: Any) -> bool:
    """Return whether a cell holds a number, perhaps as text."""
    return cells.is_number_text(value) or (isinstance(value, int | float) and not cells.is_empty(value))


def _name_rewards(path: Path, columns: Mapping[str, Sequence[Any]]) -> dict[str, Sequence[Any]]:
    """Map reward names to the columns that may hold them. A column `rewards/NAME` holds the reward NAME."""
    reward_columns: dict[str, Sequence[Any]] = {}
    for name, values in columns.items():
        reward_prefix = next((prefix for prefix in REWARD_PREFIXES if name.startswith(prefix) and name != prefix), "")
        reward_name = name.removeprefix(reward_prefix)
        if reward_name in reward_columns or (reward_prefix and reward_name in columns):
            raise DataError(
                f"'{path}' has two columns for the reward '{reward_name}'. One of them is '{name}'. Remove one of the two columns."
            )
        if reward_prefix or (
            name in _REWARD_NAMES and any(isinstance(value, int | float) or cells.is_like_number(value) for value in values)
        ):
            cells.refuse_words(path, name, values)
        reward_columns[reward_name] = values
    return reward_columns
