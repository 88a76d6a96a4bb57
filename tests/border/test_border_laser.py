"""Self-rewarding scores that cannot be read, that are another model's, or that would never begin."""

from border.case import check, trained
from spanwise import Laser
from trl_small import trainer


def scored(steps=1, temperature=1.0, **laser):
    fields = {"token": "<unk>", "mix": 0.0, "beta": 0.5, **laser}
    return trained(steps=steps, temperature=temperature, prompts=2, group_size=4, laser=fields)


CASES = {
    "`laser: {}`": scored(token=""),
    "`laser: {token: <|vision_start|>}` with a vocabulary that lacks it": scored(token="<|vision_start|>"),
    "`laser: {token: '7'}`, a digit of the answers": scored(token="7"),
    "`laser: {token: <eos>}`": scored(token="<eos>"),
    "`laser: {reference: -23}` of another model": lambda folder: trainer(
        folder, extra={"credit": {"laser": Laser("?", reference=-23.0, mix=0.0)}}
    ).train(),
    "`laser: {reference: -1.5}`, so near to 0 that no score reaches 1": scored(reference=-1.5),
    "`temperature: 0` with `laser`": scored(temperature=0.0),
    "`laser` whose mixing begins behind the last batch": scored(steps=5, mix=0.1),
    "`laser: {mix: 0, threshold: 0.2}`": scored(threshold=0.2),
    "`laser` whose verdict has `if_missing: -1`": trained(
        laser={"token": "<unk>", "mix": 0.0}, objectives=[{"reward": "correct", "pays": ["solution"], "if_missing": -1.0}]
    ),
    "`laser: {verdict: right}`, an objective that the recipe does not have": scored(verdict="right"),
}

test = check(__doc__, CASES)
