"""Tables that anybody made: CSV, TSV, JSON, JSON lines and parquet with a prompt and a completion, or several, in each row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq

from spanwise.errors import DataError
from spanwise.rollouts.cells import FieldError, as_text, chats, empty, is_chat, is_message, lists, spelled_out, typed
from spanwise.rollouts.files import SUFFIXES, check_names, joined, read_delimited, records, whole_numbers
from spanwise.rollouts.messages import completion_parts, prompt_text
from spanwise.rollouts.roles import HOW, REWARD_STARTS, Roles, check_roles, find_roles
from spanwise.rollouts.table import RolloutTable, as_trained, gaps, is_made, recorded
from spanwise.rollouts.text import cut_text
from spanwise.score import Reward

#: What pandas calls an index that was written as a column.
_INDEX = ("", "__index_level_0__", "Unnamed: 0")
#: Columns that hold rewards, by name or by the beginning of it: a list in them must have one for each completion.
_REWARD = ("reward", "rewards", "score", "scores", "advantage")


class Said(NamedTuple):
    """One completion: the row that it stands in, its place in the list there, how long that is, prompt and what was said."""

    row: int
    place: int
    size: int
    prompt: Any
    completion: Any


def read_plain(
    path: Path,
    files: Sequence[Path],
    tokenizer: str | Path | None,
    columns: Mapping[str, str] | None = None,
) -> RolloutTable:
    """Read a table with a completion in each row, or a list of completions of one prompt.

    Every numeric column without a role is taken for a reward, `rewards/NAME` under the name NAME; a list of numbers beside a list
    of completions has one for each of them. Rows without a completion are left out and counted: null is no empty text. A
    conversation in `messages`, without a completion beside it, ends with what the model said.
    """
    asked = check_roles(columns)
    held = {name: cells for name, cells in _read(path, files).items() if name not in _INDEX or name in asked.values()}
    if not any(map(len, held.values())):
        raise DataError(f"'{path}' holds no completions.")
    roles = find_roles(path, list(held), asked)
    said, absent = said_in(path, held, roles)
    if not said:
        raise DataError(f"'{path}' holds no completions: none of its {absent} rows has one.")
    spread = columns_of(path, held, roles, said)
    prompts = [prompt_text(one.prompt) for one in said]
    keys = _keys(path, roles, prompts, said, held, asked)
    rewards = _rewards(path, spread, roles)
    if roles.answer is not None:
        spread["answer"] = spread[roles.answer]
    cut = cut_text([completion_parts(one.completion) for one in said], tokenizer)
    total = len({one.row for one in said}) + absent
    return RolloutTable.of(
        _kind(files[0]),
        path,
        cut,
        prompts=prompts,
        steps=_steps(path, held, roles, said),
        keys=keys,
        rewards=rewards,
        notes=[
            _read_as(roles),
            f"{absent} of {total} rows hold no completion and are left out." if absent else "",
            gaps(rewards),
        ],
        columns={name: values for name, values in spread.items() if not is_made(name)},
        as_recorded=as_trained(rewards, cut.tokens, spread),
    )


def _kind(file: Path) -> str:
    """What the file is called: its suffix, where that says something."""
    suffix = file.suffix.lower().removeprefix(".")
    return suffix.upper() if suffix in ("csv", "tsv", "json", "jsonl") else "parquet" if _is_parquet(file) else "JSONL"


def _is_parquet(file: Path) -> bool:
    with file.open("rb") as stream:
        return stream.read(4) == b"PAR1"


def _read(path: Path, files: Sequence[Path]) -> dict[str, list[Any]]:
    """The columns of all files under each other."""
    if files[0].suffix.lower() in SUFFIXES:
        tables = [read_delimited(file) for file in files]
        for file, one in zip(files, tables, strict=True):
            check_names(file, one.column_names)
        table = joined(path, tables, promote="default")
    elif _is_parquet(files[0]):
        table = joined(path, [pq.read_table(file) for file in files], promote="permissive")
    else:
        found = [record for _, _, record in records(files)]
        names = dict.fromkeys(name for record in found for name in record)
        return {name: [record.get(name) for record in found] for name in names}
    return {name: table[name].to_pylist() for name in table.column_names}


def _steps(path: Path, held: Mapping[str, Sequence[Any]], roles: Roles, said: Sequence[Said]) -> list[int]:
    if roles.step is None:
        return [0] * len(said)
    numbers = [None if empty(number) else number for number in typed(held[roles.step])]
    return whole_numbers(path, "Row", ((one.row, numbers[one.row]) for one in said))


def _keys(
    path: Path,
    roles: Roles,
    prompts: Sequence[str],
    said: Sequence[Said],
    held: Mapping[str, Sequence[Any]],
    asked: Mapping[str, str],
) -> list[str] | None:
    """What the completions of a group share, where it is not the prompt: an id, or the row that lists them."""
    if roles.group is None:
        return [f"{one.row}" for one in said] if any(one.size > 1 for one in said) else None
    cells = [held[roles.group][one.row] for one in said]
    lacking = sum(map(empty, cells))
    if lacking:
        lack = f"{lacking} of {len(cells)} completions of '{path}' have no '{roles.group}'"
        raise DataError(f"{lack}; say it of all of them, or group by prompt with --columns group=PROMPT_COLUMN.")
    keys = [str(cell) for cell in cells]
    alone = len(set(keys)) == len(keys) > len(set(prompts))
    if alone and "group" not in asked:
        unlike = f"The column '{roles.group}' of '{path}' has another value in each of {len(keys)} rows"
        raise DataError(
            f"{unlike}, and these have {len(set(prompts))} prompts, so nothing would be compared. Say what the completions of one "
            f"prompt share: {HOW.format(role='group')}, such as group={roles.prompt or 'NAME'}."
        )
    return keys


def _rewards(path: Path, columns: Mapping[str, Sequence[Any]], roles: Roles) -> dict[str, Reward]:
    """The columns that are rewards, `rewards/NAME` as NAME."""
    found: dict[str, Reward] = {}
    free = {name: cells for name, cells in columns.items() if name not in roles.used and not is_made(name)}
    for name, reward in recorded(free).items():
        prefix = next((start for start in REWARD_STARTS if name.startswith(start) and name != start), "")
        short = name.removeprefix(prefix)
        if short in found or (prefix and short in columns):
            raise DataError(f"'{path}' has two columns for the reward '{short}', '{name}' is one of them; leave one out.")
        found[short] = reward
    return found


def _read_as(roles: Roles) -> str:
    """Which columns were taken for what, where their names do not say it by themselves."""
    if roles.completion is None:
        return "The conversations of 'messages' end with what the model said; what comes before is the prompt."
    pairs = (("prompt", roles.prompt), ("completion", roles.completion), ("answer", roles.answer), ("group", roles.group))
    taken = [f"{role} from '{name}'" for role, name in pairs if name is not None and name != role]
    return f"Columns: {', '.join(taken)}." if taken else ""


def said_in(path: Path, held: Mapping[str, Sequence[Any]], roles: Roles) -> tuple[list[Said], int]:
    """Every completion with its prompt, and how many rows hold none."""
    size = len(next(iter(held.values())))
    prompts = chats(held[roles.prompt]) if roles.prompt else [None] * size
    if roles.completion is None:
        pairs = [_at(path, n, str(roles.prompt), cell, _parted) for n, cell in enumerate(prompts)]
        found = [Said(n, 0, 1, *pair) for n, pair in enumerate(pairs) if pair is not None]
        return found, size - len(found)
    cells = (lists if roles.grouped else chats)(held[roles.completion])
    said: list[Said] = []
    absent = 0
    for n, (prompt, cell) in enumerate(zip(prompts, cells, strict=True)):
        listed = _at(path, n, roles.completion, cell, _listed)
        here = [Said(n, place, len(listed), prompt, one) for place, one in enumerate(listed) if not empty(one)]
        if here and empty(prompt) and roles.group is None:
            raise DataError(f"Row {n} of '{path}' has nothing in column '{roles.prompt}'; fill it in or remove the row.")
        said += here
        absent += not here
    return said, absent


def columns_of(path: Path, held: Mapping[str, Sequence[Any]], roles: Roles, said: Sequence[Said]) -> dict[str, list[Any]]:
    """The columns beside prompts and completions, with a value for each completion.

    That is the one of its row, or its own, where the row has a list of completions and the column a list of numbers as long.
    Numbers as text become numbers, but for answers, which are text. An object of rewards becomes a column for each, `rewards/NAME`.
    """
    several = roles.grouped or any(one.size > 1 for one in said)
    found: dict[str, list[Any]] = {}
    for name, cells in held.items():
        if name in (roles.prompt, roles.completion, roles.step) and name not in (roles.answer, roles.group):
            continue
        if name in roles.used:
            read = [as_text(cell) for cell in cells] if name == roles.answer else typed(cells)
            found[name] = [read[one.row] for one in said]
            continue
        column = lists(cells) if several else [spelled_out(cell) for cell in cells] if name in _REWARD else list(cells)
        one_each = several and any(isinstance(cell, list) for cell in column) and _one_each(path, name, column, said)
        column = [_own(column[one.row], one) if one_each else column[one.row] for one in said]
        if name in _REWARD and any(isinstance(cell, dict) for cell in column):
            for key in dict.fromkeys(key for cell in column if isinstance(cell, dict) for key in cell):
                found[f"rewards/{key}"] = typed([cell.get(key) if isinstance(cell, dict) else None for cell in column])
        else:
            found[name] = typed(column)
    return found


def _own(cell: Any, one: Said) -> Any:
    return cell[one.place] if isinstance(cell, list) else cell


def _one_each(path: Path, name: str, column: Sequence[Any], said: Sequence[Said]) -> bool:
    """Whether the lists of a column hold one number, or one object of rewards, for each completion of their row."""
    rows = {one.row: one.size for one in said if isinstance(column[one.row], list)}
    reward = name in _REWARD or name.startswith(REWARD_STARTS)
    kinds = (bool, int, float, type(None), *((dict,) if reward else ()))
    if not all(isinstance(value, kinds) for row in rows for value in column[row]):
        return False
    wrong = next((row for row, size in rows.items() if len(column[row]) != size), None)
    if wrong is not None and reward:
        raise DataError(
            f"Row {wrong} of '{path}' has {rows[wrong]} completions and {len(column[wrong])} values of '{name}'; give one for "
            "each, null where there is none."
        )
    return wrong is None


def _at(path: Path, row: int, name: str, cell: Any, read: Callable[[Any], Any]) -> Any:
    """What `read` makes of a cell; what it says against it, with the place."""
    try:
        return read(cell)
    except FieldError as error:
        raise DataError(f"Row {row} of '{path}' has {cell!r:.80} in column '{name}'; {error}.") from None


def _listed(cell: Any) -> list[Any]:
    """The completions of a cell: one, or a list of them; a chat is one.

    >>> _listed("4"), _listed(["4", None]), len(_listed([{"role": "assistant", "content": "4"}]))
    (['4'], ['4', None], 1)
    """
    if is_chat(cell):
        if len(cell) > 1 and all(message["role"] == "assistant" for message in cell):
            raise FieldError(
                "that may be one conversation or several completions; of one, write the text, of several a list of texts or of "
                "lists of messages"
            )
        return [cell]
    several = isinstance(cell, (list, tuple))
    entries = [[one] if is_message(one) else one for one in (cell if several else [cell])]
    if any(isinstance(one, (list, tuple, dict)) and not is_chat(one) for one in entries):
        raise FieldError("a completion is a text, or a list of messages such as {'role': 'assistant', 'content': '...'}")
    return entries


def _parted(cell: Any) -> tuple[Any, Any] | None:
    """A whole conversation as a prompt and what the model said last; None where there is nothing.

    >>> _parted([{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}])[1]
    [{'role': 'assistant', 'content': '4'}]
    """
    if empty(cell):
        return None
    if not is_chat(cell):
        raise FieldError("without a column of completions it must hold a list of messages that ends with the assistant's")
    spoken = [n for n, message in enumerate(cell) if message["role"] == "assistant"]
    if spoken != [len(cell) - 1]:
        raise FieldError(
            f"{len(spoken)} of its {len(cell)} messages are the assistant's, where the last one alone may be; write what was "
            "sampled into a column 'completion', and what came before it into 'prompt'"
        )
    return cell[:-1], cell[-1:]
