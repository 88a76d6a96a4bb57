"""Features beside the methods, each in a room of its own: its settings, its credit and its part in each engine (`spanwise.mode`).

A new mode is a folder here, its line in `MODES`, and its section among the fields of `spanwise.recipe.Recipe`. What a mode does in
an engine is imported when that engine makes it, so that this room needs torch alone.
"""

from collections.abc import Mapping

from spanwise.mode import Mode
from spanwise.modes.laser.config import Laser

#: The modes that a recipe can have, by the name of their section.
MODES: Mapping[str, type[Mode]] = {mode.name: mode for mode in (Laser,)}

__all__ = ["MODES", "Laser", "Mode"]
