"""`spanwise compare` with real trainings of a step or two, side by side and stopped together, and what it leaves behind."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
import yaml
from rich.console import Console
from scipy import stats

import forked
from spanwise.commands.compare import compare as room
from spanwise.commands.compare.compare import compare, plan_runs, side_by_side
from spanwise.commands.shared.samples import Samples, read_samples
from spanwise.commands.train import train as train_room
from spanwise.commands.train.train import train
from spanwise.engines.checkpoints import write_manifest
from spanwise.errors import DataError, RecipeError
from spanwise.measure import compare_arms
from spanwise.recipe import load, resolved, scheme_of
from spanwise.rollouts.folder import RunFolder
from spanwise.tasks import task_shape

SMALL = {
    "steps": 1, "prompts": 2, "group_size": 4, "start_steps": 2, "eval_prompts": 4, "eval_samples": 4, "eval_every": 0,
    "keep_rollouts": 0, "report": False,
}  # fmt: skip


def run(output, *, arms=("group", "rlcr"), seeds=(0, 1), choices=SMALL, **options):
    return compare(arms=arms, seeds=seeds, output=str(output), choices=choices, console=Console(width=160), **options)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Two arms with two seeds, trained once, in this process: four processes would import everything anew."""
    output = tmp_path_factory.mktemp("compare") / "out"
    output.mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a batch that teaches nothing
        for planned in plan_runs(("group", "rlcr"), (0, 1), SMALL, str(output)):
            planned.file.write_text(yaml.safe_dump(planned.asked()))
            train(planned.recipe)
    run(output)
    return output


@pytest.fixture
def output(finished, tmp_path):
    """A copy of that comparison."""
    return Path(shutil.copytree(finished, tmp_path / "out"))


def test_every_arm_and_seed_is_a_run_folder_whose_evaluation_can_be_worked_out_again(finished):
    assert sorted(path.name for path in finished.iterdir() if path.is_dir()) == ["group-0", "group-1", "rlcr-0", "rlcr-1"]
    recipe = yaml.safe_load((finished / "rlcr-1" / "recipe.yaml").read_text())
    assert (recipe["method"], recipe["seed"], recipe["baseline"]) == ("rlcr", 1, None)
    group = yaml.safe_load((finished / "group-0" / "recipe.yaml").read_text())
    assert {objective["baseline"] for objective in group["objectives"]} == {"group"}
    table = pq.read_table(finished / "group-0" / "evaluation.parquet").to_pylist()
    assert len(table) == 16
    assert sorted({row["prompt"] for row in table}) == [0, 1, 2, 3]
    final = json.loads((finished / "group-0" / "summary.json").read_text())["final"]
    assert final["accuracy"] == pytest.approx(sum(row["correct/solution"] for row in table) / 16)
    assert final["coverage"] == pytest.approx(sum(row["confidence"] is not None for row in table) / 16)
    samples = read_samples(finished / "group-0")
    intervals = samples.intervals(resamples=50)
    for name, value in samples.figures().items():
        assert (intervals[name] is None) == (value is None)
        assert value is None or intervals[name].value == pytest.approx(value)
    vote = samples.votes(budgets=(1,))["majority"].intervals[0].value
    assert vote == pytest.approx(final["accuracy"])


