"""The command line as a user meets it: real processes, their output and exit status."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import forked
from rollout_files import records, write_lines
from tokenizers_small import byte_model

SMALL = [
    "--steps", "2", "--prompts", "2", "--group-size", "4", "--set", "start_steps=2", "--set", "eval_prompts=4",
    "--set", "eval_samples=2", "--eval-every", "1", "--set", "report=false",
]  # fmt: skip
NO_NETWORK = Path(__file__).parent / "no_network"


def spanwise(*arguments, cache, expect=0, path=""):
    """Run a command; it must not reach for the network, whatever the hub's own switch says."""
    tried = cache / "network"
    environment = {
        **os.environ, "SPANWISE_CACHE": str(cache), "OMP_NUM_THREADS": "1", "COLUMNS": "160", "HF_HUB_OFFLINE": "0",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(NO_NETWORK), str(path), os.environ.get("PYTHONPATH")))),
        "NETWORK_TRIED": str(tried),
    }  # fmt: skip
    done = forked.run(
        forked.module("spanwise", *arguments), environment=environment, varying=("PYTHONPATH", "SPANWISE_CACHE"),
        imports="import spanwise.cli, spanwise.commands.train.train, spanwise.report",
    )  # fmt: skip
    assert not tried.exists(), tried.read_text()
    assert done.returncode == expect, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def run(cache, tmp_path_factory):
    """One real run of two steps, with a checkpoint after each."""
    folder = tmp_path_factory.mktemp("run") / "first"
    return folder, spanwise("train", *SMALL, "--save-every", "1", "--output", folder, cache=cache)


def run_record(folder):
    """Return start, curve, batches and final of the summary, and the kind of each line of the metrics."""
    summary, lines = json.loads((folder / "summary.json").read_text()), records(folder / "metrics.jsonl")
    about = [(line["step"], next((kind for kind in ("evaluation", "final") if kind in line), "batch")) for line in lines]
    return [summary[name] for name in ("start", "curve", "batches", "final")], about


@pytest.mark.long
def test_train_leaves_everything_behind(run):
    folder, done = run
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
    assert list(recipe["layout"]) == ["solution", "confidence"]
    assert recipe["objectives"][1]["baseline"] == "outcome"
    first_step = next(line for line in records(folder / "metrics.jsonl") if "loss" in line)
    assert {"rewards/correct/mean", "credit/solution/mean_abs", "credit/malformed", "spanwise/seconds"} <= set(first_step)
    (_, curve, batches, final), about = run_record(folder)
    assert about == [(0, "evaluation"), (1, "batch"), (1, "evaluation"), (2, "batch"), (2, "final")]
    assert ([point["step"] for point in curve], [batch["step"] for batch in batches]) == ([0, 1, 2], [1, 2])
    assert {"accuracy", "refusal_rate", "format_rate", "ece"} <= set(final)
    assert 0 < json.loads((folder / "summary.json").read_text())["spanwise_share"] < 1
    assert (folder / "model" / "config.json").is_file()
    assert "Finding blocks, scoring and credit took" in done.stdout
    state = json.loads((folder / "checkpoints" / "checkpoint-2" / "trainer_state.json").read_text())
    assert len(state["log_history"]) == 1  # metrics.jsonl holds the log; a run of weeks must not keep it in memory, too
    # q* of .7 at G = 4, by enumeration of the groups: .804 (docs/fidelity.md).
    assert "the baseline 'outcome' teaches it to state the confidence .80." in " ".join(done.stdout.split())


@pytest.mark.long
def test_a_resolved_recipe_trains_the_same_again_and_resuming_gives_the_uninterrupted_run(run, cache, tmp_path):
    folder, _ = run
    spanwise("train", folder / "recipe.yaml", "--output", tmp_path / "again", cache=cache)
    resume = ["--resume", folder / "checkpoints" / "checkpoint-1"]
    spanwise("train", *SMALL, "--output", tmp_path / "resumed", *resume, cache=cache)
    assert run_record(tmp_path / "again") == run_record(tmp_path / "resumed") == run_record(folder)


@pytest.mark.long
def test_an_interrupted_run_goes_on_from_its_newest_intact_checkpoint(run, cache, tmp_path):
    folder, _ = run
    broken = shutil.copytree(folder, tmp_path / "broken")
    weights = broken / "checkpoints" / "checkpoint-2" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    metrics = broken / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:4]) + '{"step": 2, "fin')
    done = spanwise("train", *SMALL, "--save-every", "1", "--output", broken, "--resume", "last", cache=cache)
    newest = "Training resumes from checkpoint-1, because newer checkpoints are not readable: checkpoint-2: "
    assert f"{newest}model.safetensors is damaged: it has 1000 of" in done.stdout
    assert run_record(broken) == run_record(folder)


