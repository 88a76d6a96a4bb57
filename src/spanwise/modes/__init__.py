"""Features beside the methods, each in a room of its own: its settings, its credit, its part in each engine, its metrics and page.

A new mode is a folder here with one `@register(NAME, kind="mode")`, and its import below. This room needs torch alone.
"""

from spanwise.mode import Mode
from spanwise.modes.registry import MODES, scoring_mode

from spanwise.modes.critic.config import CriticConfig  # isort: skip
from spanwise.modes.laser.config import Laser  # isort: skip

__all__ = ["MODES", "CriticConfig", "Laser", "Mode", "scoring_mode"]
