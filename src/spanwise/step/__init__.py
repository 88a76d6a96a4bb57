"""One training step's worth of credit, the same for every engine: read, gather, credit, advantages, metrics, warnings, rollouts."""

from spanwise.step.rows import Ranks, ReadBatch
from spanwise.step.step import Step, StepResult
from spanwise.step.turns import TURNS, steps_of_turns, turn_rows

__all__ = ["TURNS", "Ranks", "ReadBatch", "Step", "StepResult", "steps_of_turns", "turn_rows"]
