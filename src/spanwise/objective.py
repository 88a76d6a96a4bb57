"""`Objective`: one reward, the blocks it pays, and what its baseline is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from spanwise.errors import RecipeError, unknown

BaselineName = Literal["none", "batch", "group", "outcome", "blended"]
BASELINES: tuple[BaselineName, ...] = ("none", "batch", "group", "outcome", "blended")
ScaleName = Literal["none", "std"]


@dataclass(frozen=True)
class Objective:
    """One reward, the blocks it pays, and what its baseline is given.

    Args:
        reward: the name of a built-in reward (`correct`, `brier`, ...) or a callable, see `spanwise.score.rewards`.
        pays: the blocks whose tokens this reward moves.
        given: the name of an objective earlier in the list whose reward is the outcome that the baseline may know
            (`baseline: outcome` or `blended`), and by which `brier` and `log_score` judge the report.
        baseline: what is subtracted: nothing, the batch mean, the group mean, the mean of the group's completions with the
            same outcome, or the blended estimate of it.
        scale: divide by the standard deviation of the same stratum, or not.
        weight: multiplies the credit.
        if_missing: what a reward stands for that the completion left out (no confidence, or an unreadable one). Its credit goes
            to the paid blocks; a completion that lacks them all carries it on its last trainable token. None: no credit.
        name: how metrics call it; defaults to the reward's name.
        options: further keyword arguments of the reward (`tag`, `column`, `clip`, ...).

    Example:
        >>> Objective("brier", pays=("confidence",), given="correct", baseline="outcome", if_missing=-1.0).name
        'brier'
    """

    reward: str | Callable[..., Any]
    pays: tuple[str, ...]
    given: str | None = None
    baseline: BaselineName = "group"
    scale: ScaleName = "none"
    weight: float = 1.0
    if_missing: float | None = None
    name: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "pays", tuple(self.pays))
        if not self.name:
            label = self.reward if isinstance(self.reward, str) else getattr(self.reward, "__name__", "reward")
            object.__setattr__(self, "name", label)
        if not self.pays:
            raise RecipeError(f"Objective '{self.name}' pays no block; name at least one in 'pays'.")
        if self.baseline not in BASELINES:
            raise RecipeError(unknown("baseline", self.baseline, BASELINES))
        if self.scale not in ("none", "std"):
            raise RecipeError(unknown("scale", self.scale, ("none", "std")))
        if self.baseline in ("outcome", "blended") and self.given is None:
            raise RecipeError(
                f"Objective '{self.name}' has baseline '{self.baseline}' and no outcome to condition on; "
                f"add 'given: correct' (the name of an earlier objective) or use 'baseline: group'."
            )
