"""Compare answers: as text first, and by Math-Verify in processes that can be killed where text cannot decide.

Math-Verify may hang, eat memory or take its process down on a hostile answer, and its own timeout works in a main thread only.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from decimal import Decimal
from importlib.util import find_spec

from spanwise.errors import DataError, check_known
from spanwise.score.worker import DELIMITERS, is_words
from spanwise.score.workers import DEADLINE, Verdict, Workers, shared_workers
from spanwise.types import Status

#: The largest number of characters that Math-Verify reads. Of a longer answer it reads the end, and there only the text between
#: signs of mathematics.
LONGEST = 10_000

# Possessive, because an answer may be a megabyte of digits: giving them back one by one would take quadratic time.
_INTEGER = re.compile(r"([+-]?)([0-9]++)")
_BRACE = re.compile(r"[{}]")
RIGHT, WRONG = Verdict(Status.OK, 1.0), Verdict(Status.OK, 0.0)


class MathVerifier(Workers):
    """Check answers against gold answers with Math-Verify, in worker processes with a deadline; see `spanwise.score.workers`.

    Args:
        workers: how many processes check at a time; None: one for each core of this process. They start on first use, and no more
            of them than there are checks to make.
        deadline: seconds of processor time one check may take. By the clock it may take four times that and ten seconds more.
        memory: address space of a worker in bytes, 0 for no limit (not enforced on Windows).
        cache: how many verdicts are kept, by (gold, answer).

    Raises:
        DataError: Math-Verify is not installed (on the first check).
        RewardError: the first workers of all cannot start, three times in a row. A later start that fails costs its item (ERROR).

    Example:
        >>> with MathVerifier() as verifier:
        ...     [verdict.value for verdict in verifier.equal([("1/2", "0.50"), ("1/2", "2")])]
        [1.0, 0.0]
    """

    kind = "math"
    what = "Math-Verify"
    harmless = ("1/2", "1/2")
    advice = "Without it no answer can be compared; set verify: exact to compare text."

    def equal(self, pairs: Sequence[tuple[str, str]]) -> list[Verdict]:
        """Check every (gold, answer) pair; the verdicts come in the order of the pairs.

        OK with 1.0 or 0.0; TIMEOUT past the deadline; ERROR if the gold answer cannot be read, or the process died or ran
        out of memory. An answer that cannot be read is not equal: 0.0.
        """
        if pairs and find_spec("math_verify") is None:
            raise DataError(
                "Comparing answers as mathematics needs Math-Verify: install 'spanwise[math]', or set verify: exact."
            )
        return self.check(pairs)


def shared_verifier(*, workers: int | None = None, deadline: float | int = DEADLINE) -> MathVerifier:
    """Return the shared verifier with these limits that the built-in rewards use, made on first use and closed when Python ends.

    Args:
        workers, deadline: see `MathVerifier`.

    >>> shared_verifier() is shared_verifier(deadline=5.0)
    True
    """
    return shared_workers(MathVerifier, workers=workers, deadline=deadline)


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
    check_known("verify", verify, ("auto", "math", "exact"))
    cleaned = [(_written(gold), (answer or "").strip()) for gold, answer in zip(golds, answers, strict=True)]
    verdicts = {n: _by_text(gold, answer, verify) for n, (gold, answer) in enumerate(cleaned)}
    open_n = [n for n, verdict in verdicts.items() if verdict is None]
    if open_n:
        checked = (verifier or shared_verifier()).equal([(_end(cleaned[n][0]), _end(cleaned[n][1])) for n in open_n])
        verdicts.update(zip(open_n, checked, strict=True))
    return [verdict for verdict in verdicts.values() if verdict is not None]


def bare(text: str) -> str:
    r"""Remove spaces, dollars and `\boxed{}` around a whole answer."""
    first, last = _stripped(text, 0, len(text))
    closing, dollars = _closing(text) if "\\boxed{" in text else {}, text.count("$")
    while True:  # by places instead of copies of the text, so that a thousand nested boxes cost no more than one
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
    """Return a verdict without mathematics; None where only mathematics can decide."""
    if not gold:
        return Verdict(Status.ERROR, math.nan, "there is no gold answer")
    if gold == answer:
        return RIGHT
    if not answer or verify == "exact":
        return WRONG
    if verify == "auto":
        bare_gold, bare_answer = bare(gold), bare(answer)
        if bare_gold == bare_answer:
            return RIGHT
        if bare_answer.isascii() and not any(sign.isalnum() for sign in bare_answer):
            return WRONG  # "?", "...": no possible value
        plain_gold, plain_answer = _plain(bare_gold), _plain(bare_answer)
        if plain_gold is not None and plain_answer is not None:
            return RIGHT if plain_gold == plain_answer else WRONG
    if not _end(gold):
        return Verdict(Status.ERROR, math.nan, f"the gold answer has {len(gold)} characters: too long for mathematics")
    return None if _end(answer) else WRONG


def _end(text: str) -> str:
    """Return the end of a text that Math-Verify reads; "" if even that is too long."""
    if len(text) <= LONGEST:
        return text
    end = text[-LONGEST:]
    end = end.partition("\n")[2] or end  # a line cut in two might hold half a pair of dollars
    return end if any(sign in end for sign in DELIMITERS) else ""


def _plain(text: str) -> str | None:
    """Return an integer in one spelling, or words unchanged; None where mathematics might decide otherwise."""
    number = _INTEGER.fullmatch(text)
    if number:
        digits = number[2].lstrip("0") or "0"
        return f"-{digits}" if number[1] == "-" and digits != "0" else digits
    return text if is_words(text) else None


def _closing(text: str) -> dict[int, int]:
    """Map each opening brace to the brace that closes it; braces that are never closed are left out."""
    opened: list[int] = []
    closing: dict[int, int] = {}
    for brace in _BRACE.finditer(text):
        if brace[0] == "{":
            opened.append(brace.start())
        elif opened:
            closing[opened.pop()] = brace.start()
    return closing


def _stripped(text: str, first: int, last: int) -> tuple[int, int]:
    """Return the interval without the space at its ends."""
    while first < last and text[first].isspace():
        first += 1
    while first < last and text[last - 1].isspace():
        last -= 1
    return first, last