@pytest.mark.long
def test_without_the_metrics_of_the_resumed_run_there_is_no_start(run, cache, tmp_path):
    moved = shutil.copytree(run[0] / "checkpoints" / "checkpoint-1", tmp_path / "moved" / "checkpoint-1")
    resumed = tmp_path / "resumed"
    spanwise("train", *SMALL, "--output", resumed, "--resume", moved, cache=cache)
    summary = json.loads((resumed / "summary.json").read_text())
    assert set(summary["start"]) == set(summary["final"])
    assert set(summary["start"].values()) == {None}
    assert [point["step"] for point in summary["curve"]] == [1, 2]


@pytest.mark.long
def test_a_model_and_a_dataset_by_name(cache, tmp_path):
    """The real path with a random model: the paper's prompt, a reward function of the user's own, LoRA-free, one step."""
    byte_model(tmp_path / "model")
    write_lines(tmp_path / "sums.jsonl", [{"question": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(12)])
    (tmp_path / "my_rewards.py").write_text("def short(blocks, **columns):\n    return [-len(str(b)) for b in blocks]\n")
    (tmp_path / "recipe.yaml").write_text(
        "objectives:\n- {reward: correct, pays: [solution], if_missing: 0.0}\n"
        "- {reward: 'my_rewards:short', pays: [solution]}\n"
        "- {reward: brier, pays: [confidence], given: correct, baseline: outcome, if_missing: -1.0}\n"
    )
    done = spanwise(
        "train", tmp_path / "recipe.yaml", "--model", tmp_path / "model", "--dataset", tmp_path / "sums.jsonl", "--steps", "1",
        "--prompts", "2", "--group-size", "2", "--set", "max_completion_length=12", "--set", "eval_prompts=2",
        "--set", "eval_samples=1", "--output", tmp_path / "out", cache=cache, path=tmp_path,
    )  # fmt: skip
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (summary["task"], summary["final"]["refusal_rate"]) == ("confidence", None)
    assert yaml.safe_load((tmp_path / "out" / "recipe.yaml").read_text())["objectives"][1]["reward"] == "my_rewards:short"
    assert "short" in done.stdout


@pytest.mark.long
def test_fidelity_of_a_model_that_states_no_confidence(run, cache):
    done = spanwise("fidelity", run[0], "--prompts", "4", "--samples", "4", "--rerolls", "2", cache=cache, expect=2)
    assert done.stderr.startswith("Error: None of 16 completions has the block 'confidence', which spanwise samples again.")


@pytest.mark.long
def test_demo_has_both_arms(cache, tmp_path):
    done = spanwise(
        "demo", "confidence", "--steps", "1", "--output", tmp_path / "demo", "--set", "start_steps=2", "--set", "eval_prompts=4",
        "--set", "eval_samples=2", "--set", "prompts=2", "--set", "group_size=4", "--set", "report=false",
        "--set", "start=easy", "--set", "calibration=brier", cache=cache,
    )  # fmt: skip
    arms = json.loads((tmp_path / "demo" / "summary.json").read_text())["arms"]
    assert set(arms) == {"scalar", "blockwise"}
    measured = {"accuracy", "mean_accuracy", "refusal_rate", "peak_refusal_rate", "format_rate", "ece", "brier", "auroc"}
    assert measured | {"seconds"} <= set(arms["scalar"])
    assert "seed 0: all arms begin with the same warm start (easy); the rewards are correctness and brier" in done.stdout
    assert "refusals" in done.stdout


def test_import_loads_no_trainer():
    code = (
        "import time, torch; started = time.perf_counter(); import spanwise, sys; seconds = time.perf_counter() - started;"
        "heavy = {'transformers', 'trl', 'datasets', 'accelerate', 'pydantic', 'rich', 'math_verify', 'ray', 'scipy', 're2'};"
        "print(sorted(heavy & set(sys.modules)), seconds)"
    )
    printed = subprocess.check_output([sys.executable, "-c", code], text=True, cwd=Path(__file__).parent)
    heavy, seconds = printed.rsplit(" ", 1)
    assert heavy == "[]"
    assert float(seconds) < 1.5
