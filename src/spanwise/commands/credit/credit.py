"""`spanwise credit`: the credit that several methods give to every token of existing rollouts. Nothing is trained."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from spanwise.commands.credit.apply import CreditResult, apply_arms
from spanwise.commands.credit.arms import choose_arms
from spanwise.commands.credit.blocks import Blocks, SampledTexts, choose_blocks, compared_groups, parse_pay
from spanwise.commands.credit.write import check_writable, write_again, write_result
from spanwise.commands.shared.folder import MOST, check_no_run
from spanwise.commands.shared.options import key_value
from spanwise.errors import DataError, RecipeError
from spanwise.recipe import answer_layout, load
from spanwise.rollouts import read_rollouts
from spanwise.rollouts.folder import sole_writer
from spanwise.rollouts.schema import RECORDED
from spanwise.tasks import task_shape

#: The recipe fields that affect only the recipe's own method, not the methods compared with it.
_OWN_FIELDS = ("baseline", "per", "values", "refine", "options")


def credit_rollouts(
    rollouts: str | Path,
    *,
    recipe: str | Path | None = None,
    methods: Sequence[str] = (),
    tokenizer: str | Path | None = None,
    columns: Mapping[str, str] | None = None,
    reward: Mapping[str, str] | None = None,
    pay: Sequence[str] = (),
    overrides: Mapping[str, Any] | None = None,
    own_only: bool = False,
) -> CreditResult:
    """Read a rollout file, and credit its completions by several methods.

    With `own_only`, a spanwise run is credited by the method that trained it alone, unless `methods` are named.
    """
    block_reward_pairs = [key_value(pay_text, "--pay", "block=reward, such as draft=passed") for pay_text in pay]
    paid_blocks = list(dict.fromkeys(block for block, _ in block_reward_pairs))
    table = read_rollouts(rollouts, tokenizer=tokenizer, columns=columns, parts=paid_blocks)
    if not table.trainable.any():
        raise DataError(f"None of the {len(table)} completions of '{rollouts}' has any text. {table.note}".strip())
    run_recipe_file = None if table.folder is None else table.folder / "recipe.yaml"
    overrides = overrides or {}
    full_recipe = load(recipe or run_recipe_file, overrides)
    if pay:
        if "objectives" in overrides:
            raise RecipeError("--pay and --set objectives both say which blocks are paid; give only one of them.")
        overrides = {**overrides, **parse_pay(block_reward_pairs, full_recipe, table)}
        full_recipe = load(recipe or run_recipe_file, overrides)
    run_recipe = None if run_recipe_file is None else full_recipe
    if recipe is not None and run_recipe_file is not None:
        size_overrides = {name: overrides[name] for name in ("group_size", "prompts") if name in overrides}
        run_recipe = load(run_recipe_file, size_overrides)
    # The recipe's method must fit the file if the user chose it. A default that does not fit is skipped.
    user_gave_rule = recipe is not None or "method" in overrides or "objectives" in overrides
    task_layout, max_length = task_shape(full_recipe)
    # If another trainer wrote the file, the length limit is unknown unless the user gives it.
    length_limit_fields = {"max_completion_length", "task"}
    limit_is_unknown = run_recipe_file is None and not length_limit_fields & full_recipe.model_fields_set
    max_length = int(table.tokens.lengths.max()) if limit_is_unknown else max_length
    # If no task is named, assume a user's own model. Such a model does not write the tags of the embedded task.
    task_is_named = run_recipe_file is not None or "task" in full_recipe.model_fields_set
    usual_layout = (None if task_is_named else full_recipe.own_layout) or answer_layout(full_recipe, task_layout)
    # The recipe of a spanwise run names the tags. Search its completions for tags only if the user gave a credit rule.
    texts = SampledTexts(table) if user_gave_rule or run_recipe_file is None else []
    group_n, group_notes = compared_groups(table, full_recipe, run_recipe)
    blocks = choose_blocks(Blocks(usual_layout, max_length), full_recipe, table, texts, asked=bool(reward))
    # Do not run code from a recipe that the user did not name.
    runs_code = recipe is not None or "objectives" in overrides
    arms = choose_arms(table, full_recipe, blocks, methods, reward, texts=texts, must_fit=user_gave_rule, run_code=runs_code)
    if methods and arms.own is None:
        _check_own_fields(full_recipe.method, methods, overrides)
    if own_only and not methods and arms.own is not None and table.folder is not None:
        arms = replace(arms, schemes={arms.own: arms.schemes[arms.own]})
    limit_dividing_methods = [name for name, scheme in arms.schemes.items() if limit_is_unknown and scheme.per == max_length]
    if limit_dividing_methods:
        verb = "divides" if len(limit_dividing_methods) == 1 else "divide"
        methods_text = " and ".join(limit_dividing_methods)
        group_notes.append(
            f"{methods_text} {verb} each credit by {max_length}, the number of tokens of the file's longest completion. If "
            "training allows longer completions, give its limit: --set max_completion_length=N."
        )
    is_from_another_trainer = run_recipe_file is None and table.as_recorded is not None
    shows_recorded_credit = RECORDED in methods if methods else is_from_another_trainer
    return apply_arms(table, arms, group_n, group_notes, recorded=shows_recorded_credit, must=bool(methods))


def _check_own_fields(own_method: str, methods: Sequence[str], overrides: Mapping[str, Any]) -> None:
    """Refuse settings of the recipe's own method if `methods` lacks it. The method with another baseline still reads `options`."""
    reads_options = own_method in [name.partition(":")[0] for name in methods]
    unread_fields = [name for name in _OWN_FIELDS if name in overrides and not (name == "options" and reads_options)]
    if unread_fields:
        raise RecipeError(
            f"--set {unread_fields[0]} only changes the recipe's own method, which --methods does not name. Write "
            "--methods recipe, and choose the method with --set method=NAME."
        )


def credit(
    rollouts: str | Path,
    *,
    output: str | Path = "runs/credit",
    rows: int = MOST,
    write: str | None = None,
    console: Console | None = None,
    **options: Any,
) -> CreditResult:
    """Credit a rollout file and report at most `rows` completions. `write` names the method to add to copies of the file."""
    if rows < 1:
        raise RecipeError(f"--rows is {rows}; the report must show at least 1 completion.")
    check_no_run(output)
    with sole_writer(output):
        credit_result = credit_rollouts(rollouts, **options)
        if write == "recipe" and credit_result.arms.own is not None:
            write = credit_result.arms.own  # the recipe's method may appear under the name of a preset with equal settings
        if write is not None:
            check_writable(credit_result, write, Path(output))
        write_result(Path(output), credit_result, {**options, "rows": rows}, console or Console())
        if write is not None:
            write_again(credit_result, write, Path(output), console or Console())
    return credit_result
