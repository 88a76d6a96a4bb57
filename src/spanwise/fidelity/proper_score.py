"""Proper scores of a stated confidence, on tensors: what a re-rolled confidence would have earned."""

from __future__ import annotations

from typing import Literal

from jaxtyping import Float
from torch import Tensor

from spanwise.errors import RecipeError, unknown

#: The scores that are best for whoever says what they believe.
ScoreName = Literal["brier", "log_score"]


def proper_score(
    confidence: Float[Tensor, "*n"], outcome: Float[Tensor, "*n"], *, rule: ScoreName = "brier", clip: float = 0.01
) -> Float[Tensor, "*n"]:
    r"""Score confidences by what came true: the rewards `brier` and `log_score`, without their text.

    Equation
        brier      -(q - c)^2
        log_score  c log q' + (1 - c) log(1 - q'), q' = q clipped to [clip, 1 - clip]

    Args:
        confidence: q in [0, 1], any shape; NaN where none was stated (its score is NaN).
        outcome: c, 0 or 1.
        rule: which score.
        clip: least confidence that counts; of log_score.

    Raises:
        RecipeError: there is no such rule.

    Example:
        >>> import torch
        >>> q, c = torch.tensor([.7, .7]), torch.tensor([1., 0.])
        >>> proper_score(q, c), proper_score(q, c, rule="log_score")
        (tensor([-0.0900, -0.4900]), tensor([-0.3567, -1.2040]))
    """
    if rule == "brier":
        return -(confidence - outcome).square()
    if rule != "log_score":
        raise RecipeError(unknown("score of a confidence", rule, ("brier", "log_score")))
    clipped = confidence.clamp(clip, 1 - clip)
    return outcome * clipped.log() + (1 - outcome) * (1 - clipped).log()
