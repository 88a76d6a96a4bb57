"""Which methods are applied to a rollout file, each with its layout, objectives and options."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from spanwise.credit import METHODS, method
from spanwise.engines.files import RolloutTable
from spanwise.errors import LayoutError, RecipeError
from spanwise.recipe import Plan, Recipe, answer_layout, plan
from spanwise.score import BASELINES
from spanwise.segment import Layout
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
        plan: layout, objectives, spreading.
        options: of `assign`.
        estimator: a function of the summed reward, instead of the objectives' baselines.
        per_token: a function of rewards per token, instead of all of that.
        needs: what `per_token` is given from the file.
    """

    name: str
    plan: Plan
    options: Mapping[str, Any] = field(default_factory=dict)
    estimator: Callable[..., Tensor] | None = None
    per_token: Callable[..., Tensor] | None = None
    needs: tuple[str, ...] = ()


def choose_arms(recipe: Recipe, wanted: Sequence[str], table: RolloutTable) -> tuple[list[Arm], list[str]]:
    """The arms asked for; without any, the usual ones and the recipe's own.

    Args:
        recipe: layout, objectives and options; its own method is always called by its own settings.
        wanted: `method`, `method:baseline` or `recipe`; empty for the usual ones.
        table: the file they are applied to.

    Returns:
        The arms, and sentences on those of the usual ones that do not fit the recipe.

    Raises:
        RecipeError: an unknown method or baseline, a method that needs what the file does not have.
    """
    own = _own(recipe)
    if wanted:
        return [_arm(name, recipe, own, table) for name in dict.fromkeys(wanted)], []
    arms: list[Arm] = []
    notes: list[str] = []
    for name in USUAL:
        try:
            arms.append(_arm(name, recipe, own, table))
        except (RecipeError, LayoutError) as error:
            notes.append(f"{name} is left out: {error}")
    same = next((arm.name for arm in arms if arm.plan == own.plan and arm.per_token is None), None)
    return (arms if same else [*arms, own]), notes


def base_layout(recipe: Recipe) -> Layout:
    """The blocks of the recipe, or of its task (`answer_layout`)."""
    task = _LAYOUTS.get(recipe.task)
    if task is None and recipe.layout is None:
        raise RecipeError(f"Task '{recipe.task}' has no layout of its own here; add a layout to the recipe.")
    return Layout(recipe.layout or {}, prefilled=recipe.prefilled) if task is None else answer_layout(recipe, task)


def _own(recipe: Recipe) -> Arm:
    """The recipe as it stands, under the shortest name that means the same."""
    filled = plan(recipe, base_layout(recipe), _longest(recipe))
    for name in (recipe.method, f"{recipe.method}:{recipe.baseline}"):
        try:
            if _plan_of(name, recipe) == filled:
                return Arm(name, filled, _options(recipe, filled), _estimator(filled))
        except (RecipeError, LayoutError):
            continue
    return Arm("recipe", filled, _options(recipe, filled), _estimator(filled))


def _arm(name: str, recipe: Recipe, own: Arm, table: RolloutTable) -> Arm:
    if name in ("recipe", own.name):
        return own
    chosen = method(name.partition(":")[0])
    if chosen.preset is not None:
        filled = _plan_of(name, recipe)
        return Arm(name, filled, _options(recipe, filled), _estimator(filled))
    if ":" in name:
        raise RecipeError(f"Method '{chosen.name}' takes no baseline; ask for '{chosen.name}' alone.")
    unknown_needs = [need for need in chosen.needs if need not in ("mask_nt", *_PER_TOKEN)]
    if chosen.kind != "token" or unknown_needs:
        needs = ", ".join(unknown_needs or chosen.needs)
        raise RecipeError(
            f"Method '{chosen.name}' cannot be applied to a rollout file: it needs {needs}, which no format holds. Call "
            f"spanwise.credit.{chosen.estimator.__name__} from Python."
        )
    missing = [column for need, column in _PER_TOKEN.items() if need in chosen.needs and column not in table.token_values]
    if missing:
        words = {"value": "values of a critic", "logp": "log-probabilities"}
        there = "no token ids" if not table.has_ids else "none of them"
        raise RecipeError(
            f"Method '{chosen.name}' needs {' and '.join(words[m] for m in missing)} of every token, and '{table.path}' holds "
            f"{there}. Use a method that needs rewards only (grpo, rlcr, bae), or a file with the columns values and logprobs."
        )
    layout = base_layout(recipe)
    objectives = tuple(replace(objective, pays=layout.names) for objective in _plan_of("grpo", recipe).objectives)
    filled = Plan(layout, objectives, True, "completion")
    return Arm(name, filled, {}, per_token=chosen.estimator, needs=chosen.needs)


def _plan_of(name: str, recipe: Recipe) -> Plan:
    """The preset `method` or `method:baseline` on the blocks of the recipe."""
    chosen, _, baseline = name.partition(":")
    if baseline and baseline not in BASELINES:
        raise RecipeError(f"Baseline '{baseline}' of '{name}' is none of {', '.join(BASELINES)}.")
    if baseline and method(chosen).preset is not None and method(chosen).name != "bae":
        raise RecipeError(f"Method '{chosen}' takes no baseline; ask for '{chosen}' alone, or for 'bae:{baseline}'.")
    update = {"method": method(chosen).name, "baseline": baseline or "outcome", "objectives": None, "layout": None}
    changed = recipe.model_copy(update={**update, "prefilled": None, "sum_first": None, "per": None})
    return plan(changed, base_layout(recipe), _longest(recipe))


def _longest(recipe: Recipe) -> int:
    return recipe.max_completion_length or _LONGEST.get(recipe.task, 4096)


def _options(recipe: Recipe, filled: Plan) -> dict[str, Any]:
    """What the trainer would hand to `assign`; `recipe.trainer` has the last word, as in training."""
    last = recipe.trainer
    return {
        "sum_first": filled.sum_first,
        "leave_one_out": last.get("leave_one_out", recipe.leave_one_out),
        "min_stratum": last.get("min_stratum", recipe.min_stratum),
        "ddof": last.get("ddof", 1),
        "eps": last.get("scale_eps", 1e-6),
        "whiten": filled.whiten,
    }


def _estimator(filled: Plan) -> Callable[..., Tensor] | None:
    return None if filled.estimator is None else METHODS[filled.estimator].estimator
