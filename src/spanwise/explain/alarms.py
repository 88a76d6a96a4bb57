"""What is wrong with a run, by the rules of `explain.rules`, so that no figure of it is read as if nothing were."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from spanwise.explain.rules import EVALUATION, HABITS, IN_A_ROW, RUN, Remark

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
    wrong: dict[str, str] = {}
    for rule in EVALUATION:
        if rule.metric in there and rule.holds(there[rule.metric]):
            wrong = {**{figure: rule.sentence for figure in (rule.metric, *rule.hollow) if figure in there}, **wrong}
    return {name: wrong[name] for name in there if name in wrong}


def habits(batches: Sequence[Mapping[str, Any]], *, in_a_row: int = IN_A_ROW) -> dict[str, str]:
    """Metric -> what was wrong in the longest run of at least `in_a_row` training batches, and what usually causes it."""
    sentences = {}
    for key, name, rule in _metrics(batches, HABITS):
        run = _longest(batches, key, name, rule)
        if len(run) < in_a_row:
            continue
        shares = sorted(line[key] for line in run)
        share = f"{shares[0]:.0%}" if shares[0] == shares[-1] else f"{shares[0]:.0%} to {shares[-1]:.0%}"
        steps = f" (steps {run[0]['step']} to {run[-1]['step']})" if "step" in run[0] else ""
        what = rule.sentence.format(name=name)
        sentences[key] = f"In {len(run)} batches in a row{steps} {share.replace('%', ' %')} {what} {rule.cause}"
    return sentences


def batch_alarms(batches: Sequence[Mapping[str, Any]]) -> list[str]:
    r"""What is wrong with many of the training batches of a run, in sentences: what lasted (`habits`), then what holds over all.

    Args:
        batches: the lines of `metrics.jsonl` of training batches.

    Example:
        >>> print(*batch_alarms([{"credit/no_signal": 1.0, "credit/brier/reward_absent": 1.0}] * 2), sep="\n")
        In 100 % of the training batches nothing was learned: no completion differed from what it is compared with.
        No completion of any training batch has the reward 'brier'.
    """
    lasting = habits(batches)
    sentences = list(lasting.values())
    for key, name, rule in sorted(_metrics(batches, RUN), key=lambda metric: RUN.index(metric[2])):
        values = [line[key] for line in batches if line.get(key) is not None]
        if key not in lasting and values and rule.holds(sum(values) / len(values)):
            sentences.append(rule.sentence.format(name=name, share=f"{100 * sum(values) / len(values):.0f} %"))
    return sentences


def _metrics(batches: Sequence[Mapping[str, Any]], rules: Sequence[Remark]) -> Iterator[tuple[str, str, Remark]]:
    """Each metric of the batches that a rule is about, in order, and the objective or comparison that it names."""
    for key in dict.fromkeys(key for line in batches for key in line if key.startswith("credit/")):
        name = key.removeprefix("credit/").rpartition("/")[0]
        yield from ((key, name, rule) for rule in rules if key == rule.metric.format(name=name))


def _longest(batches: Sequence[Mapping[str, Any]], key: str, name: str, rule: Remark) -> list[Mapping[str, Any]]:
    """The longest run of batches in which a rule holds; one without the metric ends a run."""
    first, best, excuse = 0, (0, 0), rule.unless.format(name=name)
    for n, line in enumerate(batches):
        value = line.get(key)
        if value is None or not rule.holds(value) or (line.get(excuse) or 0.0) > 0.5:
            first = n + 1
        elif n + 1 - first > best[1] - best[0]:
            best = (first, n + 1)
    return list(batches)[slice(*best)]


def critic_streams(batches: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Name of each value of a critic in the batches ("" is the only one) -> what its metrics start with."""
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
