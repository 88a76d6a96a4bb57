"""Which methods are applied to a rollout file, each with its layout, objectives and options."""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from spanwise.credit import method, states_confidence
from spanwise.errors import DataError, LayoutError, RecipeError, SpanwiseError, unknown
from spanwise.layout import Layout
from spanwise.objective import BASELINES
from spanwise.recipe import Recipe, answer_layout, calibration_of, scheme_of
from spanwise.rollouts import RolloutTable
from spanwise.scheme import Scheme
from spanwise.score import REWARDS
from spanwise.tasks import DIGITS_LAYOUT, TWICE_LAYOUT
from spanwise.tasks.hub import LAYOUTS

#: What is shown beside the recipe's own method when nothing else is asked for.
USUAL = ("grpo", "rlcr", "bae")
_LAYOUTS: Mapping[str, Layout] = {"digits": DIGITS_LAYOUT, "digits_twice": TWICE_LAYOUT, **LAYOUTS}
_LONGEST = {"digits": 32, "digits_twice": 32}
_PER_TOKEN = {"value_nt": "value", "logp_nt": "logp"}


@dataclass(frozen=True)
class Arm:
    """One method as it is applied to a file.

    Attributes:
        name: as the user wrote it: a method, or `method:baseline`.
        scheme: the rule of credit.
    """

    name: str
    scheme: Scheme


