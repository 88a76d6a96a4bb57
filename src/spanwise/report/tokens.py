"""Write the token view: any completion, with each token coloured by the credit of two methods."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

import numpy as np
from markupsafe import Markup

from spanwise.errors import AlignmentError, DataError
from spanwise.explain.remarks import SHARING
from spanwise.report.page import deflated, template
from spanwise.report.why import DIGITS, Rule, clause, credits, explained, opening, unit
from spanwise.report.words import GLOSSARY
from spanwise.rollouts.rows import TokenRow

# Few digits keep a page of 500 completions with 1,000 tokens each under 3 MB.
COARSE = 3  # Significant digits of token values and probabilities.
FEW = 2  # Significant digits of a column of token numbers that changes more than `MANY` times.
MANY = 200_000

#: A compressed column has at most this many distinct words, because each becomes one Unicode code point.
_MOST_WORDS = 0x110000 - 2048 - 32


@dataclass(frozen=True)
class TokenView:
    """The data of the token view: completions, their tokens, and each token's credit by method.

    Attributes:
        methods: names, in order; every completion has advantages under each of them.
        completions: in order.
        outcome: the objective whose reward of 1 or 0 says right or wrong; None: nothing says it.
        segments: what opens a segment, in words; "": there are none.
        rules: method -> how it credits, as far as that is known.
        own: the method of the user's recipe, which stands on the right; None: the second one.
        total: completions that there are, of which these are some; None: these are all.
        by_step: show the completions of one step at a time, and a slider over the steps.

    Example:
        >>> row = TokenRow("1+1=", ["2"], {"grpo": [0.5]}, {"answer": [(0, 1)]}, {"correct": 1.0}, {"correct": "ok"}, "")
        >>> len(TokenView(("grpo",), [row]).completions)
        1
    """

    methods: tuple[str, ...]
    completions: Sequence[TokenRow]
    outcome: str | None = None
    segments: str = ""
    rules: Mapping[str, Rule] = field(default_factory=dict)
    own: str | None = None
    total: int | None = None
    by_step: bool = False

    @property
    def pair(self) -> tuple[str, str]:
        """Return the two methods that the page shows first. These are grpo, if present, and the run's own."""
        left_method = "grpo" if "grpo" in self.methods else self.methods[0]
        second_method = self.methods[1] if len(self.methods) > 1 else left_method
        right_method = self.own if self.own and self.own in self.methods else second_method
        if left_method == right_method:
            left_method = next((name for name in self.methods if name != right_method), right_method)
        return left_method, right_method


