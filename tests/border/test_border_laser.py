"""Self-rewarding scores that cannot be read, that are another model's, or that would never begin."""

import yaml

from border.case import Case, check, command
from spanwise import Laser
from trl_small import trainer

QUICK = ("--set", "start_steps=1", "--set", "eval_prompts=2", "--set", "eval_samples=2", "--set", "report=false")


def trained(folder, steps=1, temperature=1.0, **laser):
    """`spanwise train` of the embedded task with a score."""
    fields = {"token": "<unk>", "mix": 0.0, "beta": 0.5, **laser}
    recipe = {"steps": steps, "temperature": temperature, "prompts": 2, "group_size": 4, "laser": fields}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return command("train", "recipe.yaml", "--output", str(folder / "run"), *QUICK)


def of_another_model(folder):
    """A few scripted completions under a reference that is not this policy's."""
    run = trainer(folder, extra={"credit": {"laser": Laser("?", reference=-23.0, mix=0.0)}})
    run.train()


CASES = [
    Case(
        "`laser: {}`",
        lambda folder: trained(folder, token=""),
        "laser.token is ''; name one token of the vocabulary, or its id.",
    ),
    Case(
        "`laser: {token: <|vision_start|>}` with a vocabulary that lacks it",
        lambda folder: trained(folder, token="<|vision_start|>"),
        "laser.token '<|vision_start|>' is not in the vocabulary of 61 tokens; name one that is, such as <unk>.",
    ),
    Case(
        "`laser: {token: '7'}`, a digit of the answers",
        lambda folder: trained(folder, token="7"),
        "laser.token '7' is text that the policy writes, so it can be sampled; name a special one, such as <unk>.",
    ),
    Case(
        "`laser: {token: <eos>}`",
        lambda folder: trained(folder, token="<eos>"),
        "laser.token '<eos>' begins, ends or pads a completion; name one that has no use, such as <unk>.",
    ),
    Case(
        "`laser: {reference: -23}` of another model",
        of_another_model,
        "laser.reference is -23, and the starting policy gives '?' -... nats (+- ...), so its answers start at a score of "
        "...: the reference is of another model, or token. Leave it out, and it is measured.",
    ),
    Case(
        "`laser: {reference: -1.5}`, so near to 0 that no score reaches 1",
        lambda folder: trained(folder, reference=-1.5),
        "laser: with beta 0.5 and the reference -1.5 no score can exceed 0.75, so no answer could be called right; set beta to "
        "0.67 or more.",
    ),
    Case(
        "`temperature: 0` with `laser`",
        lambda folder: trained(folder, temperature=0.0),
        "temperature is 0.0, and must be at least 0.01",
    ),
    Case(
        "`laser` whose mixing begins behind the last batch",
        lambda folder: trained(folder, steps=5, mix=0.1),
        "laser: the mixing begins after 200 generation batches and the run has 5, so it does nothing; set "
        "self_rewarding_warmup down, or mix: 0.",
    ),
    Case(
        "`laser: {verdict: right}`, an objective that the recipe does not have",
        lambda folder: trained(folder, verdict="right"),
        "laser.verdict: There is no objective 'right'. ...",
    ),
]

test = check(CASES)
