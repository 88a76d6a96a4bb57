"""Define the options of `spanwise reference`."""

from pathlib import Path

from rich.console import Console

from spanwise.commands.shared.options import Fields, Whole, check_sizes, recipe_fields


def command(
    recipe: Path | None = None,
    /,
    *,
    model: str | None = None,
    dataset: str | None = None,
    prompts: Whole = 16,
    samples: Whole = 16,
    set_: Fields = None,
) -> None:
    """Measure laser's reference: the log-probability of its reserved token before training (docs/laser.md).

    Args:
        recipe: YAML file with a laser section; the file or these options name a model and a dataset.
        model: hub name or folder.
        dataset: hub name, folder or file (json, jsonl, parquet, csv, tsv).
        prompts: the number of training prompts.
        samples: completions per prompt.
        set_: any recipe field, as field=value (spanwise train --help lists them); may be repeated.
    """
    from spanwise.commands.reference.reference import reference as measure
    from spanwise.commands.shared.fitted import say
    from spanwise.recipe import load

    check_sizes(prompts=prompts, samples=samples)
    full_recipe = load(recipe, recipe_fields(set_, model=model, dataset=dataset))
    console = Console()
    figures = measure(full_recipe, prompts=prompts, samples=samples, console=console)
    say(
        console,
        f"{figures['completions']} of {prompts * samples} completions were not cut off. After the end of these completions, the "
        f"token '{figures['token']}' has the log-probability {figures['mean']:.4g} +- {figures['std']:.2g} (mean +- standard "
        f"deviation). spanwise computed the log-probability at the temperature {figures['temperature']:g}. As in LaSeR's code, "
        f"the result is multiplied by {figures['temperature']:g}. Write in the recipe:\n"
        f"laser: {{token: '{figures['token']}', reference: {figures['mean']:.4g}, ...}}",
    )
