"""`spanwise why` and `spanwise doctor`: zeros that cannot be explained, engines that are not as they should be."""

import os
import subprocess
import sys

import pytest

from border.case import case, check, command
from packages_small import package
from rollout_files import WELL_FORMED, episode, node, trace, verl_file, write_lines
from spanwise.commands.doctor import examine
from spanwise.recipe import scheme_at

LAYOUT = ("--set", "layout={solution: [answer], confidence: [confidence]}")


@case
def why(folder, *words, texts=WELL_FORMED, acc=(1.0, 1.0, 0.0, 0.0), code=2):
    return command("why", verl_file(folder / "1.jsonl", texts, acc=acc), *LAYOUT, *words, code=code)


@case
def doctor(folder, *installed, command="spanwise.commands.doctor", code, **about):
    environment = {**os.environ, "PYTHONPATH": package(folder, *installed, **about)}
    done = subprocess.run([sys.executable, "-m", *command.split()], env=environment, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def untried(folder):
    """The engine itself is imported where the doctor is tested; what is seen here is its version."""
    package(folder, "trl", None, version="2.3.0")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setattr(examine, "probe_in_process", lambda name: ([], []))
        examine.main()


def streams(folder):
    """A verifiers trace whose second answer has two sampled tokens and one log-probability."""
    more = node("assistant", "5", parent=1, sampled=True, ids=(1, 2), mask=(1, 1), logprobs=(-0.5,))
    return write_lines(folder / "traces.jsonl", [episode(trace("4", "4", {"correct": 1.0}, extra=[more]))])


def without_layout(folder):
    (folder / "recipe.yaml").write_text("method: grpo\n")
    return f"{scheme_at(folder / 'recipe.yaml', longest=64)}"


CASES = {
    "`why` for a completion that the file does not have": why("--completion", "9"),
    "`why` with no example at all": why("--examples", "0"),
    "a trace with more sampled tokens than log-probabilities": lambda folder: command("why", streams(folder)),
    "`why` under a method that needs a critic": why("--methods", "gae"),
    "`why` for a prompt whose answers are all wrong, half of them cut off": why(
        "--methods", "grpo", texts=["<answer>5</answer>", "<answer>6"] * 2, acc=[0.0] * 4, code=0
    ),
    "`why` for a prompt that has one completion": why("--methods", "grpo", texts=WELL_FORMED[:1], acc=[1.0], code=0),
    "`doctor` where a package under an engine cannot be imported": doctor(
        "datasets", "raise ImportError('built for another Python')\n", code=1
    ),
    "`doctor` beside a version of an engine that nobody has tried": untried,
    "the command line without its packages": doctor(
        "rich", "raise ModuleNotFoundError('', name='rich')\n", command="spanwise.cli doctor", code=1
    ),
    "a recipe without a layout for verl or SkyRL": without_layout,
}

test_why = check(__doc__, CASES)
