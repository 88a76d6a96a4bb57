"""A user's own train.py: wrong tags are said with the first batch, right ones and rewards of its own train what they always did."""

import re

import pytest
import torch

from spanwise.layout import Layout
from spanwise.objective import Objective
from trl_small import THIRD_PARTY, trainer, weights

pytestmark = THIRD_PARTY


def solved(completions, answer, **columns):
    """A reward in TRL's signature."""
    return [float(f"<answer>{right}</answer>" in said) for said, right in zip(completions, answer, strict=True)]


def stated(blocks):
    """A reward that reads the blocks; None where there is nothing to read."""
    return [None if part["confidence"] is None else 1.0 - float(part["confidence"]["confidence"]) for part in blocks]


OWN = [Objective(solved, pays="solution"), Objective(stated, pays="confidence", if_missing=-1.0)]


def fingerprint(model):
    """One number that any change of any weight changes."""
    return sum(
        float((value * torch.arange(value.numel()).reshape(value.shape).sin()).sum()) for value in weights(model).values()
    )


def test_wrong_tags_are_said_with_the_first_batch(tmp_path):
    layout = Layout({"plan": ["plan"], "code": ["code"]})
    paid = [Objective(solved, pays="plan"), Objective("format", pays="code")]
    run = trainer(tmp_path, extra={"layout": layout, "objectives": paid}, max_steps=1)
    with pytest.warns(UserWarning, match="Step 0:") as seen:
        run.train()
    said = [str(one.message) for one in seen if str(one.message).startswith("Step 0:")]
    assert len(said) == 1, said
    assert re.match(r"Step 0: <plan> is in 0 and <code> is in 0 of 8 completions; they do contain .*<answer> \(8\)", said[0])
    assert not any("too easy or too hard" in str(one.message) for one in seen)


def test_right_tags_and_own_rewards_train_what_they_always_did(tmp_path, recwarn):
    run = trainer(tmp_path, extra={"objectives": OWN}, max_steps=3, learning_rate=0.1)
    run.train()
    assert [str(one.message) for one in recwarn if issubclass(one.category, UserWarning)] == []
    # Recorded with the revision before anything was said of a batch; processors differ by 2.5e-9 after three steps.
    assert fingerprint(run.model) == pytest.approx(26.29541351573708, rel=1e-7)
    assert float(run.last_rollouts.advantages_nt.double().abs().sum()) == pytest.approx(6.36666683992371, rel=1e-7)
