"""Warn about problems of a batch, a training run or an evaluation by rules, each with a sentence and the usual cause."""

from spanwise.explain.alarms import alarms, batch_alarms, end_alarms
from spanwise.explain.remarks import setup_warnings

__all__ = ["alarms", "batch_alarms", "end_alarms", "setup_warnings"]
