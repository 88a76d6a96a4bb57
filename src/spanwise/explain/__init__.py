"""What is said of a batch, a run and an evaluation: one table of rules, and the sentences that follow from it."""

from spanwise.explain.alarms import alarms, batch_alarms, critic_alarms
from spanwise.explain.remarks import setup_warnings
from spanwise.explain.rules import CALIBRATION, CAUSES, LASER, LASER_FIGURES, SHOWN_BY

__all__ = [
    "CALIBRATION",
    "CAUSES",
    "LASER",
    "LASER_FIGURES",
    "SHOWN_BY",
    "alarms",
    "batch_alarms",
    "critic_alarms",
    "setup_warnings",
]
