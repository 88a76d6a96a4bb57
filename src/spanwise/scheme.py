"""`Scheme`: the complete rule of credit, the only place where layout, objectives, method and options meet."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from spanwise.credit import METHODS, Method, Preset, Refinement, method, preset_layout, preset_objectives, states_confidence
from spanwise.credit.recursion import check_alpha
from spanwise.credit.streams import ValuesName, resolved_values, stream_names
from spanwise.errors import RecipeError, unknown
from spanwise.layout import Layout
from spanwise.mode import Mode, check_modes
from spanwise.objective import BaselineName, Objective, function_name
from spanwise.score import check_objectives, judge_of, written_out
from spanwise.segment import SEGMENTERS

#: The task that `recipe.yaml` names of a run which a script drives: it says the rule of credit (`Scheme.plain`), and no prompts.
SCRIPT = "own"
#: What `pipeline.credit_batch` makes of every reading, so that no engine has to bring it.
_MADE = ("length_n", "block_nt", "adv_nt", "correct_n")
#: Options that other libraries call otherwise (NeMo-RL, beside its `gae_lambda_value` for the critic).
_OTHER_NAMES = {"gae_lambda_policy": "lam"}
#: Options that lie between 0 and 1 in every method that has them.
_SHARES = ("gamma", "lam")
#: Inputs of methods that are one field of a `Batch`.
_FIELDS = {"trajectory_s": "steps", "step_s": "steps", "anchor_s": "steps", "importance_nt": "logp_nt"}
_WORDS = {
    "value_nt": "values of a critic (value_nt)",
    "logp_nt": "log-probabilities (logp_nt)",
    "steps": "steps of trajectories (steps)",
    "ids_nt": "token ids (ids_nt)",
}


@dataclass(frozen=True)
class Scheme:
    """The complete rule of credit: what is read, what is rewarded, how it is compared and how it is spread.

    Attributes:
        method: name of a registered method.
        layout: the blocks of a completion and what finds them.
        objectives: the rewards, the blocks each pays and its baseline, in an order in which `given` looks back.
        per: what a token's share is counted in: "block", "completion" or a number of tokens, see `spread`; or "batch", the mean
            tokens of a completion of the whole batch, so that the loss is the mean over all of its tokens.
        options: of the method, those that differ from its defaults (`spanwise methods NAME` lists them).
        recorded: objectives whose rewards are known already, so that the tags they would read need not be in the layout.
        values: what the values of a critic are of (`gae`, `sae`). "shared": of all that is still to come, one recursion over all
            trainable tokens in which each objective's reward lies on the last token of the blocks it pays. "objective": a value
            per objective, and a recursion over the blocks that it pays alone. None: "objective" if objectives pay different blocks,
            else "shared". See `spanwise.credit.streams.reward_streams`.
        modes: features beside the method, such as a `Laser`, in the order in which they change the credit.
        refine: what changes the advantages of the tokens once method and modes have credited them, a `Refinement` or the name of
            one (`ktae`, `oar`); None: nothing.

    Raises:
        RecipeError: an unknown method, an option or a fact of an objective that the method would not use, objectives that do
            not fit the layout. Nothing is dropped without a word.

    Example:
        >>> layout = Layout({"solution": ["answer"], "confidence": ["confidence"]})
        >>> scheme = Scheme.preset("bae", layout, baseline="blended")
        >>> [(o.name, o.pays, o.baseline) for o in scheme.objectives[:2]]
        [('correct', ('solution',), 'group'), ('brier', ('confidence',), 'blended')]
        >>> Scheme.preset("grpo", layout, leave_one_out=True)
        Traceback (most recent call last):
        spanwise.errors.RecipeError: Method 'grpo' has no option 'leave_one_out'; it has ddof, eps, min_stratum.
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
        _check_parts(self.objectives, self.options)
        object.__setattr__(self, "objectives", written_out(self.objectives, self.layout))
        object.__setattr__(self, "per", _per(self.per))
        object.__setattr__(self, "options", _named(self.options, self.entry))
        object.__setattr__(self, "recorded", _names(self.recorded))
        check_objectives(self.objectives, self.layout, recorded=self.recorded)
        _check_objectives_used(self)
        _check_values(self)
        check_modes(self.modes)
        object.__setattr__(self, "modes", tuple(self.modes))
        for mode in self.modes:
            mode.check_scheme(self)
        _check_options(self.entry, self.options, lambda name: _said(self, name))
        if self.refine is not None:
            object.__setattr__(self, "refine", Refinement.of(self.refine))
            _check_refine(self, Refinement.of(self.refine))

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
        """A method as it is meant to be run, with changes.

        Args:
            name: of the method.
            layout: the blocks of the task; a method that credits whole completions takes its tags as one block, unless
                `objectives` are given.
            objectives: instead of those of the preset.
            calibration: how the preset scores a confidence, `brier` (default) or `log_score`.
            baseline: what the preset compares its second objective with; `outcome` by default.
            per: instead of the preset's.
            longest: tokens of the longest completion there may be, for presets that divide by it.
            recorded, values, modes, refine: see `Scheme`.
            **options: of the method; or a mode by its name, as in `laser=Laser(...)`, which is one more of `modes`.

        Raises:
            RecipeError: a change that would change nothing; see `Scheme`.
        """
        _check_layout(layout)
        chosen = method(name)
        if chosen.kind == "refinement":
            raise RecipeError(
                f"Method '{name}' refines the advantages of another method. Write refine: {name} beside one, such as method: grpo."
            )
        if chosen.preset is None:
            raise RecipeError(
                f"Method '{name}' is a function to call from Python (spanwise.credit.{chosen.estimator.__name__}): no engine here "
                f"has what it needs ({', '.join(chosen.needs)}). Use 'bae' or another method of `spanwise methods`."
            )
        if objectives is not None:
            _refuse_void(calibration=calibration, baseline=baseline)
        else:
            layout = preset_layout(chosen.preset, layout)
            _check_preset_changes(chosen, layout, calibration, baseline)
            objectives = preset_objectives(chosen, layout, calibration=calibration or "brier", baseline=baseline)
        share = chosen.preset.per if per is None else per
        if share == "length":
            if longest is None:
                raise RecipeError(
                    f"Method '{name}' divides by the longest completion there may be; give it as longest=, or per='completion'."
                )
            share = longest
        named = [value for value in options.values() if isinstance(value, Mode)]
        options = {key: value for key, value in options.items() if not isinstance(value, Mode)}
        own = None if refine is None else Refinement.of(refine)
        return Scheme(name, layout, objectives, share, options, _names(recorded), values, (*modes, *named), own)

    @cached_property
    def entry(self) -> Method:
        """The registered method; what it remembers of earlier batches is this scheme's own."""
        return method(self.method).of_a_run()

    @property
    def names(self) -> tuple[str, ...]:
        """The objectives' names, in order."""
        return tuple(objective.name for objective in self.objectives)

    @property
    def outcome_names(self) -> tuple[str, ...]:
        """The outcomes that baselines are given and that are no objectives, in the order in which `score_all` finds them."""
        found = (name for objective in self.objectives for name in objective.outcomes if name not in self.names)
        return tuple(dict.fromkeys(found))

    @property
    def value_names(self) -> tuple[str, ...]:
        """What each value of the critic is of, in the order of `Batch.value_nt`; none if the method reads no values.

        Example:
            >>> layout = Layout({"solution": ["answer"], "confidence": ["confidence"]})
            >>> pair = [Objective("correct", "solution"), Objective("brier", "confidence", given="correct")]
            >>> Scheme("gae", layout, pair).value_names, Scheme("gae", layout, pair, values="shared").value_names
            (('correct', 'brier'), ('return',))
        """
        if "value_nt" not in self.needs:
            return ()
        return stream_names(self.objectives, self.values) if self.entry.reads_critic else ("return",)

    @property
    def gamma(self) -> float:
        """The discount between tokens, 1 for a method without one."""
        return {"gamma": 1.0, **self.entry.options, **self.options}["gamma"]

    @property
    def needs(self) -> frozenset[str]:
        """The fields of a `Batch` that method and layout cannot do without, beside token ids, mask and groups."""
        turns = any(objective.scope == "turn" for objective in self.objectives)
        refining = frozenset() if self.refine is None else _needed(self.refine.entry)
        return _needed(self.entry) | refining | self.reads | (frozenset({"steps"}) if turns else frozenset())

    @property
    def reads(self) -> frozenset[str]:
        """Those of `needs` that finding the blocks needs already: log-probabilities, where a segmenter cuts by them."""
        return frozenset({"logp_nt"} if any(map(_reads_logp, self.layout.segmenters)) else ())

    def check(self, provides: Collection[str], *, at_read: Collection[str] | None = None) -> None:
        """Refuse to run where the batches lack what method or layout needs.

        Args:
            provides: the fields of `Batch` that an engine fills in.
            at_read: those that are there when completions are read, where others come later; None: all.

        Raises:
            RecipeError: what is missing, and methods that do without it; or what a mode lacks.

        Example:
            >>> layout = Layout({"segment[*]": "cuts:5"}, most=4)
            >>> scheme = Scheme("bae", layout, [Objective("environment", "segment[*]")])
            >>> sorted(scheme.needs)
            ['logp_nt']
            >>> scheme.check(["logp_nt"], at_read=[])
            Traceback (most recent call last):
            spanwise.errors.RecipeError: The segmenter 'cuts' cuts by log-probabilities (logp_nt), which are not there...
        """
        provided = {*provides, "mask_nt"}
        if self.reads - (provided if at_read is None else set(at_read)):
            name = next(filter(_reads_logp, self.layout.segmenters))
            others = ", ".join(sorted(other for other in SEGMENTERS if not _reads_logp(other)))
            raise RecipeError(
                f"The segmenter '{name}' cuts by log-probabilities (logp_nt), which are not there when completions are read. "
                f"Use one that does without: {others}."
            )
        for mode in self.modes:
            mode.check_provided(provided)
        if self.refine is not None and (lacking := sorted(_needed(self.refine.entry) - provided)):
            raise RecipeError(
                f"refine: '{self.refine.method}' needs {' and '.join(_WORDS.get(name, name) for name in lacking)}, which is not "
                f"there. Leave refine out."
            )
        missing = [_WORDS.get(name, name) for name in sorted(_needed(self.entry) - provided)]
        turn = next((o.name for o in self.objectives if o.scope == "turn"), None)
        if turn is not None and not missing and "steps" not in provided:
            raise RecipeError(
                f"Objective '{turn}' has scope: turn, and completions are no turns of rollouts here (Batch.steps). Leave it out: "
                f"a completion of its own is one turn."
            )
        if missing:
            there = [name for name, known in sorted(METHODS.items()) if known.preset and not _needed(known) - provided]
            raise RecipeError(
                f"Method '{self.method}' needs {' and '.join(missing)}, which is not there. Methods that can be run: "
                f"{', '.join(there)}."
            )

    def check_forgets(self, engine: str) -> None:
        """Refuse a method that remembers earlier batches where nothing would keep what it remembers.

        Raises:
            RecipeError: it does.
        """
        if self.entry.stateful:
            raise RecipeError(
                f"Method '{self.method}' remembers earlier batches, and the checkpoints of {engine} do not keep what it remembers: "
                f"a resumed run would be another one. Train it with TRL or verl, or use a method without a memory."
            )

    def plain(self) -> dict[str, Any]:
        """The scheme as plain data, ready for YAML; a recipe with these fields is the same scheme."""
        return {
            "method": self.method,
            "layout": {name: list(tags) for name, tags in self.layout.blocks},
            "prefilled": self.layout.prefilled,
            "segmenter": self.layout.segmenter,
            "most": self.layout.most,
            "objectives": [_plain(objective) for objective in self.objectives],
            "per": self.per,
            "options": dict(self.options),
            **({} if self.values is None else {"values": self.values}),
            **{mode.name: mode.plain() for mode in self.modes},
            **({} if self.refine is None else {"refine": self.refine.plain()}),
        }


