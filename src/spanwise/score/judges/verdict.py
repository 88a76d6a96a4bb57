"""Read a verdict from a judge's reply: one of the choices, with a reason, or the expected value over the choices."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

_VERDICT = re.compile(r'"verdict"\s*:\s*"?')
#: What a judge writes in place of a block's name if its verdict is about the whole answer, or about no block.
WHOLE, NONE = "whole", "none"


class UnreadableReplyError(Exception):
    """A judge's reply from which no verdict can be read."""


class Judgement(NamedTuple):
    """A judge's verdict: its choice as a number, its reason, how many tokens the judge read and wrote, the block it is about."""

    value: float
    reason: str | None = None
    tokens: int = 0
    block: str | None = None


def reply_format(choices: Sequence[str], constrain: str, *, reasons: bool, parts: Sequence[str] = ()) -> dict[str, Any]:
    """Return the arguments of a request to a judge that let the server write nothing but a verdict."""
    if constrain == "none":
        return {}
    if constrain == "choice":
        return {"structured_outputs": {"choice": list(choices)}}
    field_schemas = {
        **({"reason": {"type": "string"}} if reasons else {}),
        "verdict": {"type": "string", "enum": list(choices)},
        **({"part": {"type": "string", "enum": [*parts, WHOLE, NONE]}} if parts else {}),
    }
    schema = {"type": "object", "properties": field_schemas, "required": list(field_schemas), "additionalProperties": False}
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "verdict", "strict": True, "schema": schema}}}


def reply_instruction(choices: Sequence[str], constrain: str, *, reasons: bool, parts: Sequence[str] = ()) -> str:
    """Return the sentence of the prompt that tells the judge what to write."""
    quoted_choices = " or ".join(f'"{choice}"' for choice in choices)
    if constrain == "choice" or (constrain == "none" and not reasons and not parts):
        return f"Answer with {quoted_choices} and nothing else."
    reason_instruction = '"reason": one sentence of evidence, and then ' if reasons else ""
    listed_parts = ", ".join(f'"{part}"' for part in parts)
    part_instruction = (
        f', and "part": the part that this is about most ({listed_parts}), "{WHOLE}" if it is all of them, "{NONE}" if none'
    )
    return f'Answer with a JSON object: {reason_instruction}"verdict": {quoted_choices}{part_instruction if parts else ""}.'


def read_verdict(reply: Any, choices: Mapping[str, float | int], *, expected: bool, parts: Sequence[str] = ()) -> Judgement:
    """Read the judge's verdict from the JSON reply of the chat completions API."""
    reply = reply if isinstance(reply, dict) else {}
    token_count = int((reply.get("usage") or {}).get("total_tokens") or 0)
    first_choice = next(iter(reply.get("choices") or ()), {})
    reply_text = (first_choice.get("message") or {}).get("content") or ""
    chosen_word, verdict_reason, named_part = _read_content(reply_text, choices)
    if chosen_word is None:
        cut_off_note = " (cut off at max_tokens)" if first_choice.get("finish_reason") == "length" else ""
        raise UnreadableReplyError(
            f"the judge's answer {reply_text!r:.120}{cut_off_note} holds none of the choices {', '.join(choices)}"
        )
    if parts and named_part not in (*parts, WHOLE, NONE):
        raise UnreadableReplyError(f"the judge's answer {reply_text!r:.120} names none of the parts {', '.join(parts)}")
    verdict_value = _expected_value(first_choice, reply_text, choices) if expected else float(choices[chosen_word])
    return Judgement(verdict_value, verdict_reason, token_count, named_part if parts else None)


def _read_content(content: str, choices: Mapping[str, float | int]) -> tuple[str | None, str | None, str | None]:
    """Return the choice that a judge's reply makes, its reason and the part it names; None for what the reply lacks."""
    brace_index = content.find("{")
    try:
        reply_object = json.JSONDecoder().raw_decode(content, brace_index)[0] if brace_index >= 0 else None
    except (ValueError, RecursionError):
        reply_object = None
    if isinstance(reply_object, dict) and "verdict" in reply_object:
        reason, part = (field if isinstance(field := reply_object.get(key), str) else None for key in ("reason", "part"))
        return _matching_choice(str(reply_object["verdict"]).strip(), choices), reason, part
    exact_choice = _matching_choice(content.strip().strip('".'), choices)
    if exact_choice is not None or brace_index >= 0:  # a word in a JSON object that breaks off is no verdict
        return exact_choice, None, None
    choices_pattern = "|".join(map(re.escape, sorted(choices, key=len, reverse=True)))
    found_words = re.findall(rf"(?<!\w)(?:{choices_pattern})(?!\w)", content, re.IGNORECASE)
    return (_matching_choice(found_words[-1], choices), content.strip(), None) if found_words else (None, None, None)


def _matching_choice(word: str, choices: Mapping[str, float | int]) -> str | None:
    """Return the choice that a word of a judge's reply names, in upper or lower case; None if it names none."""
    return next((choice for choice in choices if choice.lower() == word.lower()), None)


def _expected_value(message: Mapping[str, Any], content: str, choices: Mapping[str, float | int]) -> float:
    """Return the mean of the choices' numbers, weighted by the probability of the first token of each choice."""
    tokens = (message.get("logprobs") or {}).get("content")
    if not tokens:
        raise UnreadableReplyError("the reply lacks the log-probabilities that an expected value needs: set expected: false")
    verdict_start = max((match.end() for match in _VERDICT.finditer(content)), default=len(content) - len(content.lstrip()))
    token_ends = accumulate(len(token["token"]) for token in tokens)
    verdict_token = next((token for token, end in zip(tokens, token_ends, strict=True) if end > verdict_start), tokens[-1])
    probability_by_choice = dict.fromkeys(choices, 0.0)
    for candidate in verdict_token.get("top_logprobs") or [verdict_token]:
        token_text = candidate["token"].strip().lstrip('"').strip().lower()
        matching_choices = [
            word
            for word in choices
            if token_text and (word.lower().startswith(token_text) or token_text.startswith(word.lower()))
        ]
        if len(matching_choices) == 1:
            probability_by_choice[matching_choices[0]] += math.exp(candidate["logprob"])
    probability_sum = sum(probability_by_choice.values())
    if probability_sum <= 0.0:
        raise UnreadableReplyError("no choice is among the likeliest tokens: write choices that differ in their first token")
    return sum(probability_by_choice[word] * number for word, number in choices.items()) / probability_sum
