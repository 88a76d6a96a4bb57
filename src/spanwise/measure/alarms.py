"""What is wrong with a policy, so that no figure of it is read as if nothing were."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spanwise.remarks import habits

#: What looks good, or like anything, of a policy that is never right, never answers or says one number.
CALIBRATION = ("ece", "brier", "auroc", "mean_confidence", "sharpness")
#: What the figures of a self-rewarding score begin with, beside those of a stated confidence.
LASER = "laser_"
#: Its figures: `coverage` and those of `CALIBRATION`.
LASER_FIGURES = tuple(f"{LASER}{name}" for name in ("coverage", *CALIBRATION))
_SCORED = LASER_FIGURES[1:]
#: The figure that shows it, when, what it means, and the figures that mean nothing then. The first that holds speaks for a figure.
_RULES: tuple[tuple[str, Callable[[float], bool], str, tuple[str, ...]], ...] = (
    ("refusal_rate", lambda value: value > 0.5, "most completions refuse to answer", ("accuracy", *CALIBRATION, *_SCORED)),
    ("accuracy", lambda value: value < 0.05, "hardly any answer is right", (*CALIBRATION, *_SCORED)),
    ("verdict_rate", lambda value: value < 0.5, "most answers could not be judged", ("accuracy", *CALIBRATION, *_SCORED)),
    ("coverage", lambda value: value < 0.5, "few completions state a confidence", CALIBRATION),
    ("sharpness", lambda value: value < 1e-4, "every completion states the same confidence", CALIBRATION),
    ("format_rate", lambda value: value < 0.9, "many completions are malformed", ()),
    ("laser_coverage", lambda value: value < 0.5, "few completions have a score, the others were cut off", _SCORED),
    ("laser_mean_confidence", lambda value: value <= 0, "every score is 0, after clipping", _SCORED),
    ("laser_mean_confidence", lambda value: value >= 1, "every score is 1, after clipping", _SCORED),
    ("laser_sharpness", lambda value: value < 1e-4, "every completion has the same score", _SCORED),
)
_OUT_OF_REACH = (
    "Usually the score is not trained yet (reasoning_warmup, alpha), or its reference is of another model or token."
)

#: What is wrong -> the figure that shows it.
SHOWN_BY: Mapping[str, str] = {what: figure for figure, _, what, _ in _RULES}
#: What is wrong -> what usually causes it.
CAUSES: Mapping[str, str] = {
    "most completions refuse to answer": (
        "Usually a wrong answer costs more than none, as where all rewards are summed into one number: pay answer and confidence "
        "by blocks (method: bae), or start from a better policy."
    ),
    "hardly any answer is right": "Usually the prompts are too hard for this policy, or answers are not read where they stand.",
    "most answers could not be judged": (
        "Usually gold answers are missing or cannot be read, or checks run out of time (verifier: {deadline: ...})."
    ),
    "few completions state a confidence": (
        "Usually leaving it out costs nothing (if_missing), or completions are cut off before it."
    ),
    "every completion states the same confidence": (
        "Usually the confidence is paid with the answer, or the members of its groups are all alike."
    ),
    "many completions are malformed": (
        "Usually nothing pays for the tags (format), or completions are cut off at their longest length."
    ),
    "few completions have a score, the others were cut off": "Usually the longest completion is too short for this policy.",
    "every score is 0, after clipping": _OUT_OF_REACH,
    "every score is 1, after clipping": _OUT_OF_REACH,
    "every completion has the same score": _OUT_OF_REACH,
}

_EXPLAINED = "/explained_variance"


def alarms(figures: Mapping[str, float | int | None]) -> dict[str, str]:
    """Which figures of an evaluation must not be read calmly, and why.

    A refusal rate above .5, an accuracy below .05, verdicts or confidences on less than half of the completions, a variance of the
    confidences below 1e-4, a format rate below .9; and with each but the last the figures that a policy gets for nothing then. Of a
    self-rewarding score (`laser_...`) the same of its coverage and variance, and a mean of 0 or 1: it is always the same number.

    Args:
        figures: as `measure.figures` gives them; None and NaN are not there.

    Returns:
        figure -> what is wrong, for those of `figures` that are there.

    Example:
        >>> alarms({"accuracy": 0.001, "ece": 0.001, "format_rate": 1.0})
        {'accuracy': 'hardly any answer is right', 'ece': 'hardly any answer is right'}
    """
    there = {name: float(value) for name, value in figures.items() if value is not None and value == value}
    found: dict[str, str] = {}
    for name, is_wrong, what, hollow in _RULES:
        if name in there and is_wrong(there[name]):
            found = {**{figure: what for figure in (name, *hollow) if figure in there}, **found}
    return {name: found[name] for name in there if name in found}


def batch_alarms(batches: Sequence[Mapping[str, Any]]) -> list[str]:
    r"""What is wrong with many of the training batches of a run, in sentences; several in a row are `remarks.habits`.

    Args:
        batches: the lines of `metrics.jsonl` of training batches.

    Example:
        >>> print(*batch_alarms([{"credit/no_signal": 1.0, "credit/brier/reward_absent": 1.0}] * 2), sep="\n")
        In 100 % of the training batches nothing was learned: no completion differed from what it is compared with.
        No completion of any training batch has the reward 'brier'.
    """
    lasting = habits(batches)
    said = list(lasting.values())
    silent = [line["credit/no_signal"] for line in batches if line.get("credit/no_signal") is not None]
    if "credit/no_signal" not in lasting and silent and sum(silent) > 0.5 * len(silent):
        share = f"{100 * sum(silent) / len(silent):.0f} %"
        said.append(
            f"In {share} of the training batches nothing was learned: no completion differed from what it is compared with."
        )
    for key in dict.fromkeys(key for line in batches for key in line if key.endswith("/reward_absent")):
        absent = [line[key] for line in batches if line.get(key) is not None]
        if key not in lasting and absent and min(absent) >= 1.0:
            said.append(f"No completion of any training batch has the reward '{key.split('/')[1]}'.")
    return said


def critic_streams(batches: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The critics, or the values of one, that training batches tell of.

    Args:
        batches: the lines of `metrics.jsonl` of training batches.

    Returns:
        name of the value ("" is the only one) -> what its metrics start with.

    Example:
        >>> critic_streams([{"critic/explained_variance": 0.5}, {"critic/brier/explained_variance": 0.5}])
        {'': 'critic', 'brier': 'critic/brier'}
    """
    keys = dict.fromkeys(key for line in batches for key in line if key.startswith("critic/") and key.endswith(_EXPLAINED))
    return {
        key.removesuffix(_EXPLAINED).removeprefix("critic").removeprefix("/"): key.removesuffix(_EXPLAINED) for key in keys
    }


