"""Define the options of `spanwise compare`."""

from pathlib import Path

from spanwise.commands.shared.options import Fields, Whole, listed, recipe_fields, seed_numbers


def command(
    recipe: Path | None = None,
    /,
    *,
    arms: str = "outcome,blended,group,rlcr",
    seeds: str = "0,1,2,3,4",
    output: str = "runs/compare",
    reference: str | None = None,
    processes: Whole | None = None,
    set_: Fields = None,
) -> None:
    """Train several methods or baselines with several seeds, and say which differences exceed noise.

    Finished runs in the output folder are not trained again, so an interrupted comparison resumes, and seeds can be added.
    All trainings start from the same model. Ctrl-C also ends the running trainings.

    Args:
        recipe: YAML file with the fields that the arms share; an arm's own fields win over this file.
        arms: baselines, methods or recipe files, separated by commas.
        seeds: numbers separated by commas.
        output: folder for the table, the report and the runs.
        reference: compare every other arm with this one only; default: all pairs.
        processes: the number of trainings at a time; default: 2 on two or more CPU cores without a GPU, else 1.
        set_: any recipe field of all arms, as field=value; may be repeated. Write null for no value.
    """
    from spanwise.commands.compare.compare import compare as run

    run(
        arms=listed(arms), seeds=seed_numbers(seeds), output=output, shared=recipe, choices=recipe_fields(set_),
        reference=reference, processes=processes,
    )  # fmt: skip
