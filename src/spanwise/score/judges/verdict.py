"""Read a verdict from a judge's reply: one of the choices, with a reason, or the expected value over the choices."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

_VERDICT = re.compile(r'"verdict"\s*:\s*"?')


#: A verdict is about one part, all of the answer, or nothing of it.
WHOLE, NONE = "whole", "none"


class UnreadableReplyError(Exception):
    """A reply that holds none of the choices."""


@dataclass(frozen=True)
class Judgement:
    """What a judge said: the number of its choice, its reason, the tokens that it read and wrote, and the part that it is about."""

    value: float
    reason: str | None = None
    tokens: int = 0
    place: str | None = None


def form_of(choices: Sequence[str], constrain: str, *, reasons: bool, parts: Sequence[str] = ()) -> dict[str, Any]:
    """Return the arguments of a request that let the server write nothing but a verdict."""
    if constrain == "none":
        return {}
    if constrain == "choice":
        return {"structured_outputs": {"choice": list(choices)}}
    fields = {**({"reason": {"type": "string"}} if reasons else {}), "verdict": {"type": "string", "enum": list(choices)}}
    if parts:
        fields |= {"part": {"type": "string", "enum": [*parts, WHOLE, NONE]}}
    schema = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "verdict", "strict": True, "schema": schema}}}


def asked_for(choices: Sequence[str], constrain: str, *, reasons: bool, parts: Sequence[str] = ()) -> str:
    """Say in words what the judge is to write."""
    words = " or ".join(f'"{choice}"' for choice in choices)
    if constrain == "choice" or (constrain == "none" and not reasons and not parts):
        return f"Answer with {words} and nothing else."
    reason = '"reason": one sentence of evidence, and then ' if reasons else ""
    named = ", ".join(f'"{part}"' for part in parts)
    place = (
        f', and "part": the part that this is about most ({named}), "{WHOLE}" if it is all of them, "{NONE}" if none'
        if parts
        else ""
    )
    return f'Answer with a JSON object: {reason}"verdict": {words}{place}.'


def read_verdict(reply: Any, choices: Mapping[str, float | int], *, expected: bool, parts: Sequence[str] = ()) -> Judgement:
    """Read a reply of the chat completions API, as plain JSON."""
    fields = reply if isinstance(reply, dict) else {}
    tokens = int((fields.get("usage") or {}).get("total_tokens") or 0)
    choice = next(iter(fields.get("choices") or ()), {})
    content = (choice.get("message") or {}).get("content") or ""
    word, reason, place = _word(content, choices)
    if word is None:
        cut = ", cut off at max_tokens" if choice.get("finish_reason") == "length" else ""
        raise UnreadableReplyError(f"the judge answered {content!r:.120}{cut}, and none of {', '.join(choices)}")
    if parts and place not in (*parts, WHOLE, NONE):
        raise UnreadableReplyError(f"the judge answered {content!r:.120}, with none of the parts {', '.join(parts)}")
    value = _expected(choice, content, choices) if expected else float(choices[word])
    return Judgement(value, reason, tokens, place if parts else None)


def _word(content: str, choices: Mapping[str, float | int]) -> tuple[str | None, str | None, str | None]:
    """Return the choice that a reply makes, its reason, and the part that it names."""
    start = content.find("{")
    try:
        parsed = json.JSONDecoder().raw_decode(content, start)[0] if start >= 0 else None
    except (ValueError, RecursionError):
        parsed = None
    if isinstance(parsed, dict) and "verdict" in parsed:
        word, reason, place = str(parsed["verdict"]).strip(), parsed.get("reason"), parsed.get("part")
        return _named(word, choices), reason if isinstance(reason, str) else None, place if isinstance(place, str) else None
    exact = _named(content.strip().strip('".'), choices)
    if exact is not None or start >= 0:  # half a JSON object is no verdict
        return exact, None, None
    words = re.compile(
        rf"(?<!\w)(?:{'|'.join(map(re.escape, sorted(choices, key=len, reverse=True)))})(?!\w)", re.IGNORECASE
    )
    last = next(reversed(words.findall(content)), None)
    return (None, None, None) if last is None else (_named(last, choices), content.strip(), None)


def _named(word: str, choices: Mapping[str, float | int]) -> str | None:
    return next((name for name in choices if name.lower() == word.lower()), None)


def _expected(choice: Mapping[str, Any], content: str, choices: Mapping[str, float | int]) -> float:
    """Return the mean of the choices' numbers under the probabilities that the judge gave to the first token of each."""
    tokens = (choice.get("logprobs") or {}).get("content")
    if not tokens:
        raise UnreadableReplyError(
            "the reply holds no log-probabilities, of which the expected value is made: set expected: false"
        )
    place = max((match.end() for match in _VERDICT.finditer(content)), default=len(content) - len(content.lstrip()))
    ends = accumulate(len(token["token"]) for token in tokens)
    token = next((token for token, end in zip(tokens, ends, strict=True) if end > place), tokens[-1])
    mass = dict.fromkeys(choices, 0.0)
    for other in token.get("top_logprobs") or [token]:
        start = other["token"].strip().lstrip('"').strip().lower()
        names = [name for name in choices if start and (name.lower().startswith(start) or start.startswith(name.lower()))]
        if len(names) == 1:
            mass[names[0]] += math.exp(other["logprob"])
    total = sum(mass.values())
    if total <= 0.0:
        raise UnreadableReplyError("no choice is among the likeliest tokens: let choices differ in their first one")
    return sum(mass[name] * number for name, number in choices.items()) / total
