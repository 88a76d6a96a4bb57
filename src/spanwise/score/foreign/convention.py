"""`Convention`: how another library calls a reward function for one completion, and what it returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from spanwise.errors import RewardError, unknown


@dataclass(frozen=True)
class Item:
    """One completion, for a function that rewards one at a time: the text it sees, and its cells of the dataset."""

    text: str
    row: Mapping[str, Any]

    def first(self, *names: str, default: Any = None) -> Any:
        """Return the cell of the first of these columns that the dataset has."""
        return next((self.row[name] for name in names if name in self.row), default)


@dataclass(frozen=True)
class Convention:
    """How a library calls a reward function for one completion.

    Attributes:
        fits: whether a function, with the names of its parameters, is written for this library.
        arguments: what the function is offered; it gets those that its parameters name.
        read: result -> (number or None, note); a dict of numbers in place of the number is read by the objective's `key`.
        prepare: function -> what is called.
    """

    fits: Callable[[Any, frozenset[str]], bool]
    arguments: Callable[[Item], dict[str, Any]]
    read: Callable[[Any], tuple[Any, str | None]] = lambda result: (result, None)
    prepare: Callable[[Any], Callable[..., Any]] = lambda function: function
    #: The key of a dict that holds the reward where the objective names none.
    key: str | None = None

    def number(self, result: Any, key: str | None, who: str) -> tuple[Any, str | None]:
        """Return the number of one result, and a note on it; `key` names the entry of a dict."""
        value, note = self.read(result)
        if isinstance(value, Mapping):
            key = key or self.key
            if key is None or key not in value:
                raise RewardError(f"{who} returned a dict; set key. {unknown('key', key or '', map(str, value))}")
            return value[key], note
        if key is not None and value is not None:
            raise RewardError(f"{who} returned {value!r:.60} and no dict, so that key: {key} names nothing; leave it out.")
        return value, note
