"""The shape of every test here: a check that holds for spanwise and does not hold for the mistake as it was made elsewhere."""

from collections.abc import Callable
from typing import TypeVar

import pytest

Variant = TypeVar("Variant")


def catches(check: Callable[[Variant], object], ours: Variant, faulty: Variant):
    """`check(ours)` passes, and `check(faulty)` fails: the test could have found the fault."""
    check(ours)
    with pytest.raises(AssertionError):
        check(faulty)
