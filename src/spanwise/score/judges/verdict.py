"""Read the verdict from a judge's reply."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from spanwise.score.worker import MISSING, json_value

_VERDICT = re.compile(r'"verdict"\s*:\s*"?')
_OBJECT = re.compile(r'\{\s*"')
_JSON = json.JSONDecoder(strict=False)  # A strict decoder refuses the line breaks that judges write into JSON strings.
_LABEL = r"[\W_]{0,30}?(?:[\w *]{1,30}:[\W_]{0,30}?)?"  # Matches a label, such as "Verdict:".
_LIST_NUMBER = re.compile(r"(?m)^[^\w\n]*\d+[.)]\s")  # Matches a list's numbers (`1.`, `2.`), which are no verdicts.
#: Matches a model's thoughts before its answer, unless the reply begins with JSON.
_THINKING = re.compile(r"\A(?!\s*\{).*?</think>|\A\s*<think>.*", re.DOTALL)
#: The words that a judge writes if a criterion applies to the whole answer, or to no block.
WHOLE, NONE = "whole", "none"


class UnreadableReplyError(Exception):
    """A judge's reply from which no verdict can be read."""


class Judgement(NamedTuple):
    """The verdict of a judge: a number, a reason, token counts and the judged block."""

    value: float
    reason: str | None = None
    tokens: int = 0
    block: str | None = None


def reply_rules(
    choices: Sequence[str], constrain: str, *, reasons: bool, parts: Sequence[str] = ()
) -> tuple[str, dict[str, Any]]:
    """Return the instruction on how a judge must answer, and the API options that enforce the instruction."""
    choices_text = " or ".join(f'"{choice}"' for choice in choices)
    if constrain == "choice" or (constrain == "none" and not reasons and not parts):
        choice_options = {"structured_outputs": {"choice": list(choices)}} if constrain == "choice" else {}
        return f"Answer with {choices_text} and nothing else.", choice_options
    field_schemas: dict[str, Any] = {"verdict": {"type": "string", "enum": list(choices)}}
    field_instructions = f'"verdict": {choices_text}'
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
    schema_options = {} if constrain == "none" else {"response_format": json_format}
    return f"Answer with a JSON object: {field_instructions}.", schema_options


def read_verdict(reply: Any, choices: Mapping[str, float | int], *, expected: bool, parts: Sequence[str] = ()) -> Judgement:
    """Read the judge's verdict from the JSON reply of the chat completions API."""
    reply_body = reply if isinstance(reply, dict) else {}
    token_count = int((reply_body.get("usage") or {}).get("total_tokens") or 0)
    first_choice = next(iter(reply_body.get("choices") or ()), {})
    content = (first_choice.get("message") or {}).get("content") or ""
    reply_text = content if isinstance(content, str) else "".join(piece.get("text") or "" for piece in content)
    choices_pattern = "|".join(map(re.escape, sorted(choices, key=len, reverse=True)))
    word_pattern = re.compile(rf"(?<!\w)(?<!\d[.,])(?:{choices_pattern})(?!\w|[.,]\d)", re.IGNORECASE)
    answer_label = f"the judge's answer {(reply_text if first_choice else reply)!r:.120}"
    chosen_words, verdict_reason, named_part = _read_content(_THINKING.sub("", reply_text), choices, word_pattern)
    if len(chosen_words) != 1:
        cut_off_note = " (cut off at max_tokens)" if first_choice.get("finish_reason") == "length" else ""
        count_text = "several" if chosen_words else "none"
        raise UnreadableReplyError(f"{answer_label}{cut_off_note} holds {count_text} of the choices {', '.join(choices)}")
    if parts and named_part not in (*parts, WHOLE, NONE):
        raise UnreadableReplyError(f"{answer_label} names none of the parts {', '.join(parts)}")
    verdict_value = _expected_value(first_choice, choices, word_pattern) if expected else float(choices[chosen_words.pop()])
    return Judgement(verdict_value, verdict_reason, token_count, named_part if parts else None)


