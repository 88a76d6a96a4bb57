"""A new engine is small: the toy engine gives a block, a completion, a token and a step method the numbers of TRL's path."""

from pathlib import Path

import pytest
import torch

import trl_small as small
from spanwise import Scheme, Vocabulary
from spanwise.credit import gae, gigpo
from spanwise.credit.contrib import _unconfirmed
from spanwise.errors import RecipeError
from toy_engine import SIDES, ToyEngine

pytestmark = small.THIRD_PARTY
VOCABULARY = Vocabulary(tuple(piece.encode() for piece in small.PIECES))
NUMBER = {piece: index for index, piece in enumerate(small.PIECES)}
LENGTHS = [len(one.pieces) for one in small.SAID_WITH_TOOLS]
EXACT = {"options": {"verify": "exact"}}


def rows(said=small.SAID_WITH_TOOLS):
    """What the scripted policy said, as a trainer holds it: a tool's output is not sampled."""
    questions = small.prompts()
    for i, one in enumerate(said):
        yield {
            "prompt": questions[i // small.GROUP]["prompt"],
            "answer": questions[i // small.GROUP]["answer"],
            "ids": [NUMBER[piece] for piece in one.pieces],
            "sampled": [int(block >= 0) for block in one.blocks],
        }


def scheme(name, **changes):
    objectives = small.OBJECTIVES
    if name != "bae":
        whole = Scheme.preset(name, small.LAYOUT, per="completion").objectives
        objectives = [type(o)(o.reward, o.pays, options=EXACT["options"], if_missing=o.if_missing) for o in whole]
    layout = small.LAYOUT if name == "bae" else Scheme.preset(name, small.LAYOUT, per="completion").layout
    return Scheme.preset(name, layout, objectives=objectives, **changes)


def test_it_is_small():
    assert len((Path(__file__).parents[1] / "toy_engine.py").read_text().splitlines()) < 80


@pytest.mark.parametrize("name", ["bae", "grpo", "reinforce++"])
def test_it_equals_trl(tmp_path, name):
    rule = scheme(name, per="completion" if name != "bae" else "block")
    run = small.trainer(tmp_path, said=small.SAID_WITH_TOOLS, tools=True, extra={"scheme": rule})
    run.train()
    logged = next(line for line in run.state.log_history if "credit/malformed" in line)
    expected = [row[:length].tolist() for row, length in zip(run.last_rollouts.advantages_nt, LENGTHS, strict=True)]
    assert any(value for row in expected for value in row)
    for side in SIDES:
        found, shown = ToyEngine(rule, VOCABULARY, side=side).step(list(rows()))
        assert found == expected
        assert {key: value for key, value in shown.items() if value == value} == {
            key: logged[key] for key in shown if logged[key] is not None
        }


@pytest.mark.parametrize("side", SIDES)
def test_a_token_method_with_a_critic(side):
    values = [[0.25 + 0.01 * t for t in range(length)] for length in LENGTHS]
    rule = scheme("gae", lam=0.9)
    engine = ToyEngine(rule, VOCABULARY, side=side, needs=("value_nt",))
    found, _ = engine.step(list(rows()), value_nt=values)
    # Without masks, alignments and padding: the trainable tokens of one completion, and its reward at their end.
    for row, value, adv, one in zip(rows(), values, found, small.SAID_WITH_TOOLS, strict=True):
        kept = [t for t, flag in enumerate(row["sampled"]) if flag]
        reward_nt = torch.zeros(1, len(kept))
        reward_nt[0, -1] = one.right
        alone = gae(reward_nt, torch.tensor([[value[t] for t in kept]]), torch.ones(1, len(kept)).bool(), lam=0.9)
        assert [adv[t] for t in kept] == pytest.approx((alone[0] / len(kept)).tolist(), abs=1e-6)
        assert all(adv[t] == 0 for t in range(len(adv)) if t not in kept)
    with pytest.raises(RecipeError, match="needs values of a critic"):
        ToyEngine(rule, VOCABULARY, side=side)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(("name", "function"), [("gigpo", gigpo), ("gagpo", _unconfirmed.gagpo)])
def test_a_step_method(side, name, function):
    trajectory_s, step_s = torch.tensor([9, 9, -4, -4, 1, 1, 0, 0]), torch.tensor([0, 1, 0, 1, 1, 0, 0, 1])
    anchor_s = ["a", "b", "a", "b", "c", "a", "a", "c"]
    engine = ToyEngine(scheme(name), VOCABULARY, side=side, needs=("steps",))
    found, _ = engine.step(list(rows()), steps=(trajectory_s, step_s, anchor_s))
    group_s = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    reward_s = torch.tensor([one.right for one in small.SAID_WITH_TOOLS], dtype=torch.float64)
    adv_s = function(reward_s, group_s, trajectory_s, step_s, anchor_s)
    assert bool((adv_s != 0).any())
    sampled = torch.tensor([sum(row["sampled"]) for row in rows()])
    for s, (adv, row, expected) in enumerate(zip(found, rows(), adv_s.tolist(), strict=True)):
        trained = int(sampled[trajectory_s == trajectory_s[s]].sum())  # a rollout has one vote, however many turns it has
        assert adv == pytest.approx([expected / trained * flag for flag in row["sampled"]], abs=1e-6)
