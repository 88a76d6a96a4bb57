"""The versions of TRL, verl and SkyRL that the tests cover. `spanwise doctor` and the engines warn about others."""

from __future__ import annotations

import operator
import re

#: Maps engines to the version ranges that the tests cover, as in pyproject.toml's extras.
WINDOWS = {"trl": ">=1.10,!=1.15.0,<2", "verl": ">=0.9,<0.10", "skyrl": ">=0.3,<0.5"}
_COMPARE = {">=": operator.ge, "<": operator.lt, "!=": operator.ne}


def is_tested(engine: str, version: str) -> bool:
    """Return whether the tests cover a version of an engine. A pre-release counts as its release."""
    version_bounds = re.findall(r"([<>!]=?)([\d.]+)", WINDOWS[engine])
    return all(_COMPARE[sign](_release_numbers(version), _release_numbers(bound)) for sign, bound in version_bounds)


def _release_numbers(version: str) -> list[int]:
    """Return a version's release numbers as six integers, so that 1.10 equals 1.10.0."""
    release_text = re.split(r"[^\d.]", version)[0]
    return ([int(number) for number in release_text.split(".") if number] + [0] * 6)[:6]


def untested(engine: str, version: str) -> str:
    """Return a warning if an engine's version is untested, otherwise an empty text."""
    if is_tested(engine, version):
        return ""
    return f"spanwise is tested with {engine} {WINDOWS[engine]}, but you use {engine} {version}. Check a short run first."
