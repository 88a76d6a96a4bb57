"""Rewards that ask a model: a judge behind an HTTP endpoint, by a template or a rubric; a reward model of `transformers`."""

from spanwise.score.judges.judge import ask_judge
from spanwise.score.judges.reward_model import score_by_model

__all__ = ["ask_judge", "score_by_model"]
