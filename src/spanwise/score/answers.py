"""Whether answers are equal, with a worker process only where text alone cannot tell."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from spanwise.errors import RecipeError, unknown
from spanwise.score.maths import MathVerifier, Verdict, shared_verifier
from spanwise.types import Status

VerifyName = Literal["auto", "math", "exact"]

_INTEGER = re.compile(r"([+-]?)0*([0-9]+)")
_WORDS = re.compile(r"[A-Za-z]{2,}(?:[ '-][A-Za-z]+)*")
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
    cleaned = [
        ("" if gold is None else str(gold).strip(), (answer or "").strip())
        for gold, answer in zip(golds, answers, strict=True)
    ]
    verdicts = [_by_text(gold, answer, verify) for gold, answer in cleaned]
    open_n = [n for n, verdict in enumerate(verdicts) if verdict is None]
    if open_n:
        checked = (verifier or shared_verifier()).equal([cleaned[n] for n in open_n])
        for n, verdict in zip(open_n, checked, strict=True):
            verdicts[n] = verdict
    return [verdict for verdict in verdicts if verdict is not None]


def bare(text: str) -> str:
    r"""Take away the spaces, dollars and `\boxed{}` around a whole answer.

    >>> bare(r" $\boxed{\frac{1}{3}}$ "), bare(r"\boxed{1} or \boxed{2}"), bare("$1$ and $2$")
    ('\\frac{1}{3}', '\\boxed{1} or \\boxed{2}', '$1$ and $2$')
    """
    text = text.strip()
    if len(text) > 2 and text[0] == text[-1] == "$" and "$" not in text[1:-1]:
        return bare(text[1:-1])
    if text.startswith("\\boxed{") and _closes(text, len("\\boxed")) == len(text) - 1:
        return bare(text[len("\\boxed{") : -1])
    return text


def _by_text(gold: str, answer: str, verify: str) -> Verdict | None:
    if not gold:
        return Verdict(Status.ERROR, float("nan"), "there is no gold answer")
    if gold == answer:
        return RIGHT
    if not answer or verify == "exact":
        return WRONG
    if verify == "math":
        return None
    gold, answer = bare(gold), bare(answer)
    if gold == answer:
        return RIGHT
    if answer.isascii() and not any(sign.isalnum() for sign in answer):
        return WRONG  # "?", "...": nothing that could be a value
    plain_gold, plain_answer = _plain(gold), _plain(answer)
    if plain_gold is None or plain_answer is None:
        return None
    return RIGHT if plain_gold == plain_answer else WRONG


def _plain(text: str) -> str | None:
    """An integer in one spelling, or words as they are; None where mathematics might have a say."""
    number = _INTEGER.fullmatch(text)
    if number:
        sign, digits = number.groups()
        return f"-{digits}" if sign == "-" and digits != "0" else digits
    return text if _WORDS.fullmatch(text) and text != "pi" else None


def _closes(text: str, start: int) -> int:
    """Where the brace that opens at `start` closes; -1 if it does not."""
    depth = 0
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return position
    return -1