def _read_content(content: str, choices: Mapping[str, Any], word_pattern: re.Pattern[str]) -> tuple[set[str], Any, Any]:
    """Read from a judge's reply the choices, the reason, and the part of the answer that the verdict is about."""
    choice_by_word = {_plain(choice): choice for choice in choices}
    json_values = [json_value(content[brace.start() :], within=True, decoder=_JSON) for brace in _OBJECT.finditer(content)]
    # Do not read a verdict from a JSON object that breaks off in the judge's reply.
    if json_values or _plain(content) in choice_by_word:
        replies = [value for value in json_values if value is not MISSING and "verdict" in value] or [{"verdict": content}]
        reply = {key: field for key, field in replies[-1].items() if isinstance(field, str)}
        verdicts = {_plain(reply_object["verdict"]) for reply_object in replies}
        return {choice_by_word[word] for word in verdicts if word in choice_by_word}, reply.get("reason"), reply.get("part")
    prose = _LIST_NUMBER.sub("", content) if len(_LIST_NUMBER.findall(content)) > 1 else content
    words_by_line = [words for line in prose.splitlines() if (words := word_pattern.findall(line))]
    # A judge may state its choice at the start or in the last line.
    word_match = re.match(rf"{_LABEL}({word_pattern.pattern})(?! ?\w)", prose, re.IGNORECASE)
    choice_words = {*(words_by_line or [[]])[-1], *([word_match[1]] if word_match else [])}
    return {choice_by_word[_plain(word)] for word in choice_words}, content.strip(), None


def _plain(word: Any) -> str:
    """Return a choice in lower case, without the punctuation around it."""
    return str(word).strip('".,} \t\n').lower()


def _expected_value(message: Mapping[str, Any], choices: Mapping[str, float | int], word_pattern: re.Pattern[str]) -> float:
    """Return the mean of the choices' numbers, weighted by the probability of each choice's first token."""
    tokens = (message.get("logprobs") or {}).get("content")
    if not tokens:
        raise UnreadableReplyError("an expected value needs log-probabilities, but the reply has none; set expected: false")
    token_text = "".join(token["token"] for token in tokens)  # the text includes the judge's thoughts
    answer = _THINKING.sub("", token_text)
    verdict_ends = [match.end() for match in _VERDICT.finditer(answer)]
    verdict_starts = verdict_ends or [match.start() for match in word_pattern.finditer(answer)] or [0]
    verdict_start = len(token_text) - len(answer) + verdict_starts[-1]
    token_ends = accumulate(len(token["token"]) for token in tokens)
    verdict_token = next((token for token, end in zip(tokens, token_ends, strict=True) if end > verdict_start), tokens[-1])
    likely_tokens = verdict_token.get("top_logprobs") or [verdict_token]
    text_probabilities = [(_plain(token["token"]), math.exp(token["logprob"])) for token in likely_tokens]
    probability_by_choice = dict.fromkeys((*choices, ""), 0.0)  # "" stands for tokens with which several choices begin
    for text, probability in text_probabilities:
        begun_choices = [word for word in choices if text and _plain(word).startswith(text)]
        if len(begun_choices) > 1:  # "no" does not stand for "not sure" if "not" is a token, too
            longer_texts = tuple(other_text for other_text, _ in text_probabilities if len(other_text) > len(text))
            begun_choices = [word for word in begun_choices if not _plain(word).startswith(longer_texts)]
        if begun_choices:
            probability_by_choice[begun_choices[0] if len(begun_choices) == 1 else ""] += probability
    known_probability = sum(probability_by_choice[word] for word in choices)
    if known_probability <= 100.0 * probability_by_choice[""]:
        ambiguity_fault = "the likeliest tokens begin several choices; write choices with different first tokens"
        raise UnreadableReplyError(ambiguity_fault if probability_by_choice[""] else "the likeliest tokens begin no choice")
    return sum(probability_by_choice[word] * choice_number for word, choice_number in choices.items()) / known_probability
