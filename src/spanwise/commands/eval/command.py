"""Define the options of `spanwise eval`."""

from pathlib import Path

from rich.console import Console

from spanwise.commands.shared.options import Fields, Whole, check_sizes, recipe_fields


def command(
    model: Path,
    /,
    *,
    recipe: Path | None = None,
    prompts: Whole | None = None,
    samples: Whole = 16,
    seed: Whole = 1,
    set_: Fields = None,
) -> None:
    """Evaluate a trained model on held-out prompts: accuracy, calibration, format, refusals and votes, with 95 % intervals.

    Args:
        model: a run folder, whose recipe names the task, a checkpoint or a model folder; `evaluation.parquet` is written
            into it.
        recipe: YAML file that names the task; default: the run's own, else the embedded task.
        prompts: the number of held-out prompts, over which the intervals are; default: 512.
        samples: completions per prompt.
        seed: the seed of sampling.
        set_: any recipe field, as field=value (spanwise train --help lists them); may be repeated.
    """
    from spanwise.commands.eval.evaluate import evaluate_folder
    from spanwise.commands.shared.display import gain_table, interval_table, vote_table
    from spanwise.commands.shared.fitted import say
    from spanwise.commands.shared.task import run_or_model
    from spanwise.measure import curve_difference
    from spanwise.report.sections import VOTES_BY_SCORE
    from spanwise.report.train import unmeasured_sentences
    from spanwise.rollouts.folder import sole_writer

    recipe_changes = recipe_fields(set_, eval_prompts=prompts)
    check_sizes(prompts=prompts, samples=samples)
    folder, full_recipe = run_or_model(model, recipe, {"eval_prompts": 512, **recipe_changes})
    prompts = full_recipe.eval_prompts
    console = Console()
    with sole_writer(model):
        results, reasons = evaluate_folder(folder, full_recipe, prompts=prompts, samples=samples, seed=seed, console=console)
        results.write(model)
    drawn_prompt_count = len(results.prompt_n.unique())
    prompts_note = "" if drawn_prompt_count == prompts else f" (you asked for {prompts} prompts, but there are no more)"
    table_title = f"{model}: {drawn_prompt_count} prompts x {samples} samples{prompts_note}"
    say(console, *interval_table(table_title, results.intervals(), absent=reasons), *unmeasured_sentences(reasons))
    curves_by_block = {block: results.votes(block) for block in results.correct if results.most_votes(block)}
    if curves_by_block and results.score_n is not None and not results.stated:
        say(console, VOTES_BY_SCORE)
    say(console, *(vote_table(f"accuracy of a vote, block '{block}'", curves) for block, curves in curves_by_block.items()))
    for block in list(curves_by_block)[1:]:
        first_block_curve = curves_by_block[results.first]["majority"]
        gain_curve = curve_difference(curves_by_block[block]["majority"], first_block_curve)
        heading = f"accuracy of the majority vote: block '{block}' minus block '{results.first}'"
        say(console, gain_table(heading, gain_curve))
