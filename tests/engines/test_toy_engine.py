"""A new engine is small: the toy engine gives every token the advantage of the file, however its trainer aligns completions."""

from pathlib import Path

import pytest
import torch

import conformance
from spanwise import Vocabulary
from spanwise.credit import gae
from spanwise.errors import RecipeError
from spanwise.recipe import scheme_at
from toy_engine import SIDES, ToyEngine

VOCABULARY = Vocabulary(tuple(piece.encode() for piece in conformance.PIECES))
GAE = (
    conformance.LAYOUT
    + """method: gae
options: {lam: 0.9}
per: completion
objectives: [{reward: correct, pays: [solution, confidence], options: {verify: exact}}]
"""
)


def rows_of(rows):
    """As a trainer holds them: a tool's output is not sampled."""
    for row in rows:
        yield {"prompt": row["group"], **{key: row.get(key) for key in ("ids", "sampled", "answer", "paid")}}


def test_it_is_small():
    assert len((Path(__file__).parents[1] / "toy_engine.py").read_text().splitlines()) < 80


# Here leaving list elements out is free, and one turn is paid for a confidence that it does not state.
@pytest.mark.filterwarnings("ignore:.*leave out n:UserWarning", "ignore:.*spanwise ignores rewards of completions")
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", conformance.RECIPES)
def test_it_gives_every_token_the_advantage_of_the_file(tmp_path, name, side):
    rows, expected = conformance.expected(name)
    rule, steps = conformance.scheme(name, tmp_path), None
    if "rollout" in rows[0]:
        names = {name: j for j, name in enumerate(dict.fromkeys(row["rollout"] for row in rows))}
        of_row = torch.tensor([names[row["rollout"]] for row in rows])
        steps = of_row, torch.tensor([row["step"] for row in rows]), [row["anchor"] for row in rows]
    engine = ToyEngine(rule, VOCABULARY, side=side, needs=("steps",))
    advantages, metrics = engine.step(list(rows_of(rows)), steps=steps)
    conformance.assert_rows(advantages, expected)
    assert name != "blocks" or metrics["credit/malformed"] == 0.2  # two of ten state no confidence


@pytest.mark.parametrize("side", SIDES)
def test_a_token_method_with_a_critic(tmp_path, side):
    rows, _ = conformance.expected("blocks")
    values = [[0.25 + 0.01 * t for t in range(len(row["ids"]))] for row in rows]
    (tmp_path / "gae.yaml").write_text(GAE)
    rule = scheme_at(tmp_path / "gae.yaml", longest=64)
    advantages, _ = ToyEngine(rule, VOCABULARY, side=side, needs=("value_nt",)).step(list(rows_of(rows)), value_nt=values)
    # Without masks, alignments and padding: the trainable tokens of one completion, and its reward at their end.
    for row, value, adv in zip(rows, values, advantages, strict=True):
        sampled = [t for t, flag in enumerate(row["sampled"]) if flag]
        reward_nt = torch.zeros(1, len(sampled))
        reward_nt[0, -1] = row["right"]
        expected = gae(reward_nt, torch.tensor([[value[t] for t in sampled]]), torch.ones(1, len(sampled)).bool(), lam=0.9)
        assert [adv[t] for t in sampled] == pytest.approx((expected[0] / len(sampled)).tolist(), abs=1e-6)
        assert all(adv[t] == 0 for t in range(len(adv)) if t not in sampled)
    with pytest.raises(RecipeError, match="needs values of a critic"):
        ToyEngine(rule, VOCABULARY, side=side)
