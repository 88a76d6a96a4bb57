"""`spanwise eval` on the command line."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from spanwise.commands.shared.options import Fields, check_sizes, recipe_fields


def command(
    model: Path,
    /,
    *,
    recipe: Path | None = None,
    prompts: int = 512,
    samples: int = 16,
    seed: int = 1,
    set_: Fields = None,
) -> None:
    """Sample a trained model on held-out prompts: accuracy, calibration, format, refusals, votes, with 95 % intervals by prompt.

    Args:
        model: a run folder (its recipe says the task), a checkpoint of it or a model folder; `evaluation.parquet` is written
            into it.
        recipe: YAML file that says the task; default: the run's own, else the embedded task.
        prompts: held-out prompts.
        samples: completions per prompt.
        seed: of sampling.
        set_: any recipe field, as field=value (spanwise train --help lists them); may be repeated.
    """
    from spanwise.commands.eval.evaluate import evaluate_folder
    from spanwise.commands.shared.display import gain_table, interval_table, vote_table
    from spanwise.commands.shared.fitted import say
    from spanwise.commands.shared.task import run_or_model
    from spanwise.measure import curve_difference
    from spanwise.report import VOTES_BY_SCORE, unmeasured_sentences
    from spanwise.rollouts.folder import sole_writer

    check_sizes(prompts=prompts, samples=samples)
    place, loaded = run_or_model(model, recipe, {**recipe_fields(set_), "eval_prompts": prompts})
    console = Console()
    with sole_writer(model):
        drawn, absent = evaluate_folder(place, loaded, prompts=prompts, samples=samples, seed=seed, console=console)
        drawn.write(model)
    prompts_drawn = len(drawn.prompt_n.unique())
    fewer = "" if prompts_drawn == prompts else f" (there are no more; {prompts} were asked for)"
    title = f"{model}: {prompts_drawn} prompts x {samples} samples{fewer}"
    say(console, *interval_table(title, drawn.intervals(), absent=absent), *unmeasured_sentences(absent))
    votes = {block: drawn.votes(block) for block in drawn.correct if drawn.most_votes(block)}
    if votes and drawn.score_n is not None and not drawn.stated:
        say(console, VOTES_BY_SCORE)
    say(console, *(vote_table(f"accuracy of a vote, block '{block}'", curves) for block, curves in votes.items()))
    for block in list(votes)[1:]:
        gain = curve_difference(votes[block]["majority"], votes[drawn.first]["majority"])
        say(console, gain_table(f"majority of '{block}' minus majority of '{drawn.first}', paired by prompt", gain))
