"""The warm start, which the first arm makes for both, is billed to neither."""

import time
import warnings
from importlib import import_module

import pytest

import trl_small
from spanwise.commands.demo.demo import FIELDS, INVOICES, run_demo, running_mean, verdict
from spanwise.errors import RecipeError

pytestmark = trl_small.THIRD_PARTY
SMALL = {"start_steps": 1, "prompts": 2, "group_size": 2, "eval_prompts": 2, "eval_samples": 1, "report": False}


def ran(demo, folder, **choices):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an untrained model writes no JSON, which is said
        return run_demo(demo, seeds=[0], output=str(folder), choices={**SMALL, **choices})


def test_the_seconds_of_an_arm_are_those_of_its_steps(tmp_path, monkeypatch):
    """A warm start of 2 steps, from an empty cache; the clock says that keeping each stretch of it took 1000 seconds."""
    monkeypatch.setenv("SPANWISE_CACHE", str(tmp_path / "cache"))
    room = import_module("spanwise.tasks.warm_start")  # the folder exports a function of this name
    save, clock, waits = room.save, time.perf_counter, []
    monkeypatch.setattr(room, "save", lambda *args, **named: (waits.append(1000.0), save(*args, **named)))
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + sum(waits))
    result = ran(FIELDS, tmp_path / "demo", steps=2, fields=2)
    assert len(waits) == 2  # the first arm alone, for both stretches of the warm start
    assert all(0 < arm["seconds of steps"] < 1000 for arm in result["arms"].values())
    assert result["seconds"] > 2000


@pytest.mark.long
def test_letters_are_trained_in_both_ways_and_measured_by_field(tmp_path):
    """A warm start of one step writes no JSON: nothing is right, and the curves say so."""
    curves = ran(INVOICES, tmp_path / "demo", steps=1, max_completion_length=32)["curves"]
    assert curves == {"one number": [0.0], "by field": [0.0]}


@pytest.mark.parametrize("demo", [FIELDS, INVOICES])
def test_a_demo_of_fields_keeps_the_rewards_that_it_measures(demo):
    with pytest.raises(RecipeError, match="objectives"):
        run_demo(demo, seeds=[0], output="demo", choices={"objectives": []})


def test_a_running_mean_has_fewer_values_at_the_start_and_half_of_the_questions_are_most():
    assert running_mean([0.0, 1.0, 0.5]) == [0.0, 0.5, 0.5]
    end = "the policy learned to refuse most questions, and still refuses them at the end"
    assert verdict({"peak_refusal_rate": 0.6, "refusal_rate": 0.55}) == end
