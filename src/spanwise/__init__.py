"""spanwise gives every span of a language model's completion its own credit in reinforcement learning.

A `Batch` of sampled token ids is read (`read`: blocks and rewards), compared (`credit`) and spread over tokens (`advantages`)
under one `Scheme`. `segment`, `score` and `credit` are functions here; what else the rooms of these names hold is imported from
them, as in `from spanwise.credit import grpo`. Trainers live in `spanwise.engines` and load only there.
"""

from spanwise.batch import Batch, Steps, by_turn
from spanwise.credit import advantage, assign, bae, blended_baseline, dr_grpo, grpo, rlcr, rloo, spread
from spanwise.critic import CriticConfig
from spanwise.errors import AlignmentError, DataError, DivergedError, LayoutError, RecipeError, RewardError, SpanwiseError
from spanwise.laser import Laser
from spanwise.layout import Layout
from spanwise.objective import Objective
from spanwise.pipeline import Reading, advantages, credit, metrics, read
from spanwise.registry import register
from spanwise.remarks import remarks
from spanwise.scheme import Scheme
from spanwise.score import score
from spanwise.segment import Vocabulary, segment
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
    "grpo",
    "metrics",
    "read",
    "register",
    "remarks",
    "rlcr",
    "rloo",
    "score",
    "segment",
    "spread",
]
