"""Functions that somebody else wrote: what they raise or return amiss is a sentence, and a long silence is broken."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Sequence
from threading import Timer
from typing import Any

import numpy as np
from torch import Tensor

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


def listed_values(result: Any, size: int, *, what: str, noun: str) -> Sequence[Any]:
    """What a function returned, if that is a list of one value for each completion."""
    if isinstance(result, (Tensor, np.ndarray)):
        if len(result.shape) > 1:
            raise RewardError(
                f"{what} returned an array of the shape {tuple(result.shape)}; return one {noun} per completion, an array of the "
                f"shape ({size},)."
            )
        result = result.tolist()
    if not isinstance(result, (list, tuple)):
        raise RewardError(f"{what} returned {type(result).__name__}; return a list of {size} {noun}s.")
    if len(result) != size:
        raise RewardError(f"{what} returned {len(result)} {noun}s for {size} completions.")
    return result


def _place(error: Exception) -> str:
    """Where in its own file the function went wrong; nothing for a function without one."""
    frames = traceback.extract_tb(error.__traceback__)[1:]
    own = [frame for frame in frames if frame.filename == frames[0].filename]
    return f" It happened in {own[-1].filename}, line {own[-1].lineno}." if own else ""