def critic_alarms(batches: Sequence[Mapping[str, Any]], *, last: int = 10) -> dict[str, str]:
    """Which values of a critic know nothing at the end of a run, in sentences.

    Args:
        batches: the lines of `metrics.jsonl` of training batches.
        last: the mean explained variance of the last quarter of them, at most so many batches, must be above 0.

    Returns:
        name of the value ("" is the only one) -> what is wrong.

    Edge cases:
        A batch in which every target is the same has no explained variance (NaN, None); where none has one, that is what is wrong.

    Example:
        >>> critic_alarms([{"critic/explained_variance": value} for value in (0.9, 0.5, -1.5)])
        {'': 'The critic knows nothing: its explained variance is -1.50 at the end (mean of the last batch).'}
    """
    said = {}
    for name, key in critic_streams(batches).items():
        values = [value for line in batches if (value := line.get(f"{key}{_EXPLAINED}")) is not None and value == value]
        values = values[-min(last, max(1, len(values) // 4)) :]
        critic = f"The critic of '{name}'" if name else "The critic"
        if not values:
            said[name] = (
                f"{critic} cannot be judged: no batch has an explained variance, as everything in it earned the same."
            )
        elif (mean := sum(values) / len(values)) <= 0:
            over = "the last batch" if len(values) == 1 else f"the last {len(values)} batches"
            said[name] = f"{critic} knows nothing: its explained variance is {mean:.2f} at the end (mean of {over})."
    return said
