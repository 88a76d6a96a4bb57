"""The warm start, which the first arm makes for both, is billed to neither."""

import time
import warnings
from importlib import import_module

from rich.console import Console

import trl_small
from spanwise.commands.demo.demo import FIELDS, run_demo, running_mean, verdict

pytestmark = trl_small.THIRD_PARTY


def test_the_seconds_of_an_arm_are_those_of_its_steps(tmp_path, monkeypatch):
    """A warm start of 2 steps, from an empty cache, that takes 6 seconds longer than it needs."""
    monkeypatch.setenv("SPANWISE_CACHE", str(tmp_path / "cache"))
    room = import_module("spanwise.tasks.warm_start")  # the folder exports a function of this name
    save, waits = room.save, []
    monkeypatch.setattr(room, "save", lambda *args, **named: (waits.append(time.sleep(3)), save(*args, **named)))
    choices = {
        "start_steps": 1, "steps": 2, "prompts": 2, "group_size": 2, "fields": 2, "eval_prompts": 2, "eval_samples": 1,
        "report": False,
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an untrained model writes no JSON, which is said
        result = run_demo(FIELDS, seeds=[0], output=str(tmp_path / "demo"), choices=choices, console=Console(quiet=True))
    assert len(waits) == 2  # the first arm alone, for both stretches of the warm start
    first, second = (arm["seconds of steps"] for arm in result["arms"].values())
    assert 0 < first < 6
    assert 0 < second < 6
    assert result["seconds"] > 6 + first + second


def test_a_running_mean_has_fewer_values_at_the_start():
    assert running_mean([0.0, 1.0, 0.5]) == [0.0, 0.5, 0.5]


def test_an_arm_that_ends_in_refusing_is_called_collapsed():
    assert verdict({"peak_refusal_rate": 0.98, "refusal_rate": 0.95}) == "collapsed into refusing and stayed there"
