"""Modes: optional features such as a critic. Each has a folder with settings, credit, metrics and engine code.

A new mode is a folder here with one `@register(NAME, kind="mode")`, and its import below. Importing this package needs torch only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spanwise.mode import Mode
from spanwise.registry import Registry


def _named(name: str, mode: type[Mode], _: str) -> type[Mode]:
    mode.name = name
    return mode


#: The class of every mode by name.
MODES: Registry[type[Mode]] = Registry("mode", kinds=("mode",), group="spanwise.modes", entry=_named)

from spanwise.modes.critic.config import CriticConfig  # noqa: E402 - registers itself
from spanwise.modes.laser.config import Laser  # noqa: E402

__all__ = ["MODES", "CriticConfig", "Laser", "Mode", "scoring_mode"]


def scoring_mode(sections: Mapping[str, Any]) -> Mode | None:
    """Return a recipe's first mode that scores completions, such as laser. None if the recipe has none."""
    configured_modes = (mode.of(sections[name]) for name, mode in MODES.items() if sections.get(name))
    return next((mode for mode in configured_modes if mode.judge is not None), None)
