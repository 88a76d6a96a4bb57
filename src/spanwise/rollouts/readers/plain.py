"""Tables that anybody made: CSV, TSV, JSON, JSON lines and parquet with a prompt and a completion, or several, in each row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from spanwise.errors import DataError
from spanwise.rollouts.cells import empty, typed
from spanwise.rollouts.delimited import SUFFIXES, read_delimited
from spanwise.rollouts.fields import FieldError, whole
from spanwise.rollouts.lines import records
from spanwise.rollouts.messages import completion_parts, prompt_text
from spanwise.rollouts.parquet import check_names, joined
from spanwise.rollouts.roles import HOW, Roles, check_roles, find_roles
from spanwise.rollouts.said import REWARD_STARTS, Said, columns_of, said_in
from spanwise.rollouts.table import RolloutTable, as_trained, gaps, is_made, recorded
from spanwise.rollouts.text import cut_text
from spanwise.score import Reward

#: What pandas calls an index that was written as a column.
_INDEX = ("", "__index_level_0__", "Unnamed: 0")


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
        steps=[0] * len(said) if roles.step is None else _steps(path, held[roles.step], said),
        keys=keys,
        rewards=rewards,
        notes=[
            _read_as(roles),
            f"{absent} of {total} rows hold no completion and are left out." if absent else "",
            gaps(rewards),
        ],
        columns={name: values for name, values in spread.items() if not is_made(name)},
        keyed=keys is not None,
        as_recorded=as_trained(spread, rewards, cut.tokens),
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


def _steps(path: Path, cells: Sequence[Any], said: Sequence[Said]) -> list[int]:
    numbers = typed(cells)
    steps = []
    for one in said:
        try:
            steps.append(whole(None if empty(numbers[one.row]) else numbers[one.row], "step"))
        except FieldError as error:
            raise DataError(f"Row {one.row} of '{path}' {error}.") from None
    return steps


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
