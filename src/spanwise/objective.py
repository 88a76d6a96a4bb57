"""`Objective`: a reward, and the blocks whose tokens it credits."""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, update_wrapper
from numbers import Real
from typing import Any, Literal, Protocol, runtime_checkable

from spanwise.errors import RecipeError, check_known
from spanwise.registry import registered

BaselineName = Literal["none", "batch", "group", "outcome", "blended"]
BASELINES: tuple[BaselineName, ...] = ("none", "batch", "group", "outcome", "blended")
ScaleName = Literal["none", "std"]
ScopeName = Literal["rollout", "turn"]
#: If an objective is repeated for each block, "own" means the current block, and "earlier" the blocks before it.
EARLIER, OWN = "earlier", "own"
HIDDEN = "<hidden>"  # the text that saved files hold in place of a secret, such as an API key


@runtime_checkable
class Rubric(Protocol):
    """A rubric of the library `verifiers`: reward functions and their weights."""

    funcs: list[Any]
    weights: list[float]


@dataclass(frozen=True, init=False)
class Objective:
    """A reward, the blocks whose tokens it credits, and its baseline.

    Args:
        reward: the name of a built-in reward (`correct`, `brier`, ...) or a function, plain or async, as TRL, verl, verifiers or
            inspect_ai call it, see `spanwise.score.rewards`. A rubric of verifiers becomes one objective per function.
        criteria: a rubric, a list of texts with a weight and the part they are about. A YAML file, or the list itself: an objective
            per criterion, called `<name>.<criterion>`, which pays that part (else `pays`), for a reward that has an option
            `criterion`, such as `judge`. A column with a rubric for each prompt: one objective per paid block, `<name>.<block>`,
            whose reward adds up the weighted verdicts about that block; a criterion without a part is asked of each paid block.
        only: an objective earlier in the list: the reward is kept where that one is 1, and is UNSCORED elsewhere, so that right
            completions are compared with right ones and the others get nothing (PAPO, arXiv 2603.26535). Where completions are
            turns, that one counts for all turns of a rollout, unless its scope is "turn".
        key: of a function that returns a dict for each completion, the entry that is the reward. None: verl's `score`.
        pays: the blocks, or the block, whose tokens this reward moves. `items[*]` is `items` of any index; `*` is all but the rest.
        each: instead of one objective, one per block that this name or pattern matches, called `<name>.<block>`. Each reads the
            part that its block is made of (the option `tag`) and pays its block, or what `pays` says (`OWN`: its own block).
        given: the outcomes of what comes before the paid blocks that the baseline may know (`baseline: outcome` or `blended`),
            from coarse to fine. Each is the name of an objective earlier in the list (its reward is the outcome), the name of a
            registered outcome, "module:function", or a function, see `spanwise.score.outcomes`. One of them need not be a list.
            `brier` and `log_score` judge the report by one of them, their option `of`, whose reward counts for all turns of a
            rollout as in `only`. With `each`, `EARLIER` stands for the rewards of the blocks before its own, the nearest first.
        baseline: what is subtracted: nothing, the batch mean, the group mean, the mean of the group's completions with the
            same outcomes, or the blended estimate of it. None: the method's own choice.
        scale: divide by the standard deviation of the same stratum, or not. None: the method's own choice.
        back_off: where too few completions of the group have the same outcomes, compare with those that agree in all but the
            last, and so on up to the whole group (`baseline: outcome`). None: if several outcomes are given; else no credit.
        weight: multiplies the credit.
        if_missing: what a reward stands for that the completion left out (no confidence, or an unreadable one). Its credit goes
            to the paid blocks; a completion that lacks them all carries it on its last trainable token. None: no credit, so that
            leaving the block out costs nothing, and a policy that earns little there may learn to. What a reward function returns
            for a completion without the block does not count: this number does.
        scope: what the reward is a fact of, where completions are turns of rollouts (`Batch.steps`). "rollout": of all its turns,
            taken from the last turn that has it; compared with one vote per rollout, it pays the blocks of every turn. "turn": of
            one turn, whose blocks it pays; compared with the turns of the group, those of a rollout together one vote. None:
            the rollout, but the turn for methods that credit steps.
        name: how metrics call it; defaults to the reward's name. For a rubric of verifiers: its functions are `<name>.<function>`.
        options: further keyword arguments of the reward (`tag`, `column`, `clip`, ...).

    Raises:
        RecipeError: a field that holds what it cannot mean, or the name of no reward, with what to write instead.

    Example:
        >>> Objective("brier", pays=("confidence",), given=("correct", "complete"), baseline="outcome").outcomes
        ('correct', 'complete')
    """

    reward: str | Callable[..., Any]
    pays: tuple[str, ...]
    given: tuple[str | Callable[..., Any], ...]
    baseline: BaselineName | None
    scale: ScaleName | None
    back_off: bool | None
    weight: float
    if_missing: float | None
    scope: ScopeName | None
    name: str
    options: Mapping[str, Any]
    each: str | None
    key: str | None
    criteria: str | Sequence[Any] | None
    only: str | None

    # `pays` and `given` take one name or a list, but the fields are always tuples.
    def __init__(
        self,
        reward: str | Callable[..., Any] | Rubric,
        pays: str | Sequence[str] = (),
        given: str | Callable[..., Any] | Sequence[str | Callable[..., Any]] | None = None,
        baseline: BaselineName | None = None,
        scale: ScaleName | None = None,
        back_off: bool | None = None,
        weight: float | int = 1.0,
        if_missing: float | int | None = None,
        scope: ScopeName | None = None,
        name: str = "",
        options: Mapping[str, Any] | None = None,
        each: str | None = None,
        key: str | None = None,
        criteria: str | Sequence[Any] | None = None,
        only: str | None = None,
    ) -> None:
        field_values = {key: value for key, value in locals().items() if key != "self"}
        field_values |= {"pays": _several(pays), "given": _several(given), "options": {} if options is None else options}
        field_values["name"] = name or key or (reward if isinstance(reward, str) else getattr(reward, "__name__", "reward"))
        vars(self).update(field_values)
        self._check_types()
        self._check_baseline()
        vars(self).update(weight=float(weight), if_missing=None if if_missing is None else float(if_missing))

    @property
    def outcomes(self) -> tuple[str, ...]:
        """The names of the outcomes on which the baseline may depend. A function's name is "module:function"."""
        return tuple(outcome if isinstance(outcome, str) else function_name(outcome) for outcome in self.given)

    def _check_types(self) -> None:
        """Refuse wrong types, an unknown reward, and an outcome that is given twice."""
        rule_by_field: Mapping[str, tuple[bool, str]] = {
            "reward": (
                isinstance(self.reward, (str, Rubric)) or _is_function(self.reward),
                "write the name of a reward, or pass a function or an instance of a class",
            ),
            "key": (
                isinstance(self.key, str) and not isinstance(self.reward, str),
                "name an entry of the dict that your reward function returns",
            ),
            "name": (isinstance(self.name, str), "a name is text"),
            "pays": (_all(self.pays, lambda x: isinstance(x, str) and x), "write names of blocks: 'pays: [solution]'"),
            "given": (
                _all(self.given, lambda x: (isinstance(x, str) and x) or (_is_function(x) and not is_async(x))),
                "write names of earlier objectives or outcomes, or 'module:function'. In Python, functions work, too",
            ),
            "each": (isinstance(self.each, str) and self.each != "", "write a block or a pattern: 'items[*]'"),
            "criteria": (
                isinstance(self.criteria, (str, list, tuple)) and len(self.criteria) > 0,
                "write a list, such as [{text: It names a figure., part: plan}], or name a file or column with such a list",
            ),
            "only": (isinstance(self.only, str), "name an earlier objective: 'correct'"),
            "weight": (is_number(self.weight), "write a finite number"),
            "if_missing": (is_number(self.if_missing), "write a finite number, or leave the field out"),
            "back_off": (isinstance(self.back_off, bool), "write true or false, or leave the field out"),
            "scope": (self.scope in ("rollout", "turn"), "write 'rollout' or 'turn', or leave the field out"),
            "options": (isinstance(self.options, Mapping), "write 'options: {name: value}'"),
        }
        optional_keys = ("key", "each", "criteria", "only", "if_missing", "back_off", "scope")
        for field_name, (is_valid, advice) in rule_by_field.items():
            if not is_valid and not (getattr(self, field_name) is None and field_name in optional_keys):
                raise RecipeError(f"Objective '{self.name}' has {field_name}: {getattr(self, field_name)!r}; {advice}.")
        if isinstance(self.reward, str):
            registered("reward").find(self.reward)
        if not self.pays and self.each is None and self.criteria is None:
            raise RecipeError(f"Objective '{self.name}' pays no block; name at least one in 'pays'.")
        if EARLIER in self.outcomes and self.each is None:
            raise RecipeError(
                f"Objective '{self.name}' has '{EARLIER}' in 'given', but no field 'each'. '{EARLIER}' stands for the rewards of "
                f"the blocks before the scored block, so it only works with 'each'. Add 'each', or remove '{EARLIER}'."
            )
        doubled_name = next((name for name in self.outcomes if self.outcomes.count(name) > 1), None)
        if doubled_name is not None:
            raise RecipeError(f"Objective '{self.name}' has '{doubled_name}' twice in 'given'; name each outcome once.")

    def _check_baseline(self) -> None:
        """Refuse an unknown baseline, scale or back_off. Also one that contradicts the other fields."""
        check_known("baseline", self.baseline or "none", BASELINES)
        check_known("scale", self.scale or "none", ("none", "std"))
        if self.baseline in ("outcome", "blended") and not self.given:
            raise RecipeError(
                f"Objective '{self.name}' has the baseline '{self.baseline}', which needs an outcome in 'given'. Add "
                "'given: correct' (the name of an earlier objective) or use 'baseline: group'."
            )
        if self.scope == "turn" and (self.baseline == "blended" or self.scale == "std"):
            whole_rollout_setting = "baseline: blended" if self.baseline == "blended" else "scale: std"
            raise RecipeError(
                f"Objective '{self.name}' has scope: turn, but {whole_rollout_setting} works with whole rollouts only. Remove "
                "one of the two settings."
            )
        if self.back_off is not None and self.baseline != "outcome":
            raise RecipeError(
                f"Objective '{self.name}' has back_off: {str(self.back_off).lower()}, which needs the baseline 'outcome'; "
                f"leave it out or write 'baseline: outcome'."
            )


