"""spanwise gives every span of a language model's completion its own credit in reinforcement learning.

Under one `Scheme`, `read` finds the blocks and rewards of a `Batch`, `credit_batch` compares its completions and `advantages`
gives every token its share. The subpackages hold more, as in `from spanwise.credit import grpo`. Trainers are imported only in
`spanwise.engines`.
"""

from __future__ import annotations

from importlib import import_module
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
    from spanwise.explain import setup_warnings
    from spanwise.layout import Layout
    from spanwise.modes.critic.config import CriticConfig
    from spanwise.modes.laser.config import Laser
    from spanwise.objective import Objective
    from spanwise.pipeline import Reading, advantages, credit_batch, metrics, read
    from spanwise.registry import register
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
    "credit_batch",
    "dr_grpo",
    "find_blocks",
    "grpo",
    "metrics",
    "read",
    "register",
    "rlcr",
    "rloo",
    "score_all",
    "setup_warnings",
    "spread",
]

#: The public names of each module. They are imported on first use, so that the command line starts without torch.
_ROOMS = {
    "batch": "Batch Steps by_turn",
    "credit": "advantage assign bae blended_baseline dr_grpo grpo rlcr rloo spread",
    "modes.critic.config": "CriticConfig",
    "errors": "AlignmentError DataError DivergedError LayoutError RecipeError RewardError SpanwiseError",
    "modes.laser.config": "Laser",
    "layout": "Layout",
    "objective": "Objective",
    "pipeline": "Reading advantages credit_batch metrics read",
    "registry": "register",
    "explain": "setup_warnings",
    "scheme": "Scheme",
    "score": "score_all",
    "segment": "Vocabulary find_blocks",
    "types": "BlockText Credit Fault Scores Spans Status",
}
_HOMES = {name: room for room, names in _ROOMS.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        globals()[name] = getattr(import_module(f"spanwise.{_HOMES[name]}"), name)
        return globals()[name]
    if name in _ROOMS:
        return import_module(f"spanwise.{name}")
    raise AttributeError(f"module 'spanwise' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
