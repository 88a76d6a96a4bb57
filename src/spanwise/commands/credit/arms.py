"""Which methods are applied to a rollout file, each with its layout, objectives and options."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, cast

from spanwise.commands.credit.blocks import Blocks, base_layout, verdict_of
from spanwise.credit import METHODS, Method, Preset, method, states_confidence
from spanwise.errors import DataError, LayoutError, RecipeError, SpanwiseError, unknown
from spanwise.objective import BASELINES, Objective
from spanwise.recipe import Recipe, scheme_of
from spanwise.rollouts import RolloutTable, schema
from spanwise.rollouts.schema import RECORDED
from spanwise.scheme import Scheme
from spanwise.score import REWARDS, judge_of
from spanwise.tasks.digits_long import LONGEST

#: What is shown beside the recipe's own method when nothing else is asked for.
USUAL = ("grpo", "rlcr", "bae")
#: Fields of a `Batch` that a file may hold, in words.
PER_TOKEN = {"value_nt": "values of a critic", "logp_nt": "log-probabilities"}
_LONGEST = {"digits": 32, "digits_twice": 32, "digits_long": LONGEST}


@dataclass(frozen=True)
class Arm:
    """One method as it is applied to a file.

    Attributes:
        name: as the user wrote it: a method, or `method:baseline`.
        scheme: the rule of credit.
        own: it is the recipe as it stands.
        taken: objective -> the recorded reward that it is taken from; the others are computed from the text.
    """

    name: str
    scheme: Scheme
    own: bool = False
    taken: Mapping[str, str] = field(default_factory=dict)


def choose_arms(
    recipe: Recipe,
    wanted: Sequence[str] | None,
    table: RolloutTable,
    rewards: Mapping[str, str] | None = None,
    *,
    blocks: Blocks | None = None,
    given: bool = False,
    run_code: bool = True,
) -> tuple[list[Arm], list[str]]:
    """The arms asked for, each once, else the usual ones and the recipe's own; and sentences on those that do not fit the file."""
    taken = taken_rewards(table, rewards or {})
    asked = _Asked(recipe, blocks or Blocks(base_layout(recipe)), taken, run_code)
    own: Arm | SpanwiseError
    try:
        asked = asked.with_objectives()
        own = _own(asked)
    except (RecipeError, LayoutError) as error:
        if given:
            raise
        own = error
    if wanted is not None:
        arms = list({arm.name: arm for arm in [_arm(name, asked, own, table) for name in wanted]}.values())  # two may be one
        _check_objectives(arms, rewards or {})
        return [_rewarded(arm, taken, table) for arm in arms], []
    arms: list[Arm] = []
    reasons: dict[str, list[str]] = {}
    failure: SpanwiseError | None = None
    for name in (*USUAL, "recipe"):
        try:
            arm = _rewarded(_arm(name, asked, own, table), taken, table)
        except (RecipeError, LayoutError, DataError) as error:
            if given and name == "recipe":
                raise
            failure = error
            reasons.setdefault(str(error), []).append(name)
            continue
        if name in USUAL or all(arm.scheme != other.scheme for other in arms):
            arms.append(arm)
    if failure is not None and not arms:
        raise failure
    _check_objectives(arms, rewards or {})
    return arms, [left_out(names, reason) for reason, names in reasons.items()]


def left_out(names: Sequence[str], reason: str) -> str:
    """The sentence on methods that do not fit; the recipe's own is named only where no other has the same reason.

    >>> left_out(["rlcr", "bae", "recipe"], "There is no confidence.")
    'rlcr and bae are left out: There is no confidence.'
    """
    shown = [name for name in names if name != "recipe"] or ["the recipe's own method"]
    return f"{' and '.join(shown)} {'is' if len(shown) == 1 else 'are'} left out: {reason}"


def taken_rewards(table: RolloutTable, rewards: Mapping[str, str]) -> dict[str, str]:
    """Objective -> the recorded reward it is taken from: the one of its name, or the one that `rewards` gives.

    `correct` is also taken from the column that says right and wrong (`verdict_of`): what a trainer has recorded goes
    before what the text would give. "text" in `rewards` means that it is computed all the same.
    """
    for objective, column in rewards.items():
        if column != "text" and column not in table.rewards:
            raise RecipeError(_no_reward(table, objective, column))
    chosen = {"correct": verdict_of(table) or "text"} | {name: name for name in table.rewards} | dict(rewards)
    return {name: column for name, column in chosen.items() if column != "text" and column in table.rewards}


def _no_reward(table: RolloutTable, objective: str, column: str) -> str:
    """Why a column is no recorded reward."""
    cells = [value for value in table.columns.get(column, ()) if value is not None]
    if cells:
        return f"--reward {objective}={column}: that column of '{table.path}' holds no numbers; it has {reprlib.repr(cells[0])}."
    if column in table.columns:
        return f"--reward {objective}={column}: that column of '{table.path}' is empty."
    if not table.rewards:
        return f"--reward {objective}={column}: '{table.path}' records no rewards at all."
    return unknown(f"reward in '{table.path}' called", column, table.rewards)


