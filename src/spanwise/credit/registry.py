"""The registry of the methods that compute advantages. A method has a name, inputs, a source, and the preset that recipes run."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, get_args

from spanwise.errors import LayoutError, RecipeError, check_known, unknown
from spanwise.layout import EACH, Layout
from spanwise.objective import BaselineName, Objective, is_number
from spanwise.registry import Registry

Kind = Literal["completion", "block", "token", "step", "refinement"]

#: The meaning of each property that `spanwise.testing.check_estimator` tests. A method that breaks a property by design
#: gives the reason in its `exceptions`, as in `exceptions={"shift": "the mean reward is a divisor"}`.
PROPERTIES: Mapping[str, str] = {
    "result": "the result is one finite number per completion, block, token or step, in float64 or the dtype of the inputs",
    "pure": "the method leaves its inputs unchanged, and a second call gives the same numbers",
    "precision": "rewards in float32 and float64 give the same numbers",
    "negative": "rewards may be negative",
    "absent": "an absent reward (NaN) gives exactly the advantage 0 and does not change the advantages of other rewards",
    "permutation": "the result of a row does not depend on the order of the rows or on how ids are numbered",
    "shift": "adding a constant to all rewards of a group changes nothing",
    "constant": "a group whose rewards are all equal gets exactly 0, and so does a group of one",
    "split": "a group gets the same numbers whether or not the batch has other groups",
    "masking": "masked tokens get exactly 0 and do not change the numbers of other tokens",
    "poison": "the values at masked tokens (NaN, 1e9, any id) are never read",
    "padding": "padding on the left gives the same numbers as padding on the right",
    "conservation": "the shares of a block's tokens add up to the credit of the block; tokens outside blocks get exactly 0",
    "monotone": "a higher reward never lowers the advantage of the completion, block, step or last token that gets it",
    "signs": "over all examples, some credit is above 0 and some is below 0",
}
#: Parameters of methods that objectives or the batch fill in, so users cannot set them.
FACTS = (
    "baseline", "scale_k", "back_off_k", "if_missing_k", "given_k", "judged_k", "outcome_no", "by_outcome_nk2", "weight_m",
    "bootstrap_n", "voter_n",
)  # fmt: skip
_INDEXED = re.compile(r"_(?:n|s|m|k|nm|nk|nt|st|no|n2|nk2|nmo)$")
_COMPARED = ("reward_n", "reward_nm", "reward_nk", "reward_nt", "reward_s", "group_n", "group_s")
#: Method inputs that spanwise computes from any batch, so no engine has to provide them.
_MADE = ("length_n", "block_nt", "adv_nt", "correct_n")
#: Maps a method's parameter to the field of `Batch` from which spanwise computes the parameter.
_FIELDS = {"trajectory_s": "steps", "step_s": "steps", "anchor_s": "steps", "importance_nt": "logp_nt"}
#: Maps a field of `Batch` to its name in messages.
_WORDS = {
    "value_nt": "values of a critic (value_nt)",
    "logp_nt": "log-probabilities (logp_nt)",
    "steps": "steps of trajectories (steps)",
    "ids_nt": "token ids (ids_nt)",
}
_SWITCH = (lambda value: isinstance(value, bool), "write true or false")
_ANYTHING = (lambda value: True, "")
_NUMBER = (is_number, "write a finite number")
_NOT_NEGATIVE = (lambda value: is_number(value) and value >= 0, "write a finite number, 0 or more")
_SHARE = (lambda value: is_number(value) and 0 <= value <= 1, "it must lie between 0 and 1")
#: Maps an option to a test of its value, and to advice for a value that fails.
_VALUES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "min_stratum": (lambda v: is_number(v) and isinstance(v, int) and v >= 2, "a baseline needs at least 2 completions"),
    "ddof": (lambda v: not isinstance(v, bool) and v in (0, 1), "write 0 (population) or 1 (sample)"),
    "eps": _NOT_NEGATIVE,
    "length_adaptive_alpha": (
        lambda v: v is None or (is_number(v) and v > 0),
        "write a positive number, such as 0.05 (the value of VAPO)",
    ),
    "conflict": (lambda v: v is None or (is_number(v) and 0 < v <= 1), "write null, or a number above 0 and at most 1"),
    "similarity": (lambda v: v is None or (is_number(v) and 0 < v < 1), "write null, or a number between 0 and 1"),
    "threshold": (lambda v: is_number(v) and v >= 0, "write 0 or more. Tokens below this probability are boundaries"),
    **dict.fromkeys(("gamma", "lam"), _SHARE),
}
#: Like `_VALUES`, tests of options' values, but only for spanwise's own methods: plug-ins may use the names otherwise.
_OWN_VALUES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("h1", "h2", "h3"), _NOT_NEGATIVE),
    "quantile": _SHARE,
    "beta": (
        lambda v: is_number(v) and v >= -1,
        "write -1 or more, because smaller numbers would reverse the signs of advantages",
    ),
    "window": (lambda v: is_number(v) and isinstance(v, int) and v >= 2, "write a whole number, at least 2"),
    "history": (
        lambda v: v is None or (is_number(v) and isinstance(v, int) and v >= 1),
        "write null, or a whole number, at least 1",
    ),
}


@dataclass(frozen=True)
class Preset:
    """The settings of a method for recipes that give nothing but its name.

    Attributes:
        whole: make the whole completion one block; False keeps the task's blocks.
        per: the length that credit is divided by, see `spread`; "length" is the length of the longest possible completion.
        calibrated: add a second objective, for the confidence or the second attempt.
        format: the weight of the objectives that pay well-formed tags; 0: there are none.

    Example:
        >>> METHODS["grpo"].preset.whole, METHODS["bae"].preset.whole
        (True, False)
    """

    whole: bool = False
    per: Literal["block", "completion", "length"] = "block"
    calibrated: bool = True
    format: float = 0.0


@dataclass(frozen=True)
class Method:
    """A registered estimator of advantages, such as GRPO.

    Attributes:
        name: as in recipes.
        estimator: the pure function.
        kind: what its rewards are indexed by: completions (`reward_n`, or `reward_nm` with a column per objective), blocks
            (`reward_nk`), tokens (`reward_nt`) or the steps of trajectories (`reward_s`); a refinement takes `adv_nt` instead.
        paper: where it comes from.
        preset: how a recipe runs it; None: it is called from Python only.
        exceptions: which of `PROPERTIES` it does not have by its nature -> why.
        source: what the formula here was taken from: the paper, the authors' code, a framework's, or notes about it.
        memory: makes a run's estimator, which remembers earlier batches and takes further options; None: nothing is remembered.
        only_with: option -> (another option, or what the objectives say; its values) without which the option does nothing.
        check: refuses values of several options that cannot work together; it gets all options.

    Raises:
        RecipeError: an exception to a property that does not exist.

    Example:
        >>> METHODS["gae"].kind, METHODS["gae"].required
        ('token', ('reward_nt', 'value_nt', 'mask_nt'))
    """

    name: str
    estimator: Callable[..., Any]
    kind: Kind
    paper: str
    preset: Preset | None = None
    exceptions: Mapping[str, str] = field(default_factory=dict)
    source: str = "its paper"
    only_with: Mapping[str, tuple[str, tuple[Any, ...]]] = field(default_factory=dict)
    memory: Callable[[], Callable[..., Any]] | None = None
    check: Callable[[Mapping[str, Any]], None] | None = None

    def __post_init__(self) -> None:
        for name in self.exceptions:
            if name not in PROPERTIES:
                raise RecipeError(f"Method '{self.name}': {unknown('property', name, PROPERTIES)}")

    def of_a_run(self) -> Method:
        """Return the method with an empty memory of earlier batches, for a new run."""
        return self if self.memory is None else replace(self, estimator=self.memory(), memory=None)

    @property
    def summary(self) -> str:
        """The first sentence of the estimator's docstring."""
        return (inspect.getdoc(self.estimator) or "").split("\n")[0]

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """The names of the estimator's parameters, in order."""
        return tuple(self._parameters)

    @cached_property
    def required(self) -> tuple[str, ...]:
        """The estimator's parameters that have no default."""
        return tuple(name for name, p in self._parameters.items() if p.default is p.empty)

    @cached_property
    def needs(self) -> tuple[str, ...]:
        """The inputs that the estimator requires besides rewards and prompt ids, such as `mask_nt`."""
        return tuple(name for name in self.required if name not in _COMPARED)

    @cached_property
    def fields(self) -> frozenset[str]:
        """The fields of `Batch` that the method needs besides rewards and prompt ids."""
        return frozenset(_FIELDS.get(name, name) for name in self.needs if name not in _MADE)

    def lacking(self, provided: Collection[str]) -> str:
        """Name the fields of `Batch` that the method needs and the batch lacks. Return "" if none."""
        return " and ".join(_WORDS.get(name, name) for name in sorted(self.fields - {*provided}))

    @cached_property
    def reads_values(self) -> bool:
        """True if the method computes an advantage for each token from a critic's values."""
        return self.kind == "token" and "value_nt" in self.needs

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """The estimator's keyword parameters with their defaults."""
        parameters = self._parameters.items()
        return {name: p.default for name, p in parameters if p.kind is p.KEYWORD_ONLY and p.default is not p.empty}

    @property
    def stateful(self) -> bool:
        """True if the estimator remembers earlier batches (`state_dict`, `load_state_dict`)."""
        return hasattr(self.estimator, "state_dict") and hasattr(self.estimator, "load_state_dict")

    @cached_property
    def options(self) -> dict[str, Any]:
        """The options of the method that a user may set, with their defaults."""
        return {name: value for name, value in self.settings.items() if name not in FACTS and not _INDEXED.search(name)}

    def check_names(self, options: Collection[str]) -> None:
        """Refuse options that the method does not have, with a `RecipeError`."""
        for name in options:
            if name not in self.options:
                belongs_to_objective = name in ("baseline", "scale", "back_off") and "baseline" in self.inputs
                raise RecipeError(
                    f"Method '{self.name}' has no option '{name}'; it has {', '.join(sorted(self.options)) or 'none'}."
                    f"{' Set this option in the objectives.' if belongs_to_objective else ''}"
                )

    def check_options(self, options: Mapping[str, Any], **says: list[Any]) -> None:
        """Refuse options of the method that are unknown, impossible or without effect (`RecipeError`).

        Args:
            options: what is chosen.
            **says: what the objectives say, by the name that `only_with` has for it.
        """
        self.check_names(options)
        for name, value in options.items():
            passes_check, advice = self._rule_of(name)
            if not passes_check(value):
                raise RecipeError(f"The option {name} is {value!r}; {advice}.")
            if name in self.only_with and value != self.options[name]:
                other_option, required_values = self.only_with[name]
                chosen_values = says.get(other_option, [{**self.options, **options}.get(other_option)])
                if not any(chosen_value in required_values for chosen_value in chosen_values):
                    raise RecipeError(
                        f"Option '{name}' of method '{self.name}' would change nothing here. It has an effect only if "
                        f"{other_option.removesuffix('_k')} is {' or '.join(map(str, required_values))}."
                    )
        if self.check is not None:
            self.check({**self.options, **options})

    def _rule_of(self, name: str) -> tuple[Callable[[Any], bool], str]:
        """Return a function that checks an option's value, and advice for a user whose value fails the check."""
        if allowed_words := self._words.get(name):
            return allowed_words.__contains__, f"write {', '.join(allowed_words[:-1])} or {allowed_words[-1]}"
        is_own_method = f"{getattr(self.estimator, '__module__', '')}.".startswith("spanwise.")
        if value_rule := _VALUES.get(name) or (_OWN_VALUES.get(name) if is_own_method else None):
            return value_rule
        # An option with a boolean or numeric default takes only such values, unless annotated otherwise.
        default, annotation = self.options[name], self._parameters[name].annotation
        option_type = type(default)
        if annotation not in (option_type, option_type.__name__, inspect.Parameter.empty):
            return _ANYTHING
        return _SWITCH if option_type is bool else _NUMBER if option_type is float and is_number(default) else _ANYTHING

    @cached_property
    def _words(self) -> dict[str, tuple[str, ...]]:
        """The allowed words of each option that has the type `Literal`."""
        try:
            parameters = inspect.signature(self.estimator, eval_str=True).parameters
        except (NameError, AttributeError, TypeError, SyntaxError):  # a plug-in's annotation cannot be evaluated
            return {}
        words_by_option = {name: get_args(p.annotation) for name, p in parameters.items() if name in self.options}
        return {name: words for name, words in words_by_option.items() if words and all(isinstance(w, str) for w in words)}

    @cached_property
    def _parameters(self) -> dict[str, inspect.Parameter]:
        fixed_parameters = getattr(self.estimator, "keywords", {})  # parameters that a functools.partial has fixed
        parameters = inspect.signature(self.estimator).parameters.items()
        variadic_kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        return {name: p for name, p in parameters if name not in fixed_parameters and p.kind not in variadic_kinds}


