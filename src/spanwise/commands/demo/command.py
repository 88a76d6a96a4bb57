"""Define the options of `spanwise demo`."""

from typing import Literal

from spanwise.commands.shared.options import Fields, Flag, Whole, recipe_fields, seed_numbers


def command(
    task: Literal["invoices", "confidence", "fields", "digits"] = "invoices",
    /,
    *,
    output: str | None = None,
    seeds: str = "0",
    steps: Whole | None = None,
    overwrite: Flag = False,
    set_: Fields = None,
) -> None:
    """Show why blocks matter: train the same model with one advantage per completion, and again with one per block.

    Args:
        task: invoices: letters to be read into JSON; confidence: a digit puzzle with a solution and a stated confidence, also
            called digits; fields: a JSON object of eight small answers.
        output: folder for the summary and the runs; default: a new one, runs/demo-<n>.
        seeds: one or more numbers, separated by commas.
        steps: the number of generation batches of each arm.
        overwrite: replace the runs in the output folder.
        set_: any other recipe field of both arms, as field=value; may be repeated.
    """
    from spanwise.commands.demo.demo import DEMOS, run_demo

    chosen_fields = recipe_fields(set_, steps=steps)
    run_demo(DEMOS[task], output=output, seeds=seed_numbers(seeds), choices=chosen_fields, overwrite=overwrite)
