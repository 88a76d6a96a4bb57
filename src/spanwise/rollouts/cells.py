"""Values of a table or a record that anybody wrote: numbers and lists kept as text, messages of chats, and what must be there."""

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

#: What stands in a column of numbers where there is none, as pandas, R, SQL and spreadsheets write it.
NOTHING = frozenset({"", "NA", "N/A", "#N/A", "<NA>", "NaN", "nan", "NULL", "null", "None", "none"})
_TRUTH = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
#: How a text spells a number.
NUMBER = re.compile(r"\s*[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?\s*|\s*[+-]?(inf|Inf|Infinity|infinity|nan|NaN)\s*")


def typed(values: Sequence[Any]) -> list[Any]:
    """A column whose texts are numbers, or true and false, as these; any other column as it is.

    In a column of numbers `NOTHING` is None.

    >>> typed(["1", "0.5", None]), typed(["1", "NA", "3e2"]), typed(["True", "", "false"]), typed(["1", "x", "NA"])
    ([1, 0.5, None], [1, None, 300.0], [True, None, False], ['1', 'x', 'NA'])
    """
    values = [float(value) if isinstance(value, Decimal) else value for value in values]
    texts = [value for value in values if isinstance(value, str)]
    spelled = [text for text in texts if text.strip() not in NOTHING]
    others = [value for value in values if not isinstance(value, str) and value is not None]
    if not texts or not (spelled or others) or not all(isinstance(value, (bool, int, float)) for value in others):
        return values
    if spelled and all(text in _TRUTH for text in spelled):
        meant = _TRUTH
    elif all(map(NUMBER.fullmatch, spelled)):
        meant = {text: int(text) if text.strip().lstrip("+-").isdecimal() else float(text) for text in spelled}
    else:
        return values
    return [meant.get(value) if isinstance(value, str) else value for value in values]


def empty(value: Any) -> bool:
    """Whether a cell holds nothing: null, or NaN, which pandas has in its place; an empty text is something.

    >>> empty(None), empty(float("nan")), empty(""), empty(0)
    (True, True, False, False)
    """
    return value is None or (isinstance(value, float) and math.isnan(value))