#: All registered methods by name.
METHODS: Registry[Method] = Registry(
    "method", kinds=("completion", "block", "token", "step", "refinement"), group="spanwise.methods", entry=Method
)


def method(name: str) -> Method:
    """Return the method called `name`, spanwise's or a plug-in's. For an unknown name, a RecipeError suggests the nearest name.

    Example:
        >>> method("rloo").kind
        'completion'
    """
    return METHODS.find(name)


def outcome_methods() -> tuple[str, ...]:
    """Return the names of the methods that need one reward per completion and nothing else."""
    completion_methods = (entry for entry in METHODS.values() if entry.kind == "completion" and not entry.needs)
    return tuple(sorted(entry.name for entry in completion_methods if entry.inputs[0] == "reward_n"))


#: The lowest value of each calibration score. A completion without a confidence gets it.
WORST_SCORE = {"brier": -1.0, "log_score": -4.605170185988091}


def states_confidence(layout: Layout) -> bool:
    """Return whether the last block of a layout states a confidence. If not, it is a second attempt."""
    return len(layout.names) == 1 or "confidence" in layout.keys[layout.names[-1]]


def preset_rule(
    chosen: Method, task: Layout, calibration: str | None, baseline: BaselineName | None
) -> tuple[Layout, tuple[Objective, ...]]:
    """Return the layout and the objectives of a method's preset."""
    preset = chosen.preset or Preset()
    method_layout = _merge_blocks(task) if preset.whole and len(task.names) > 1 else task
    if calibration is not None and not (preset.calibrated and states_confidence(method_layout)):
        explanation = f"method '{chosen.name}' rewards no confidence"
        if preset.calibrated:
            explanation = "the last block states no confidence"
        raise RecipeError(
            f"calibration is '{calibration}', but {explanation}, so the calibration would change nothing. Leave calibration out."
        )
    if baseline is not None and not (preset.calibrated and "baseline" in chosen.inputs):
        raise RecipeError(
            f"baseline is '{baseline}', but method '{chosen.name}' has a baseline of its own, so yours would change "
            "nothing. Leave it out, or use method 'bae'."
        )
    return method_layout, preset_objectives(chosen, method_layout, calibration=calibration or "brier", baseline=baseline)


