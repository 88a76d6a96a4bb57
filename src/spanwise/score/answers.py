"""Whether answers are equal, with a worker process only where text alone cannot tell."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Literal

from spanwise.errors import RecipeError, unknown
from spanwise.score.maths import MathVerifier, shared_verifier
from spanwise.score.workers import Verdict
from spanwise.types import Status

VerifyName = Literal["auto", "math", "exact"]

#: Characters of an answer that Math-Verify reads at most. Of a longer one it reads the end, and only what stands there between
#: signs of mathematics.
LONGEST = 10_000

_DELIMITERS = ("$", "\\boxed", "\\(", "\\[")
# Possessive, because what a policy writes may be a megabyte of digits: giving some back one by one takes a time that is quadratic.
_INTEGER = re.compile(r"([+-]?)([0-9]++)")
_WORDS = re.compile(r"[A-Za-z]{2,}+(?:[ '-][A-Za-z]++)*+")
_BRACE = re.compile(r"[{}]")
RIGHT, WRONG = Verdict(Status.OK, 1.0), Verdict(Status.OK, 0.0)


def judge(
    golds: Sequence[object], answers: Sequence[str | None], *, verify: str = "auto", verifier: MathVerifier | None = None
) -> list[Verdict]:
    r"""Judge each answer by its gold answer.

    Rule, in this order: no gold answer (None, blank) is ERROR; no answer (None, blank) is wrong; equal text, outer spaces aside,
    is right; then by `verify`:

    - `exact`: wrong.
    - `auto`: outer `$` and `\boxed{}` fall away and the text is compared again; signs alone are wrong; integers are compared as
      integers and words as text; whatever is left goes to Math-Verify. "0.50" equals "1/2", and no process starts for "4"
      against "7".
    - `math`: everything left goes to Math-Verify, which also takes "paris" for "Paris".

    Of an answer of more than 10,000 characters (`LONGEST`) Math-Verify reads the end, from a line's start on where it has lines,
    if there is a `$`, a `\boxed`, a `\(` or a `\[` in it, else nothing: then the answer is wrong. A gold answer without such an
    end cannot be read: ERROR. Everything else takes a time proportional to the text.

    Args:
        golds: the gold answers; numbers are taken as text.
        answers: what the completions say.
        verify: `auto`, `math` or `exact`.
        verifier: who does the maths; the shared verifier if not given.

    Raises:
        RecipeError: `verify` is none of the three.

    Example:
        >>> [verdict.value for verdict in judge(["4", "4", 4], ["4", "04", None])]
        [1.0, 1.0, 0.0]
    """
    if verify not in ("auto", "math", "exact"):
        raise RecipeError(unknown("verify", verify, ("auto", "math", "exact")))
    cleaned = [(_written(gold), (answer or "").strip()) for gold, answer in zip(golds, answers, strict=True)]
    verdicts = [_by_text(gold, answer, verify) for gold, answer in cleaned]
    open_n = [n for n, verdict in enumerate(verdicts) if verdict is None]
    if open_n:
        checked = (verifier or shared_verifier()).equal([(_end(cleaned[n][0]), _end(cleaned[n][1])) for n in open_n])
        for n, verdict in zip(open_n, checked, strict=True):
            verdicts[n] = verdict
    return [verdict for verdict in verdicts if verdict is not None]


def bare(text: str) -> str:
    r"""Take away the spaces, dollars and `\boxed{}` around a whole answer."""
    first, last = _stripped(text, 0, len(text))
    closing, dollars = _closing(text) if "\\boxed{" in text else {}, text.count("$")
    while True:  # in places instead of parts of the text, so that a thousand nested boxes cost no more than one
        if last - first > 2 and dollars == 2 and text[first] == text[last - 1] == "$":
            first, last, dollars = *_stripped(text, first + 1, last - 1), 0
        elif text.startswith("\\boxed{", first, last) and closing.get(first + len("\\boxed")) == last - 1:
            first, last = _stripped(text, first + len("\\boxed{"), last - 1)
        else:
            return text[first:last]


def _written(gold: object) -> str:
    if isinstance(gold, int) and not isinstance(gold, bool):
        return str(Decimal(gold))  # str(int) refuses more than 4,300 digits
    return "" if gold is None else str(gold).strip()


def _by_text(gold: str, answer: str, verify: str) -> Verdict | None:
    if not gold:
        return Verdict(Status.ERROR, float("nan"), "there is no gold answer")
    if gold == answer:
        return RIGHT
    if not answer or verify == "exact":
        return WRONG
    if verify == "auto":
        verdict = _by_value(bare(gold), bare(answer))
        if verdict is not None:
            return verdict
    if not _end(gold):
        return Verdict(Status.ERROR, float("nan"), f"the gold answer has {len(gold)} characters: too long for mathematics")
    return None if _end(answer) else WRONG


def _by_value(gold: str, answer: str) -> Verdict | None:
    """A verdict without mathematics; None where it might have a say."""
    if gold == answer:
        return RIGHT
    if answer.isascii() and not any(sign.isalnum() for sign in answer):
        return WRONG  # "?", "...": nothing that could be a value
    plain_gold, plain_answer = _plain(gold), _plain(answer)
    if plain_gold is None or plain_answer is None:
        return None
    return RIGHT if plain_gold == plain_answer else WRONG


def _end(text: str) -> str:
    """What Math-Verify reads of a text; "" if it is too long for that."""
    if len(text) <= LONGEST:
        return text
    end = text[-LONGEST:]
    end = end.partition("\n")[2] or end  # a line that is cut in two might hold half a pair of dollars
    return end if any(sign in end for sign in _DELIMITERS) else ""


def _plain(text: str) -> str | None:
    """An integer in one spelling, or words as they are; None where mathematics might have a say."""
    number = _INTEGER.fullmatch(text)
    if number:
        sign, digits = number[1], number[2].lstrip("0") or "0"
        return f"-{digits}" if sign == "-" and digits != "0" else digits
    return text if _WORDS.fullmatch(text) and text != "pi" else None


def _closing(text: str) -> dict[int, int]:
    """Where each brace that opens closes; those that never do are left out."""
    opened: list[int] = []
    closing: dict[int, int] = {}
    for brace in _BRACE.finditer(text):
        if brace[0] == "{":
            opened.append(brace.start())
        elif opened:
            closing[opened.pop()] = brace.start()
    return closing


def _stripped(text: str, first: int, last: int) -> tuple[int, int]:
    """The interval without the space at its ends."""
    while first < last and text[first].isspace():
        first += 1
    while first < last and text[last - 1].isspace():
        last -= 1
    return first, last
