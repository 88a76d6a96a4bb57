"""The token view: any completion, coloured by what two methods credit its tokens with."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from spanwise.errors import AlignmentError, DataError
from spanwise.explain.glossary import GLOSSARY
from spanwise.report.headline import clause, openings
from spanwise.report.page import deflated
from spanwise.report.view import Rule, TokenView
from spanwise.report.why import credits, explained, units
from spanwise.rollouts.rows import TokenRow

#: Significant digits that are kept of an advantage or a reward, of a value or a probability, and of any column that changes from
#: one token to the next more often than MANY times: so 500 completions of 1,000 tokens with all of it are a page under 3 MB.
DIGITS, COARSE, FEW, MANY = 4, 3, 2, 200_000

#: Words that a coded column can tell apart: the code points from 32 on, without the 2,048 that UTF-8 cannot hold.
_MOST_WORDS = 0x110000 - 2048 - 32

_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"), autoescape=True, undefined=StrictUndefined
)


def token_view(view: TokenView) -> Markup:
    """Write the body of the token view; the scripts and styles `courses` and `tokens` in `static` bring it to life.

    Completions are untrusted. They travel as compressed base64 and become text nodes in the browser, never markup.

    Args:
        view: methods and completions.

    Edge cases:
        No completions show a sentence. Numbers keep 4 significant digits (advantages, rewards) or 3 (values, probabilities), 2
        where a column changes between tokens more than 200,000 times; exactly 0 stays 0, nothing else becomes 0. Texts of tokens
        beyond the first 1,112,031 different ones show as "…".

    Raises:
        DataError: no method, or a completion without advantages under one of them.
        AlignmentError: advantages, values, probabilities or a span that do not fit the tokens.

    Example:
        >>> row = TokenRow("1+1=", ["2", "<b>"], {"grpo": [.5, .5]}, {"answer": [(0, 2)]}, {"correct": 1.0}, {"correct": "ok"}, "")
        >>> html = token_view(TokenView(("grpo",), [row]))
        >>> "<b>" in html
        False
    """
    return Markup(_TEMPLATES.get_template("tokens.html.j2").render(data=pack(payload(view)), count=len(view.completions)))


def pack(data: Any) -> str:
    """Compress JSON to base64.

    >>> pack({"a": [1, None]}) == deflated('{"a":[1,null]}')
    True
    """
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    text = re.sub("[\ud800-\udfff]", lambda half: f"\\u{ord(half[0]):04x}", text)  # JSON can hold half a pair, UTF-8 cannot
    return deflated(text)


def payload(view: TokenView) -> dict[str, Any]:
    """Code the view as JSON data; what repeats is stored once.

    A coded column is {"words": distinct entries, most frequent first, "codes": a text per completion, None where it has
    none}; the character with code point 32 + i (2048 more from U+D800 on, which UTF-8 cannot hold) stands for word i.
    Numbers have a "scale" too: the size that is shown in full colour; and whether they are "rounded" to 2 digits. "outcome" is the
    place of that objective, None without one that ever is 0 or 1.
    """
    if not view.methods:
        raise DataError("A token view needs at least one method; none is given.")
    rows = view.completions
    for number, row in enumerate(rows, start=1):
        _check(row, number, view.methods)
    objectives = list(dict.fromkeys(name for row in rows for name in row.rewards))
    judged = [name for name in objectives if name == view.outcome and any(row.rewards.get(name) in (0, 1) for row in rows)]
    advantages = {method: [_array(row.advantages[method]) for row in rows] for method in view.methods}
    return {
        "methods": list(view.methods),
        "objectives": objectives,
        "outcome": objectives.index(judged[0]) if judged else None,
        "prompts": _coded([[row.prompt] for row in rows]),
        "steps": [row.step for row in rows],
        "scores": [_own_score(row.score) for row in rows],
        "faults": _coded([[row.fault] for row in rows]),
        "spans": [
            [[name, *span] for name, spans in row.spans.items() for span in spans if span[1] > span[0]] for row in rows
        ],
        "rewards": [[_number(row.rewards.get(name), DIGITS) for name in objectives] for row in rows],
        "statuses": _coded([[row.statuses.get(name, "") for name in objectives] for row in rows]),
        "stops": [[_number(row.stop.get(method), DIGITS) for method in view.methods] if row.stop else None for row in rows],
        "tokens": _coded([row.tokens for row in rows]),
        "advantages": [_coded_numbers(arrays, DIGITS) for arrays in advantages.values()],
        "values": [
            {"name": name, **column}
            for name in dict.fromkeys(name for row in rows for name in row.values)
            if (column := _coded_numbers([_array(row.values.get(name)) for row in rows], COARSE))
        ],
        "segments": view.segments,
        **_reasons(view),
        "opens": [{name: list(tokens) for name, tokens in row.opens.items()} for row in rows],
        "probabilities": _coded_numbers([_array(row.probabilities) for row in rows], COARSE),
    }


def _reasons(view: TokenView) -> dict[str, Any]:
    """Why each number is what it is: the clauses of a sentence, credit, arithmetic and groups."""
    rows, rules = view.completions, {method: view.rules.get(method, Rule()) for method in view.methods}
    return {
        "pair": [view.methods.index(name) for name in view.pair],
        "openings": _coded([[said] for said in openings(view)]),
        "clauses": [_coded([[clause(row, method, rule)] for row in rows]) for method, rule in rules.items()],
        "why": [[explained(row, method, rule) for method, rule in rules.items()] for row in rows],
        "credits": [[credits(row, method) for method in view.methods] for row in rows],
        "units": units(rows, view.methods),
        "groups": [None if row.group is None else f"{row.step}/{row.group}" for row in rows],
        "answers": [row.answer for row in rows],
        "stated": [
            next((value for value in row.stated.values() if value == value and value is not None), None) for row in rows
        ],
        "glossary": dict(GLOSSARY),
        "total": max(view.total or 0, len(rows)),
    }


def _own_score(score: float | None) -> str | None:
    """What a completion says of itself, in words.

    >>> _own_score(0.834), _own_score(-0.1), _own_score(math.nan)
    ('says of itself 0.83', 'says of itself 0.00 (-0.1, clipped)', 'no score of its own: it was cut off')
    """
    if score is None or math.isnan(score):
        return None if score is None else "no score of its own: it was cut off"
    clipped = min(max(score, 0.0), 1.0)
    return f"says of itself {clipped:.2f}" + (f" ({score:.2g}, clipped)" if clipped != score else "")


def _check(row: TokenRow, number: int, methods: Sequence[str]) -> None:
    """Everything about a completion has the size of its tokens."""
    lacking = next((method for method in methods if method not in row.advantages), None)
    if lacking is not None:
        raise DataError(
            f"Completion {number} has no advantages under '{lacking}'; it has {', '.join(row.advantages) or 'none'}."
        )
    size = len(row.tokens)
    columns = {f"values{' of ' if name else ''}{name}": values for name, values in row.values.items()}
    columns |= {f"advantages under '{method}'": row.advantages[method] for method in methods}
    columns |= {} if row.probabilities is None else {"probabilities": row.probabilities}
    for name, column in columns.items():
        if len(column) != size:
            raise AlignmentError(f"Completion {number} has {size} tokens and {len(column)} {name}; give one for each.")
    for tokens in filter(len, row.opens.values()):
        if not 0 <= min(tokens) <= max(tokens) < size:
            raise AlignmentError(
                f"Segments of completion {number} open at tokens {min(tokens)} to {max(tokens)}, but there are {size}."
            )
    for name, start, end in ((name, *span) for name, spans in row.spans.items() for span in spans):
        if start < end and not 0 <= start < end <= size:
            raise AlignmentError(
                f"Block '{name}' of completion {number} spans tokens [{start}, {end}), but there are {size}."
            )


def _array(numbers: Sequence[float] | None) -> np.ndarray | None:
    return None if numbers is None else np.asarray(numbers, dtype=np.float64)


def _scale(numbers: np.ndarray) -> float:
    """The 98th percentile of the sizes that are not 0, so that no outlier bleaches the rest."""
    sizes = np.abs(numbers)
    sizes = sizes[np.isfinite(sizes) & (sizes > 0)]
    return float(f"{np.quantile(sizes, 0.98, method='higher'):.{DIGITS}g}") if sizes.size else 0.0


def _coded_numbers(arrays: Sequence[np.ndarray | None], digits: int) -> dict[str, Any] | None:
    """A coded column of rounded numbers; None if no completion has any."""
    if all(array is None for array in arrays):
        return None
    exact = np.concatenate([array for array in arrays if array is not None])
    known = np.nan_to_num(exact)
    digits = FEW if np.count_nonzero(known[1:] != known[:-1]) > MANY else digits
    words, index = np.unique(_rounded(exact, digits), return_inverse=True)
    rounded = [_number(value, digits) for value in words.tolist()]
    lengths = [None if array is None else len(array) for array in arrays]
    column = _column([repr(word) for word in rounded], index, lengths, lambda word: rounded[word])
    return {**column, "scale": _scale(exact), "rounded": digits == FEW}


def _rounded(exact: np.ndarray, digits: int) -> np.ndarray:
    """About `digits` significant digits, so that few distinct numbers are left for `_number` to write out."""
    safe = np.isfinite(exact) & (np.abs(exact) > 1e-290)
    size = np.where(safe, np.abs(exact), 1.0)
    step = 10.0 ** (np.floor(np.log10(size)) - digits + 1)
    return np.where(safe, np.rint(exact / step) * step, exact)


def _coded(rows: Sequence[Sequence[str]]) -> dict[str, Any]:
    """A coded column of texts."""
    place: dict[str, int] = {}
    index = np.array([place.setdefault(text, len(place)) for row in rows for text in row], dtype=np.int64)
    words = list(place)
    if len(words) > _MOST_WORDS:
        words = [*words[: _MOST_WORDS - 1], "…"]
        index = np.minimum(index, _MOST_WORDS - 1)
    return _column(words, index, [len(row) for row in rows], lambda word: words[word])


def _column(
    keys: Sequence[str], index: np.ndarray, lengths: Sequence[int | None], entry: Callable[[int], Any]
) -> dict[str, Any]:
    """Code `index`, which points into `keys`; entries of equal keys become one word, and frequent words get short codes."""
    first: dict[str, int] = {}
    merged = np.array([first.setdefault(key, n) for n, key in enumerate(keys)], dtype=np.int64)
    index = merged[index]
    count = np.bincount(index, minlength=len(keys))
    order = np.argsort(-count, kind="stable")[: len(first)]
    rank = np.zeros(len(keys), dtype=np.int64)
    rank[order] = np.arange(len(order))
    points = 32 + rank[index]
    points += 2048 * (points >= 0xD800)
    codes, start = [], 0
    for length in lengths:
        codes.append(None if length is None else points[start : start + length].astype("<u4").tobytes().decode("utf-32-le"))
        start += length or 0
    return {"words": [entry(int(word)) for word in order], "codes": codes}


def _number(value: float | None, digits: int) -> float | int | str | None:
    """The rounded number; None for NaN, a text for what JSON cannot hold."""
    if value is None or math.isnan(value):
        return None
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded
