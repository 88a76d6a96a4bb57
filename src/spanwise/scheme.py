"""`Scheme`: the complete rule of credit, made of a layout, objectives, a method and its options."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from spanwise.credit import METHODS, Method, method
from spanwise.credit.refinement import Refinement
from spanwise.credit.registry import preset_rule
from spanwise.credit.spread import ValuesName, name_streams, resolve_values
from spanwise.errors import RecipeError, wrong_entries
from spanwise.layout import Layout
from spanwise.mode import Mode, check_modes
from spanwise.objective import BaselineName, Objective, ScopeName, function_name
from spanwise.score.outcomes import judge_of
from spanwise.score.reward import built_in
from spanwise.score.score import check_objectives, measures_of, written_out
from spanwise.segment import SEGMENTERS

SCRIPT = "own"  # The value of `task` in run folders of a user's own training script.
_OTHER_NAMES = {"gae_lambda_policy": "lam"}  # NeMo-RL's name of the option `lam`.


@dataclass(frozen=True)
class Scheme:
    """The complete rule of credit: blocks, rewards, how completions are compared, and how tokens share credit.

    Attributes:
        method: name of a registered method.
        layout: the blocks of a completion and the segmenters that find them.
        objectives: the rewards, the blocks that each pays and its baseline. `given` may name objectives earlier in the list only.
        per: the length that a credit is divided by: "block", "completion" or a number of tokens, see `spread`; or "batch", the
            mean length of the batch's completions, so that the loss is the mean over all of its tokens.
        options: the method's options that differ from its defaults (`spanwise methods NAME` lists them).
        recorded: objectives whose rewards come from a file, so that the layout need not have the tags they would read.
        values: what a critic predicts (`gae`, `sae`). "shared": the sum of all rewards still to come. "objective": each objective's
            own reward, with a recursion over the blocks it pays. None: "objective" if objectives pay different blocks, else
            "shared". See docs/methods.md.
        modes: features beside the method, such as a `Laser`, in the order in which they change the credit.
        refine: the refinement that changes the advantages of tokens after method and modes; None: no refinement.

    Raises:
        RecipeError: an unknown method, an option or a field of an objective that it would ignore, or that the layout lacks.

    Example:
        >>> layout = Layout({"solution": ["answer"], "confidence": ["confidence"]})
        >>> scheme = Scheme.preset("bae", layout, baseline="blended")
        >>> [(o.name, o.pays, o.baseline) for o in scheme.objectives[:2]]
        [('correct', ('solution',), 'group'), ('brier', ('confidence',), 'blended')]
    """

    method: str
    layout: Layout
    objectives: Sequence[Objective]
    per: str | float | int = "block"
    options: Mapping[str, Any] = field(default_factory=dict)
    recorded: frozenset[str] = frozenset()
    values: ValuesName | None = None
    modes: Sequence[Mode] = ()
    refine: Refinement | None = None

    def __post_init__(self) -> None:
        _check_layout(self.layout)
        _check_kinds(self.objectives, self.options)
        check_modes(self.modes)
        vars(self).update(
            objectives=written_out(self.objectives, self.layout),
            per=_parse_per(self.per),
            options=_translate(self.options, self.entry),
            recorded=_as_set(self.recorded),
            modes=tuple(self.modes),
        )
        check_objectives(self.objectives, self.layout, recorded=self.recorded)
        _check_objectives_used(self)
        _check_values(self)
        for stage in self.stages:
            stage.check_scheme(self)
        baselines = [objective.baseline or "group" for objective in self.objectives]
        scales = [objective.scale or "none" for objective in self.objectives]
        self.entry.check_options(self.options, baseline=baselines, scale_k=scales)

    @staticmethod
    def preset(
        name: str,
        layout: Layout,
        *,
        objectives: Sequence[Objective] | None = None,
        calibration: str | None = None,
        baseline: BaselineName | None = None,
        per: str | float | int | None = None,
        longest: int | None = None,
        recorded: Collection[str] = (),
        values: ValuesName | None = None,
        modes: Sequence[Mode] = (),
        refine: Refinement | str | Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Scheme:
        """Build the preset of a method: the scheme that it is meant to run with. Arguments change it.

        Args:
            name: name of the method.
            layout: the blocks of the task. Without `objectives`, a method that credits whole completions merges the blocks
                into one, unless two blocks share a tag, as two attempts do.
            objectives: replace those of the preset.
            calibration: how the preset scores a confidence, `brier` (default) or `log_score`.
            baseline: baseline of the preset's second objective; `outcome` by default.
            per: replaces the preset's.
            longest: number of tokens of the longest possible completion, for presets that divide by it.
            recorded, values, modes, refine: see `Scheme`.
            **options: options of the method; a mode by its name, as in `laser=Laser(...)`, is added to `modes`.

        Raises:
            RecipeError: a change that would have no effect; see `Scheme`.
        """
        _check_layout(layout)
        method_entry = method(name)
        if method_entry.kind == "refinement":
            raise RecipeError(
                f"Method '{name}' only refines the advantages of another method. Write both, such as method: grpo and "
                f"refine: {name}."
            )
        if method_entry.preset is None:
            raise RecipeError(
                f"No trainer can use method '{name}', because no trainer passes {', '.join(method_entry.needs)}. Use 'bae' or "
                f"another method of `spanwise methods`. You can still call spanwise.credit.{method_entry.estimator.__name__} from "
                "Python."
            )
        if objectives is None:
            layout, objectives = preset_rule(method_entry, layout, calibration, baseline)
        elif calibration is not None or baseline is not None:
            option, setting = ("calibration", calibration) if calibration is not None else ("baseline", baseline)
            raise RecipeError(
                f"{option} is '{setting}', but you also passed objectives, so {option} would change nothing. Set it in the "
                "objectives."
            )
        per = method_entry.preset.per if per is None else per
        if per == "length":
            if longest is None:
                raise RecipeError(
                    f"Method '{name}' divides by the length of the longest possible completion. Pass it as longest=, or pass "
                    f"per='completion'."
                )
            per = longest
        modes = (*modes, *(option for option in options.values() if isinstance(option, Mode)))
        options = {key: option for key, option in options.items() if not isinstance(option, Mode)}
        refinement = None if refine is None else Refinement.of(refine)
        return Scheme(name, layout, objectives, per, options, _as_set(recorded), values, modes, refinement)

    @property
    def stages(self) -> tuple[Any, ...]:
        """The stages that change the method's credit, in order: first the modes, then the refinement."""
        return (*self.modes, *(() if self.refine is None else (self.refine,)))

    @cached_property
    def entry(self) -> Method:
        """The method's registry entry. If it remembers earlier batches, this scheme gets its own memory."""
        return method(self.method).of_a_run()

    @property
    def default_scope(self) -> ScopeName:
        """The scope of an objective that names none: the turn if the method credits steps, else the whole rollout."""
        return "turn" if self.entry.kind == "step" else "rollout"

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the objectives, in order."""
        return tuple(objective.name for objective in self.objectives)

    @property
    def outcome_names(self) -> tuple[str, ...]:
        """The outcomes that baselines may use, except rewards of objectives. Order: `Scores.outcome_names`."""
        all_outcomes = [name for objective in self.objectives for name in objective.outcomes]
        return tuple(dict.fromkeys(name for name in all_outcomes if name not in self.names))

    @property
    def value_names(self) -> tuple[str, ...]:
        """The names of the values that a critic predicts. Order: `Batch.value_nt`; () without a critic."""
        if "value_nt" not in self.needs:
            return ()
        return name_streams(self.objectives, self.values) if self.entry.reads_values else ("return",)

    @property
    def gamma(self) -> float:
        """The method's discount of rewards from token to token; 1 if it has none."""
        return {"gamma": 1.0, **self.entry.options, **self.options}["gamma"]

    @property
    def needs(self) -> frozenset[str]:
        """The fields of a `Batch` that the scheme needs beside token ids, mask and groups."""
        has_turn_objective = any(objective.scope == "turn" for objective in self.objectives)
        refine_fields = frozenset() if self.refine is None else self.refine.entry.fields
        return self.entry.fields | refine_fields | self.reads | (frozenset({"steps"}) if has_turn_objective else frozenset())

    @property
    def reads(self) -> frozenset[str]:
        """The `Batch` fields that are needed to find blocks: `logp_nt` if a segmenter cuts by log-probability, else none."""
        return frozenset({"logp_nt"} if any(map(_reads_logp, self.layout.segmenters)) else ())

    def check(self, provides: Collection[str], *, at_read: Collection[str] | None = None) -> None:
        """Refuse to run if the batches lack a field that the scheme's method, layout, objectives or modes need.

        Args:
            provides: the fields of `Batch` that an engine fills in.
            at_read: the fields that the engine has when it reads completions; None: all of `provides`.

        Raises:
            RecipeError: a field is missing; the message names methods or segmenters that do without it.

        Example:
            >>> layout = Layout({"segment[*]": "cuts:5"}, most=4)
            >>> scheme = Scheme("bae", layout, [Objective("environment", "segment[*]")])
            >>> sorted(scheme.needs)
            ['logp_nt']
            >>> scheme.check(["logp_nt"])
        """
        provided_fields = {*provides, "mask_nt"}
        if self.reads - (provided_fields if at_read is None else set(at_read)):
            logp_segmenter = next(filter(_reads_logp, self.layout.segmenters))
            segmenters_text = ", ".join(sorted(name for name in SEGMENTERS if not _reads_logp(name)))
            raise RecipeError(
                f"The segmenter '{logp_segmenter}' needs log-probabilities (logp_nt) to cut completions, but the batch "
                f"has none when it is read. Use a segmenter that needs no log-probabilities: {segmenters_text}."
            )
        for stage in self.stages:
            stage.check_provided(provided_fields)
        if missing_inputs := self.entry.lacking(provided_fields):
            sorted_methods = sorted(METHODS.items())
            runnable_names = [name for name, entry in sorted_methods if entry.preset and not entry.lacking(provided_fields)]
            raise RecipeError(
                f"Method '{self.method}' needs {missing_inputs}, which the batches here do not hold. Methods that can be run: "
                f"{', '.join(runnable_names)}."
            )
        if "steps" not in provided_fields:
            _refuse(
                self.objectives,
                lambda o: o.scope == "turn",
                "Objective '{o.name}' has scope: turn, but the completions here are not split into turns (Batch.steps is None). "
                "Leave scope out.",
            )

    def check_forgets(self, engine: str) -> None:
        """Refuse a method that remembers earlier batches (`RecipeError`), as the engine's checkpoints lose the memory."""
        if self.entry.stateful:
            raise RecipeError(
                f"Method '{self.method}' remembers earlier batches, but {engine} saves no such memory in its checkpoints, "
                "so a resumed run would start without it. Train with TRL or verl, or use a method without a memory."
            )

    def check_loads(self, engine: str) -> None:
        """Refuse a reward that loads a model (`RecipeError`). The engine's workers have no device for it."""
        entry_by_name = {objective.name: built_in(objective) for objective in self.objectives}
        if loader_names := [name for name, entry in entry_by_name.items() if entry is not None and entry.loads_model]:
            raise RecipeError(
                f"Objective '{loader_names[0]}' loads a reward model, but the reward workers of {engine} have no device for a "
                "model. Serve the reward model, and write an `async def` reward function that asks the server. Or train with TRL."
            )

    @property
    def measures(self) -> tuple[str, ...]:
        """The names of costs that rewards report, such as a judge's requests. Form: "<objective>/<measure>"."""
        return measures_of(self.objectives)

    def plain(self) -> dict[str, Any]:
        """Return the scheme as plain data for YAML. A recipe with these fields gives the same scheme."""
        return {
            "method": self.method,
            "layout": {name: list(tags) for name, tags in self.layout.blocks},
            "prefilled": self.layout.prefilled,
            "segmenter": self.layout.segmenter,
            "most": self.layout.most,
            "objectives": [_plain(objective, self.layout) for objective in self.objectives],
            "per": self.per,
            "options": dict(self.options),
            **({} if self.values is None else {"values": self.values}),
            **{stage.name: stage.plain() for stage in self.stages},
        }


def _check_layout(layout: Any) -> None:
    """Refuse an object other than a `Layout` as the layout of a scheme."""
    if not isinstance(layout, Layout):
        raise RecipeError(
            f"The layout is {layout!r}; write Layout({{'solution': ['answer'], 'confidence': ['confidence']}})."
        )


def _check_kinds(objectives: Any, options: Any) -> None:
    """Refuse objectives and options of the wrong type."""
    if wrong_objectives := wrong_entries(objectives, Objective):
        raise RecipeError(
            f"The objectives must be a list of Objective(...), such as [Objective('correct', pays='solution')]; "
            f"got {wrong_objectives[0]!r}."
        )
    if not isinstance(options, Mapping):
        raise RecipeError(f"The method's options are {options!r}; write each with its name, such as {{'ddof': 0}}.")


def _as_set(names: Collection[str]) -> frozenset[str]:
    """Return one name, or several, as a set of names."""
    return frozenset([names] if isinstance(names, str) else names)


def _plain(objective: Objective, layout: Layout) -> dict[str, Any]:
    """Return an objective as plain data for YAML. Empty fields and the layout's own tags (`format`) are left out."""
    reward_name = objective.reward if isinstance(objective.reward, str) else function_name(objective.reward)
    given_outcomes = objective.outcomes[0] if len(objective.given) == 1 else list(objective.outcomes)
    recipe_entry = {**vars(objective), "reward": reward_name, "pays": list(objective.pays), "given": given_outcomes}
    filled_options = {"tags": list(dict.fromkeys(layout.tags))} if objective.reward == "format" else {}
    recipe_entry["options"] = {
        name: value for name, value in objective.options.items() if (name, value) not in filled_options.items()
    }
    return {key: value for key, value in recipe_entry.items() if value is not None and value not in ({}, [])}


def _parse_per(per: Any) -> str | float:
    """Check and return `per`, the divisor of credit: "block", "completion", "batch" or a positive number."""
    if per in ("block", "completion", "batch"):
        return str(per)
    with suppress(TypeError, ValueError):
        if not isinstance(per, bool) and 0 < float(per) < float("inf"):
            return float(per)
    raise RecipeError(f"per is '{per}'; write 'block', 'completion', 'batch' or a positive number of tokens, such as 512.")


def _reads_logp(segmenter: str) -> bool:
    """Return whether a segmenter cuts completions into blocks by the log-probabilities of tokens."""
    return SEGMENTERS.find(segmenter).reads_logp


def _refuse(objectives: Sequence[Objective], find_fault: Callable[[Objective], Any], sentence: str) -> None:
    """Raise an error if `find_fault` finds a fault in an objective. `sentence` gets both, as `{o}` and `{fault}`."""
    for objective in objectives:
        if fault_sentence := find_fault(objective):
            raise RecipeError(sentence.format(o=objective, fault=fault_sentence))


def _check_objectives_used(scheme: Scheme) -> None:
    """Refuse objectives with a field that the method would ignore."""
    method_entry = scheme.entry
    objectives = scheme.objectives
    method_label = f"method '{scheme.entry.name}'"
    for input_name, name in (("baseline", "baseline"), ("scale_k", "scale"), ("back_off_k", "back_off")):
        if input_name not in method_entry.inputs:
            _refuse(
                objectives,
                lambda o, name=name: getattr(o, name) is not None,
                f"Objective '{{o.name}}' has the {name} '{{o.{name}}}', but {method_label} has its own way of comparing, so "
                f"the {name} would change nothing. Leave it out, or use method 'bae'.",
            )
    _refuse(
        objectives,
        lambda o: o.baseline not in ("outcome", "blended") and next((n for n in o.outcomes if n != judge_of(o)), None),
        "Objective '{o.name}' names the outcome '{fault}' in 'given', but neither its reward nor its baseline uses this "
        "outcome. Use baseline 'outcome' or 'blended', or remove '{fault}' from 'given'.",
    )
    if method_entry.kind != "block" and not method_entry.reads_values:
        first_objective = objectives[0]
        other_objective = next((o for o in objectives if set(o.pays) != set(first_objective.pays)), None)
        if other_objective is not None:
            raise RecipeError(
                f"Method '{method_entry.name}' cannot credit blocks separately, but two objectives pay different blocks. Objective "
                f"'{first_objective.name}' pays {', '.join(first_objective.pays)}, and objective '{other_objective.name}' pays "
                f"{', '.join(other_objective.pays)}. Let all objectives pay the same blocks, or use method 'bae'."
            )
    if method_entry.kind != "block" and "reward_nm" not in method_entry.inputs:
        _refuse(
            objectives,
            lambda o: o.only,
            f"Objective '{{o.name}}' has 'only: {{o.only}}', so some completions lack this reward. They would get no credit "
            f"at all, because {method_label} adds up all rewards. Leave 'only' out, or use method 'bae'.",
        )
    if method_entry.kind == "token":
        _refuse(
            objectives,
            lambda o: o.scope == "turn",
            f"Objective '{{o.name}}' has scope: turn, but {method_label} gives a whole rollout one reward, at its end. Leave scope "
            f"out, or use method 'gigpo'.",
        )
    if method_entry.kind == "block" and "voter_n" not in method_entry.inputs:
        _refuse(
            objectives,
            lambda o: o.scope == "turn",
            f"Objective '{{o.name}}' has scope: turn, but {method_label} does not know which turns belong to one rollout. "
            "So a rollout would count as often as it has turns. Leave scope out, or use method 'bae'.",
        )
    if method_entry.kind != "block" and "reward_nm" in method_entry.inputs and "weight_m" not in method_entry.inputs:
        _refuse(
            objectives,
            lambda o: o.weight != 1.0,
            f"Objective '{{o.name}}' has the weight {{o.weight}}, but {method_label} takes no weights, so the weight would "
            "change nothing. Leave the weight out.",
        )


def _check_values(scheme: Scheme) -> None:
    """Refuse the setting `values` (what a critic predicts) if the method has no critic."""
    if scheme.values is None:
        return
    resolve_values(scheme.objectives, scheme.values)
    if not scheme.entry.reads_values:
        raise RecipeError(
            f"values is '{scheme.values}', but method '{scheme.method}' uses no critic with a value for each token. So "
            "values would change nothing. Leave values out, or use method 'gae' or 'sae'."
        )


def _translate(options: Mapping[str, Any], entry: Method) -> dict[str, Any]:
    """Translate other libraries' option names into those of spanwise. Refuse an option given under both names."""
    translated_options = dict(options)
    for alias, option_name in _OTHER_NAMES.items():
        if alias in translated_options and option_name in entry.options:
            if option_name in translated_options:
                raise RecipeError(
                    f"'{alias}' is another name of the option '{option_name}', and both are given; remove one of them."
                )
            translated_options[option_name] = translated_options.pop(alias)
    return translated_options
