"""Parse the cells of tables and the fields of JSON records."""

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

#: The texts that pandas, R, SQL and spreadsheets write for a missing number.
NOTHING = frozenset({"", "NA", "N/A", "#N/A", "<NA>", "NaN", "nan", "NULL", "null", "None", "none"})
_BOOLEAN_OF_TEXT = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_FOREIGN_ASSISTANT_ROLES = {"gpt", "model", "ai", "bot", "chatbot"}
NUMBER = re.compile(r"\s*[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?\s*|\s*[+-]?(inf|Inf|Infinity|infinity|nan|NaN)\s*")
_INTEGER = re.compile(r"\s*[+-]?\d{1,300}\s*")  # Python refuses to read integers of more than 4,300 digits


def parse_numbers(values: Sequence[Any]) -> list[Any]:
    """Convert a column's texts to numbers or booleans if all can be converted. "NaN" and the like become None."""
    values = [float(value) if isinstance(value, Decimal) else value for value in values]
    text_cells = [value for value in values if isinstance(value, str)]
    filled_texts = [text for text in text_cells if text.strip() not in NOTHING]
    non_text_values = [value for value in values if not isinstance(value, str) and value is not None]
    if (
        not text_cells
        or not (filled_texts or non_text_values)
        or not all(isinstance(value, (bool, int, float)) for value in non_text_values)
    ):
        return values
    if filled_texts and all(text in _BOOLEAN_OF_TEXT for text in filled_texts):
        value_of_text = _BOOLEAN_OF_TEXT
    elif all(map(NUMBER.fullmatch, filled_texts)):
        value_of_text = {text: int(text) if _INTEGER.fullmatch(text) else float(text) for text in filled_texts}
    else:
        return values
    return [value_of_text.get(value) if isinstance(value, str) else value for value in values]


def is_number_text(value: Any) -> bool:
    """Return whether a value is a text that spells a number."""
    return isinstance(value, str) and NUMBER.fullmatch(value) is not None


def is_like_number(value: Any) -> bool:
    """Return whether a text is a number, or begins with one, such as "0,5", "50%" or "3 of 4"."""
    return is_number_text(value) or (isinstance(value, str) and re.match(r"\s*[+-]?[.,]?\d", value) is not None)


def refuse_words(path: Path, name: str, values: Sequence[Any]) -> None:
    """Raise an error if a column of rewards holds a text that is no number."""
    for n, value in enumerate(values):
        if isinstance(value, str) and value.strip() not in NOTHING and not is_number_text(value):
            raise DataError(
                f"'{path}' has {value!r:.60} in column '{name}' of completion {n}, but a reward must be a number. Leave the cell "
                f"empty if the completion has no reward. If the column holds no rewards, rename the column."
            )


def is_empty(value: Any) -> bool:
    """Return whether a cell is null or NaN. An empty text is not empty in this sense."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def parse_literal(text: Any) -> Any:
    """Parse the text of a list or an object, as JSON or as Python prints it. Return any other text unchanged."""
    if not isinstance(text, str) or text.lstrip()[:1] not in ("[", "{"):
        return text
    for parse in (json.loads, ast.literal_eval):
        try:
            parsed_value = parse(text.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        if isinstance(parsed_value, (list, dict)):
            return parsed_value
    return text


def is_message(value: Any) -> bool:
    """Return whether a value is a chat message: an object with a role, and at least one field that `message_text` reads."""
    if not isinstance(value, Mapping) or not isinstance(value.get("role"), str):
        return False
    model_fields = ("reasoning_content", "reasoning", "refusal") if value["role"] == "assistant" else ()
    return not value.keys().isdisjoint(("content", "tool_calls", "function_call", *model_fields))


def is_chat(value: Any) -> bool:
    """Return whether a value is a list of chat messages."""
    return isinstance(value, (list, tuple)) and len(value) > 0 and all(map(is_message, value))


def is_chat_or_message(value: Any) -> bool:
    """Return whether a value is a chat or a single chat message."""
    return is_chat(value) or is_message(value)


def is_list(value: Any) -> bool:
    """Return whether a value is a list."""
    return isinstance(value, list)


def parse_literals(values: Iterable[Any], fits: Callable[[Any], bool]) -> Iterable[Any]:
    """Parse a column's texts as lists or objects if `fits` accepts all of them. Otherwise return the column unchanged."""
    fitting_flags = (fits(parse_literal(value)) for value in values if isinstance(value, str))
    return map(parse_literal, values) if next(fitting_flags, False) and all(fitting_flags) else values


