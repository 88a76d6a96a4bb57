"""One training step's worth of credit, the same for every engine: read, gather, credit, advantages, metrics, warnings, rollouts."""

from spanwise.step.rows import TURNS, Ranks, ReadBatch, steps_of_turns, turn_rows
from spanwise.step.step import Step, StepResult

__all__ = ["TURNS", "Ranks", "ReadBatch", "Step", "StepResult", "steps_of_turns", "turn_rows"]
