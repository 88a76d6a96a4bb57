"""The named methods: what each needs, its paper, and the preset of objectives it stands for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from spanwise.credit.bae import bae
from spanwise.credit.dr_grpo import dr_grpo
from spanwise.credit.grpo import grpo
from spanwise.credit.rlcr import rlcr
from spanwise.errors import RecipeError, unknown
from spanwise.score.objective import Objective
from spanwise.segment.layout import Layout

# What a completion without a confidence is taken to have scored: the worst the rule can give (log_score clips at .01).
WORST_SCORE = {"brier": -1.0, "log_score": -4.605170185988091}


@dataclass(frozen=True)
class Method:
    """A named method: a pure estimator and the preset that runs it from a recipe.

    Attributes:
        name: as in recipes.
        estimator: the pure function behind it.
        summary: one sentence.
        needs: what it needs beside rewards and prompt ids.
        paper: where it comes from.
        whole: the preset treats the completion as one block.
        sum_first: the preset adds the rewards before the baseline.
        per: what a token's share is counted in, see `spread`; "length" is the recipe's max_completion_length.
        scale: of the objectives.
        calibrated: the preset has a second objective on the confidence.
    """

    name: str
    estimator: Callable[..., Any]
    summary: str
    needs: str
    paper: str
    whole: bool = False
    sum_first: bool = False
    per: Literal["block", "completion", "length"] = "block"
    scale: Literal["none", "std"] = "none"
    calibrated: bool = True

    def layout(self, task: Layout) -> Layout:
        """The layout the preset uses for a task: its own blocks, or all of its tags in one block."""
        if not self.whole:
            return task
        return Layout({"completion": tuple(dict.fromkeys(task.tags))}, prefilled=task.prefilled)

    def objectives(self, layout: Layout, *, calibration: str = "brier", baseline: str = "outcome") -> tuple[Objective, ...]:
        """The preset's objectives for a layout.

        Args:
            layout: of the task; the first block holds the solution, the last the confidence.
            calibration: `brier` or `log_score`.
            baseline: of the confidence, for `bae`.
        """
        if calibration not in WORST_SCORE:
            raise RecipeError(unknown("calibration score", calibration, WORST_SCORE))
        correct = Objective("correct", pays=(layout.names[0],), scale=self.scale, if_missing=0.0)
        if not self.calibrated:
            return (correct,)
        score = Objective(
            calibration, pays=(layout.names[-1],), given="correct", if_missing=WORST_SCORE[calibration], scale=self.scale
        )
        if self.sum_first:
            return replace(correct, pays=layout.names), replace(score, pays=layout.names)
        return correct, replace(score, baseline=baseline)


METHODS = {
    method.name: method
    for method in (
        Method(
            "bae",
            bae,
            "Every block its own reward and baseline; the confidence is compared at equal outcome.",
            "a layout with two blocks or more",
            "Blockwise Advantage Estimation, arXiv 2602.10231",
        ),
        Method(
            "rlcr",
            rlcr,
            "Correctness plus calibration score as one number for the whole completion.",
            "a confidence",
            "Beyond Binary Rewards, arXiv 2507.16806",
            sum_first=True,
        ),
        Method(
            "grpo",
            grpo,
            "One reward, standardised inside the group.",
            "nothing more",
            "DeepSeekMath, arXiv 2402.03300",
            whole=True,
            per="completion",
            scale="std",
            calibrated=False,
        ),
        Method(
            "dr_grpo",
            dr_grpo,
            "One reward against its group mean, tokens divided by a constant.",
            "nothing more",
            "Understanding R1-Zero-Like Training, arXiv 2503.20783",
            whole=True,
            per="length",
            calibrated=False,
        ),
    )
}


def method(name: str) -> Method:
    """The method called `name`; a RecipeError with a suggestion if there is none."""
    if name not in METHODS:
        raise RecipeError(unknown("method", name, METHODS))
    return METHODS[name]
