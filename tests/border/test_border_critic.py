"""Critics that a method lacks, that none reads, or that cannot be what was meant."""

import json

import yaml

from border.case import Case, check, command

QUICK = ("--set", "start_steps=1", "--set", "eval_prompts=2", "--set", "eval_samples=2", "--set", "report=false")
GAE = {"method": "gae", "objectives": [{"reward": "correct", "pays": ["solution", "confidence"]}]}


def trained(folder, **fields):
    """`spanwise train` of a recipe."""
    (folder / "recipe.yaml").write_text(yaml.safe_dump({**GAE, **fields}))
    return command("train", "recipe.yaml", "--output", str(folder / "run"), *QUICK)


def of_other_values(folder):
    """A saved critic of two values where the recipe needs one."""
    (folder / "critic").mkdir()
    about = {"values": ["correct", "brier"], "head": "scalar", "bins": 51, "value_range": [0.0, 1.0], "tokenizer": "0"}
    (folder / "critic" / "critic.json").write_text(json.dumps(about))
    return trained(folder, critic={"model": "critic"})


CASES = [
    Case(
        "`method: gae` without `critic`",
        trained,
        "Method 'gae' needs a critic and the recipe has none. Write critic: {learning_rate: 1.0e-5}, or use a method that "
        "compares completions, such as 'bae' or 'grpo'.",
    ),
    Case(
        "`method: bae` with a `critic`",
        lambda folder: trained(folder, method="bae", objectives=None, critic={}),
        "Method 'bae' reads no values, so a critic would change nothing. Leave it out, or use 'gae' or 'sae'.",
    ),
    Case(
        "`critic: {lerning_rate: 0.001}`",
        lambda folder: trained(folder, critic={"lerning_rate": 1e-3}),
        "There is no field of critic 'lerning_rate'. Did you mean 'learning_rate'?",
    ),
    Case(
        "`critic: {gae_lambda_policy: 0.95}`",
        lambda folder: trained(folder, critic={"gae_lambda_policy": 0.95}),
        "critic.gae_lambda_policy belongs to the method, which it makes the advantages of: write options: "
        "{gae_lambda_policy: 0.95}.",
    ),
    Case(
        "`critic: {model: nowhere}`",
        lambda folder: trained(folder, critic={"model": "nowhere"}),
        "The critic 'nowhere' cannot be read: ...",
    ),
    Case(
        "`critic: {model: runs/pre/critic}`, whose values are of other objectives",
        of_other_values,
        "The critic '...critic' gives 2 values (correct, brier) and this recipe needs 1 (return). Use a critic of the same "
        "objectives and the same values.",
    ),
]

test = check(CASES)