def _check_layout(layout: Any) -> None:
    if not isinstance(layout, Layout):
        raise RecipeError(
            f"The layout is {layout!r}; write Layout({{'solution': ['answer'], 'confidence': ['confidence']}})."
        )


def _check_parts(objectives: Any, options: Any) -> None:
    """Refuse what is no list of objectives and no mapping of options."""
    listed = isinstance(objectives, Sequence) and not isinstance(objectives, str)
    wrong = next((entry for entry in objectives if not isinstance(entry, Objective)), None) if listed else objectives
    if wrong is not None or not listed:
        raise RecipeError(
            f"The objectives are a list of Objective(...), such as [Objective('correct', pays='solution')]; there is {wrong!r}."
        )
    if not isinstance(options, Mapping):
        raise RecipeError(f"The method's options are {options!r}; write them by name, such as {{'ddof': 0}}.")


def _names(names: Collection[str]) -> frozenset[str]:
    """One string is one name."""
    return frozenset([names] if isinstance(names, str) else names)


def _plain(objective: Objective) -> dict[str, Any]:
    reward = objective.reward if isinstance(objective.reward, str) else function_name(objective.reward)
    given = objective.outcomes[0] if len(objective.given) == 1 else list(objective.outcomes)
    entry = {**vars(objective), "reward": reward, "pays": list(objective.pays), "given": given}
    entry["options"] = dict(objective.options)
    return {key: value for key, value in entry.items() if value is not None and value not in ({}, [])}


