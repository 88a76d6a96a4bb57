"""Presets and the price of malformed tags, asked for in ways that cannot be meant."""

from border.case import Case, check, command, said
from spanwise import Layout, Objective, Scheme
from spanwise.recipe import load, scheme_of
from spanwise.tasks import DIGITS_LAYOUT

FORMAT = {"reward": "format", "pays": ["confidence"], "weight": 0.25}


def recipe_with(entry, **fields):
    def run(folder):
        objectives = [{"reward": "correct", "pays": ["solution"]}, entry]
        return said(lambda: scheme_of(load(None, {"objectives": objectives, **fields}), DIGITS_LAYOUT, 32))

    return run


CASES = [
    Case(
        "`spanwise methods bae_papers`",
        lambda folder: command("methods", "bae_papers"),
        "There is no method 'bae_papers'. Did you mean 'bae_paper'? ...",
    ),
    Case(
        "`spanwise compare --arms rlcr,rlcr-paper`",
        lambda folder: command("compare", "--arms", "rlcr,rlcr-paper", "--output", folder),
        "There is no arm (a baseline, a method or a recipe file) 'rlcr-paper'. Did you mean 'rlcr_paper'? ...",
    ),
    Case(
        "`method: rlcr_paper` with `baseline: group`",
        lambda folder: said(lambda: scheme_of(load(None, {"method": "rlcr_paper", "baseline": "group"}), DIGITS_LAYOUT, 32)),
        "baseline is 'group', but method 'rlcr_paper' has its own, so it would change nothing. ...",
    ),
    Case(
        "a price on malformed tags with a misspelt option, `emtpy: true`",
        recipe_with({**FORMAT, "options": {"emtpy": True}}),
        "There is no option of reward 'format' called 'emtpy'. Did you mean 'empty'? ...",
    ),
    Case(
        "a price on malformed tags that pays no block of the task, `pays: [report]`",
        recipe_with({**FORMAT, "pays": ["report"]}),
        "Objective 'format' pays 'report'. There is no block 'report'. ...",
    ),
    Case(
        "a price for each block under one name",
        lambda folder: said(
            lambda: Scheme(
                "bae",
                Layout({"plan": ["plan"], "code": ["code"]}),
                [Objective("format", "plan"), Objective("format", "code")],
            )
        ),
        "Two objectives are called 'format'; give one of them another 'name'.",
    ),
    Case(
        "one number for everything (rlcr) with a price on the confidence alone",
        recipe_with(FORMAT, method="rlcr"),
        "Method 'rlcr' gives a completion one number, but 'correct' pays solution and 'format' pays confidence. ...",
    ),
    Case(
        "a price without end, `weight: .inf`",
        recipe_with({**FORMAT, "weight": float("inf")}),
        "Objective 'format' has weight: inf; write a finite number.",
    ),
]

test = check(CASES)
