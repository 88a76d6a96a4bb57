"""`spanwise train` as processes: killed in the middle of a run with a critic and resumed, and two that share one run."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from rollout_files import timeless_metrics
from spanwise.engines.checkpoints import checkpoint_fault, read_manifest

pytestmark = pytest.mark.long

#: Adam, warm-up and shuffled mini-batches in the critic, a value for each block; the policy waits for one step.
RECIPE = """
{method: sae, steps: 5, prompts: 2, group_size: 8, start_steps: 100, eval_prompts: 2, eval_samples: 2, eval_every: 0,
 save_every: 1, report: false, values: objective,
 objectives: [{reward: correct, pays: [solution]}, {reward: brier, pays: [confidence], if_missing: -1.0}],
 critic: {learning_rate: 1.0e-3, epochs: 2, mini_batches: 2, warmup_steps: 3, value_clip: 0.5, gae_lambda_value: 0.95,
          policy_training_start_step: 1}}
"""


def spanwise(*arguments, cache, launcher=("-m", "spanwise.cli")):
    environment = {**os.environ, "SPANWISE_CACHE": str(cache), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    return subprocess.Popen(
        [sys.executable, *launcher, *map(str, arguments)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True,
    )  # fmt: skip


def ended(process):
    out, _ = process.communicate(timeout=280)
    assert process.returncode == 0, out[-4000:]
    return out


def same(left, right):
    assert left
    torch.testing.assert_close(left, right, rtol=0, atol=0)


@pytest.mark.timeout(600)
def test_a_killed_run_goes_on_to_the_same_critic(tmp_path):
    recipe, whole, run, cache = (tmp_path / name for name in ("recipe.yaml", "whole", "run", "cache"))
    recipe.write_text(RECIPE)
    ended(spanwise("train", recipe, "--output", whole, cache=cache))
    process = spanwise("train", recipe, "--output", run, cache=cache)
    until = time.monotonic() + 200
    while not (run / "checkpoints" / "checkpoint-2").is_dir():  # its files may be half written
        assert process.poll() is None, process.communicate()[0][-4000:]
        assert time.monotonic() < until
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not (run / "summary.json").exists()
    assert "resumes from checkpoint-" in ended(spanwise("train", "--resume", run, cache=cache))

    assert timeless_metrics(run) == timeless_metrics(whole)
    assert len([line for line in timeless_metrics(run) if "critic/brier/explained_variance" in line]) == 5
    last = Path("checkpoints") / "checkpoint-5"
    for file in ("critic/model.safetensors", "model/model.safetensors", last / "critic" / "model.safetensors"):
        same(load_file(run / file), load_file(whole / file))
    for file in ("critic/optimizer.pt", "optimizer.pt", "scheduler.pt"):
        same(*(torch.load(folder / last / file, weights_only=True) for folder in (run, whole)))
    same(load_file(run / last / "critic" / "model.safetensors"), load_file(run / "critic" / "model.safetensors"))
    assert not (run / "critic" / "optimizer.pt").exists()


def test_the_rollouts_of_all_processes_are_kept(tmp_path):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "spanwise.cli"]
    small = ["trainer={save_total_limit: 1}", "start_steps=2", "eval_prompts=2", "eval_samples=2", "report=false"]
    words = ["--steps", "1", "--prompts", "2", "--group-size", "4", "--eval-every", "1", "--save-every", "1"]
    words += [word for field in small for word in ("--set", field)]
    run = tmp_path / "run"
    ended(spanwise("train", *words, "--output", run, cache=tmp_path / "cache", launcher=launcher))
    table = pq.read_table(run / "rollouts" / "step_000001.parquet")
    assert table["group"].to_pylist() == [0] * 4 + [1] * 4
    first, *_, last = table["prompt"].to_pylist()
    assert table["prompt"].to_pylist() == [first] * 4 + [last] * 4
    assert first != last
    tokens = sum(map(sum, table["trainable"].to_pylist()))
    summary = json.loads((run / "summary.json").read_text())
    assert summary["tokens_per_second"] * summary["step_seconds"] == pytest.approx(tokens)
    checkpoint = run / "checkpoints" / "checkpoint-1"
    manifest = read_manifest(checkpoint)
    assert (checkpoint_fault(checkpoint), manifest["processes"]) == (None, 2)
    assert {"rng_state_0.pth", "rng_state_1.pth", "optimizer.pt", "entropy_ctrl_state.json"} <= set(manifest["files"])
