"""What chat messages, prompts and completions say, as text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

#: A completion as text: its parts in order, each with whether the model wrote it.
Parts = Sequence[tuple[str, bool]]


def clean(text: str) -> str:
    r"""The text with lone surrogates, which no file can hold, replaced; JSON may bring them in.

    >>> clean("caf\u00e9 \ud800")
    'café �'
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


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