def _per(per: Any) -> str | float:
    """A share as one of the words or a positive number of tokens."""
    if per in ("block", "completion", "batch"):
        return str(per)
    try:
        number = float("nan") if isinstance(per, bool) else float(per)
    except (TypeError, ValueError):
        number = float("nan")
    if not 0 < number < float("inf"):
        raise RecipeError(
            f"per is '{per}'; write 'block', 'completion', 'batch' or a positive number of tokens, such as 512."
        )
    return number


def _reads_logp(segmenter: str) -> bool:
    return SEGMENTERS.find(segmenter).reads_logp


def _needed(known: Method) -> frozenset[str]:
    """The fields of a `Batch` that a method cannot do without."""
    return frozenset(_FIELDS.get(name, name) for name in known.needs if name not in _MADE)


def _refuse_void(**changes: Any) -> None:
    for name, value in changes.items():
        if value is not None:
            raise RecipeError(
                f"{name} is '{value}', but the objectives are given, so it would change nothing; say it in the objectives."
            )


def _check_preset_changes(chosen: Method, layout: Layout, calibration: str | None, baseline: str | None) -> None:
    """Refuse a calibration or a baseline that the preset's objectives do not have."""
    second = (chosen.preset or Preset()).calibrated
    if calibration is not None and not (second and states_confidence(layout)):
        why = "rewards correctness alone" if not second else "finds no confidence in the last block"
        raise RecipeError(f"calibration is '{calibration}', but method '{chosen.name}' {why}, so it would change nothing.")
    if baseline is not None and not (second and "baseline" in chosen.inputs):
        raise RecipeError(
            f"baseline is '{baseline}', but method '{chosen.name}' has its own, so it would change nothing. Leave it out, or use "
            f"method 'bae'."
        )


