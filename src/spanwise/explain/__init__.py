"""Warnings on a batch, a run and an evaluation: one table of rules, and the sentences that follow from it."""

from spanwise.explain.alarms import alarms, batch_alarms, end_alarms
from spanwise.explain.remarks import setup_warnings

__all__ = ["alarms", "batch_alarms", "end_alarms", "setup_warnings"]
