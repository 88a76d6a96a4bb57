"""Warn about problems of a batch, a training run or an evaluation by rules, each with a sentence and the usual cause."""

from spanwise.explain.alarms import alarms
from spanwise.explain.remarks import setup_warnings

__all__ = ["alarms", "setup_warnings"]
