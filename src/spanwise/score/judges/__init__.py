"""Rewards that ask a model: a judge behind an HTTP endpoint reads a part of a completion against a template or a rubric."""

from spanwise.score.judges.judge import ask_judge

__all__ = ["ask_judge"]