def test_the_table_is_student_t_over_seeds(output, capsys):
    # Replace the evaluations: four samples of one prompt, of which `right` are right and all state .8.
    for name, right in {"group-0": 3, "group-1": 2, "rlcr-0": 1, "rlcr-1": 4}.items():
        correct_n, said_n = (torch.arange(4) < right).double(), torch.full((4,), 0.8, dtype=torch.float64)
        columns = ({"solution": ["7"] * right + ["3"] * (4 - right)}, {"solution": correct_n}, said_n, said_n > 0)
        Samples(torch.zeros(4).long(), *columns).write(output / name)
    comparison = run(output)
    summary = json.loads((output / "summary.json").read_text())
    for arm, (first, second) in {"group": (0.75, 0.5), "rlcr": (0.25, 1.0)}.items():
        cell = summary["figures"][arm]["accuracy"]
        low, high = stats.t.interval(0.95, 1, loc=(first + second) / 2, scale=abs(first - second) / 2)
        assert (cell["low"], cell["high"]) == pytest.approx((low, high))
    majority = {arm: figures["majority@4"]["mean"] for arm, figures in summary["figures"].items()}
    assert majority == {"group": 0.75, "rlcr": 0.5}  # of one half and three quarters right; one quarter and all
    assert [entry["verdict"] for entry in summary["differences"] if entry["figure"] == "accuracy"] == ["noise"]
    votes = ("majority@4", "weighted@4")
    assert comparison.figures == ("accuracy", "auroc", "ece", "brier", "coverage", "format_rate", *votes)  # no refusals
    assert summary["figures"]["rlcr"]["auroc"]["seeds"] == 1  # there is none if all are right
    assert (summary["seeds"], summary["recipe"]["steps"], "method" in summary["recipe"]) == ([0, 1], 1, False)
    assert "| rlcr | 0.625" in (output / "comparison.md").read_text()
    assert "do not show which method is better" in capsys.readouterr().out


def test_a_share_without_verdicts_shows_in_the_table_without_any_there_is_no_vote_and_sizes_must_agree(output):
    samples = read_samples(output / "group-0")
    samples.correct["solution"][::4] = math.nan  # one time-out in each prompt
    samples.write(output / "group-0")
    comparison = run(output)
    assert comparison.cells["group", "verdict_rate"].value == pytest.approx((0.75 + 1) / 2)
    assert comparison.cells["group", "majority@4"].count == 2
    for folder in output.glob("*-?"):
        samples = read_samples(folder)
        samples.correct["solution"][:] = math.nan
        samples.write(folder)
        assert samples.figures()["accuracy"] is None
    comparison = run(output)
    assert not [name for name in comparison.figures if name == "accuracy" or "@" in name]
    assert comparison.cells["group", "verdict_rate"].value == 0.0
    file = output / "group-0" / "evaluation.parquet"
    pq.write_table(pq.read_table(file)[:8], file)  # as spanwise eval --prompts 2 leaves it
    with pytest.raises(DataError, match=r"2 prompts x 4 samples.*4 prompts x 4 samples"):
        run(output)


def by_commands(monkeypatch, code):
    """Replace each training by a process that runs `code`; returns each run's name and whether it resumes."""
    commands = []

    def command(run, *, resume):
        commands.append((run.folder.name, resume))
        return [sys.executable, "-c", code, str(run.folder)]

    monkeypatch.setattr(room, "train_command", command)
    return commands


def test_what_is_there_is_not_trained_again(output, capsys, tmp_path, monkeypatch):
    for file in output.glob("*.yaml"):
        file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), "output": "somewhere else"}))
    (tmp_path / "kept").write_bytes((output / "rlcr-1" / "evaluation.parquet").read_bytes())
    code = f"import shutil, sys; shutil.copy({str(tmp_path / 'kept')!r}, sys.argv[1] + '/evaluation.parquet')"
    trained = by_commands(monkeypatch, code)
    run(output)
    assert "runs are finished" not in capsys.readouterr().out
    assert trained == []
    (output / "rlcr-1" / "evaluation.parquet").unlink()  # as an interruption before the end leaves it
    comparison = run(output, reference="group")
    assert "3 of 4 runs are finished" in capsys.readouterr().out
    assert trained == [("rlcr-1", False)]
    assert {(d.a, d.b) for d in comparison.differences} == {("rlcr", "group")}
    with pytest.raises(DataError, match=r"of another recipe: steps was 1 and is 2 now"):
        run(output, choices={**SMALL, "steps": 2})


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise SystemExit('Error: no epsilon_hihg')", "Error: no epsilon_hihg"),
        ("import os; os.kill(os.getpid(), 9)", r"the run was ended by signal 9 \(Killed\)"),
    ],
)
def test_a_run_that_fails_is_named_and_the_others_stay(code, reason, output, tmp_path, monkeypatch):
    by_commands(monkeypatch, f"print('train 10/120', flush=True); {code}")
    bad = tmp_path / "bad.yaml"
    bad.write_text("trainer: {epsilon_hihg: 1}\n")
    with pytest.raises(DataError, match=rf"bad-0: {reason} \(full log: .*bad-0\.log\)"):
        run(output, arms=("group", str(bad)), seeds=(0,), processes=1)
    assert (output / "group-0" / "summary.json").is_file()
    # Nothing was trained, so the recipe can be put right.
    bad.write_text("trainer: {epsilon_high: 0.3}\n")
    assert not plan_runs((str(bad),), (0,), SMALL, str(output))[0].finished()


