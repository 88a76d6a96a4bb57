"""Warn about problems of a batch, a run or an evaluation, and name the usual cause."""

from spanwise.explain.alarms import alarms
from spanwise.explain.remarks import setup_warnings

__all__ = ["alarms", "setup_warnings"]