def spelled_out(text: Any) -> Any:
    """The list or object that a text spells, in JSON or as Python prints it; the text itself if it spells none.

    >>> spelled_out('[{"role": "user"}]'), spelled_out("['a', None]"), spelled_out("[so"), spelled_out("4")
    ([{'role': 'user'}], ['a', None], '[so', '4')
    """
    if not isinstance(text, str) or text.lstrip()[:1] not in ("[", "{"):
        return text
    for read in (json.loads, ast.literal_eval):
        try:
            value = read(text.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        if isinstance(value, (list, dict)):
            return value
    return text


def is_message(value: Any) -> bool:
    """Whether a value is a message of a chat: an object with a role."""
    return isinstance(value, Mapping) and isinstance(value.get("role"), str)


def is_chat(value: Any) -> bool:
    """Whether a value is a list of messages.

    >>> is_chat([{"role": "user", "content": "2+2="}]), is_chat(["2+2="]), is_chat([])
    (True, False, False)
    """
    return isinstance(value, (list, tuple)) and len(value) > 0 and all(map(is_message, value))


def is_talk(value: Any) -> bool:
    """Whether a value is a chat, or one message of it."""
    return is_chat(value) or is_message(value)


def is_list(value: Any) -> bool:
    """Whether a value is a list."""
    return isinstance(value, list)


def spelled(values: Iterable[Any], fits: Callable[[Any], bool]) -> Iterable[Any]:
    """A column in which every text spells what fits, as that; any other column as it is. It may be gone through several times.

    >>> list(spelled(["[1, 0]", None], is_list)), list(spelled(["[1, 0]", "no"], is_list))
    ([[1, 0], None], ['[1, 0]', 'no'])
    """
    texts = (fits(spelled_out(value)) for value in values if isinstance(value, str))
    return map(spelled_out, values) if next(texts, False) and all(texts) else values


def chats(values: Iterable[Any]) -> list[Any]:
    """A column in which every text spells a chat, as chats; any other column as it is.

    >>> chats(['[{"role": "user", "content": "a"}]', None])[0][0]["content"], chats(["[]", "b"])
    ('a', ['[]', 'b'])
    """
    return list(spelled(values, is_talk))


def as_text(value: Any) -> str | None:
    """A gold answer as text: of a list or an object its JSON; None where there is none.

    >>> as_text(4), as_text({"city": "Rome"}), as_text(float("nan")), as_text("04")
    ('4', '{"city": "Rome"}', None, '04')
    """
    if empty(value):
        return None
    if isinstance(value, (list, dict)):
        return json.dumps(value, ensure_ascii=False, default=str)
    return str(value)


#: A completion as text: its parts in order, each with whether the model wrote it.
Parts = Sequence[tuple[str, bool]]


def clean(text: str) -> str:
    r"""The text with lone surrogates, which no file can hold, replaced; JSON may bring them in.

    >>> clean("caf\u00e9 \ud800")
    'café �'
    """
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def spoken(content: Any) -> str:
    """The text of a message's content, or of anything that stands for one: a string, a list of parts, nothing.

    >>> spoken([{"type": "text", "text": "Hi"}, {"type": "image"}])
    'Hi'
    """
    if isinstance(content, str):
        return clean(content)
    if isinstance(content, Mapping):
        content = content.get("content")
    if isinstance(content, (list, tuple, np.ndarray)):
        return "".join(spoken(part.get("text") or "" if isinstance(part, Mapping) else part) for part in content)
    return "" if content is None else clean(str(content))


def said(message: Any) -> str:
    r"""All that a message says, under each other: reasoning, content, calls of tools.

    A call is read as verifiers keeps it (`name`, `arguments`) and as chat templates do (the two inside `function`).

    >>> said({"content": "", "reasoning_content": "Add.", "tool_calls": [{"function": {"name": "sum", "arguments": {"of": 2}}}]})
    'Add.\nsum({"of": 2})'
    """
    if not isinstance(message, Mapping):
        return spoken(message)
    calls = message.get("tool_calls")
    calls = calls if isinstance(calls, (list, tuple, np.ndarray)) else [] if calls is None else [calls]
    parts = [spoken(message.get("reasoning_content")), spoken(message), *map(_called, calls)]
    return "\n".join(part for part in parts if part)


def _called(call: Any) -> str:
    if not isinstance(call, Mapping):
        return spoken(call)
    named = call.get("function")
    named = named if isinstance(named, Mapping) else call
    arguments = named.get("arguments")
    if isinstance(arguments, (Mapping, list)):
        arguments = json.dumps(arguments, ensure_ascii=False, default=str)
    return clean(f"{named.get('name') or ''}({'' if arguments is None else arguments})")


def prompt_text(prompt: Any) -> str:
    r"""A prompt as text: itself, or its messages under each other, each with its role.

    >>> prompt_text([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2"}])
    '[system] Be brief.\n[user] 2+2'
    """
    if isinstance(prompt, (list, tuple, np.ndarray)):
        return "\n".join(f"[{m['role']}] {said(m)}" if isinstance(m, Mapping) and "role" in m else spoken(m) for m in prompt)
    return spoken(prompt)


def prompt_fault(prompt: Any, *, template: bool) -> str | None:
    """Why a trainer could not take a prompt, and what to give it; None where it can.

    >>> prompt_fault([["user", "2+2"]], template=True)
    "a prompt is a text, or a list of messages such as {'role': 'user', 'content': '...'}."
    """
    if isinstance(prompt, str):
        return None if prompt.strip() else "a prompt must say something."
    messages = prompt if isinstance(prompt, list) and prompt else [None]
    if not all(isinstance(one, Mapping) and isinstance(one.get("role"), str) and "content" in one for one in messages):
        return "a prompt is a text, or a list of messages such as {'role': 'user', 'content': '...'}."
    if not template:
        return "that is a conversation, and the tokenizer of the model has no chat template. Give texts, or another model."
    return None


def completion_parts(completion: Any) -> Parts:
    """A completion as text: a string, or the messages of a conversation.

    >>> completion_parts([{"role": "assistant", "content": "4"}, {"role": "tool", "content": "ok"}])
    [('4', True), ('ok', False)]
    """
    if isinstance(completion, (list, tuple)):
        return [(said(m), not isinstance(m, dict) or m.get("role", "assistant") == "assistant") for m in completion]
    return [(spoken(completion), True)]


class FieldError(DataError):
    """A record does not hold what its format says; whoever reads the file puts the file and the line before it."""


def whole(value: Any, key: str) -> int:
    """A whole number; 0 where there is none.

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
    """The object under a key; an empty one where there is none.

    >>> mapping({"task": None}, "task")
    {}
    """
    value = record.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise FieldError(f"has {_shown(value)} as '{key}', which must be an object")
    return value


def listed(record: Mapping[str, Any], key: str, kind: type | tuple[type, ...], words: str) -> list[Any]:
    """The list under a key, all of one kind; an empty one where there is none.

    >>> listed({"mask": [0, 1]}, "mask", int, "flags")
    [0, 1]
    """
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
    """Read a record inside; what is wrong with it is said with its place."""
    try:
        yield
    except FieldError as error:
        raise DataError(f"{place} {error}.") from None
    except RecursionError:
        raise DataError(f"{place} is nested too deeply to be read; leave out the field that is.") from None


def steps_of(path: Path, values: Iterable[Any]) -> list[int]:
    """The step of every row; 0 where there is none."""
    steps: list[int] = []
    for n, value in enumerate(values):
        with at_place(f"Row {n} of '{path}'"):
            steps.append(whole(value, "step"))
    return steps


def by_column(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Records as columns; None where a record lacks one.

    >>> by_column([{"a": 1}, {"b": 2}])
    {'a': [1, None], 'b': [None, 2]}
    """
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def lacks(key: str, record: Mapping[str, Any]) -> FieldError:
    """The sentence for a record without something that its format has."""
    return FieldError(f"has no '{key}'; it has {', '.join(map(str, record)) or 'nothing'}")


def _shown(value: Any) -> str:
    return "null" if value is None else reprlib.repr(value)
