"""From a method's preset to a layout and objectives: what is run when nothing but the method is named."""

from __future__ import annotations

from typing import Any

from spanwise.credit.registry import Method, Preset
from spanwise.errors import RecipeError, check_known
from spanwise.layout import Layout
from spanwise.objective import BaselineName, Objective

# What a completion without a confidence is taken to have scored: the worst the rule can give (log_score clips at .01).
WORST_SCORE = {"brier": -1.0, "log_score": -4.605170185988091}


def preset_rule(
    chosen: Method, task: Layout, calibration: str | None, baseline: BaselineName | None
) -> tuple[Layout, tuple[Objective, ...]]:
    """The layout and the objectives of a method's preset; a change that its objectives have no use for is refused.

    The layout is the task's, or all of its marks in one block for a method that credits whole completions.
    """
    preset, layout = chosen.preset or Preset(), task
    if preset.whole and len(task.names) > 1:
        layout = Layout({"completion": task.marks}, prefilled=task.prefilled, segmenter=task.segmenter, most=task.most)
    if calibration is not None and not (preset.calibrated and states_confidence(layout)):
        why = "finds no confidence in the last block" if preset.calibrated else "rewards correctness alone"
        raise RecipeError(f"calibration is '{calibration}', but method '{chosen.name}' {why}, so it would change nothing.")
    if baseline is not None and not (preset.calibrated and "baseline" in chosen.inputs):
        raise RecipeError(
            f"baseline is '{baseline}', but method '{chosen.name}' has its own, so it would change nothing. Leave it out, or use "
            f"method 'bae'."
        )
    return layout, preset_objectives(chosen, layout, calibration=calibration or "brier", baseline=baseline)


def states_confidence(layout: Layout) -> bool:
    """Whether the last block states a confidence; if not, it is a second attempt.

    >>> states_confidence(Layout({"first": ["answer"], "second": ["answer"]}))
    False
    """
    return len(layout.names) == 1 or "confidence" in layout.keys[layout.names[-1]]


def preset_objectives(
    chosen: Method, layout: Layout, *, calibration: str = "brier", baseline: BaselineName | None = None
) -> tuple[Objective, ...]:
    """The objectives of a method: correctness pays the first block, a second objective the last one, well-formed tags each block.

    The second objective is a calibration score where the last block states a confidence, else the reward of a second attempt. A
    method that gives a completion one number pays it to every block. Tags are paid where the preset says so.

    Args:
        chosen: the method; without a preset, that of `Preset()`.
        layout: the blocks that are paid.
        calibration: `brier` or `log_score`.
        baseline: of the second objective; for methods that take baselines, `outcome` if not given.

    Example:
        >>> from spanwise.credit import method
        >>> attempts = Layout({"first": ["answer"], "second": ["answer"]})
        >>> [o.name for o in preset_objectives(method("bae"), attempts)]
        ['correct', 'second_attempt', 'first_format', 'second_format']
        >>> layout = Layout({"solution": ["answer"], "confidence": ["confidence"]})
        >>> [(o.name, o.pays, o.baseline) for o in preset_objectives(method("bae_paper"), layout)]
        [('correct', ('solution',), 'group'), ('brier', ('confidence',), 'outcome')]
        >>> [(o.name, o.pays) for o in preset_objectives(method("rlcr"), layout)][1:]
        [('brier', ('confidence', 'solution')), ('format', ('solution', 'confidence'))]
    """
    check_known("calibration score", calibration, WORST_SCORE)
    first, last = layout.names[0], layout.names[-1]
    by_block, preset = chosen.kind == "block", chosen.preset or Preset()
    group, against = ("group", baseline or "outcome") if "baseline" in chosen.inputs else (None, None)
    # A reward reads the first block it pays; every other block comes after its own.
    objectives = [Objective("correct", pays=(first,) if by_block else layout.names, baseline=group, if_missing=0.0)]
    if preset.calibrated:
        confident = states_confidence(layout)
        second = Objective(
            calibration if confident else "second_attempt",
            pays=(last,) if by_block else tuple(dict.fromkeys((last, *layout.names))),
            given="correct" if confident or against in ("outcome", "blended") else (),
            baseline=against,
            if_missing=WORST_SCORE[calibration] if confident else 0.0,
            options={} if confident else {"first": first},
        )
        objectives.append(second)
    # What other segmenters find has no tags to be well-formed. A group that is well-formed gets exactly 0. A tag may hold nothing:
    # what stands in it is the other objectives' business. So is a block that is left out, which has no tags to be judged by; one
    # number for all blocks counts it as malformed.
    if preset.format and layout.segmenters == ("tags",):
        tags: dict[str, Any] = {"weight": preset.format, "baseline": group, "options": {"empty": True}}
        each = [Objective("format", name, name=f"{name}_format", **tags) for name in layout.names]
        objectives += each if by_block else [Objective("format", layout.names, if_missing=0.0, **tags)]
    return tuple(objectives)