def choose_arms(
    recipe: Recipe, wanted: Sequence[str], table: RolloutTable, rewards: Mapping[str, str] | None = None
) -> tuple[list[Arm], list[str]]:
    """The arms asked for, each once; without any, those of the usual ones and the recipe's own that fit the file.

    Args:
        recipe: layout, objectives and options; its own method is always called by its own settings.
        wanted: `method`, `method:baseline` or `recipe`; empty for the usual ones.
        table: the file they are applied to.
        rewards: objective -> recorded reward, see `taken_rewards`.

    Returns:
        The arms, and sentences on those of the usual ones that do not fit the recipe or the file.

    Raises:
        RecipeError: an unknown method or baseline, a method that needs what the file does not have; LayoutError, DataError:
            none fits, why the last one does not.
    """
    taken = taken_rewards(table, rewards or {})
    try:
        own: Arm | SpanwiseError = _own(recipe, taken)
    except (RecipeError, LayoutError) as error:
        own = error
    if wanted:
        arms = [_arm(name, recipe, own, table, taken) for name in wanted]
        return list({arm.name: arm for arm in arms}.values()), []  # two names may mean one arm
    arms: list[Arm] = []
    reasons: dict[str, list[str]] = {}
    failure: SpanwiseError | None = None
    for name in (*USUAL, "recipe"):
        try:
            arm = _arm(name, recipe, own, table, taken)
            sources(table, arm, taken)
        except (RecipeError, LayoutError, DataError) as error:
            failure = error
            reasons.setdefault(str(error), []).append(name)
            continue
        if name in USUAL or all(arm.scheme != other.scheme for other in arms):
            arms.append(arm)
    if failure is not None and not arms:
        raise failure
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

    "text" in `rewards` means that it is computed although there is one of its name.

    Raises:
        RecipeError: the file does not record what `rewards` names.
    """
    for objective, column in rewards.items():
        if column != "text" and column not in table.rewards:
            raise RecipeError(_no_reward(table, objective, column))
    chosen = {name: name for name in table.rewards} | dict(rewards)
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


def sources(table: RolloutTable, arm: Arm, taken: Mapping[str, str]) -> dict[str, str]:
    """Where each reward of an arm comes from, in words.

    Raises:
        DataError: one can come from nowhere.
    """
    origin: dict[str, str] = {}
    for objective in arm.scheme.objectives:
        name = objective.name
        if name in taken:
            origin[name] = "the file" if taken[name] == name else f"the file's '{taken[name]}'"
            continue
        origin[name] = "the text"
        options = {**REWARDS[objective.reward].options, **objective.options} if isinstance(objective.reward, str) else {}
        column = options.get("column")
        if column is not None and not any(value is not None for value in table.columns.get(column, ())):
            lack = f"needs the right answers, and '{table.path}' has none (no column '{column}')"
            taken_from = f"--reward {name}={next(iter(table.rewards), '')}"
            there = f"It records {', '.join(table.rewards)}: take one with {taken_from}, or add the column."
            raise DataError(f"Reward '{name}' {lack}. {there if table.rewards else 'Add the column.'}")
    return origin


def base_layout(recipe: Recipe) -> Layout:
    """The blocks of the recipe, or of its task (`answer_layout`)."""
    return answer_layout(recipe, _LAYOUTS[recipe.task])


def provides(table: RolloutTable) -> list[str]:
    """The fields of a `Batch` that a file fills in."""
    return ["group_n", "ids_nt", "mask_nt", "columns", *(f"{name}_nt" for name in table.token_values)]


def _own(recipe: Recipe, taken: Collection[str]) -> Arm:
    """The recipe as it stands, under the shortest name that means the same."""
    scheme = scheme_of(recipe, base_layout(recipe), _longest(recipe), recorded=taken)
    for name in (recipe.method, *(f"{recipe.method}:{baseline}" for baseline in BASELINES)):
        try:
            if _named(name, recipe, taken) == scheme:
                return Arm(name, scheme)
        except (RecipeError, LayoutError):
            continue
    return Arm("recipe", scheme)


def _arm(name: str, recipe: Recipe, own: Arm | SpanwiseError, table: RolloutTable, taken: Collection[str]) -> Arm:
    if isinstance(own, Arm) and name in ("recipe", own.name):
        return own
    if isinstance(own, SpanwiseError) and name == "recipe":
        raise own
    chosen = method(name.partition(":")[0])
    if ":" in name and "baseline" not in chosen.inputs:
        raise RecipeError(f"Method '{chosen.name}' takes no baseline; ask for '{chosen.name}' alone, or for 'bae'.")
    lacking = [need for need in chosen.needs if need not in ("mask_nt", "length_n", *_PER_TOKEN)]
    if lacking:
        raise RecipeError(
            f"Method '{chosen.name}' cannot be applied to a rollout file: it needs {', '.join(lacking)}, which no format holds. "
            f"Call spanwise.credit.{chosen.estimator.__name__} from Python."
        )
    missing = [column for need, column in _PER_TOKEN.items() if need in chosen.needs and column not in table.token_values]
    if missing:
        words = {"value": "values of a critic", "logp": "log-probabilities"}
        there = "no token ids" if not table.has_ids else "none of them"
        raise RecipeError(
            f"Method '{chosen.name}' needs {' and '.join(words[m] for m in missing)} of every token, and '{table.path}' holds "
            f"{there}. Use a method that needs rewards only (grpo, rlcr, bae), or a file with the columns values and logprobs."
        )
    return Arm(name, _named(name, recipe, taken))


def _named(name: str, recipe: Recipe, taken: Collection[str]) -> Scheme:
    """The preset `method` or `method:baseline` on the blocks of the recipe; its options are those of its own method."""
    wanted, _, baseline = name.partition(":")
    if baseline and baseline not in BASELINES:
        raise RecipeError(f"Baseline '{baseline}' of '{name}' is none of {', '.join(BASELINES)}.")
    chosen, layout = method(wanted), base_layout(recipe)
    scored = chosen.preset is not None and chosen.preset.calibrated and states_confidence(layout)
    return Scheme.preset(
        wanted,
        layout,
        calibration=calibration_of(recipe) if scored else None,
        baseline=cast(Any, baseline or None),
        longest=_longest(recipe),
        recorded=taken,
        **(recipe.options if wanted == recipe.method else {}),
    )


def _longest(recipe: Recipe) -> int:
    return recipe.max_completion_length or _LONGEST.get(recipe.task, 4096)
