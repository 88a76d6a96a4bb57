"""Presets and the price of malformed tags, asked for in ways that cannot be meant."""

from border.case import case, check, command
from spanwise import Layout, Objective, Scheme
from spanwise.recipe import load, scheme_of
from spanwise.tasks import DIGITS_LAYOUT

FORMAT = {"reward": "format", "pays": ["confidence"], "weight": 0.25}


@case
def recipe(objective=None, **fields):
    """The scheme of a recipe, with one objective more than the price of a right answer."""
    objectives = {} if objective is None else {"objectives": [{"reward": "correct", "pays": ["solution"]}, objective]}
    return scheme_of(load(None, {**objectives, **fields}), DIGITS_LAYOUT, 32)


CASES = {
    "`spanwise methods bae_papers`": case(command)("methods", "bae_papers"),
    "`spanwise compare --arms rlcr,rlcr-paper`": case(command)("compare", "--arms", "rlcr,rlcr-paper", "--output", "."),
    "`method: rlcr_paper` with `baseline: group`": recipe(method="rlcr_paper", baseline="group"),
    "a price on malformed tags with a misspelt option, `emtpy: true`": recipe({**FORMAT, "options": {"emtpy": True}}),
    "a price on malformed tags that pays no block of the task, `pays: [report]`": recipe({**FORMAT, "pays": ["report"]}),
    "a price for each block under one name": case(Scheme)(
        "bae", Layout(["plan", "code"]), [Objective("format", "plan"), Objective("format", "code")]
    ),
    "one number for everything (rlcr) with a price on the confidence alone": recipe(FORMAT, method="rlcr"),
    "a price without end, `weight: .inf`": recipe({**FORMAT, "weight": float("inf")}),
    "an objective with `pay` in place of `pays`": recipe({"reward": "brier", "pay": ["confidence"]}),
    "an objective without `pays`": recipe({"reward": "brier"}),
    "the usual objectives and a layout without a confidence": recipe(layout={"solution": ["answer"]}),
    "Scheme.preset('grpo', Layout(['step[*]'], segmenter='steps'))": lambda folder: Scheme.preset(
        "grpo", Layout(["step[*]"], segmenter="steps")
    ),
    "`options: {baseline: group}`, which objectives say": recipe(FORMAT, options={"baseline": "group"}),
}

test = check(__doc__, CASES)
