"""The process that runs Math-Verify: one JSON line in, one JSON line out, until its input closes.

It is run by path and imports nothing of this package, so that it starts in a second and holds no torch; `workers.py` starts it,
watches the clock and kills it.
"""

import json
import logging
import os
import re
import signal
import sys
from collections.abc import Sequence
from typing import Any

_WORDS = re.compile(r"[A-Za-z]{2,}(?:[ '-][A-Za-z]+)*")
_DELIMITERS = ("$", "\\boxed", "\\(", "\\[")


def as_latex(text: str) -> str:
    r"""Put bare text between dollars, so that `\frac{1}{3}` is not read as 3; words become `\text{...}`, not a product of letters.

    >>> as_latex(r"\frac{1}{3}"), as_latex("Paris"), as_latex("it is $4$")
    ('$\\frac{1}{3}$', '$\\text{Paris}$', 'it is $4$')
    """
    text = text.strip()
    if any(sign in text for sign in _DELIMITERS) or "\n" in text:
        return text
    if _WORDS.fullmatch(text) and text != "pi":
        return f"$\\text{{{text}}}$"
    return f"${text}$"


def equals_as_math(gold: str, answer: str) -> dict[str, Any]:
    """Whether `answer` equals `gold` as mathematics; an error if the gold answer cannot be read.

    Memory errors rise; any other exception inside a comparison counts as "not equal", as Math-Verify itself has it.
    """
    from math_verify import parse, verify

    # This process is killed from outside: alarms of its own would only work in a main thread.
    parsed_gold = parse(as_latex(gold), parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    if all(isinstance(part, str) for part in parsed_gold):  # nothing found, or only the raw text
        return {"error": "the gold answer cannot be read as mathematics"}
    try:
        parsed = parse(as_latex(answer), parsing_timeout=None, raise_on_error=True)  # pyright: ignore[reportArgumentType]
        return {"value": bool(verify(parsed_gold, parsed, timeout_seconds=None, raise_on_error=True))}
    except MemoryError:
        raise
    except Exception:
        parsed = parse(as_latex(answer), parsing_timeout=None)  # pyright: ignore[reportArgumentType]
        return {"value": bool(verify(parsed_gold, parsed, timeout_seconds=None))}


def answer_one(request: Sequence[str]) -> dict[str, Any]:
    """Answer one request; an exception becomes an `error` entry."""
    try:
        return equals_as_math(*request)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:300]}


def main() -> None:
    """Warm up, say so, then answer line by line."""
    deadline, patience, memory = float(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    # What the libraries print must not reach the pipe that carries the answers.
    out = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    started = answer_one(("1/2", "0.5"))
    print(json.dumps(started), file=out, flush=True)
    if sys.platform != "win32" and memory:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    for line in sys.stdin:
        _limit(deadline, patience)
        reply = answer_one(json.loads(line))
        _limit(0.0, 0.0)
        print(json.dumps(reply), file=out, flush=True)


def _limit(processor: float, clock: float) -> None:
    """End this process after so many seconds of its own time, or by the clock: if the parent dies, nobody else would stop it."""
    if sys.platform != "win32":
        signal.setitimer(signal.ITIMER_PROF, processor)
        signal.setitimer(signal.ITIMER_REAL, clock)


if __name__ == "__main__":
    main()