def test_the_numbers_of_another_recipe_are_never_taken(output):
    other = plan_runs(("group",), (0,), {**SMALL, "learning_rate": 1e-3}, str(output))[0]
    assert plan_runs(("group",), (0,), SMALL, str(output))[0].finished()
    # As left by a training under another recipe that failed before it wrote anything.
    other.file.write_text(yaml.safe_dump(other.asked()))
    with pytest.raises(DataError, match="learning_rate was"):
        other.finished()
    # As a plain `spanwise train` into that folder leaves it, or a comparison whose record was deleted.
    other.file.unlink()
    with pytest.raises(DataError, match="is missing"):
        other.finished()
    shutil.rmtree(other.folder)
    assert not other.finished()


@pytest.mark.parametrize(
    "choices", [{"task": "invoices"}, {"refine": "ktae"}, {"laser": {"token": "<unk>", "reference": -12.0}}]
)
def test_what_a_run_fills_in_is_no_other_recipe(choices, tmp_path):
    planned = plan_runs(("grpo",), (0,), choices, str(tmp_path))[0]
    planned.folder.mkdir()
    planned.file.write_text(yaml.safe_dump(planned.asked()))
    recipe = load(planned.file)
    settings = resolved(recipe, scheme_of(recipe, *task_shape(recipe)))
    RunFolder(planned.folder).begin(settings, history=[{"step": 0}])
    assert not planned.finished()
    planned.file.write_text(yaml.safe_dump({**planned.asked(), "most": 16}))  # as older versions wrote it
    assert not planned.finished()
    RunFolder(planned.folder).write_recipe({**settings, "most": 5})
    with pytest.raises(DataError, match="another recipe"):
        planned.finished()