def _check_objectives_used(scheme: Scheme) -> None:
    """Refuse what an objective says and the method would not hear."""
    chosen, objectives = scheme.entry, scheme.objectives
    facts: Mapping[str, tuple[str, Callable[[Objective], bool]]] = {
        "baseline": ("baseline", lambda o: o.baseline is not None),
        "scale_k": ("scale", lambda o: o.scale is not None),
        "back_off_k": ("back_off", lambda o: o.back_off is not None),
    }
    for fact, (name, said) in facts.items():
        found = next((o for o in objectives if said(o)), None)
        if found is not None and fact not in chosen.inputs:
            raise RecipeError(
                f"Objective '{found.name}' has the {name} '{getattr(found, name)}', but method '{chosen.name}' has its own way of "
                f"comparing, so it would change nothing. Leave it out, or use method 'bae'."
            )
    for objective in objectives:
        conditions = objective.baseline in ("outcome", "blended")
        idle = [name for name in objective.outcomes if name != judge_of(objective)]
        if idle and not conditions:
            raise RecipeError(
                f"Objective '{objective.name}' is given '{idle[0]}', but neither its reward nor its baseline looks at it. Use "
                f"baseline 'outcome' or 'blended', or leave it out."
            )
    if chosen.kind != "block" and not chosen.reads_critic:
        first = objectives[0]
        other = next((o for o in objectives if set(o.pays) != set(first.pays)), None)
        if other is not None:
            raise RecipeError(
                f"Method '{chosen.name}' gives a completion one number, but '{first.name}' pays {', '.join(first.pays)} and "
                f"'{other.name}' pays {', '.join(other.pays)}. Let all objectives pay the same blocks, or use method 'bae'."
            )
    turn = next((o for o in objectives if o.scope == "turn"), None)
    if turn is not None and chosen.kind == "token":
        raise RecipeError(
            f"Objective '{turn.name}' has scope: turn, but method '{chosen.name}' runs over the tokens of whole rollouts, with one "
            f"reward at the end. Leave it out, or use method 'gigpo'."
        )
    if turn is not None and chosen.kind == "block" and "voter_n" not in chosen.inputs:
        raise RecipeError(
            f"Objective '{turn.name}' has scope: turn, but method '{chosen.name}' does not know whose rows it compares: a "
            f"rollout of many turns would have many votes. Leave it out, or use method 'bae'."
        )
    weighs = chosen.kind == "block" or "reward_nm" not in chosen.inputs or "weight_m" in chosen.inputs
    heavy = next((o for o in objectives if o.weight != 1.0), None)
    if heavy is not None and not weighs:
        raise RecipeError(
            f"Objective '{heavy.name}' has the weight {heavy.weight}, but method '{chosen.name}' takes no weights (weight_m)."
        )


