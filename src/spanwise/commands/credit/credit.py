"""`credit`: the credit that several methods would have given to every token of existing rollouts. Nothing is trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from spanwise.commands.credit.apply import CreditResult, apply_arms
from spanwise.commands.credit.arms import choose_arms
from spanwise.commands.credit.blocks import Blocks, SampledTexts, blocks_of, compared_groups, paid_blocks
from spanwise.commands.credit.write import check_writable, write_result, write_traces_again
from spanwise.commands.shared.folder import MOST, check_no_run
from spanwise.errors import DataError, RecipeError
from spanwise.recipe import answer_layout, load
from spanwise.rollouts import read_rollouts
from spanwise.rollouts.folder import sole_writer
from spanwise.rollouts.schema import RECORDED
from spanwise.tasks import task_shape


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
) -> CreditResult:
    """Read rollouts and apply methods to them."""
    table = read_rollouts(rollouts, tokenizer=tokenizer, columns=columns)
    if not table.trainable.any():
        raise DataError(f"None of the {len(table)} completions of '{rollouts}' has any text. {table.note}".strip())
    own_recipe, overrides = None if table.folder is None else table.folder / "recipe.yaml", overrides or {}
    full_recipe = run = load(recipe or own_recipe, overrides)
    if pay:
        if "objectives" in overrides:
            raise RecipeError("Both --pay and --set objectives say who is paid; give one of them.")
        overrides = {**overrides, **paid_blocks(pay, full_recipe, table)}
        full_recipe = run = load(recipe or own_recipe, overrides)
    if recipe is not None and own_recipe is not None:
        run = load(own_recipe, {name: overrides[name] for name in ("group_size", "prompts") if name in overrides})
    given = recipe is not None or not {"method", "objectives"}.isdisjoint(overrides)  # the user's recipe must fit the file
    task, longest = task_shape(full_recipe)
    usual = answer_layout(full_recipe, task)
    # Early completions of a spanwise run may lack the tags.
    texts = SampledTexts(table) if given or own_recipe is None else []
    group_n, group_notes = compared_groups(table, full_recipe, None if own_recipe is None else run)
    blocks = blocks_of(Blocks(usual, longest), full_recipe, table, texts, asked=bool(reward))
    # A recipe of the folder that the user did not name must not run code.
    names_objectives = recipe is not None or "objectives" in overrides
    arms = choose_arms(table, full_recipe, blocks, methods, reward, texts=texts, given=given, run_code=names_objectives)
    recorded = RECORDED in methods if methods else own_recipe is None and table.as_recorded is not None
    return apply_arms(table, arms, group_n, group_notes, recorded=recorded, must=bool(methods))


def credit(
    rollouts: str | Path,
    *,
    output: str | Path = "runs/credit",
    rows: int = MOST,
    write: str | None = None,
    console: Console | None = None,
    **options: Any,
) -> CreditResult:
    """Credit rollouts, write the files and a report of at most `rows` completions, and print a short table.

    With `write`, the traces are written again with the advantages of this method.
    """
    if rows < 1:
        raise RecipeError(f"--rows is {rows}; the report needs at least 1 completion.")
    check_no_run(output)
    with sole_writer(output):
        result = credit_rollouts(rollouts, **options)
        if write is not None:
            check_writable(result, write, Path(output))
        write_result(Path(output), result, {**options, "rows": rows}, console or Console())
        if write is not None:
            write_traces_again(result, write, Path(output), console or Console())
    return result
