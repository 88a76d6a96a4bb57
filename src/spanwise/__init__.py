"""spanwise gives every span of a language model's completion its own credit in reinforcement learning.

Tokens become spans (`spanwise.segment.segment`), spans become rewards (`spanwise.score.score`), rewards become advantages per
token (`assign` and `spread`, or the methods `bae`, `rlcr`, `grpo`, `dr_grpo`). Trainers live in `spanwise.engines` and load only
there.
"""

from spanwise.credit import advantage, assign, bae, blended_baseline, dr_grpo, grpo, rlcr, spread
from spanwise.errors import AlignmentError, DataError, LayoutError, RecipeError, RewardError, SpanwiseError
from spanwise.layout import Layout
from spanwise.objective import Objective
from spanwise.segment import Vocabulary
from spanwise.types import BlockText, Credit, Fault, Scores, Spans, Status

__version__ = "0.1.0"

__all__ = [
    "AlignmentError",
    "BlockText",
    "Credit",
    "DataError",
    "Fault",
    "Layout",
    "LayoutError",
    "Objective",
    "RecipeError",
    "RewardError",
    "Scores",
    "Spans",
    "SpanwiseError",
    "Status",
    "Vocabulary",
    "advantage",
    "assign",
    "bae",
    "blended_baseline",
    "dr_grpo",
    "grpo",
    "rlcr",
    "spread",
]
