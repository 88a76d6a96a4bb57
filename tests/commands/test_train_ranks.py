"""`spanwise train` on two processes keeps the rollouts of both."""

import json
import os
import subprocess
import sys

import pyarrow.parquet as pq
import pytest

from spanwise.engines.checkpoints import checkpoint_fault, read_manifest

pytestmark = pytest.mark.long


def test_the_rollouts_of_all_processes_are_kept(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "spanwise.cli"]
    command += ["train", "--steps", "1", "--prompts", "2", "--group-size", "4", "--output", "run", "--eval-every", "1"]
    command += ["--save-every", "1", "--set", "trainer={save_total_limit: 1}"]
    command += ["--set", "start_steps=2", "--set", "eval_prompts=2", "--set", "eval_samples=2", "--set", "report=false"]
    settings = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "SPANWISE_CACHE": str(tmp_path / "cache")}
    result = subprocess.run(
        command, env={**os.environ, **settings}, cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr[-4000:]
    table = pq.read_table(tmp_path / "run" / "rollouts" / "step_000001.parquet")
    assert table["group"].to_pylist() == [0] * 4 + [1] * 4
    first, *_, last = table["prompt"].to_pylist()
    assert table["prompt"].to_pylist() == [first] * 4 + [last] * 4
    assert first != last
    tokens = sum(map(sum, table["trainable"].to_pylist()))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["tokens_per_second"] * summary["step_seconds"] == pytest.approx(tokens)
    checkpoint = tmp_path / "run" / "checkpoints" / "checkpoint-1"
    assert checkpoint_fault(checkpoint) is None
    manifest = read_manifest(checkpoint)
    assert manifest["processes"] == 2
    assert {"rng_state_0.pth", "rng_state_1.pth", "optimizer.pt", "entropy_ctrl_state.json"} <= set(manifest["files"])
