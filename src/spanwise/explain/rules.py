"""What is said of an evaluation: which figure shows it, beyond what, in which words, and its usual cause."""

from __future__ import annotations

from collections.abc import Mapping

from spanwise.metric import Alarm

#: What looks good, or like anything, of a policy that is never right, never answers or says one number.
CALIBRATION = ("ece", "brier", "auroc", "mean_confidence", "sharpness")
#: What the figures of the score of a completion begin with, beside those of a stated confidence.
OF_SCORE = "laser_"
#: Its figures: `coverage` and those of `CALIBRATION`.
SCORE_FIGURES = tuple(f"{OF_SCORE}{name}" for name in ("coverage", *CALIBRATION))
_SCORED = SCORE_FIGURES[1:]
_OUT_OF_REACH = (
    "Usually the score is not trained yet (reasoning_warmup, alpha), or its reference is of another model or token."
)
#: Of an evaluation. The first that holds speaks for a figure.
EVALUATION = (
    ("refusal_rate", Alarm("above", 0.5, "most completions refuse to answer",
        "Usually a wrong answer costs more than none, as where all rewards are summed into one number: pay answer and confidence "
        "by blocks (method: bae), or start from a better policy.", hollow=("accuracy", *CALIBRATION, *_SCORED),
    )),
    ("accuracy", Alarm("below", 0.05, "hardly any answer is right",
        "Usually the prompts are too hard for this policy, or answers are not read where they stand.",
        hollow=(*CALIBRATION, *_SCORED),
    )),
    ("verdict_rate", Alarm("below", 0.5, "most answers could not be judged",
        "Usually gold answers are missing or cannot be read, or checks run out of time (verifier: {deadline: ...}).",
        hollow=("accuracy", *CALIBRATION, *_SCORED),
    )),
    ("coverage", Alarm("below", 0.5, "few completions state a confidence",
        "Usually leaving it out costs nothing (if_missing), or completions are cut off before it.", hollow=CALIBRATION,
    )),
    ("sharpness", Alarm("below", 1e-4, "every completion states the same confidence",
        "Usually the confidence is paid with the answer, or the members of its groups are all alike.", hollow=CALIBRATION,
    )),
    ("format_rate", Alarm("below", 0.9, "many completions are malformed",
        "Usually nothing pays for the tags (format), or completions are cut off at their longest length.",
    )),
    (f"{OF_SCORE}coverage", Alarm("below", 0.5, "few completions have a score, the others were cut off",
        "Usually the longest completion is too short for this policy.", hollow=_SCORED,
    )),
    (f"{OF_SCORE}mean_confidence", Alarm("at most", 0.0, "every score is 0, after clipping", _OUT_OF_REACH, hollow=_SCORED)),
    (f"{OF_SCORE}mean_confidence", Alarm("at least", 1.0, "every score is 1, after clipping", _OUT_OF_REACH, hollow=_SCORED)),
    (f"{OF_SCORE}sharpness", Alarm("below", 1e-4, "every completion has the same score", _OUT_OF_REACH, hollow=_SCORED)),
)  # fmt: skip

#: What is wrong with an evaluation -> the figure that shows it.
SHOWN_BY: Mapping[str, str] = {alarm.sentence: figure for figure, alarm in EVALUATION}
#: What is wrong with an evaluation -> what usually causes it.
CAUSES: Mapping[str, str] = {alarm.sentence: alarm.cause for _, alarm in EVALUATION}