def token_view(view: TokenView) -> Markup:
    """Write the HTML of the token view, without its scripts and styles.

    Completions are untrusted. They travel as compressed base64 and become text nodes in the browser, never markup. Numbers
    keep 4 significant digits (advantages, rewards) or 3 (values, probabilities), 2 where a column changes between tokens
    more than 200,000 times; exactly 0 stays 0, nothing else becomes 0. Texts of tokens beyond the 1,112,031 most frequent
    ones show as "…".
    """
    json_text = json.dumps(payload(view), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return Markup(template("tokens.html.j2").render(data=deflated(json_text), count=len(view.completions)))


def payload(view: TokenView) -> dict[str, Any]:
    """Encode the completions, tokens and credit of a `TokenView` as JSON data, with repeated values stored once."""
    if not view.methods:
        raise DataError("A token view needs at least one method; none is given.")
    rows = view.completions
    for completion_number, row in enumerate(rows, start=1):
        _check(row, completion_number, view.methods)
    objective_names = list(dict.fromkeys(name for row in rows for name in row.rewards))
    outcome_name = view.outcome or ""
    is_judged = any(row.rewards.get(outcome_name) in (0, 1) for row in rows)
    method_rules = {method: view.rules.get(method, Rule()) for method in view.methods}.items()
    stated_confidences = chain.from_iterable(row.stated.items() for row in rows)
    confidence_names = {name for name, value in stated_confidences if _number(value) is not None}
    value_names = dict.fromkeys(name for row in rows for name in row.values)
    return {
        "methods": list(view.methods),
        "objectives": objective_names,
        "outcome": objective_names.index(outcome_name) if is_judged else None,
        "prompts": _coded([[row.prompt] for row in rows]),
        "steps": [row.step for row in rows],
        "by_step": view.by_step,
        "scores": [_own_score(row.score) for row in rows],
        "faults": _coded([[row.fault] for row in rows]),
        "spans": [
            [[name, *span] for name, spans in row.spans.items() for span in spans if span[1] > span[0]] for row in rows
        ],
        "rewards": [[_number(row.rewards.get(name)) for name in objective_names] for row in rows],
        "statuses": _coded([[row.statuses.get(name, "") for name in objective_names] for row in rows]),
        "stops": [[_number(row.stop.get(method)) for method in view.methods] if row.stop else None for row in rows],
        "tokens": _coded([row.tokens for row in rows]),
        "advantages": [_coded_numbers([row.advantages[method] for row in rows], DIGITS) for method in view.methods],
        "values": [
            {"name": name, **(_coded_numbers([row.values.get(name) for row in rows], COARSE) or {})} for name in value_names
        ],
        "segments": view.segments,
        "pair": [view.methods.index(name) for name in view.pair],
        "openings": _coded([[opening(row, view.outcome, confidence_names)] for row in rows]),
        "clauses": [_coded([[clause(row, method, rule)] for row in rows]) for method, rule in method_rules],
        "why": [[explained(row, method, rule) for method, rule in method_rules] for row in rows],
        "credits": [
            [{block: _number(value) for block, value in credits(row, method, rule).items()} for method, rule in method_rules]
            for row in rows
        ],
        "units": [unit(rows, method, rule) for method, rule in method_rules],
        "groups": [None if row.group is None else f"{row.step}/{row.group}" for row in rows],
        "answers": [row.answer for row in rows],
        "stated": [next((value for value in row.stated.values() if _number(value) is not None), None) for row in rows],
        "glossary": dict(GLOSSARY),
        "sharing": SHARING,
        "total": max(view.total or 0, len(rows)),
        "opens": [{name: list(indices) for name, indices in row.opens.items()} for row in rows],
        "probabilities": _coded_numbers([row.probabilities for row in rows], COARSE),
    }


def _own_score(score: float | None) -> str | None:
    """Describe a completion's self-rewarding score: the policy's rating of its own answer."""
    if score is None or math.isnan(score):
        return None if score is None else "no self-rewarding score, because the completion was cut off"
    clipped_score = min(max(score, 0.0), 1.0)
    return f"says of itself {clipped_score:.2f}" + (f" ({score:.2g}, clipped)" if clipped_score != score else "")


def _check(row: TokenRow, number: int, methods: Sequence[str]) -> None:
    """Refuse a completion whose advantages, values or spans do not fit the number of its tokens."""
    for method in methods:
        if method not in row.advantages:
            methods_text = ", ".join(row.advantages) or "none"
            raise DataError(f"Completion {number} has no advantages under '{method}'; it has {methods_text}.")
    length = len(row.tokens)
    token_columns = {f"values of {name}" if name else "values": values for name, values in row.values.items()}
    token_columns |= {f"advantages under '{method}'": row.advantages[method] for method in methods}
    token_columns |= {} if row.probabilities is None else {"probabilities": row.probabilities}
    for name, column in token_columns.items():
        if len(column) != length:
            raise AlignmentError(f"Completion {number} has {length} tokens and {len(column)} {name}; give each token one.")
    labelled_spans = [(f"Block '{name}'", *span) for name, spans in row.spans.items() for span in spans]
    labelled_spans += [("A segment", min(indices), max(indices) + 1) for indices in row.opens.values() if len(indices)]
    for label, start, end in labelled_spans:
        if start < end and not 0 <= start < end <= length:
            raise AlignmentError(
                f"{label} of completion {number} spans tokens [{start}, {end}), but the completion has only {length} tokens."
            )


def _coded_numbers(columns: Sequence[Sequence[float] | None], digits: int) -> dict[str, Any] | None:
    """Compress lists of token numbers with `_coded`. `scale` is the absolute value that the page shows in full colour."""
    if all(column is None for column in columns):
        return None
    columns_v = np.concatenate([np.asarray(column, dtype=np.float64) for column in columns if column is not None])
    finite_number_v = np.nan_to_num(columns_v)
    change_count = np.count_nonzero(finite_number_v[1:] != finite_number_v[:-1])
    digit_count = FEW if change_count > MANY else digits
    distinct_numbers, distinct_index_v = np.unique(columns_v, return_inverse=True)
    rounded_numbers = [_number(value, digit_count) for value in distinct_numbers.tolist()]
    number_iterator = iter([rounded_numbers[index] for index in distinct_index_v.tolist()])
    rounded_columns = [None if column is None else list(islice(number_iterator, len(column))) for column in columns]
    # The 98th percentile gets the full colour, so that one outlier does not make all others pale.
    magnitudes = np.abs(columns_v[np.isfinite(columns_v) & (columns_v != 0)])
    scale = np.quantile(magnitudes, 0.98, method="higher") if magnitudes.size else 0.0
    return {**_coded(rounded_columns), "scale": float(f"{scale:.{DIGITS}g}"), "rounded": digit_count == FEW}


def _coded(rows: Sequence[Sequence[Hashable] | None]) -> dict[str, Any]:
    """Compress rows of words: write each distinct word once, and one character for each use."""
    word_counts = Counter(word for row in rows for word in row or ())
    distinct_words = [word for word, _ in word_counts.most_common()]
    if len(distinct_words) > _MOST_WORDS:
        distinct_words = [*distinct_words[: _MOST_WORDS - 1], "…"]
    code_points = (point for point in range(32, 0x110000) if not 0xD800 <= point <= 0xDFFF)  # UTF-8 encodes no surrogates
    code_of_word = {word: chr(point) for word, point in zip(distinct_words, code_points, strict=False)}
    unlisted_code = code_of_word.get("…", "")  # "…" stands for unlisted words
    return {
        "words": distinct_words,
        "codes": [None if row is None else "".join(code_of_word.get(word, unlisted_code) for word in row) for row in rows],
    }


def _number(value: float | None, digits: int = DIGITS) -> float | int | str | None:
    """Round a number for JSON. NaN becomes None and infinity becomes a text, because JSON has neither."""
    if value is None or math.isnan(value):
        return None
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    rounded_value = float(f"{value:.{digits}g}")
    return int(rounded_value) if rounded_value.is_integer() and abs(rounded_value) < 1e15 else rounded_value
