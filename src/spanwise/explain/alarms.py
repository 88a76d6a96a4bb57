"""Find a run's problems: figures that cannot be trusted, and batches without learning signal."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Literal, TypeVar

from spanwise.credit_metrics import CREDIT
from spanwise.metric import Alarm, metrics_in
from spanwise.registry import registered

#: The names of the metrics of calibration.
CALIBRATION = ("ece", "brier", "auroc", "mean_confidence", "sharpness")
OF_SCORE = "laser_"  # Metrics of the self-rewarding score have this prefix.
OF_REWARD = "reward/"  # Metrics of mean rewards on held-out prompts have this prefix.
#: The names of the evaluation figures of laser's score, the policy's rating of its own answers.
SCORE_FIGURES = tuple(f"{OF_SCORE}{name}" for name in ("coverage", *CALIBRATION))
_SCORED = SCORE_FIGURES[1:]
_OUT_OF_REACH = (
    "Equal scores usually mean that LaSeR has not yet trained the model to rate its answers (see laser.reasoning_warmup and "
    "laser.alpha), or that laser.reference was measured with another model or token."
)
#: Evaluation figures with their alarms. If several alarms of a figure hold, the first gives the warning.
EVALUATION = (
    ("refusal_rate", Alarm("above", 0.5, "most completions refuse to answer",
        "Refusals usually mean that a wrong answer costs more than no answer, for example if all rewards are summed. Credit answer "
        "and confidence separately (method: bae), or use a better policy.", hollow=("accuracy", *CALIBRATION, *_SCORED),
    )),
    ("accuracy", Alarm("below", 0.05, "hardly any answer is right",
        "Few right answers usually mean that the prompts are too hard, or that the answer is read from the wrong tag or block.",
        hollow=(*CALIBRATION, *_SCORED),
    )),
    ("verdict_rate", Alarm("below", 0.5, "most answers could not be judged",
        "Answers without a verdict usually have no readable gold answer. If checks time out, raise verifier: {deadline: ...}.",
        hollow=("accuracy", *CALIBRATION, *_SCORED),
    )),
    ("coverage", Alarm("below", 0.5, "few completions state a confidence",
        "Missing confidences usually mean that they cost nothing (then set if_missing), or that completions are cut off.",
        hollow=CALIBRATION,
    )),
    ("sharpness", Alarm("below", 1e-4, "every completion states the same confidence",
        "Equal confidences usually mean that they get only the answer's credit, or that a group's completions are all alike.",
        hollow=CALIBRATION,
    )),
    ("format_rate", Alarm("below", 0.9, "many completions are malformed",
        "Malformed completions usually mean that no reward (such as `format`) pays for tags, or that the token limit is too low.",
    )),
    (f"{OF_SCORE}coverage", Alarm("below", 0.5, "few completions have a score, because the others were cut off",
        "Cut-off completions usually mean that the token limit is too low for the policy. Raise the token limit.", hollow=_SCORED,
    )),
    (f"{OF_SCORE}mean_confidence", Alarm("at most", 0.0, "every score is 0, after clipping", _OUT_OF_REACH, hollow=_SCORED)),
    (f"{OF_SCORE}mean_confidence", Alarm("at least", 1.0, "every score is 1, after clipping", _OUT_OF_REACH, hollow=_SCORED)),
    (f"{OF_SCORE}sharpness", Alarm("below", 1e-4, "every completion has the same score", _OUT_OF_REACH, hollow=_SCORED)),
)  # fmt: skip

#: Maps the warning sentence of each evaluation alarm to the metric that the alarm watches.
SHOWN_BY: Mapping[str, str] = {alarm.sentence: figure for figure, alarm in EVALUATION}
#: Maps the sentence of each evaluation alarm to the usual cause of the alarm.
CAUSES: Mapping[str, str] = {alarm.sentence: alarm.cause for _, alarm in EVALUATION}
_Key = TypeVar("_Key")
IN_A_ROW = 3  # Report a problem after this many training batches in a row.
_LATER = re.compile(r"\[[1-9]\d*\]")  # Matches an index above 0 in the name of an objective, such as "[2]".


def alarms(figures: Mapping[str, float | int | None]) -> dict[str, str]:
    """Return the figures of an evaluation that cannot be trusted, each with the reason.

    The table `EVALUATION` holds the rules; each names the figures that a policy gets for nothing while its alarm holds.

    Args:
        figures: as `measure.figures` gives them; None and NaN are not there.

    Returns:
        figure -> what is wrong, for those of `figures` that are there.

    Example:
        >>> alarms({"accuracy": 0.001, "ece": 0.001, "format_rate": 1.0})
        {'accuracy': 'hardly any answer is right', 'ece': 'hardly any answer is right'}
    """
    known_figures = {name: value for name, value in figures.items() if value is not None and value == value}
    reason_of_figure: dict[str, str] = {}
    for name, alarm in EVALUATION:
        if name in known_figures and alarm.holds(known_figures[name]):
            for untrusted_figure in (name, *alarm.hollow):
                reason_of_figure.setdefault(untrusted_figure, alarm.sentence)
    return {name: reason_of_figure[name] for name in known_figures if name in reason_of_figure}


def by_sentence(sentences: Mapping[_Key, str]) -> dict[str, list[_Key]]:
    """Group evaluation figures by their warning sentence."""
    keys_by_sentence: dict[str, list[_Key]] = {}
    for key, sentence in sentences.items():
        keys_by_sentence.setdefault(sentence, []).append(key)
    return keys_by_sentence


def later_elements(names: Iterable[str]) -> set[str]:
    """Return the names of later list elements, such as `price[2]`, if the first element, `price[0]`, is also in `names`."""
    all_names = set(names)
    return {name for name in all_names if _LATER.search(name) and _LATER.sub("[0]", name) in all_names}


def _find_watched(
    batches: Sequence[Mapping[str, Any]], when: Literal["lasting", "overall", "at_end"]
) -> Iterator[tuple[str, str, Alarm]]:
    """Yield each logged metric that has an alarm of the kind `when`, such as "at_end"."""
    mode_metrics = (metric for mode in registered("mode").values() for metric in mode.metrics)
    logged_metrics = list(metrics_in(batches, [*CREDIT, *mode_metrics]))
    later_element_names = later_elements(name for _, name, _ in logged_metrics)
    ignored_keys = {f"credit/{name}/reward_absent" for name in later_element_names}
    for metric_key, name, metric in logged_metrics:
        if (alarm := getattr(metric, when)) and metric_key not in ignored_keys:
            yield metric_key, name, alarm


def habits(batches: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return a warning for each metric that has an alarming value in several consecutive batches."""
    sentence_of_metric = {}
    for metric_key, name, alarm in _find_watched(batches, "lasting"):
        if len(streak := _longest_run(batches, metric_key, name, alarm)) < IN_A_ROW:
            continue
        streak_shares = [batch[metric_key] for batch in streak]
        min_share_text, max_share_text = f"{100 * min(streak_shares):.0f} %", f"{100 * max(streak_shares):.0f} %"
        share_text = min_share_text if min_share_text == max_share_text else f"{min_share_text} to {max_share_text}"
        steps_text = f" (steps {streak[0]['step']} to {streak[-1]['step']})" if "step" in streak[0] else ""
        problem_text = alarm.sentence.format(name=name, share=share_text)
        sentence_of_metric[metric_key] = f"In {len(streak)} batches in a row{steps_text}: {problem_text} {alarm.cause}"
    return sentence_of_metric


