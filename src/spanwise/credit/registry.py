"""The registry of methods: every estimator by name, with what it needs, its paper and the preset that runs it from a recipe."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any, Literal, TypeVar

from spanwise.errors import RecipeError, unknown
from spanwise.objective import BaselineName

Kind = Literal["completion", "block", "token", "step"]
Estimator = TypeVar("Estimator", bound=Callable[..., Any])

#: What `spanwise.testing.check_estimator` asks of every method, as far as it applies to its kind. A method whose nature breaks one
#: of them says so where it registers: `exceptions={"shift": "the reward is divided by the mean reward"}`.
PROPERTIES: Mapping[str, str] = {
    "result": "one finite number for every completion, block, token or step, in the promised dtype",
    "pure": "its inputs stay as they are and a second call gives the same numbers",
    "precision": "rewards in float32 and float64 give the same numbers",
    "negative": "rewards may be negative",
    "absent": "a NaN reward gets exactly 0 and is left out: the others get what they get without it",
    "permutation": "another order of the rows, or other group ids, only reorders the result",
    "shift": "adding a constant to all rewards of a group changes nothing",
    "constant": "a group whose rewards are all equal, or a group of one, gets exactly 0",
    "split": "groups computed in separate batches get what they get in one batch",
    "masking": "masked tokens, wherever they stand, change nothing at the others and get exactly 0",
    "poison": "what stands at a masked token (NaN, 1e9, any id) is never read",
    "padding": "padding on the left and on the right give the same numbers",
    "conservation": "spread over the tokens of its block, credit adds up to itself and is exactly 0 elsewhere",
}

#: Distributions announce methods of their own under this entry point group; loading the entry point must register them.
ENTRY_POINT_GROUP = "spanwise.methods"


@dataclass(frozen=True)
class Preset:
    """How a recipe runs a method when it names nothing but the method.

    Attributes:
        whole: the completion is one block; otherwise the task's own blocks.
        sum_first: the rewards are added up before the estimator sees them.
        per: what a token's share is counted in, see `spread`; "length" is the recipe's max_completion_length.
        calibrated: there is a second objective on the confidence.
        baseline: of the confidence; None: the recipe's own choice.
        scale: of every objective.
        weight: of the confidence.
        whiten: the summed credit is standardised over the batch (GDPO).
    """

    whole: bool = False
    sum_first: bool = False
    per: Literal["block", "completion", "length"] = "block"
    calibrated: bool = True
    baseline: BaselineName | None = None
    scale: Literal["none", "std"] = "none"
    weight: float = 1.0
    whiten: bool = False


@dataclass(frozen=True)
class Method:
    """A named estimator.

    Attributes:
        name: as in recipes.
        estimator: the pure function.
        kind: what its rewards are indexed by: completions (`reward_n`), blocks (`reward_nk`), tokens (`reward_nt`) or the steps
            of trajectories (`reward_s`).
        paper: where it comes from.
        preset: how a recipe runs it; None: it is called from Python only.
        exceptions: which of `PROPERTIES` it does not have by its nature -> why.
    """

    name: str
    estimator: Callable[..., Any]
    kind: Kind
    paper: str
    preset: Preset | None
    exceptions: Mapping[str, str] = field(default_factory=dict)

    @property
    def summary(self) -> str:
        """The first sentence of the estimator's docstring."""
        return (inspect.getdoc(self.estimator) or "").split("\n")[0]

    @property
    def needs(self) -> tuple[str, ...]:
        """The inputs it cannot do without, beside rewards and prompt ids."""
        parameters = list(inspect.signature(self.estimator).parameters.values())[1:]
        required = (p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD)
        return tuple(name for name in required if name not in ("group_n", "group_s"))

    @property
    def settings(self) -> Mapping[str, Any]:
        """Its keyword options with their defaults."""
        parameters = inspect.signature(self.estimator).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is not p.empty}


METHODS: dict[str, Method] = {}


def register(
    name: str, *, kind: Kind, paper: str, preset: Preset | None = None, exceptions: Mapping[str, str] | None = None
) -> Callable[[Estimator], Estimator]:
    """Register an estimator under a name; the function itself stays as it is.

    Raises:
        RecipeError: another function has the name already, or an exception to a property that does not exist.

    Example:
        >>> @register("mean_of_two", kind="completion", paper="none")
        ... def mean_of_two(reward_n, group_n):
        ...     '''Halve every reward.'''
        ...     return reward_n / 2
        >>> METHODS.pop("mean_of_two").summary
        'Halve every reward.'
    """
    for property_name in exceptions or {}:
        if property_name not in PROPERTIES:
            raise RecipeError(f"Method '{name}': {unknown('property', property_name, PROPERTIES)}")

    def decorate(estimator: Estimator) -> Estimator:
        known = METHODS.get(name)
        if known is not None and known.estimator is not estimator:
            place = f"{known.estimator.__module__}.{known.estimator.__qualname__}"
            raise RecipeError(f"There is a method '{name}' already ({place}); register yours under another name.")
        METHODS[name] = Method(name, estimator, kind, paper, preset, dict(exceptions or {}))
        return estimator

    return decorate


def method(name: str) -> Method:
    """The method called `name`, from here or from an installed plug-in; a RecipeError with a suggestion if there is none."""
    if name not in METHODS:
        load_plugins()
    if name not in METHODS:
        raise RecipeError(unknown("method", name, METHODS))
    return METHODS[name]


def load_plugins() -> None:
    """Import what other distributions announce under `spanwise.methods`; a broken one is named, not hidden.

    Raises:
        RecipeError: a plug-in that cannot be imported.
    """
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        try:
            entry.load()
        except Exception as error:  # whatever a stranger's module raises, the user must learn which one it was
            raise RecipeError(f"The plug-in '{entry.name}' ({entry.value}) cannot be loaded: {error}.") from error
