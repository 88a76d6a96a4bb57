"""Read a verdict from a judge's reply: a choice with its reason, or the expected value over the choices."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from spanwise.score.worker import json_value

_VERDICT = re.compile(r'"verdict"\s*:\s*"?')
#: Matches the thoughts before an answer. A reply that begins with JSON has none: its reason may quote `</think>`.
_THINKING = re.compile(r"\A(?!\s*\{).*?</think>|\A\s*<think>.*", re.DOTALL)
#: What a judge writes instead of a block's name if its verdict is about the whole answer, or about no block.
WHOLE, NONE = "whole", "none"


class UnreadableReplyError(Exception):
    """A judge's reply from which no verdict can be read."""


class Judgement(NamedTuple):
    """A judge's verdict: its number and reason, the count of tokens read and written, and the judged block."""

    value: float
    reason: str | None = None
    tokens: int = 0
    block: str | None = None


def reply_rules(
    choices: Sequence[str], constrain: str, *, reasons: bool, parts: Sequence[str] = ()
) -> tuple[str, dict[str, Any]]:
    """Return the sentence that tells a judge what to write, and request options that enforce it."""
    quoted_choices = " or ".join(f'"{choice}"' for choice in choices)
    if constrain == "choice" or (constrain == "none" and not reasons and not parts):
        choice_rule = {"structured_outputs": {"choice": list(choices)}} if constrain == "choice" else {}
        return f"Answer with {quoted_choices} and nothing else.", choice_rule
    field_schemas: dict[str, Any] = {"verdict": {"type": "string", "enum": list(choices)}}
    field_instructions = f'"verdict": {quoted_choices}'
    if reasons:
        field_schemas = {"reason": {"type": "string"}, **field_schemas}
        field_instructions = f'"reason": one sentence of evidence, and then {field_instructions}'
    if parts:
        field_schemas["part"] = {"type": "string", "enum": [*parts, WHOLE, NONE]}
        part_list_text = ", ".join(f'"{part}"' for part in parts)
        field_instructions += f', and "part": the part that this is about most ({part_list_text}), '
        field_instructions += f'"{WHOLE}" if it is all of them, "{NONE}" if none'
    schema = {"type": "object", "properties": field_schemas, "required": list(field_schemas), "additionalProperties": False}
    json_format = {"type": "json_schema", "json_schema": {"name": "verdict", "strict": True, "schema": schema}}
    format_rule = {} if constrain == "none" else {"response_format": json_format}
    return f"Answer with a JSON object: {field_instructions}.", format_rule


def read_verdict(reply: Any, choices: Mapping[str, float | int], *, expected: bool, parts: Sequence[str] = ()) -> Judgement:
    """Read the judge's verdict from the JSON reply of the chat completions API."""
    reply_body = reply if isinstance(reply, dict) else {}
    token_count = int((reply_body.get("usage") or {}).get("total_tokens") or 0)
    first_choice = next(iter(reply_body.get("choices") or ()), {})
    reply_text = (first_choice.get("message") or {}).get("content") or ""
    answer_label = f"the judge's answer {(reply_text if first_choice else reply)!r:.120}"
    chosen_word, verdict_reason, named_part = _read_content(_THINKING.sub("", reply_text), choices)
    if chosen_word is None:
        cut_off_note = " (cut off at max_tokens)" if first_choice.get("finish_reason") == "length" else ""
        raise UnreadableReplyError(f"{answer_label}{cut_off_note} holds none of the choices {', '.join(choices)}")
    if parts and named_part not in (*parts, WHOLE, NONE):
        raise UnreadableReplyError(f"{answer_label} names none of the parts {', '.join(parts)}")
    verdict_value = _expected_value(first_choice, reply_text, choices) if expected else float(choices[chosen_word])
    return Judgement(verdict_value, verdict_reason, token_count, named_part if parts else None)


def _read_content(content: str, choices: Mapping[str, float | int]) -> tuple[str | None, str | None, str | None]:
    """Return the choice, the reason and the part's name in a judge's reply. Return None for each that is missing."""
    choice_of = {choice.lower(): choice for choice in choices}
    reply_object = json_value(content, within=True, decoder=json.JSONDecoder())
    if isinstance(reply_object, dict) and "verdict" in reply_object:
        fields = {key: field for key, field in reply_object.items() if isinstance(field, str)}
        return choice_of.get(str(reply_object["verdict"]).strip().lower()), fields.get("reason"), fields.get("part")
    bare_content = content.strip().strip('".').lower()
    if bare_content in choice_of or "{" in content:  # a choice in the middle of an incomplete JSON object does not count
        return choice_of.get(bare_content), None, None
    choices_pattern = "|".join(map(re.escape, sorted(choices, key=len, reverse=True)))
    choice_words = re.findall(rf"(?<!\w)(?:{choices_pattern})(?!\w)", content, re.IGNORECASE)
    return (choice_of.get(choice_words[-1].lower()), content.strip(), None) if choice_words else (None, None, None)


def _expected_value(message: Mapping[str, Any], content: str, choices: Mapping[str, float | int]) -> float:
    """Return the mean of the choices' numbers, weighted by the probability of each choice's first token."""
    tokens = (message.get("logprobs") or {}).get("content")
    if not tokens:
        raise UnreadableReplyError("the reply lacks the log-probabilities that an expected value needs: set expected: false")
    answer_start = len(content) - len(_THINKING.sub("", content).lstrip())
    verdict_start = max((match.end() for match in _VERDICT.finditer(content, answer_start)), default=answer_start)
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