def parse_chats(values: Iterable[Any]) -> list[Any]:
    """Parse a column's texts as chats if every text is one. Otherwise return the column unchanged."""
    return list(parse_literals(values, is_chat_or_message))


def answer_text(value: Any) -> str | list[Any] | None:
    """Return a gold answer as text. Lists and objects become JSON, an empty cell None. A list of one answer stays a list."""
    if is_empty(value):
        return None
    if isinstance(value, list) and len(value) == 1:
        return value  # rewards accept a list of one answer
    if isinstance(value, (list, dict)):
        return json.dumps(value, ensure_ascii=False, default=object_text)
    return str(value)


def object_text(value: Any) -> str:
    """Convert an object that JSON cannot hold to text. The text has no memory address, so equal images give equal texts."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", str(value))


#: The texts of a completion, each with a flag: whether the model wrote it.
Parts = Sequence[tuple[str, bool]]


def clean(text: str) -> str:
    """Replace lone surrogates in a text, which no UTF-8 file can hold."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def content_text(content: Any) -> str:
    """Return the content of a chat message as text."""
    if isinstance(content, str):
        return clean(content)
    if isinstance(content, Mapping):
        content = content.get("content")
    if isinstance(content, (list, tuple, np.ndarray)):
        return "".join(
            content_text(item.get("text") or item.get("refusal") or "" if isinstance(item, Mapping) else item)
            for item in content
        )
    return "" if content is None else clean(str(content))


def message_text(message: Any) -> str:
    """Return a message's reasoning, content and tool calls as text."""
    if not isinstance(message, Mapping):
        return content_text(message)
    tool_calls = message.get("tool_calls")
    if not isinstance(tool_calls, (list, tuple, np.ndarray)):
        tool_calls = [] if tool_calls is None else [tool_calls]
    if not len(tool_calls) and message.get("function_call") is not None:  # OpenAI's old field for a tool call
        tool_calls = [message["function_call"]]
    # Servers use different fields for reasoning and refusals.
    reasoning_text = content_text(message.get("reasoning_content")) or content_text(message.get("reasoning"))
    content_or_refusal = content_text(message) or content_text(message.get("refusal"))
    return "\n".join(filter(None, [reasoning_text, content_or_refusal, *map(_call_text, tool_calls)]))


def _call_text(call: Any) -> str:
    """Write a tool call as `name(arguments)`."""
    if not isinstance(call, Mapping):
        return content_text(call)
    function_field = call.get("function")
    called_function = function_field if isinstance(function_field, Mapping) else call
    arguments = called_function.get("arguments")
    if isinstance(arguments, (Mapping, list)):
        arguments = json.dumps(arguments, ensure_ascii=False, default=object_text)
    return clean(f"{called_function.get('name') or ''}({'' if arguments is None else arguments})")


def prompt_text(prompt: Any) -> str:
    """Return a prompt as text. A chat becomes JSON, with the role and the text of each message."""
    if is_chat(prompt):
        return json.dumps([{"role": message["role"], "content": message_text(message)} for message in prompt])
    if isinstance(prompt, (list, tuple, np.ndarray)):
        return "\n".join(
            f"[{m['role']}] {message_text(m)}" if isinstance(m, Mapping) and "role" in m else content_text(m) for m in prompt
        )
    return content_text(prompt)


def parse_prompt(text: str) -> str | list[Any]:
    """If a prompt is a chat in JSON, return the list of its messages. Return any other prompt unchanged."""
    try:
        messages = json.loads(text) if text.lstrip().startswith("[") else []
    except (ValueError, RecursionError):
        return text
    return messages if is_chat(messages) else text