def hidden_names(settings: Any, prefix: str = "") -> list[str]:
    """Return the paths of hidden secrets in nested settings, such as `judge.key`."""
    if isinstance(settings, str) and settings == HIDDEN:  # `==` of an array has no single truth value
        return [prefix]
    setting_entries: Iterable[tuple[Any, Any]] = enumerate(settings) if isinstance(settings, list) else ()
    if isinstance(settings, Mapping):
        setting_entries = settings.items()
    return [path for name, setting in setting_entries for path in hidden_names(setting, f"{prefix}.{name}".lstrip("."))]


def function_name(function: Callable[..., Any]) -> str:
    """Return a function's name as recipes write it, "module:function". An object goes by its class."""
    function_or_class = function if hasattr(function, "__qualname__") else type(function)
    if function_or_class is partial:
        raise RecipeError(f"{function!r} has no name, so no file can name it. Wrap it in a named function, or register it.")
    return f"{function_or_class.__module__}:{function_or_class.__qualname__}"


def _several(names_or_functions: Any) -> Any:
    """Turn one name or function, or a list of them, into a tuple. Leave other values as they are."""
    if names_or_functions is None:
        return ()
    if isinstance(names_or_functions, str) or callable(names_or_functions):
        return (names_or_functions,)
    return tuple(names_or_functions) if isinstance(names_or_functions, Sequence) else names_or_functions


