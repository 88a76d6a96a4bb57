"""Load the recipe that an engine's settings name. Refuse settings and recipes that do not work together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from spanwise.engines.shared import RULE, say
from spanwise.errors import refuse
from spanwise.modes import MODES
from spanwise.recipe import RecipeRule, read_file, rule_at
from spanwise.scheme import Scheme

#: The `Batch` fields that most trainers fill in.
PROVIDES = ("group_n", "ids_nt", "mask_nt", "columns", "steps", "logp_nt")
#: The methods that divide by the standard deviation of a group, whatever the recipe says.
_DIVIDES_BY_STD = ("grpo", "dcpo", "gdpo", "grpo_verif", "ha_dw")
#: The recipe fields that an engine reads.
_CREDIT = {*RULE, *MODES, "calibration", "baseline", "verifier"}


def read_rule(
    path: Any,
    *,
    engine: str,
    longest: int,  # The maximum number of tokens of a completion.
    get_setting: Callable[[str], Any],  # Returns the value of an engine's option, or None if it is not set.
    faults: Mapping[str, Any],
    fixed: Mapping[str, tuple[Any, str]],  # Maps an engine's option to its required value and the reason (a sentence).
    discounts: Mapping[str, str] = {},  # Maps the engine's discount options to those of the method.
    deviation: str = "",  # The name of the engine's option that divides by a group's standard deviation.
) -> tuple[RecipeRule, list[str]]:
    """Load a recipe and its scheme (credit rule). Refuse engine settings that conflict with it. Also return warnings."""
    fixed_setting_faults = {
        f"{name} is {get_setting(name)}. {reason} Leave {name} at {required}.": get_setting(name) not in (None, required)
        for name, (required, reason) in fixed.items()
    }
    refuse({**faults, **fixed_setting_faults})
    discount_by_name = {name: get_setting(name) for name in discounts}
    given_discounts = {name: value for name, value in discount_by_name.items() if value not in (None, 1.0)}
    method_options = {discounts[name]: value for name, value in given_discounts.items()}
    rule = rule_at(path, longest=longest, options=method_options)
    recipe, scheme = rule
    recipe_discounts = {name: scheme.options.get(discounts[name]) for name in given_discounts}
    scale_settings = (scheme.options.get("scale"), *(objective.scale for objective in scheme.objectives))
    divides_by_std = scheme.method in _DIVIDES_BY_STD or "std" in scale_settings
    std_setting = get_setting(deviation) if deviation else None
    refuse(
        {
            f"{deviation} is {std_setting}, but the recipe (method '{scheme.method}') divides by the standard deviation of groups. "
            f"Remove the setting {deviation}. Or change the recipe: remove scale: std, and replace the method by dr_grpo if it is "
            f"{' or '.join(_DIVIDES_BY_STD)}.": (divides_by_std and std_setting is not None and not std_setting),
            **{
                f"{name} is {value}, but the recipe has {discounts[name]}: {recipe_discounts[name]}. Remove one of them.": (
                    recipe_discounts[name] not in (None, value)
                )
                for name, value in given_discounts.items()
            },
        }
    )
    return rule, [
        f"{name}={value} sets the recipe's option {discounts[name]}."
        if recipe_discounts[name] is not None
        else f"{name}={value} has no effect, as neither method '{scheme.method}' nor {engine}'s grpo discounts rewards."
        for name, value in given_discounts.items()
        if discounts[name] not in recipe.options
    ]


def check_rule(
    path: str | Path,
    rule: RecipeRule,
    *,
    engine: str,
    provides: Collection[str] = PROVIDES,
    faults: Mapping[str, Any] = {},
    notes: Collection[str] = (),
) -> RecipeRule:
    """Refuse a recipe that the trainer cannot use. Issue the warnings `notes`. Return the recipe's rule."""
    modes_text = ", ".join(rule.recipe.modes)
    modes_fault = (
        f"The recipe sets {modes_text}, which does not work with {engine}. Leave it out, or train with TRL, verl or SkyRL."
    )
    refuse({modes_fault: modes_text, **faults})
    rule.scheme.check_forgets(engine)
    rule.scheme.check_loads(engine)
    rule.scheme.check(provides)
    say(idle_fields(path, engine=engine, reads_output=True), *notes)
    return rule


def compares_groups(scheme: Scheme) -> bool:
    """Return whether other groups change a group's credit, because the method standardises over the batch."""
    return "split" in scheme.entry.exceptions and {**scheme.entry.options, **scheme.options}.get("whiten", True)


def idle_fields(path: str | Path, *, engine: str, reads_output: bool = False) -> str:
    """Return a warning about recipe fields that an engine ignores."""
    recipe_fields = read_file(path)
    ignored_fields = {*recipe_fields} - _CREDIT
    if reads_output and recipe_fields.get("output"):  # without a folder, keep_rollouts does nothing
        ignored_fields -= {"output", "keep_rollouts"}
    for name, mode in MODES.items():
        if mode.elsewhere:
            ignored_fields |= {f"{name}.{field}" for field in recipe_fields.get(name) or {} if field not in mode.elsewhere}
    if not ignored_fields:
        return ""
    return f"{engine} ignores the recipe's {', '.join(sorted(ignored_fields))} and uses its own configuration instead."
