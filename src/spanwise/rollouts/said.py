"""What the rows of a table say: their completions, one or a list in each row, and the columns beside them, one value for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from spanwise.errors import DataError
from spanwise.rollouts import schema
from spanwise.rollouts.cells import as_text, chats, empty, is_chat, is_message, lists, spelled_out, typed
from spanwise.rollouts.fields import FieldError
from spanwise.rollouts.roles import Roles

#: Columns that hold rewards, by name or by the beginning of it: a list in them must have one for each completion.
_REWARD = ("reward", "rewards", "score", "scores", "advantage")
#: Before the name of a reward.
REWARD_STARTS = ("rewards/", schema.reward(""))


class Said(NamedTuple):
    """One completion: the row that it stands in, its place in the list there, how long that is, prompt and what was said."""

    row: int
    place: int
    size: int
    prompt: Any
    completion: Any


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
