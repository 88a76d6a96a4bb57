"""From a method's preset to objectives: what a recipe runs when it names nothing but the method."""

from __future__ import annotations

from dataclasses import replace

from spanwise.credit.registry import Preset
from spanwise.errors import RecipeError, unknown
from spanwise.layout import Layout
from spanwise.objective import BaselineName, Objective

# What a completion without a confidence is taken to have scored: the worst the rule can give (log_score clips at .01).
WORST_SCORE = {"brier": -1.0, "log_score": -4.605170185988091}


def preset_layout(preset: Preset, task: Layout) -> Layout:
    """The layout a preset uses for a task: the task's own blocks, or all of its tags in one block.

    >>> preset_layout(Preset(whole=True), Layout({"solution": ["answer"], "confidence": ["confidence"]})).blocks
    (('completion', ('answer', 'confidence')),)
    """
    if not preset.whole:
        return task
    return Layout({"completion": tuple(dict.fromkeys(task.tags))}, prefilled=task.prefilled)


def preset_objectives(
    preset: Preset, layout: Layout, *, calibration: str = "brier", baseline: BaselineName = "outcome"
) -> tuple[Objective, ...]:
    """The objectives of a preset: correctness pays the first block, a second objective the last one.

    The second objective is a calibration score where the last block states a confidence, else the reward of a second attempt.

    Args:
        preset: of the method.
        layout: as `preset_layout` gives it.
        calibration: `brier` or `log_score`.
        baseline: of the confidence, where the preset leaves it open.

    Example:
        >>> attempts = Layout({"first": ["answer"], "second": ["answer"]})
        >>> preset_objectives(Preset(), attempts)[1].name
        'second_attempt'
        >>> layout = Layout({"solution": ["answer"], "confidence": ["confidence"]})
        >>> [(o.name, o.pays, o.baseline) for o in preset_objectives(Preset(), layout)]
        [('correct', ('solution',), None), ('brier', ('confidence',), 'outcome')]
    """
    if calibration not in WORST_SCORE:
        raise RecipeError(unknown("calibration score", calibration, WORST_SCORE))
    correct = Objective("correct", pays=(layout.names[0],), scale=preset.scale, if_missing=0.0)
    confident = len(layout.names) == 1 or "confidence" in dict(layout.blocks)[layout.names[-1]]
    second = Objective(
        calibration if confident else "second_attempt",
        pays=(layout.names[-1],),
        given="correct",
        baseline=preset.baseline or baseline,
        scale=preset.scale,
        weight=preset.weight,
        if_missing=WORST_SCORE[calibration] if confident else 0.0,
        options={} if confident else {"first": layout.names[0]},
    )
    if not preset.calibrated:
        return (correct,)
    if preset.sum_first:
        # A reward reads the first block it pays; every other block comes after its own.
        return replace(correct, pays=layout.names), replace(
            second, pays=tuple(dict.fromkeys((layout.names[-1], *layout.names)))
        )
    return correct, second