@pytest.mark.filterwarnings("ignore")  # transformers about itself, the trainer about a batch that teaches nothing
def test_a_training_that_fails_leaves_no_old_results(finished, tmp_path, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    folder = tmp_path / "group-0"
    results = {"summary.json", "evaluation.parquet", "report.html"}
    for options, fails, left in (
        ({"trainer": {"epsilon_hihg": 1}}, None, results),  # before anything is written: the old run is whole
        ({}, "evaluate", set()),  # at the start
        ({}, "write_summary", {"evaluation.parquet"}),  # at the end
    ):
        shutil.copytree(finished / "group-0", folder)
        (folder / "report.html").write_text("of the old run")
        recipe = load(None, {**SMALL, **options, "report": False, "output": str(folder)})
        with monkeypatch.context() as patched:
            if fails:
                patched.setattr(train_room if fails == "evaluate" else RunFolder, fails, stop)
            with pytest.raises(KeyboardInterrupt if fails else RecipeError):
                train(recipe, overwrite=True)
        assert {name for name in results if (folder / name).exists()} == left
        shutil.rmtree(folder)


def test_a_comparison_goes_on_from_what_is_intact_or_starts_anew(tmp_path, monkeypatch, capsys):
    commands = by_commands(monkeypatch, "raise SystemExit('one attempt')")
    damaged, whole = (tmp_path / "group-0" / "checkpoints" / f"checkpoint-{step}" for step in (20, 10))

    def attempt():
        with pytest.raises(DataError, match="one attempt"):
            run(tmp_path, arms=("group",), seeds=(0,))
        return " ".join(capsys.readouterr().out.split())

    damaged.mkdir(parents=True)
    assert re.search(
        r"group-0: these checkpoints cannot be read: checkpoint-20: .* The run starts again from step 0\.", attempt()
    )
    whole.mkdir()
    (whole / "trainer_state.json").write_text('{"global_step": 1}')
    write_manifest(whole, processes=1, settings={})
    assert re.search(
        r"group-0: these checkpoints cannot be read: checkpoint-20: .* The run continues from checkpoint-10\.", attempt()
    )
    assert commands == [("group-0", False), ("group-0", True)]
    assert (tmp_path / "group-0.log").read_text() == "one attempt\n" * 2


@pytest.mark.parametrize(
    ("field", "shared_value", "own_value"),
    [
        ("start", "easy", "hard"), ("task", "digits", "digits_twice"), ("start_seed", 0, 1), ("start_steps", None, 5),
        ("temperature", 1.0, 0.5), ("eval_prompts", 512, 64), ("eval_samples", 16, 8), ("model", "small", "large"),
    ],
)  # fmt: skip
def test_arms_that_cannot_be_compared_are_refused(field, shared_value, own_value, tmp_path):
    """A comparison takes 16 samples of an evaluation."""
    mine, shared = tmp_path / "mine.yaml", tmp_path / "shared.yaml"
    hub = {"task": "confidence", "dataset": "sums.jsonl", "model": shared_value} if field == "model" else {}
    shared.write_text(yaml.safe_dump(hub))
    mine.write_text(yaml.safe_dump({**hub, field: own_value}))
    with pytest.raises(RecipeError, match=f"'group' has the {field} {shared_value}, but arm 'mine' has {own_value},"):
        plan_runs(("group", str(mine)), (0, 1), {}, "out", shared=shared)


def test_arms_and_seeds_that_cannot_be():
    outcome = {"baseline": "outcome"}
    for arms, seeds, choices in (((), (0,), {}), (("group",), (1, 1), {}), (("group", "bae"), (0,), outcome)):
        with pytest.raises(RecipeError):
            plan_runs(arms, seeds, choices, "out")
    (of_method,) = plan_runs(("bae",), (0,), {"baseline": "batch"}, "out")  # the arm says the method only
    assert of_method.recipe.baseline == "batch"
    with pytest.raises(RecipeError, match="Did you mean 'group'"):
        compare(arms=("group",), seeds=(0,), output="out", reference="grup")


def test_an_arm_wins_over_the_shared_recipe(tmp_path):
    shared = Path(__file__).parents[3] / "recipes" / "confidence.yaml"
    runs = plan_runs(("outcome", "blended", "rlcr"), (0,), {"steps": 3, "entropy_target": None}, "out", shared=shared)
    assert [(run.recipe.method, run.recipe.baseline) for run in runs][:2] == [("bae", "outcome"), ("bae", "blended")]
    assert runs[2].recipe.method == "rlcr"
    assert {(run.recipe.steps, run.recipe.entropy_target, run.recipe.eval_every) for run in runs} == {(3, None, 20)}
    file = tmp_path / "mine.yaml"
    file.write_text("method: bae\neval_every: 7\nobjectives: [{reward: correct, pays: [solution]}]\n")
    with pytest.raises(RecipeError, match="baseline"):
        plan_runs(("group",), (0,), {}, "out", shared=file)
    assert plan_runs(("bae",), (0,), {}, "out", shared=file)[0].recipe.eval_every == 7


def test_an_arms_file_says_what_stands_in_it_and_no_default_of_models_by_name(tmp_path):
    hub, mine, shared = {"model": "m", "dataset": "d.jsonl"}, tmp_path / "mine.yaml", tmp_path / "shared.yaml"
    shared.write_text(yaml.safe_dump({**hub, "learning_rate": 5e-6}))
    for fields in ({**hub, "method": "rlcr"}, {"instruction": "Think."}):
        mine.write_text(yaml.safe_dump(fields))
        (planned,) = plan_runs((str(mine),), (0,), {}, "out", shared=shared)
        assert planned.recipe.learning_rate == 5e-6
        assert fields.items() <= planned.asked().items()


def test_a_section_that_only_the_first_arm_has_is_not_common(tmp_path):
    gae = load(None, {**SMALL, "method": "gae", "critic": {"learning_rate": 1e-3}})
    runs = [room.ArmRun("gae", 0, gae), room.ArmRun("grpo", 0, load(None, {**SMALL, "method": "grpo"}))]
    figures = {arm: {0: {"accuracy": 0.5}} for arm in ("gae", "grpo")}
    room._write_comparison(tmp_path, runs, compare_arms(figures, figures=["accuracy"]), {"reference": None})
    recipe = json.loads((tmp_path / "summary.json").read_text())["recipe"]
    assert recipe["steps"] == 1
    assert {"critic", "method"}.isdisjoint(recipe)


SLEEP = "import time; time.sleep(60)"

#: `spanwise compare` itself, whose trainings are processes that write down their number and sleep.
#: A shell makes its background jobs ignore Ctrl-C, this suite too; a terminal does not.
COMPARE = """
import os, signal, sys
from pathlib import Path
from spanwise.cli import main
from spanwise.commands.compare import compare
from spanwise.commands.shared import task
os.setsid()
Path({leader!r}).write_text(str(os.getpid()))
signal.signal(signal.SIGINT, signal.default_int_handler)
stub = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)"
compare.train_command = lambda run, *, resume: [sys.executable, "-c", stub, f"{{run.folder}}.pid"]
task.make_task = lambda recipe, console: None
sys.argv = ["spanwise", "compare", "--arms", "group,outcome,rlcr", "--seeds", "0,1", "--processes", "2", "--output", {output!r}]
main()
"""
IMPORTS = "import spanwise.cli, spanwise.commands.compare.compare, spanwise.commands.shared.task"


@pytest.mark.long
@pytest.mark.parametrize(("stop", "whole_group", "status"), [(signal.SIGINT, True, 130), (signal.SIGTERM, False, 143)])
def test_a_stopped_comparison_leaves_no_training_behind(stop, whole_group, status, tmp_path):
    """Ctrl-C reaches every process of the terminal, a kill only the one it names."""
    output, leader = tmp_path / "out", tmp_path / "leader"
    code = COMPARE.format(leader=str(leader), output=str(output))
    with ThreadPoolExecutor(1) as thread:
        ended = thread.submit(forked.run, code, imports=IMPORTS)
        try:
            end = time.monotonic() + 60
            while sum(bool(file.read_text()) for file in output.glob("*.pid")) < 2 and not ended.done():
                assert time.monotonic() < end, "it never happened"
                time.sleep(0.05)
            (os.killpg if whole_group else os.kill)(int(leader.read_text()), stop)
            done = ended.result(timeout=20)
            assert done.returncode == status, done.stderr
            for said in ("0 of 6 runs are finished. The others train 2 at a time.", "Stopped. Run the same command again"):
                assert said in done.stdout
            assert "Traceback" not in done.stderr
            started = {file.stem: int(file.read_text()) for file in output.glob("*.pid")}
            assert set(started) == {"group-0", "outcome-0"}
            for pid in started.values():
                with pytest.raises(ProcessLookupError):
                    os.kill(pid, 0)
        finally:
            if not ended.done():
                os.killpg(int(leader.read_text()), signal.SIGKILL)


def test_an_error_ends_what_runs_and_starts_nothing_more():
    started = {}

    def start(name):
        started[name] = subprocess.Popen([sys.executable, "-c", "" if name == "short" else SLEEP])
        return started[name]

    def raise_at_first_end():
        for name, status in side_by_side(["long", "short", "never"], 2, start=start):
            raise RuntimeError(f"{name} {status}")

    with pytest.raises(RuntimeError, match="short 0"):
        raise_at_first_end()
    assert {name: process.returncode for name, process in started.items()} == {"long": -signal.SIGTERM, "short": 0}


def test_each_item_once_and_so_many_at_a_time():
    running, most, finished = set(), [], []

    def start(number):
        running.add(number)
        most.append(len(running))
        return subprocess.Popen([sys.executable, "-c", f"raise SystemExit({number})"])

    before = signal.getsignal(signal.SIGTERM)
    for number, status in side_by_side([3, 0, 5, 4], 2, start=start):
        running.remove(number)
        finished.append((number, status))
    assert sorted(finished) == [(0, 0), (3, 3), (4, 4), (5, 5)]
    assert max(most) == 2
    assert signal.getsignal(signal.SIGTERM) is before
