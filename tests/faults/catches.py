"""The shape of every test here: a check that holds for spanwise and does not hold for the mistake as it was made elsewhere."""

import pytest

from helpers import assert_close
from spanwise import SpanwiseError


def catches(check, ours, faulty):
    """`check(ours)` passes, and `check(faulty)` fails: the test could have found the fault."""
    check(ours)
    with pytest.raises(AssertionError):
        check(faulty)


def gives(*inputs, want, tolerance=1e-12):
    """Return the check that a function of these inputs gives these numbers."""
    return lambda function: assert_close(function(*inputs), want, tolerance)


def refuses(call):
    """The check that a call ends with a sentence for the user."""
    try:
        call()
    except SpanwiseError:
        return
    raise AssertionError("nothing was said")


def equals(want):
    """Return the check that a result is `want`."""

    def check(result):
        assert result == want

    return check
