"""Presets and the price of malformed tags, asked for in ways that cannot be meant."""

from border.case import check, command, output_of
from spanwise import Layout, Objective, Scheme
from spanwise.recipe import load, scheme_of
from spanwise.tasks import DIGITS_LAYOUT

FORMAT = {"reward": "format", "pays": ["confidence"], "weight": 0.25}


def recipe_with(entry, **fields):
    def run(folder):
        objectives = [{"reward": "correct", "pays": ["solution"]}, entry]
        return output_of(lambda: scheme_of(load(None, {"objectives": objectives, **fields}), DIGITS_LAYOUT, 32))

    return run


CASES = {
    "`spanwise methods bae_papers`": lambda folder: command("methods", "bae_papers"),
    "`spanwise compare --arms rlcr,rlcr-paper`": lambda folder: command(
        "compare", "--arms", "rlcr,rlcr-paper", "--output", folder
    ),
    "`method: rlcr_paper` with `baseline: group`": lambda folder: output_of(
        lambda: scheme_of(load(None, {"method": "rlcr_paper", "baseline": "group"}), DIGITS_LAYOUT, 32)
    ),
    "a price on malformed tags with a misspelt option, `emtpy: true`": recipe_with({**FORMAT, "options": {"emtpy": True}}),
    "a price on malformed tags that pays no block of the task, `pays: [report]`": recipe_with(
        {**FORMAT, "pays": ["report"]}
    ),
    "a price for each block under one name": lambda folder: output_of(
        lambda: Scheme(
            "bae", Layout({"plan": ["plan"], "code": ["code"]}), [Objective("format", "plan"), Objective("format", "code")]
        )
    ),
    "one number for everything (rlcr) with a price on the confidence alone": recipe_with(FORMAT, method="rlcr"),
    "a price without end, `weight: .inf`": recipe_with({**FORMAT, "weight": float("inf")}),
    "an objective with `pay` in place of `pays`": recipe_with({"reward": "brier", "pay": ["confidence"]}),
    "an objective without `pays`": recipe_with({"reward": "brier"}),
    "the usual objectives and a layout without a confidence": lambda folder: output_of(
        lambda: scheme_of(load(None, {"layout": {"solution": ["answer"]}}), DIGITS_LAYOUT, 32)
    ),
    "`options: {baseline: group}`, which objectives say": recipe_with(FORMAT, options={"baseline": "group"}),
}

test = check(__doc__, CASES)
