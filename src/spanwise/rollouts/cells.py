"""Parse the cells of tables and JSON records: numbers and lists stored as text, chat messages, required fields."""

from __future__ import annotations

import ast
import json
import math
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

from spanwise.errors import DataError

#: How pandas, R, SQL and spreadsheets write a missing number.
NOTHING = frozenset({"", "NA", "N/A", "#N/A", "<NA>", "NaN", "nan", "NULL", "null", "None", "none"})
_TRUTH = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
#: Matches a text that is a number.
NUMBER = re.compile(r"\s*[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?\s*|\s*[+-]?(inf|Inf|Infinity|infinity|nan|NaN)\s*")


def typed(values: Sequence[Any]) -> list[Any]:
    """Convert a column of texts to numbers or booleans if every text is one; return any other column unchanged.

    In a column of numbers `NOTHING` is None.
    """
    values = [float(value) if isinstance(value, Decimal) else value for value in values]
    texts = [value for value in values if isinstance(value, str)]
    numeric = [text for text in texts if text.strip() not in NOTHING]
    others = [value for value in values if not isinstance(value, str) and value is not None]
    if not texts or not (numeric or others) or not all(isinstance(value, (bool, int, float)) for value in others):
        return values
    if numeric and all(text in _TRUTH for text in numeric):
        value_of_text = _TRUTH
    elif all(map(NUMBER.fullmatch, numeric)):
        value_of_text = {text: int(text) if text.strip().lstrip("+-").isdecimal() else float(text) for text in numeric}
    else:
        return values
    return [value_of_text.get(value) if isinstance(value, str) else value for value in values]


def empty(value: Any) -> bool:
    """Return whether a cell is null or NaN, which pandas writes for null; an empty text is not empty."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def spelled_out(text: Any) -> Any:
    """Parse a text that holds a list or an object, as JSON or as Python prints it; return any other text unchanged."""
    if not isinstance(text, str) or text.lstrip()[:1] not in ("[", "{"):
        return text
    for parse in (json.loads, ast.literal_eval):
        try:
            value = parse(text.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        if isinstance(value, (list, dict)):
            return value
    return text


def is_message(value: Any) -> bool:
    """Return whether a value is a chat message: an object with a role."""
    return isinstance(value, Mapping) and isinstance(value.get("role"), str)


def is_chat(value: Any) -> bool:
    """Return whether a value is a list of chat messages."""
    return isinstance(value, (list, tuple)) and len(value) > 0 and all(map(is_message, value))


def is_talk(value: Any) -> bool:
    """Return whether a value is a chat or a single chat message."""
    return is_chat(value) or is_message(value)


def is_list(value: Any) -> bool:
    """Return whether a value is a list."""
    return isinstance(value, list)


def spelled(values: Iterable[Any], fits: Callable[[Any], bool]) -> Iterable[Any]:
    """Parse the texts of a column if `fits` accepts every parsed value; otherwise return the column unchanged."""
    parsed_values = (fits(spelled_out(value)) for value in values if isinstance(value, str))
    return map(spelled_out, values) if next(parsed_values, False) and all(parsed_values) else values


def chats(values: Iterable[Any]) -> list[Any]:
    """Parse the texts of a column as chats if every text is one; otherwise return the column unchanged."""
    return list(spelled(values, is_talk))


def as_text(value: Any) -> str | None:
    """Return a gold answer as text: JSON for a list or an object, None for an empty cell.

    >>> as_text(4), as_text({"city": "Rome"}), as_text(float("nan")), as_text("04")
    ('4', '{"city": "Rome"}', None, '04')
    """
    if empty(value):
        return None
    if isinstance(value, (list, dict)):
        return json.dumps(value, ensure_ascii=False, default=object_text)
    return str(value)


def object_text(value: Any) -> str:
    """Return an object that JSON does not know as text, without its place in memory, so that equal images read equal."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", str(value))


#: The parts of a completion in order: each a text, and whether the model wrote that text.
Parts = Sequence[tuple[str, bool]]


