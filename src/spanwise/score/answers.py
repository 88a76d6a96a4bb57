"""Compare completions' answers with gold answers, and read stated confidences.

Math-Verify may hang, eat memory or take its process down on a hostile answer, and its own timeout works in a main thread only.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from importlib.util import find_spec
from typing import Any

from spanwise.errors import DataError, check_known
from spanwise.score.worker import DELIMITERS, as_words
from spanwise.score.workers import DEADLINE, Verdict, Workers, check_limits, shared_workers
from spanwise.segment.json_fields import as_json
from spanwise.types import Status

#: Math-Verify reads at most this many characters of an answer, from its end.
LONGEST = 10_000

# Possessive quantifiers keep the time linear for long runs of digits.
_INTEGER = re.compile(r"([+-]?)([0-9]++)")
NUMBER = re.compile(r"(?:[0-9]++(?:\.[0-9]*+)?|\.[0-9]++)(?:[eE][+-]?[0-9]{1,3})?")
_BRACE = re.compile(r"[{}]")
RIGHT, WRONG = Verdict(Status.OK, 1.0), Verdict(Status.OK, 0.0)


class MathVerifier(Workers):
    """Check answers against gold answers with Math-Verify, in worker processes with a deadline.

    Args:
        workers: how many processes check at a time, at most one per check; None: one for each core of this process.
        deadline: seconds of processor time one check may take. By the clock it may take four times that and ten seconds more.
        memory: address space of a worker in bytes, 0 for no limit (not enforced on Windows).
        cache: how many verdicts are kept, by (gold, answer).

    Raises:
        DataError: Math-Verify is not installed (on the first call of `equal`).
        RewardError: the first workers of all cannot start, three times in a row. A later start that fails costs its item (ERROR).

    Example:
        >>> with MathVerifier() as verifier:
        ...     [verdict.value for verdict in verifier.equal([("1/2", "0.50"), ("1/2", "2")])]
        [1.0, 0.0]
    """

    kind = "math"

    def equal(self, pairs: Sequence[tuple[str, str]]) -> list[Verdict]:
        """Check with Math-Verify whether each answer equals its gold answer. The verdicts have the order of the pairs.

        Verdicts: OK with 1.0 or 0.0. BROKE with 0.0 if, twice, the check ran past the deadline or its process died. ERROR if the
        gold answer cannot be read. An answer that cannot be read is not equal: 0.0.
        """
        if pairs:
            check_package({"verify": "math"})
        return self.check(pairs)


def check_comparison(options: Mapping[str, Any]) -> None:
    """Refuse an unknown value of the option `verify`, and impossible limits of worker processes."""
    check_known("verify", options["verify"], ("auto", "math", "exact"))
    check_limits(options)


def check_package(options: Mapping[str, Any]) -> None:
    """Refuse the comparison `math` if Math-Verify is not installed."""
    if options["verify"] == "math" and find_spec("math_verify") is None:
        raise DataError("Comparing mathematics needs Math-Verify. Install 'math-verify[antlr4_9_3]', or set verify: exact.")


def judge(
    golds: Sequence[object], answers: Sequence[str | None], *, verify: str = "auto", verifier: MathVerifier | None = None
) -> list[Verdict]:
    r"""Judge whether each answer equals its gold answer, as text or as mathematics.

    Rules in this order: no gold (None, blank): ERROR; no answer (None, blank) is wrong; equal stripped text is right; by `verify`:

    - `exact`: wrong.
    - `auto`: outer `$` and `\boxed{}` fall away and the text is compared again; signs alone are wrong; integers are compared as
      integers, words and dates as text, without leading zeros; all else goes to Math-Verify. "0.50" equals "1/2".
    - `math`: everything left goes to Math-Verify, which also takes "paris" for "Paris".

    Of an answer of more than 10,000 characters (`LONGEST`) Math-Verify reads the end, from a line's start on where it has lines,
    if there is a `$`, a `\boxed`, a `\(` or a `\[` in it, else nothing: then the answer is wrong. A gold answer without such an
    end cannot be read: ERROR. Everything else takes a time proportional to the text.

    Args:
        golds: the gold answers; a number is taken as text, a list of one entry as this; longer lists, dicts and NaN are no gold;
            of a solution that ends with the line `#### 4` (GSM8K), the gold is 4.
        answers: what the completions say; a solution in that form says 4, too.
        verify: `auto`, `math` or `exact`.
        verifier: who does the maths; a shared one if not given.

    Raises:
        RecipeError: `verify` is none of the three.
        DataError: Math-Verify has to decide and is not installed.

    Example:
        >>> [verdict.value for verdict in judge(["4", "4", 4], ["4", "04", None])]
        [1.0, 1.0, 0.0]
    """
    check_known("verify", verify, ("auto", "math", "exact"))
    answer_pairs = [(gold_text(gold), gold_text(answer)) for gold, answer in zip(golds, answers, strict=True)]
    verdicts = [_judge_text(gold, answer, verify) for gold, answer in answer_pairs]
    undecided_pairs = [pair for pair, verdict in zip(answer_pairs, verdicts, strict=True) if verdict is None]
    shortened_pairs = [(_shortened(gold), _shortened(answer)) for gold, answer in undecided_pairs]
    verifier = verifier or shared_workers(MathVerifier, workers=None, deadline=DEADLINE)
    math_verdicts = iter(verifier.equal(shortened_pairs) if shortened_pairs else ())
    return [next(math_verdicts) if verdict is None else verdict for verdict in verdicts]


def bare(text: str) -> str:
    r"""Remove the white space, dollars and `\boxed{}` that enclose a whole answer."""
    start, end = _strip_interval(text, 0, len(text))
    closing_brace_of = _match_braces(text) if "\\boxed{" in text else {}
    dollar_count = text.count("$")
    # The loop copies no text, so that it takes linear time for nested boxes.
    while True:
        if end - start > 2 and dollar_count == 2 and text[start] == text[end - 1] == "$":
            start, end = _strip_interval(text, start + 1, end - 1)
            dollar_count = 0
        elif text.startswith("\\boxed{", start, end) and closing_brace_of.get(start + len("\\boxed")) == end - 1:
            start, end = _strip_interval(text, start + len("\\boxed{"), end - 1)
        else:
            return text[start:end]


def parse_confidence(text: str) -> float | None:
    """Read a stated confidence as a number from 0 to 1. Return None for any other text.

    The whole text must be one number: digits 0-9 with at most one decimal point, an exponent ("7e-1"), one full stop at the end
    ("0.7."), and a percent sign ("70%", "70 %") that divides by 100. None: "" and words ("high"), "nan", "inf", any sign ("-0.1",
    "+0.7"), out of range ("70", "1.2", "120%"), a decimal comma ("0,7"), two numbers ("0.7 or 0.8", "7/10"), other digits ("٠.٧").

    >>> [parse_confidence(text) for text in ("0.7", "70%", "0.7.", "1", "70", "high")]
    [0.7, 0.7, 0.7, 1.0, None, None]
    """
    text = text.strip().removesuffix(".").rstrip()
    number_text = text.removesuffix("%").rstrip()
    divisor = 100.0 if text.endswith("%") else 1.0
    confidence = float(number_text) / divisor if NUMBER.fullmatch(number_text) else math.inf
    return confidence if confidence <= 1.0 else None


def gold_text(gold: Any) -> str:
    """Return the gold answer in a dataset cell as text. Return "" for no or several answers."""
    gold = as_json(gold) if hasattr(gold, "tolist") or hasattr(gold, "isoformat") else gold
    gold = gold[0] if isinstance(gold, list | tuple) and len(gold) == 1 else gold
    if isinstance(gold, int) and not isinstance(gold, bool):
        return str(Decimal(gold))  # str(int) raises an error for more than 4,300 digits
    text = "" if repr(gold) in ("None", "nan", "NaT", "<NA>") or isinstance(gold, list | tuple | dict) else str(gold).strip()
    answer = text.rpartition("\n#### ")[2]  # a GSM8K solution ends with a line `#### 18`
    return text if "\n" in answer else answer


def _judge_text(gold: str, answer: str, verify: str) -> Verdict | None:
    """Judge an answer by its text alone. Return None if only Math-Verify can decide."""
    if not gold:
        return Verdict(Status.ERROR, math.nan, "there is no gold answer, or there are several")
    if gold == answer:
        return RIGHT
    if not answer or verify == "exact":
        return WRONG
    if verify == "auto":
        bare_gold, bare_answer = bare(gold), bare(answer)
        if bare_gold == bare_answer:
            return RIGHT
        if bare_answer.isascii() and not any(character.isalnum() for character in bare_answer):
            return WRONG  # an answer without letters or digits, such as "?", has no value
        plain_gold, plain_answer = _normalize(bare_gold), _normalize(bare_answer)
        if plain_gold is not None and plain_answer is not None:
            return RIGHT if plain_gold == plain_answer else WRONG
    if not _shortened(gold):
        return Verdict(Status.ERROR, math.nan, f"the gold answer is too long for Math-Verify ({len(gold)} characters)")
    return None if _shortened(answer) else WRONG


def _shortened(text: str) -> str:
    """Return a text, or only the end of a long one. Return "" if that end has no sign such as `$`."""
    if len(text) <= LONGEST:
        return text
    text_tail = text[-LONGEST:]
    text_tail = text_tail.partition("\n")[2] or text_tail  # drop the first line, which may be cut inside a formula
    return text_tail if any(delimiter in text_tail for delimiter in DELIMITERS) else ""


def _normalize(text: str) -> str | None:
    """Normalise an integer or words, so that `==` can compare them. Return None for any other text."""
    if integer_match := _INTEGER.fullmatch(text):
        integer_digits = integer_match[2].lstrip("0") or "0"
        return f"-{integer_digits}" if integer_match[1] == "-" and integer_digits != "0" else integer_digits
    return as_words(text)


def _match_braces(text: str) -> dict[int, int]:
    """Map each opening brace to the brace that closes it. Braces that are never closed are left out."""
    opening_indices: list[int] = []
    closing_by_opening: dict[int, int] = {}
    for brace in _BRACE.finditer(text):
        if brace[0] == "{":
            opening_indices.append(brace.start())
        elif opening_indices:
            closing_by_opening[opening_indices.pop()] = brace.start()
    return closing_by_opening


def _strip_interval(text: str, start: int, end: int) -> tuple[int, int]:
    """Shrink an interval of a text to leave out the white space at its ends."""
    while start < end and text[start].isspace():
        start += 1
    while start < end and text[end - 1].isspace():
        end -= 1
    return start, end
