"""What is said of a batch, a run and an evaluation: one table of rules, and the sentences that follow from it."""

from spanwise.explain.alarms import (
    CALIBRATION,
    CAUSES,
    OF_REWARD,
    OF_SCORE,
    SCORE_FIGURES,
    SHOWN_BY,
    alarms,
    batch_alarms,
    end_alarms,
)
from spanwise.explain.remarks import setup_warnings

__all__ = [
    "CALIBRATION",
    "CAUSES",
    "OF_REWARD",
    "OF_SCORE",
    "SCORE_FIGURES",
    "SHOWN_BY",
    "alarms",
    "batch_alarms",
    "end_alarms",
    "setup_warnings",
]