def clean(text: str) -> str:
    """Replace lone surrogates, which JSON may contain and no UTF-8 file can hold."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def spoken(content: Any) -> str:
    """Return the text of a message's content: a string, a list of parts, or None.

    >>> spoken([{"type": "text", "text": "Hi"}, {"type": "image"}])
    'Hi'
    """
    if isinstance(content, str):
        return clean(content)
    if isinstance(content, Mapping):
        content = content.get("content")
    if isinstance(content, (list, tuple, np.ndarray)):
        return "".join(spoken(item.get("text") or "" if isinstance(item, Mapping) else item) for item in content)
    return "" if content is None else clean(str(content))


def said(message: Any) -> str:
    """Return the reasoning, the content and the tool calls of a message as text, one below the other.

    A call is read as verifiers keeps it (`name`, `arguments`) and as chat templates do (the two inside `function`).
    """
    if not isinstance(message, Mapping):
        return spoken(message)
    calls = message.get("tool_calls")
    calls = calls if isinstance(calls, (list, tuple, np.ndarray)) else [] if calls is None else [calls]
    parts = [spoken(message.get("reasoning_content")), spoken(message), *map(_called, calls)]
    return "\n".join(message_part for message_part in parts if message_part)


def _called(call: Any) -> str:
    if not isinstance(call, Mapping):
        return spoken(call)
    function = call.get("function")
    function = function if isinstance(function, Mapping) else call
    arguments = function.get("arguments")
    if isinstance(arguments, (Mapping, list)):
        arguments = json.dumps(arguments, ensure_ascii=False, default=object_text)
    return clean(f"{function.get('name') or ''}({'' if arguments is None else arguments})")


def prompt_text(prompt: Any) -> str:
    """Return a prompt as text; a chat becomes one line per message, each with the role of its message."""
    if isinstance(prompt, (list, tuple, np.ndarray)):
        return "\n".join(f"[{m['role']}] {said(m)}" if isinstance(m, Mapping) and "role" in m else spoken(m) for m in prompt)
    return spoken(prompt)


def prompt_fault(prompt: Any, *, template: bool) -> str | None:
    """Return why a trainer cannot use a prompt and how to mend the prompt; None if the prompt is usable.

    >>> prompt_fault([["user", "2+2"]], template=True)
    "a prompt is a text, or a list of messages such as {'role': 'user', 'content': '...'}."
    """
    if isinstance(prompt, str):
        return None if prompt.strip() else "a prompt must say something."
    messages = prompt if isinstance(prompt, list) and prompt else [None]
    if not all(isinstance(m, Mapping) and isinstance(m.get("role"), str) and "content" in m for m in messages):
        return "a prompt is a text, or a list of messages such as {'role': 'user', 'content': '...'}."
    if not template:
        return "this prompt is a conversation, and the model's tokenizer has no chat template. Give texts, or another model."
    return None


def split_chat(chat: Sequence[Mapping[str, Any]]) -> tuple[Any, Any]:
    """Split a conversation into the prompt and what the model did after the last user message; None if it did nothing.

    >>> roles = ("system", "user", "assistant", "user", "assistant", "tool", "assistant")
    >>> prompt, completion = split_chat([{"role": role, "content": ""} for role in roles])
    >>> len(prompt), [message["role"] for message in completion]
    (4, ['assistant', 'tool', 'assistant'])
    """
    asked = max((n for n, message in enumerate(chat) if message["role"] == "user"), default=-1)
    turns = [n for n, message in enumerate(chat) if message["role"] == "assistant" and n > asked]
    return (chat[: turns[0]], chat[turns[0] :]) if turns else (chat, None)


def completion_parts(completion: Any) -> Parts:
    """Split a completion, a string or a list of messages, into texts with whether the model wrote each."""
    if isinstance(completion, (list, tuple)):
        return [(said(m), not isinstance(m, dict) or m.get("role", "assistant") == "assistant") for m in completion]
    return [(spoken(completion), True)]


class FieldError(DataError):
    """A record breaks its format; the reader of the file adds the file's name and the line to the message."""


def whole(value: Any, key: str) -> int:
    """Return the whole number under a key of a record, 0 if the record has no such key.

    >>> whole(None, "step"), whole(3.0, "step")
    (0, 3)
    """
    if value is None:
        return 0
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or not -(2**63) <= value < 2**63:
        raise FieldError(f"has {_shown(value)} as '{key}', which must be a whole number")
    return int(value)


def mapping(record: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the object under a key of a record, an empty one if the record has no such key."""
    value = record.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise FieldError(f"has {_shown(value)} as '{key}', which must be an object")
    return value


def listed(record: Mapping[str, Any], key: str, kind: type | tuple[type, ...], words: str) -> list[Any]:
    """Return the list under a key of a record, all entries of one type; an empty list if the record has no such key."""
    value = record.get(key)
    if value is None:
        return []
    if not isinstance(value, list):
        raise FieldError(f"has {_shown(value)} as '{key}', which must be a list of {words}")
    for entry in value:
        if not isinstance(entry, kind):
            raise FieldError(f"has {_shown(entry)} in '{key}', which must be a list of {words}")
    return value


@contextmanager
def at_place(place: str) -> Iterator[None]:
    """Read a record in a `with` block; an error names the record's place in the file."""
    try:
        yield
    except FieldError as error:
        raise DataError(f"{place} {error}.") from None
    except RecursionError:
        raise DataError(f"{place} is nested too deeply to be read; remove the deeply nested field.") from None


def steps_of(path: Path, values: Iterable[Any]) -> list[int]:
    """Return the training step of every row, 0 if a row has none."""
    steps: list[int] = []
    for n, value in enumerate(values):
        with at_place(f"Row {n} of '{path}'"):
            steps.append(whole(value, "step"))
    return steps


def by_column(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Turn records into columns, with None if a record lacks a field."""
    column_names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in column_names}


def lacks(key: str, record: Mapping[str, Any]) -> FieldError:
    """Return the error text for a record without a required field."""
    return FieldError(f"has no '{key}'; it has {', '.join(map(str, record)) or 'nothing'}")


def _shown(value: Any) -> str:
    return "null" if value is None else reprlib.repr(value)
