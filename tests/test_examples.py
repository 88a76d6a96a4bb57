"""The examples run as they stand, with few steps and a short warm-up: the very files a user copies."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

#: Two processes that import all there is; a busy machine takes its time.
pytestmark = [pytest.mark.timeout(900), pytest.mark.long]
EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Both examples start from one model, warmed up for two steps."""
    return str(tmp_path_factory.mktemp("cache"))


def run_example(name, cache, *arguments):
    environment = {**os.environ, "SPANWISE_CACHE": cache, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(EXAMPLES / name), "--warm-up", "2", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_the_loop_is_short_and_prints_its_table(cache):
    assert len((EXAMPLES / "plain_pytorch.py").read_text().splitlines()) < 150
    lines = run_example("plain_pytorch.py", cache, "--steps", "2", "--prompts", "4", "--group", "4").splitlines()
    assert lines[0].split() == ["step", "right", "brier", "malformed"]
    assert [line.split()[0] for line in lines[1:]] == ["1", "2"]


def test_the_trl_script_leaves_a_folder_and_a_report(cache, tmp_path):
    folder = tmp_path / "run"
    assert f"Report: {folder}/report.html" in run_example("trl_script.py", cache, "--steps", "5", "--output", str(folder))
    assert [file.name for file in (folder / "rollouts").iterdir()] == ["step_000005.parquet"]
    assert [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3, 4, 5]
    assert "rewards/correct/mean" in (folder / "metrics.jsonl").read_text()
    assert (folder / "report.html").is_file()
    # Its reward takes the box that the instruction asks for.
    solved = runpy.run_path(str(EXAMPLES / "trl_script.py"))["solved"]
    blocks = [{"solution": {"answer": text}} for text in (r"\boxed{4}", " 4 ", r"\boxed{5}", None)] + [{"solution": None}]
    assert solved(blocks, ["4"] * 5) == [1.0, 1.0, 0.0, 0.0, 0.0]
