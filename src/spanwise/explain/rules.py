"""The table of what is said of a run: which number shows it, beyond what, in which words, and its usual cause."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

_BEYOND = {"above": operator.gt, "below": operator.lt, "at least": operator.ge, "at most": operator.le}


@dataclass(frozen=True)
class Remark:
    """One thing that is said of a run, where a metric is on one side of a threshold (`{name}`: of any objective or comparison)."""

    metric: str
    side: Literal["above", "below", "at least", "at most"]
    threshold: float
    sentence: str
    cause: str = ""
    #: Other figures that mean nothing then.
    hollow: tuple[str, ...] = ()
    #: A metric that makes it as it should be, where that is above half.
    unless: str = ""

    def holds(self, value: float) -> bool:
        """Whether a value of the metric is beyond the threshold."""
        return _BEYOND[self.side](value, self.threshold)


#: How many training batches in a row make a habit.
IN_A_ROW = 3
#: Of training batches, where it holds in several of them in a row.
HABITS = (
    Remark(
        "credit/malformed", "above", 0.5,
        "of the completions are malformed: tags or fields are missing, doubled, nested, out of order or cut off.",
        "Usually the prompt does not ask for them, completions are cut off at the longest length, or nothing pays for the form and "
        "the policy drifts (`format` for tags, `json_schema` for fields).",
    ),
    Remark(
        "credit/{name}/reward_absent", "above", 0.5,
        "of the completions have no reward '{name}'.",
        "Usually they leave its block out and if_missing is None, so that this costs nothing; or the reward function returns None, "
        "or its check times out.",
    ),
    Remark(
        "credit/unanimous", "above", 0.9,
        "of the groups are unanimous: under no objective does a completion differ from the others, so nothing is learned from "
        "them.",
        "Usually the prompts are too easy or too hard for the policy, or the temperature is too low.",
    ),
    Remark(
        "credit/{name}/dead_strata", "above", 0.95,
        "of the strata that '{name}' is compared within are dead: nobody in them gets any credit, though rewards differ within "
        "groups.",
        "Usually groups are too small for the outcomes they are split by (group_size up, or baseline: blended).",
        unless="credit/{name}/unanimous",
    ),
    Remark(
        "credit/no_signal", "above", 0.99,
        "of the batches taught nothing: every advantage is 0.",
        "`spanwise why` on their rollouts counts the reasons.",
    ),
)  # fmt: skip
#: Of training batches, where it holds for their mean, and no habit says it.
RUN = (
    Remark(
        "credit/no_signal", "above", 0.5,
        "In {share} of the training batches nothing was learned: no completion differed from what it is compared with.",
    ),
    Remark(
        "credit/{name}/reward_absent", "at least", 1.0, "No completion of any training batch has the reward '{name}'.",
    ),
)  # fmt: skip

#: What looks good, or like anything, of a policy that is never right, never answers or says one number.
CALIBRATION = ("ece", "brier", "auroc", "mean_confidence", "sharpness")
#: What the figures of a self-rewarding score begin with, beside those of a stated confidence.
LASER = "laser_"
#: Its figures: `coverage` and those of `CALIBRATION`.
LASER_FIGURES = tuple(f"{LASER}{name}" for name in ("coverage", *CALIBRATION))
_SCORED = LASER_FIGURES[1:]
_OUT_OF_REACH = (
    "Usually the score is not trained yet (reasoning_warmup, alpha), or its reference is of another model or token."
)
#: Of an evaluation. The first that holds speaks for a figure.
EVALUATION = (
    Remark(
        "refusal_rate", "above", 0.5, "most completions refuse to answer",
        "Usually a wrong answer costs more than none, as where all rewards are summed into one number: pay answer and confidence "
        "by blocks (method: bae), or start from a better policy.", hollow=("accuracy", *CALIBRATION, *_SCORED),
    ),
    Remark(
        "accuracy", "below", 0.05, "hardly any answer is right",
        "Usually the prompts are too hard for this policy, or answers are not read where they stand.",
        hollow=(*CALIBRATION, *_SCORED),
    ),
    Remark(
        "verdict_rate", "below", 0.5, "most answers could not be judged",
        "Usually gold answers are missing or cannot be read, or checks run out of time (verifier: {deadline: ...}).",
        hollow=("accuracy", *CALIBRATION, *_SCORED),
    ),
    Remark(
        "coverage", "below", 0.5, "few completions state a confidence",
        "Usually leaving it out costs nothing (if_missing), or completions are cut off before it.", hollow=CALIBRATION,
    ),
    Remark(
        "sharpness", "below", 1e-4, "every completion states the same confidence",
        "Usually the confidence is paid with the answer, or the members of its groups are all alike.", hollow=CALIBRATION,
    ),
    Remark(
        "format_rate", "below", 0.9, "many completions are malformed",
        "Usually nothing pays for the tags (format), or completions are cut off at their longest length.",
    ),
    Remark(
        "laser_coverage", "below", 0.5, "few completions have a score, the others were cut off",
        "Usually the longest completion is too short for this policy.", hollow=_SCORED,
    ),
    Remark("laser_mean_confidence", "at most", 0.0, "every score is 0, after clipping", _OUT_OF_REACH, hollow=_SCORED),
    Remark("laser_mean_confidence", "at least", 1.0, "every score is 1, after clipping", _OUT_OF_REACH, hollow=_SCORED),
    Remark("laser_sharpness", "below", 1e-4, "every completion has the same score", _OUT_OF_REACH, hollow=_SCORED),
)  # fmt: skip

#: What is wrong with an evaluation -> the figure that shows it.
SHOWN_BY: Mapping[str, str] = {rule.sentence: rule.metric for rule in EVALUATION}
#: What is wrong with an evaluation -> what usually causes it.
CAUSES: Mapping[str, str] = {rule.sentence: rule.cause for rule in EVALUATION}
