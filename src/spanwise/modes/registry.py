"""The registry of modes: features beside the methods, by the name of their section in a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spanwise.mode import Mode
from spanwise.registry import Registry


def _named(name: str, mode: type[Mode], _: str) -> type[Mode]:
    mode.name = name
    return mode


#: Every mode by name. What a mode does in an engine is imported when that engine makes it.
MODES: Registry[type[Mode]] = Registry("mode", kinds=("mode",), group="spanwise.modes", entry=_named)


def scoring_mode(sections: Mapping[str, Any]) -> Mode | None:
    """The mode that gives completions a score, of those that a recipe has sections for."""
    modes = (mode.of(sections[name]) for name, mode in MODES.items() if sections.get(name))
    return next((mode for mode in modes if mode.judge is not None), None)