def _check_objectives(arms: Sequence[Arm], rewards: Mapping[str, str]) -> None:
    """Refuse a reward of no objective."""
    names = dict.fromkeys(objective.name for arm in arms for objective in arm.scheme.objectives)
    for objective in rewards:
        if objective not in names:
            raise RecipeError(unknown("objective", objective, names))


def _rewarded(arm: Arm, taken: Mapping[str, str], table: RolloutTable) -> Arm:
    """The arm with the recorded rewards that it takes; a DataError if a reward can come from nowhere."""
    for objective in arm.scheme.objectives:
        name = objective.name
        options = {**REWARDS[objective.reward].options, **objective.options} if isinstance(objective.reward, str) else {}
        column = None if name in taken else options.get("column")
        if column is not None and not any(value is not None for value in table.columns.get(column, ())):
            lack = f"needs the right answers, and '{table.path}' has none (no column '{column}')"
            taken_from = f"--reward {name}={next(iter(table.rewards), '')}"
            there = f"It records {', '.join(table.rewards)}: take one with {taken_from}, or add the column."
            named = f" If another column has them: --columns {column}=NAME." if column == "answer" and table.columns else ""
            raise DataError(f"Reward '{name}' {lack}. {there if table.rewards else 'Add the column.'}{named}")
    return replace(arm, taken={o.name: taken[o.name] for o in arm.scheme.objectives if o.name in taken})


@dataclass(frozen=True)
class _Asked:
    """What arms are made of; `objectives` stand in place of a preset's."""

    recipe: Recipe
    blocks: Blocks
    taken: Mapping[str, str]
    run_code: bool
    objectives: tuple[Objective, ...] | None = None

    def with_objectives(self) -> _Asked:
        """The same with the objectives of the file or the recipe, if these are other ones than the preset's own."""
        if self.blocks.objectives is not None or self.recipe.objectives is None:
            return replace(self, objectives=self.blocks.objectives)
        own = self.scheme().objectives
        usual = any(scheme.objectives == own for _, scheme in _presets(self))
        return replace(self, objectives=None if usual else own)

    def scheme(self) -> Scheme:
        """The rule of the recipe as it stands."""
        return scheme_of(self.recipe, self.blocks.layout, _longest(self.recipe), recorded=self.taken, run_code=self.run_code)


def _own(asked: _Asked) -> Arm:
    """The recipe as it stands, under the shortest name that means the same."""
    recipe = asked.recipe
    if asked.blocks.objectives is not None:  # the file's blocks, not the recipe's
        name = f"{recipe.method}:{recipe.baseline}" if recipe.baseline else recipe.method
        if modes := recipe.scheme_modes:
            return Arm("recipe", replace(_named(name, asked), modes=modes), own=True)
        return Arm(name, _named(name, asked), own=True)
    scheme = asked.scheme()
    return Arm(next((name for name, preset in _presets(asked) if preset == scheme), "recipe"), scheme, own=True)


def _presets(asked: _Asked) -> Iterator[tuple[str, Scheme]]:
    """The presets of the recipe's method, by name: the usual one, then each baseline, as far as there are any."""
    for name in (asked.recipe.method, *(f"{asked.recipe.method}:{baseline}" for baseline in BASELINES)):
        with suppress(RecipeError, LayoutError):
            yield name, _named(name, asked)


def _arm(name: str, asked: _Asked, own: Arm | SpanwiseError, table: RolloutTable) -> Arm:
    if isinstance(own, Arm) and name in ("recipe", own.name):
        check_file(own.scheme, table)
        return own
    if isinstance(own, SpanwiseError) and name == "recipe":
        raise own
    METHODS.load_plugins()
    if name.partition(":")[0] not in METHODS:
        raise RecipeError(unknown("method", name, [*METHODS, "recipe", RECORDED]))
    chosen = method(name.partition(":")[0])
    if ":" in name and "baseline" not in chosen.inputs:
        raise RecipeError(f"Method '{chosen.name}' takes no baseline; ask for '{chosen.name}' alone, or for 'bae'.")
    lacking = [need for need in chosen.needs if need not in ("mask_nt", "length_n", *PER_TOKEN)]
    if lacking:
        raise RecipeError(
            f"Method '{chosen.name}' cannot be applied to a rollout file: it needs {', '.join(lacking)}, which no format holds. "
            f"Call spanwise.credit.{chosen.estimator.__name__} from Python."
        )
    scheme = _named(name, asked)
    check_file(scheme, table)
    return Arm(name, scheme)


def token_columns(scheme: Scheme) -> dict[str, list[str]]:
    """The columns per token that a scheme reads, by the field of a `Batch` that they are.

    >>> from spanwise import Layout, Objective
    >>> pair = [Objective("correct", "solution"), Objective("brier", "confidence", given="correct")]
    >>> token_columns(Scheme("sae", Layout({"solution": ["answer"], "confidence": ["confidence"]}), pair))
    {'value_nt': ['values/correct', 'values/brier'], 'logp_nt': ['logprobs']}
    """
    asked = {"value_nt": schema.value_columns(scheme.value_names), "logp_nt": [schema.LOGP]}
    return {need: names for need, names in asked.items() if need in scheme.needs}


