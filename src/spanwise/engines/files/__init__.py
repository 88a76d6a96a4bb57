"""Rollout files of this package and of other trainers, read into one table: TRL, verl, verifiers."""

from spanwise.engines.files.read import FORMATS, read_rollouts
from spanwise.engines.files.table import Ragged, RolloutTable

__all__ = ["FORMATS", "Ragged", "RolloutTable", "read_rollouts"]
