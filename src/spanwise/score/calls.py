"""`called`: functions that somebody else wrote; what they raise is a sentence, and a long silence is broken."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable
from threading import Timer
from typing import Any

from spanwise.errors import RewardError, SpanwiseError

#: Seconds after which a function that has not returned is named.
SLOW = 60.0


def called(function: Callable[[], Any], *, what: str, size: int, advice: str) -> Any:
    """What `function()` returns; a warning while it runs names it once it takes more than a minute.

    Nothing stops it: a check that may hang needs a deadline of its own.
    """
    text = (
        f"{what} has been running for {SLOW:g} s on {size} completions. Nothing stops it; give what it waits for a deadline."
    )
    watch = Timer(SLOW, warnings.warn, (text, UserWarning))
    watch.daemon = True  # an interrupted run must not wait for it
    watch.start()
    try:
        return function()
    except SpanwiseError:
        raise
    except Exception as error:
        none = " A block or a tag that a completion lacks is None." if "'NoneType'" in f"{error}" else ""
        raise RewardError(f"{what} raised {type(error).__name__}: {error}. {advice}{none}{_place(error)}") from error
    finally:
        watch.cancel()


def _place(error: Exception) -> str:
    """Where in its own file the function went wrong; nothing for a function without one."""
    frames = traceback.extract_tb(error.__traceback__)[1:]
    own = [frame for frame in frames if frame.filename == frames[0].filename]
    return f" It happened in {own[-1].filename}, line {own[-1].lineno}." if own else ""