def _check_values(scheme: Scheme) -> None:
    """Refuse to say what values are of where there are none."""
    if scheme.values is None:
        return
    resolved_values(scheme.objectives, scheme.values)
    if not scheme.entry.reads_critic:
        raise RecipeError(
            f"values is '{scheme.values}', but method '{scheme.method}' reads no values of a critic for each token, so it would "
            f"change nothing. Leave it out, or use method 'gae' or 'sae'."
        )


def _named(options: Mapping[str, Any], chosen: Method) -> dict[str, Any]:
    """The options under their names here.

    Raises:
        RecipeError: one option under two names.
    """
    named = dict(options)
    for other, name in _OTHER_NAMES.items():
        if other in named and name in chosen.options:
            if name in named:
                raise RecipeError(f"'{other}' is another name of '{name}', and both are given; write one of them.")
            named[name] = named.pop(other)
    return named


def _check_refine(scheme: Scheme, refine: Refinement) -> None:
    """Refuse a refinement of rows that are no completions, of an objective that is not there, and options it does not use."""
    if scheme.entry.kind == "step" or any(objective.scope == "turn" for objective in scheme.objectives):
        raise RecipeError(
            f"refine changes the tokens of whole completions, and method '{scheme.method}' credits turns here. Leave refine "
            f"out, or use a method that credits whole rollouts, such as 'grpo'."
        )
    if refine.correct is not None and refine.correct not in scheme.names:
        raise RecipeError(f"refine.correct: {unknown('objective', refine.correct, scheme.names)}")
    chosen = refine.entry
    _check_options(chosen, refine.options, lambda name: [{**chosen.options, **refine.options}[name]])


def _check_options(chosen: Method, options: Mapping[str, Any], said: Callable[[str], list[Any]]) -> None:
    """Refuse options that a method does not have, or would not look at; `said` is what another option or the objectives say."""
    for name, value in options.items():
        if name not in chosen.options:
            hint = " Objectives say it." if name in ("baseline", "scale", "back_off") and "baseline" in chosen.inputs else ""
            raise RecipeError(
                f"Method '{chosen.name}' has no option '{name}'; it has {', '.join(sorted(chosen.options)) or 'none'}.{hint}"
            )
        if name == "min_stratum" and (isinstance(value, bool) or not isinstance(value, int) or value < 2):
            raise RecipeError(f"min_stratum is {value!r}; a baseline needs at least 2 completions.")
        if name == "ddof" and (isinstance(value, bool) or value not in (0, 1)):
            raise RecipeError(f"ddof is {value!r}; write 0 (population) or 1 (sample).")
        if name == "eps" and (isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf):
            raise RecipeError(f"eps is {value!r}; it must be a finite number that is not negative.")
        if name in _SHARES and (isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1):
            raise RecipeError(f"{name} is {value!r}; it must lie between 0 and 1.")
        if name == "length_adaptive_alpha" and value is not None:
            check_alpha(value)
        if name in chosen.only_with and value != chosen.options[name]:
            other, values = chosen.only_with[name]
            if not any(found in values for found in said(other)):
                says = " or ".join(map(str, values))
                raise RecipeError(
                    f"Option '{name}' of method '{chosen.name}' does something only where {other.removesuffix('_k')} is {says}; "
                    f"here it would change nothing."
                )


def _said(scheme: Scheme, name: str) -> list[Any]:
    """What an option is set to, or what the objectives say."""
    if name == "baseline":
        return [objective.baseline or "group" for objective in scheme.objectives]
    if name == "scale_k":
        return [objective.scale or "none" for objective in scheme.objectives]
    return [scheme.options.get(name, scheme.entry.options[name])]
