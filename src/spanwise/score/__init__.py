"""Turn the blocks of completions into rewards and outcomes; a reward's status tells an absent, a failed and a zero one apart."""

from spanwise.score.answers import MathVerifier, judge, shared_verifier
from spanwise.score.fields import count, equals, json_schema, listed, near, one_of
from spanwise.score.judges.judge import ask_judge
from spanwise.score.judges.reward_model import score_by_model
from spanwise.score.outcomes import (
    OUTCOMES,
    Outcome,
    check_discrete,
    complete,
    find_outcome,
    judge_of,
    judged_column,
    read_outcomes,
)
from spanwise.score.reward import REWARDS, BuiltIn, Reward
from spanwise.score.rewards import (
    brier,
    correct,
    environment,
    format_,
    log_score,
    overlong,
    parse_confidence,
    runs,
    second_attempt,
)
from spanwise.score.score import as_scores, check_objectives, score_all, score_one, written_out
from spanwise.score.workers import Verdict, close

__all__ = [
    "OUTCOMES",
    "REWARDS",
    "BuiltIn",
    "MathVerifier",
    "Outcome",
    "Reward",
    "Verdict",
    "as_scores",
    "ask_judge",
    "brier",
    "check_discrete",
    "check_objectives",
    "close",
    "complete",
    "correct",
    "count",
    "environment",
    "equals",
    "find_outcome",
    "format_",
    "json_schema",
    "judge",
    "judge_of",
    "judged_column",
    "listed",
    "log_score",
    "near",
    "one_of",
    "overlong",
    "parse_confidence",
    "read_outcomes",
    "runs",
    "score_all",
    "score_by_model",
    "score_one",
    "second_attempt",
    "shared_verifier",
    "written_out",
]
