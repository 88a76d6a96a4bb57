"""Rollout files of this package and of other trainers, read into one table: TRL, verl, verifiers."""

from spanwise.rollouts.read import FORMATS, read_rollouts
from spanwise.rollouts.table import Ragged, RolloutTable

__all__ = ["FORMATS", "Ragged", "RolloutTable", "read_rollouts"]
