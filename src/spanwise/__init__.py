"""spanwise gives every span of a language model's completion its own credit in reinforcement learning.

A `Batch` of sampled token ids is read (`read`: blocks and rewards), compared (`credit`) and spread over tokens (`advantages`)
under one `Scheme`. `credit` and `remarks` are functions here; what else the rooms of these names hold is imported from them, as in
`from spanwise.credit import grpo`. Trainers live in `spanwise.engines` and load only there.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spanwise.batch import Batch, Steps, by_turn
    from spanwise.credit import advantage, assign, bae, blended_baseline, dr_grpo, grpo, rlcr, rloo, spread
    from spanwise.errors import (
        AlignmentError,
        DataError,
        DivergedError,
        LayoutError,
        RecipeError,
        RewardError,
        SpanwiseError,
    )
    from spanwise.layout import Layout
    from spanwise.modes.critic.config import CriticConfig
    from spanwise.modes.laser.config import Laser
    from spanwise.objective import Objective
    from spanwise.pipeline import Reading, advantages, credit, metrics, read
    from spanwise.registry import register
    from spanwise.remarks import remarks
    from spanwise.scheme import Scheme
    from spanwise.score import score_all
    from spanwise.segment import Vocabulary, find_blocks
    from spanwise.types import BlockText, Credit, Fault, Scores, Spans, Status

__version__ = "0.1.0"

__all__ = [
    "AlignmentError",
    "Batch",
    "BlockText",
    "Credit",
    "CriticConfig",
    "DataError",
    "DivergedError",
    "Fault",
    "Laser",
    "Layout",
    "LayoutError",
    "Objective",
    "Reading",
    "RecipeError",
    "RewardError",
    "Scheme",
    "Scores",
    "Spans",
    "SpanwiseError",
    "Status",
    "Steps",
    "Vocabulary",
    "advantage",
    "advantages",
    "assign",
    "bae",
    "blended_baseline",
    "by_turn",
    "credit",
    "dr_grpo",
    "find_blocks",
    "grpo",
    "metrics",
    "read",
    "register",
    "remarks",
    "rlcr",
    "rloo",
    "score_all",
    "spread",
]

#: Room -> the names above that it holds. They are loaded when they are asked for, so that the command line starts without torch.
_ROOMS = {
    "batch": "Batch Steps by_turn",
    "credit": "advantage assign bae blended_baseline dr_grpo grpo rlcr rloo spread",
    "modes.critic.config": "CriticConfig",
    "errors": "AlignmentError DataError DivergedError LayoutError RecipeError RewardError SpanwiseError",
    "modes.laser.config": "Laser",
    "layout": "Layout",
    "objective": "Objective",
    "pipeline": "Reading advantages credit metrics read",
    "registry": "register",
    "remarks": "remarks",
    "scheme": "Scheme",
    "score": "score_all",
    "segment": "Vocabulary find_blocks",
    "types": "BlockText Credit Fault Scores Spans Status",
}
_HOMES = {name: room for room, names in _ROOMS.items() for name in names.split()}


class _Face(ModuleType):
    """This package: its names are loaded on first use, and a room does not take the place of the function of its name."""

    def __getattr__(self, name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'spanwise' has no attribute '{name}'")
        found = getattr(import_module(f"spanwise.{_HOMES[name]}"), name)
        super().__setattr__(name, found)
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _HOMES and isinstance(value, ModuleType):  # `import spanwise.credit`; `spanwise.credit` is a function
            return
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*vars(self), *__all__})


sys.modules[__name__].__class__ = _Face