def _longest_run(batches: Sequence[Mapping[str, Any]], key: str, name: str, alarm: Alarm) -> list[Mapping[str, Any]]:
    """Return the longest streak of batches in which an alarm holds. A batch without the metric ends it."""
    silencing_key = alarm.unless.format(name=name)

    def holds(line: Mapping[str, Any]) -> bool:
        return line.get(key) is not None and alarm.holds(line[key]) and not (line.get(silencing_key) or 0.0) > 0.5

    return max((list(streak) for has_problem, streak in groupby(batches, key=holds) if has_problem), key=len, default=[])


def batch_alarms(batches: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return warnings for training metrics with alarming values: in consecutive batches, on average, or at the end."""
    sentence_of_metric = habits(batches)
    for metric_key, name, alarm in _find_watched(batches, "overall"):
        shares = values_of(batches, metric_key)
        if metric_key not in sentence_of_metric and shares and alarm.holds(mean_share := sum(shares) / len(shares)):
            sentence_of_metric[metric_key] = alarm.sentence.format(name=name, share=f"{100 * mean_share:.0f} %")
    return [*sentence_of_metric.values(), *end_alarms(batches).values()]


def end_alarms(batches: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return a warning for each metric whose mean over the last batches is beyond its alarm's threshold.

    The last batches are a quarter of those with a value, at most 10. A metric without any value (NaN, None) has a warning
    if its alarm defines one for unknown values.
    """
    sentence_of_metric = {}
    for metric_key, name, alarm in _find_watched(batches, "at_end"):
        name_text = f" of '{name}'" if name else ""
        metric_values = values_of(batches, metric_key)
        last_values = metric_values[-min(10, max(1, len(metric_values) // 4)) :]
        if not last_values and alarm.unknown:
            sentence_of_metric[metric_key] = alarm.unknown.format(of=name_text)
        elif last_values and alarm.holds(last_mean := sum(last_values) / len(last_values)):
            batches_text = "the last batch" if len(last_values) == 1 else f"the last {len(last_values)} batches"
            sentence_of_metric[metric_key] = alarm.sentence.format(of=name_text, value=last_mean, over=batches_text)
    return sentence_of_metric


def values_of(batches: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    """Return all logged values of a metric that are not NaN."""
    return [value for batch in batches if (value := batch.get(key)) is not None and value == value]