def prompt_fault(prompt: Any, *, template: bool) -> str | None:
    """Return why a trainer cannot use a prompt, or None if it can."""
    if isinstance(prompt, str):
        return None if prompt.strip() else "a prompt must say something."
    if not (isinstance(prompt, list) and is_chat(prompt) and all("content" in message for message in prompt)):
        return "a prompt must be a text, or a list of messages such as {'role': 'user', 'content': '...'}."
    if not template:
        return "this prompt is a conversation, but the model has no chat template. Write texts, or use another model."
    return None


def check_speaker(chat: Sequence[Mapping[str, Any]]) -> None:
    """Refuse a chat in which the model has another role than assistant, such as "gpt"."""
    roles = dict.fromkeys(message["role"] for message in chat)
    if "assistant" not in roles and not _FOREIGN_ASSISTANT_ROLES.isdisjoint(roles):
        raise FieldError(
            f"the messages have the roles {', '.join(roles)}, but messages of the model must have the role assistant"
        )


def split_chat(chat: Sequence[Mapping[str, Any]]) -> tuple[Any, Any]:
    """Split a chat after its last user message into prompt and completion. Without a reply, the completion is None."""
    question_index = max((i for i, message in enumerate(chat) if message["role"] == "user"), default=-1)
    reply_index = next((i for i, reply in enumerate(chat) if reply["role"] == "assistant" and i > question_index), None)
    return (chat, None) if reply_index is None else (chat[:reply_index], chat[reply_index:])


def completion_parts(completion: Any) -> Parts:
    """Split a completion into texts, each with a flag: whether the model wrote it."""
    if isinstance(completion, (list, tuple)):
        return [(message_text(m), not isinstance(m, dict) or m.get("role", "assistant") == "assistant") for m in completion]
    return [(content_text(completion), True)]


def scalar_fields(record: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return those fields of a JSON record that hold a text, a number or None."""
    return {name: value for name, value in (record or {}).items() if isinstance(value, str | int | float | None)}


class FieldError(DataError):
    """Raised for a record that breaks its format. The reader of the file adds the file's name and the line."""


def whole_number(value: Any, key: str) -> int:
    """Check that a field's value is a whole number, and return it as an int. None becomes 0."""
    if value is None:
        return 0
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or not -(2**63) <= value < 2**63:
        raise FieldError(f"'{key}' is {short_repr(value)}, but it must be a whole number")
    return int(value)


def object_field(record: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the object in a field of a record. A missing field gives an empty object."""
    field_value = record.get(key)
    if field_value is None:
        return {}
    if not isinstance(field_value, Mapping):
        raise FieldError(f"'{key}' is {short_repr(field_value)}, but it must be an object")
    return field_value


def list_field(record: Mapping[str, Any], key: str, entry_type: type | tuple[type, ...], words: str) -> list[Any]:
    """Return the list in a field of a record, and check the type of its entries. A missing field gives an empty list."""
    field_value = record.get(key)
    if field_value is None:
        return []
    if not isinstance(field_value, list):
        raise FieldError(f"'{key}' is {short_repr(field_value)}, but it must be a list of {words}")
    for list_entry in field_value:
        if not isinstance(list_entry, entry_type):
            raise FieldError(f"'{key}' contains {short_repr(list_entry)}, but it must be a list of {words}")
    return field_value


@contextmanager
def at_place(place: str) -> Iterator[None]:
    """Add the place of a record, such as its row, to error messages from the `with` block."""
    try:
        yield
    except FieldError as error:
        raise DataError(f"{place}: {error}.") from None
    except RecursionError:
        raise DataError(f"{place}: a field is nested too deeply to be read; remove that field.") from None


def read_steps(path: Path, values: Iterable[Any]) -> list[int]:
    """Return the training step of every row, 0 if a row has none."""
    step_numbers: list[int] = []
    for row_index, value in enumerate(values):
        with at_place(f"Row {row_index} of '{path}'"):
            step_numbers.append(whole_number(value, "step"))
    return step_numbers


def by_column(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Turn records into columns, with None if a record lacks a field."""
    column_names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in column_names}


def missing_field(key: str, record: Mapping[str, Any]) -> FieldError:
    """Return the error for a record without a required field."""
    return FieldError(f"'{key}' is missing; the fields are {', '.join(map(str, record)) or 'none'}")


def short_repr(value: Any) -> str:
    """Return a short text of a value for an error message."""
    return "null" if value is None else reprlib.repr(value)
