"""From blocks of text to rewards and outcomes, each with a status: absent, failed and zero are three different things."""

from spanwise.score.answers import judge
from spanwise.score.maths import MathVerifier, Verdict, close, shared_verifier
from spanwise.score.reward import REWARDS, Reward, register
from spanwise.score.rewards import brier, correct, format_, log_score, parse_confidence, second_attempt
from spanwise.score.score import check_objectives, score, score_one

__all__ = [
    "REWARDS",
    "MathVerifier",
    "Reward",
    "Verdict",
    "brier",
    "check_objectives",
    "close",
    "correct",
    "format_",
    "judge",
    "log_score",
    "parse_confidence",
    "register",
    "score",
    "score_one",
    "second_attempt",
    "shared_verifier",
]
