"""Turn the blocks of completions into rewards and outcomes. Each reward has a status, such as OK or ABSENT."""

from spanwise.score.answers import MathVerifier, judge, parse_confidence
from spanwise.score.fields import count, equals, json_schema, listed, near, one_of
from spanwise.score.judges.judge import ask_judge
from spanwise.score.judges.reward_model import score_by_model
from spanwise.score.outcomes import OUTCOMES, Outcome, complete
from spanwise.score.reward import REWARDS, BuiltIn, Reward
from spanwise.score.rewards import brier, correct, environment, format_, log_score, overlong, runs, second_attempt
from spanwise.score.score import score_all
from spanwise.score.workers import Verdict, close

__all__ = [
    "OUTCOMES", "REWARDS", "BuiltIn", "MathVerifier", "Outcome", "Reward", "Verdict", "ask_judge", "brier", "close", "complete",
    "correct", "count", "environment", "equals", "format_", "json_schema", "judge", "listed", "log_score", "near", "one_of",
    "overlong", "parse_confidence", "runs", "score_all", "score_by_model", "second_attempt",
]  # fmt: skip