def _merge_blocks(task: Layout) -> Layout:
    """Merge all blocks into one. Keep them if two blocks share a mark, a block is repeated, or a mark must be its block's name."""
    is_repeated = any(EACH in name for name, _ in task.blocks)
    if not is_repeated and len(task.marks) == sum(len(marks) for _, marks in task.blocks):
        with suppress(LayoutError):
            return replace(task, blocks={"completion": task.marks})
    return task


def preset_objectives(
    chosen: Method, layout: Layout, *, calibration: str = "brier", baseline: BaselineName | None = None
) -> tuple[Objective, ...]:
    """Return a preset's objectives: correctness, then calibration or a second attempt, and the form of each block."""
    check_known("calibration score", calibration, WORST_SCORE)
    first_block, last_block = layout.names[0], layout.names[-1]
    preset = chosen.preset or Preset()
    takes_baseline = "baseline" in chosen.inputs
    is_blockwise = chosen.kind == "block"
    correctness_baseline = "group" if takes_baseline else None
    baseline_of_second_objective = (baseline or "outcome") if takes_baseline else None
    # Of the blocks that an objective rewards (`pays`), its reward function reads only the first.
    blocks_paid_by_correctness = (first_block,) if is_blockwise else layout.names
    objectives = [Objective("correct", pays=blocks_paid_by_correctness, baseline=correctness_baseline, if_missing=0.0)]
    if preset.calibrated:
        has_confidence = states_confidence(layout)
        second_objective = Objective(
            calibration if has_confidence else "second_attempt",
            pays=(last_block,) if is_blockwise else tuple(dict.fromkeys((last_block, *layout.names))),
            given="correct" if has_confidence or baseline_of_second_objective in ("outcome", "blended") else (),
            baseline=baseline_of_second_objective,
            if_missing=WORST_SCORE[calibration] if has_confidence else 0.0,
            options={} if has_confidence else {"first": first_block},
        )
        objectives.append(second_objective)
    # The format rewards accept an empty tag, because other rewards judge the text inside it.
    format_blocks = [name for name, _ in layout.blocks if EACH not in name]  # the reward `format` refuses repeated blocks
    can_pay_format = is_blockwise or len(format_blocks) == len(layout.blocks)
    if preset.format and can_pay_format and layout.segmenters == ("tags",):
        settings: dict[str, Any] = {"weight": preset.format, "baseline": correctness_baseline, "options": {"empty": True}}
        format_objectives = [Objective("format", name, name=f"{name}_format", **settings) for name in format_blocks]
        objectives += format_objectives if is_blockwise else [Objective("format", format_blocks, if_missing=0.0, **settings)]
    return tuple(objectives)
