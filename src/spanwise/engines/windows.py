"""The versions of each engine that the tests run with: read by `spanwise doctor` and by whoever warns of another one."""

from __future__ import annotations

import re

#: engine -> versions, as in the extra of its name.
WINDOWS = {"trl": ">=1.10,!=1.15.0,<2", "verl": ">=0.9,<0.10", "skyrl": ">=0.3,<0.5"}
_HOLDS = {
    ">=": lambda found, bound: found >= bound,
    "<": lambda found, bound: found < bound,
    "!=": lambda found, bound: found != bound,
}


def is_tested(engine: str, version: str) -> bool:
    """Whether a version of an engine lies in its window; a pre-release counts as the release that it leads to.

    >>> is_tested("verl", "0.9.1"), is_tested("verl", "0.10.0.dev0"), is_tested("trl", "1.15.0"), is_tested("trl", "1.16.0")
    (True, False, False, True)
    """
    found = _numbers(version)
    for part in WINDOWS[engine].split(","):
        sign = next(sign for sign in _HOLDS if part.startswith(sign))
        if not _HOLDS[sign](found, _numbers(part.removeprefix(sign))):
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    """The numbers of a release, without zeros at the end."""
    release = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in release[0].split(".")] if release else [0]
    while len(numbers) > 1 and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
