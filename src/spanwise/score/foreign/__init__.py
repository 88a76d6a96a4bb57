"""Reward functions as other libraries write them, each for one completion: verl's, verifiers' and inspect_ai's."""

from __future__ import annotations

from typing import Any

from spanwise.score.foreign import inspect_ai, verifiers, verl
from spanwise.score.foreign.convention import Convention, Item

__all__ = ["Convention", "Item", "convention_of"]

#: Told apart by their parameters, in this order.
_CONVENTIONS = (verl.CONVENTION, inspect_ai.CONVENTION, verifiers.CONVENTION)


def convention_of(function: Any, parameters: frozenset[str]) -> Convention | None:
    """Return how a function for one completion is called; None for a function of the whole batch."""
    return next((convention for convention in _CONVENTIONS if convention.fits(function, parameters)), None)
