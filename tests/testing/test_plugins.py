"""Methods of other distributions: packages with entry points, seen by real processes."""

import os
import subprocess
import sys

import pytest

from packages_small import package

pytestmark = pytest.mark.long

GOOD = '''
from spanwise import register
from spanwise.credit import dr_grpo

@register("doubled", kind="completion", paper="a test")
def doubled(reward_n, group_n):
    """Give everything twice."""
    return 2 * dr_grpo(reward_n, group_n)
'''
SORTS = ("methods", "rewards", "outcomes", "segmenters")
TAKEN = GOOD.replace('"doubled"', '"grpo"')
PARTS = """
from spanwise import register
from spanwise.score import Reward
from spanwise.segment import SEGMENTERS

@register("long", kind="reward")
def long(text, *, pays, columns, scored, least=3):
    return Reward.of([float(len(blocks[pays[0]][""]) >= least) for blocks in text])

@register("odd", kind="outcome")
def odd(text, *, columns):
    return [number % 2 == 1 for number in columns["number"]]

@register("mine", kind="segmenter")
def mine(parts, *, layout):
    find = SEGMENTERS["tags"].function(parts, layout=layout)

    def called(sample):
        print("mine was called")
        return find(sample)

    return called
"""
USE_PARTS = """
from spanwise import register

@register("unchanged", kind="refinement", paper="a test")  # before anything else is imported
def unchanged(adv_nt):
    return adv_nt

from spanwise import *
layout = Layout({"a": ["x"], "b": ["y"]}, segmenter="mine")
objectives = [Objective("long", pays="a"), Objective("long", pays="b", name="both", given="odd", baseline="outcome")]
batch = Batch.jagged([[0, 4, 1, 2, 4, 3], [0, 1, 2, 3]], [0, 0], columns={"number": [1, 2]})
scheme = Scheme.preset("bae", layout, objectives=objectives)
reading = read(batch, scheme, Vocabulary((b"<x>", b"</x>", b"<y>", b"</y>", b"1")))
print(reading.scores.outcome("odd").tolist(), credit_batch(reading, batch, scheme).block_nk.shape)
"""


@pytest.fixture
def installed(tmp_path):
    """Write a package of one module with an entry point of each sort; return a runner of `spanwise` beside it."""

    def install(name, code):
        entry_points = {f"spanwise.{sort}": f"{name}_{sort} = {name}" for sort in SORTS}
        path = package(tmp_path, name, code, entry_points=entry_points)
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}

        def spanwise(*arguments):
            command = [sys.executable, *(arguments if arguments[0] == "-c" else ("-m", "spanwise.cli", *arguments))]
            return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)

        return spanwise

    return install


def test_an_installed_method_is_listed_and_found(installed):
    spanwise = installed("extra_credit", GOOD)
    for words in (("methods",), ("methods", "doubled")):
        done = spanwise(*words)
        assert done.returncode == 0, done.stderr
        assert "doubled" in done.stdout
        assert "Give everything twice." in done.stdout


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import no_such_module_anywhere\n", "No module named 'no_such_module_anywhere'"),
        (TAKEN, "There is a method 'grpo' already"),
    ],
)
def test_a_broken_plugin_is_named_and_in_the_way_of_unknown_names_alone(installed, code, says):
    spanwise = installed("broken_credit", code)
    for words in (("methods",), ("methods", "doubled")):
        done = spanwise(*words)
        assert (done.returncode, "Traceback" in done.stderr) == (2, False)
        sentence = " ".join((done.stdout + done.stderr).split())
        assert "The plug-in 'broken_credit_methods' (broken_credit) cannot be loaded" in sentence
        assert says in sentence
    assert spanwise("methods", "grpo").returncode == 0


def test_installed_rewards_outcomes_and_segmenters_are_found_by_name(installed):
    done = installed("extra_parts", PARTS)("-c", USE_PARTS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["mine was called"] * 2 + ["[1.0, 0.0] torch.Size([2, 2])"]