def is_async(value: Any) -> bool:
    """Return whether the result of a function must be awaited. Objects with a call count too."""
    call_method = getattr(value, "__call__", None)  # noqa: B004 - an instance may have an async __call__
    return inspect.iscoroutinefunction(value) or inspect.iscoroutinefunction(call_method)


def rubric_functions(rubric: Rubric) -> list[tuple[Callable[..., Any], float]]:
    """Return the reward functions of a rubric of `verifiers`, each with its weight. Its objects are bound."""
    if member_rubrics := getattr(rubric, "rubrics", None):
        return [function_and_weight for member in member_rubrics for function_and_weight in rubric_functions(member)]
    class_objects = getattr(rubric, "class_objects", {})
    return [(_bind(function, class_objects), weight) for function, weight in zip(rubric.funcs, rubric.weights, strict=True)]


def _bind(function: Callable[..., Any], objects: Mapping[str, Any]) -> Callable[..., Any]:
    """Bind named objects to a function's parameters with the same names, and drop the parameters from its signature."""
    function_signature = inspect.signature(function)
    bound_objects = {name: objects[name] for name in function_signature.parameters if name in objects}
    free_parameters = [parameter for name, parameter in function_signature.parameters.items() if name not in objects]
    bound_function: Any = update_wrapper(partial(function, **bound_objects), function)
    bound_function.__signature__ = function_signature.replace(parameters=free_parameters)
    return bound_function if bound_objects else function


def _is_function(value: Any) -> bool:
    """Return whether a value can be called like a function and is no class."""
    return callable(value) and not inspect.isclass(value)


def _all(values: Any, test: Callable[[Any], Any]) -> bool:
    """Return whether a value is a tuple whose entries all pass a test."""
    return isinstance(values, tuple) and all(test(value) for value in values)


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number and not a bool."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def is_number_table(choices: Any) -> bool:
    """Return whether a value maps two or more names to numbers."""
    return isinstance(choices, Mapping) and len(choices) > 1 and all(map(is_number, choices.values()))


def families(names: Iterable[str]) -> dict[str, list[str]]:
    """Group names: the names `reward.part` of a reward with more than three parts form one group."""
    all_names = list(names)
    names_by_family: dict[str, list[str]] = {}
    part_counts = Counter(name.partition(".")[0] for name in all_names if "." in name)
    for name in all_names:
        reward_name = name.partition(".")[0]
        is_part = "." in name and part_counts[reward_name] > 3
        names_by_family.setdefault(f"{reward_name} ({part_counts[reward_name]} parts)" if is_part else name, []).append(name)
    return names_by_family
