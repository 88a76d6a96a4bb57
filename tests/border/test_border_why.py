"""`spanwise why` and `spanwise doctor`: zeros that cannot be explained, engines that are not as they should be."""

import os
import subprocess
import sys

from border.case import check, command
from packages_small import package
from rollout_files import WELL_FORMED, episode, node, trace, trl_file, verl_file, write_lines
from spanwise.recipe import scheme_at

LAYOUT = ("--set", "layout={solution: [answer], confidence: [confidence]}")


def why(folder, *words, acc=(1.0, 1.0, 0.0, 0.0), code=2, **columns):
    file = verl_file(folder / "1.jsonl", WELL_FORMED, acc=acc, **columns)
    return command("why", file, *LAYOUT, *words, code=code)


def doctor(path, *, code):
    """The doctor in a process of its own, with packages that this test installed."""
    command_ = [sys.executable, "-m", "spanwise.commands.doctor"]
    done = subprocess.run(command_, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def streams(folder):
    """A verifiers trace whose second answer has two sampled tokens and one log-probability."""
    more = node("assistant", "5", parent=1, sampled=True, ids=(1, 2), mask=(1, 1), logprobs=(-0.5,))
    return write_lines(folder / "traces.jsonl", [episode(trace("4", "4", {"correct": 1.0}, extra=[more]))])


def recipe(folder, text):
    (folder / "recipe.yaml").write_text(text)
    return f"{scheme_at(folder / 'recipe.yaml', longest=64)}"


CASES = {
    "`why` for a completion that the file does not have": lambda folder: why(folder, "--completion", "9"),
    "`why` with no example at all": lambda folder: why(folder, "--examples", "0"),
    "`why` of what a trainer recorded, in a file that records nothing of the kind": lambda folder: command(
        "why", trl_file(folder / "a.parquet", WELL_FORMED), *LAYOUT, "--methods", "recorded"
    ),
    "a trace with more sampled tokens than log-probabilities": lambda folder: command("why", streams(folder)),
    "`why` under a method that needs a critic": lambda folder: why(folder, "--methods", "gae"),
    "`why` for a prompt whose answers are all wrong, half of them cut off": lambda folder: command(
        "why",
        verl_file(folder / "1.jsonl", ["<answer>5</answer>", "<answer>6"] * 2, acc=[0.0] * 4),
        *LAYOUT,
        "--methods",
        "grpo",
        code=0,
    ),
    "`why` for a prompt that has one completion": lambda folder: command(
        "why", verl_file(folder / "1.jsonl", WELL_FORMED[:1], acc=[1.0]), *LAYOUT, "--methods", "grpo", code=0
    ),
    "`doctor` where a package under an engine cannot be imported": lambda folder: doctor(
        package(folder, "datasets", "raise ImportError('built for another Python')\n"), code=1
    ),
    "`doctor` beside a version of an engine that nobody has tried": lambda folder: doctor(
        package(folder, "trl", None, version="2.3.0"), code=0
    ),
    "the command line without its packages": lambda folder: (
        subprocess.run(
            [sys.executable, "-m", "spanwise.cli", "doctor"],
            check=False,
            text=True,
            capture_output=True,
            env={**os.environ, "PYTHONPATH": package(folder, "rich", "raise ModuleNotFoundError('', name='rich')\n")},
        ).stderr
    ),
    "a recipe without a layout for verl or SkyRL": lambda folder: recipe(folder, "method: grpo\n"),
}

test_why = check(__doc__, CASES)