def check_file(scheme: Scheme, table: RolloutTable) -> None:
    """Refuse what a file does not hold values, log-probabilities or scores for, or whose rollouts are several rows."""
    if scheme.entry.kind == "token" and table.rollout_n is not None:
        raise RecipeError(
            f"Method '{scheme.method}' runs over the tokens of a rollout from its end, and rollouts of '{table.path}' are several "
            f"rows (branches). Use a method that needs rewards only (grpo, rlcr, bae)."
        )
    for mode in scheme.modes:
        mode.recorded(table, ())
    if scheme.refine is not None and table.rollout_n is not None:
        raise RecipeError(
            f"refine changes the tokens of whole completions, and rollouts of '{table.path}' are several rows. Leave it out."
        )
    asked, held = token_columns(scheme), table.token_values
    missing = [need for need, names in asked.items() if any(name not in held for name in names)]
    if not missing:
        return
    streams = [name.partition("/")[2] for name in held if name.startswith(schema.VALUES)]
    wanted, there = "", "none of them" if table.has_ids else "no token ids"
    columns = " and ".join(name for names in asked.values() for name in names)
    advice = f"Use a method that needs rewards only (grpo, rlcr, bae), or a file with the columns {columns}"
    if streams and missing == ["value_nt"]:
        there = f"those of {', '.join(streams)}" if streams != [""] else "one value"
        wanted = f" for {', '.join(scheme.value_names)}"
        advice = "Use the recipe that the critic was trained under (its objectives and `values`)"
    raise RecipeError(
        f"Method '{scheme.method}' needs {' and '.join(PER_TOKEN[need] for need in missing)} of every token{wanted}, and "
        f"'{table.path}' holds {there}. {advice}."
    )


def _named(name: str, asked: _Asked) -> Scheme:
    """The preset `method` or `method:baseline` on the blocks of the file; its options are those of the recipe's own method.

    Where the recipe has objectives of its own, it is these that the preset compares, each in the blocks that it pays there.
    """
    wanted, _, baseline = name.partition(":")
    if baseline and baseline not in BASELINES:
        raise RecipeError(f"Baseline '{baseline}' of '{name}' is none of {', '.join(BASELINES)}.")
    chosen, layout, recipe = method(wanted), asked.blocks.layout, asked.recipe
    own = asked.objectives
    if asked.blocks.lack and "correct" not in asked.taken:
        raise RecipeError(asked.blocks.lack)
    scored = own is None and chosen.preset is not None and chosen.preset.calibrated and states_confidence(layout)
    return Scheme.preset(
        wanted,
        layout,
        objectives=None if own is None else _compared(chosen, own, layout.names, baseline),
        calibration=recipe.rule if scored else None,
        baseline=cast(Any, baseline or None) if own is None else None,
        longest=_longest(recipe),
        recorded=asked.taken,
        **(recipe.options if wanted == recipe.method else {}),
    )


def _compared(
    chosen: Method, objectives: Sequence[Objective], names: tuple[str, ...], baseline: str
) -> tuple[Objective, ...]:
    """The objectives of a recipe as a preset compares them.

    A method by block leaves them the blocks they pay; any other pays every block, what the objective is read in first. A preset
    of correctness alone takes the objective that the others are given or judged by, or the first one and its like.
    """
    if not (chosen.preset or Preset()).calibrated:
        looked_at = {name for o in objectives for name in (*o.outcomes, judge_of(o))}
        first = next((o for o in objectives if o.name in looked_at), objectives[0])
        # The same reward of every field is one number: their sum.
        objectives = [o for o in objectives if o is first or (o.reward == first.reward and not looked_at)]
    elif len(objectives) == 1 and chosen.kind != "block":
        raise RecipeError(
            f"Method '{chosen.name}' adds up several objectives, and there is only '{objectives[0].name}'; use grpo."
        )
    by_block, compares = chosen.kind == "block", "baseline" in chosen.inputs
    made = []
    for objective in objectives:
        judge = judge_of(objective)
        against = ((baseline or "outcome") if objective.given else "group") if compares else None
        judged = tuple(entry for entry in objective.given if entry == judge)
        given = objective.given if against in ("outcome", "blended") else judged
        pays = objective.pays if by_block else tuple(dict.fromkeys((*objective.pays, *names)))
        made.append(replace(objective, pays=pays, given=given, baseline=against, scale=None, back_off=None))
    if baseline and not any(objective.given for objective in objectives):
        raise RecipeError(
            f"No objective of the recipe is given an outcome, so the baseline '{baseline}' would change nothing."
        )
    return tuple(made)


def _longest(recipe: Recipe) -> int:
    return recipe.max_completion_length or _LONGEST.get(recipe.task, 4096)
