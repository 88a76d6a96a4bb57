"""Self-rewarding scores that cannot be read, that are another model's, or that would never begin."""

from border.case import check, trained
from spanwise import Laser
from trl_small import trainer


def scored(folder, steps=1, temperature=1.0, **laser):
    """`spanwise train` of the embedded task with a score."""
    fields = {"token": "<unk>", "mix": 0.0, "beta": 0.5, **laser}
    return trained(folder, steps=steps, temperature=temperature, prompts=2, group_size=4, laser=fields)


def of_another_model(folder):
    """A few scripted completions under a reference that is not this policy's."""
    run = trainer(folder, extra={"credit": {"laser": Laser("?", reference=-23.0, mix=0.0)}})
    run.train()


CASES = {
    "`laser: {}`": lambda folder: scored(folder, token=""),
    "`laser: {token: <|vision_start|>}` with a vocabulary that lacks it": lambda folder: scored(
        folder, token="<|vision_start|>"
    ),
    "`laser: {token: '7'}`, a digit of the answers": lambda folder: scored(folder, token="7"),
    "`laser: {token: <eos>}`": lambda folder: scored(folder, token="<eos>"),
    "`laser: {reference: -23}` of another model": of_another_model,
    "`laser: {reference: -1.5}`, so near to 0 that no score reaches 1": lambda folder: scored(folder, reference=-1.5),
    "`temperature: 0` with `laser`": lambda folder: scored(folder, temperature=0.0),
    "`laser` whose mixing begins behind the last batch": lambda folder: scored(folder, steps=5, mix=0.1),
    "`laser: {verdict: right}`, an objective that the recipe does not have": lambda folder: scored(folder, verdict="right"),
}

test = check(__doc__, CASES)
