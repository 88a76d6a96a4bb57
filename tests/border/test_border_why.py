"""`spanwise why` and `spanwise doctor`: zeros that cannot be explained, engines that are not as they should be."""

import os
import subprocess
import sys

from border.case import Case, check, command
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


CASES = [
    Case(
        "`why` for a completion that the file does not have",
        lambda folder: why(folder, "--completion", "9"),
        "Error: --completion is 9, but '...' holds the completions 0 to 3.",
    ),
    Case("`why` with no example at all", lambda folder: why(folder, "--examples", "0"), "Error: --examples is 0; set it to 1"),
    Case(
        "`why` of what a trainer recorded, in a file that records nothing of the kind",
        lambda folder: command("why", trl_file(folder / "a.parquet", WELL_FORMED), *LAYOUT, "--methods", "recorded"),
        "Error: '...' records no advantages, score or reward, so there is nothing to show; leave 'recorded' out.",
    ),
    Case(
        "a trace with more sampled tokens than log-probabilities",
        lambda folder: command("why", streams(folder)),
        "Error: Line 1 of '...' has 2 sampled tokens and 1 values of 'logprobs' in node 2 of trace 't'; there must be one for each "
        "of them.",
    ),
    Case(
        "`why` under a method that needs a critic",
        lambda folder: why(folder, "--methods", "gae"),
        "Error: Method 'gae' needs values of a critic of every token, and '...' holds no token ids.",
    ),
    Case(
        "`why` for a prompt whose answers are all wrong, half of them cut off",
        lambda folder: command(
            "why", verl_file(folder / "1.jsonl", ["<answer>5</answer>", "<answer>6"] * 2, acc=[0.0] * 4), *LAYOUT,
            "--methods", "grpo", code=0,
        ),
        "unanimous: all wrong ... 4 ... Of the 4 completions whose group is all wrong 4 are malformed; 2 of them end before a "
        "part of them closes.",
    ),
    Case(
        "`why` for a prompt that has one completion",
        lambda folder: command(
            "why", verl_file(folder / "1.jsonl", WELL_FORMED[:1], acc=[1.0]), *LAYOUT, "--methods", "grpo", code=0
        ),
        "singleton: nobody to be ... 1 ... compared with",
    ),
    Case(
        "`doctor` where a package under an engine cannot be imported",
        lambda folder: doctor(package(folder, "datasets", "raise ImportError('built for another Python')\n"), code=1),
        "TRL ... broken ... The adapter to TRL cannot be imported: ... built for another Python",
    ),
    Case(
        "`doctor` beside a version of an engine that nobody has tried",
        lambda folder: doctor(package(folder, "trl", None, version="2.3.0"), code=0),
        "TRL 2.3.0 >=1.10,!=1.15.0,<2 untested ... TRL 2.3.0 is not among the versions that the tests run with "
        "(>=1.10,!=1.15.0,<2).",
    ),
    Case(
        "the command line without its packages",
        lambda folder: subprocess.run(
            [sys.executable, "-m", "spanwise.cli", "doctor"], check=False, text=True, capture_output=True,
            env={**os.environ, "PYTHONPATH": package(folder, "rich", "raise ModuleNotFoundError('', name='rich')\n")},
        ).stderr,
        "The command line needs 'rich'. Install it with: pip install 'spanwise[train]' to train with TRL, or with 'spanwise[cli]' "
        "beside another engine. What is installed and whether it works: python -m spanwise.commands.doctor",
    ),
    Case(
        "a recipe without a layout for verl or SkyRL",
        lambda folder: recipe(folder, "method: grpo\n"),
        "The recipe '...' names no layout, so that no block of a completion is known; add for example layout: {solution: [answer], "
        "confidence: [confidence]}.",
    ),
]  # fmt: skip

test_why = check(CASES)
