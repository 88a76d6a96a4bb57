"""Whose folder it is: new by default, never mixed with another run, replaced whole or not at all, resumed under its own recipe."""

import hashlib
import json
import re
import shutil
from pathlib import Path
from unittest.mock import Mock

import pyarrow.parquet as pq
import pytest
import torch
import yaml
from rich.console import Console
from safetensors.torch import load_file

from full_disk import full_disk
from report_pages import data_of
from rollout_files import records, timeless_metrics
from spanwise.commands.demo.demo import DIGITS, run_demo
from spanwise.commands.report.report import report_folder
from spanwise.commands.shared.folder import new_folder, newest_folder
from spanwise.commands.shared.task import run_or_model
from spanwise.commands.train.place import run_folder
from spanwise.commands.train.train import Recorder, batch_ece, train
from spanwise.errors import DataError, RecipeError
from spanwise.objective import Objective
from spanwise.recipe import load
from spanwise.rollouts import schema
from spanwise.rollouts.folder import check_free
from spanwise.score import score_all
from spanwise.types import Scores

SMALL = {
    "steps": 2, "prompts": 2, "group_size": 4, "start_steps": 2, "eval_prompts": 2, "eval_samples": 2, "eval_every": 0,
    "save_every": 1, "report": False,
}  # fmt: skip
pytestmark = pytest.mark.filterwarnings("ignore")  # transformers about itself, the trainer about an idle batch


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A whole run with a default name, two levels below the working folder."""
    place = tmp_path_factory.mktemp("work")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        train(load(None, SMALL))
    return place / "runs" / "digits-bae-0-1"


@pytest.fixture
def run(first, tmp_path, monkeypatch):
    """A copy of that run, in another place."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(first, tmp_path / "moved")
    return tmp_path / "moved"


def retrain(*, resume=None, overwrite=False, **changes):
    return train(load(None, {**SMALL, **changes}), resume=resume, overwrite=overwrite)


def files_of(folder):
    """Path -> digest of what lies in a folder, without its lock."""
    files = (file for file in folder.rglob("*") if file.is_file() and file.name != ".lock")
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def test_numbers_count_up_and_know_their_own_name_which_on_an_own_dataset_is_that_of_the_dataset(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert newest_folder("a-0") is None
    others = ("confidence-bae-0-2", "math-bae-0-1")
    for name in ("a-0-1", "a-0-2", "a-0-10", "a-0-4-99", "a-0-last", "b-a-0-77", *others):
        (tmp_path / "runs" / name).mkdir(parents=True)
    (tmp_path / "runs" / "a-0-11").write_text("a file of the user")
    assert str(newest_folder("a-0")) == "runs/a-0-10"
    assert str(new_folder("a-0")) == "runs/a-0-3"
    recipe = load(None, {"model": "m", "dataset": "data/math.jsonl", "layout": {"all": ["answer"]}})
    with (
        pytest.raises(DataError, match="There is no checkpoint under 'runs/math-bae-0-1/checkpoints'"),
        run_folder(recipe, resume="last", overwrite=False, console=Console()),
    ):
        pass


def test_overwriting_leaves_nothing_of_the_old_run_and_all_of_the_users(run, tmp_path):
    """A link is removed, but not its target."""
    mine = {"notes.txt": "mine", "data/prompts.jsonl": "{}"}
    for file, text in {**mine, "rollouts/step_000099.parquet": "a longer run's"}.items():
        (run / file).parent.mkdir(exist_ok=True)
        (run / file).write_text(text)
    shutil.move(run / "model", tmp_path / "elsewhere")
    (run / "model").symlink_to(tmp_path / "elsewhere")
    linked = files_of(tmp_path / "elsewhere")
    retrain(method="rlcr", steps=1, save_every=0, output=str(run), overwrite=True)
    assert {file: (run / file).read_text() for file in mine} == mine
    assert files_of(tmp_path / "elsewhere") == linked
    assert not (run / "model").is_symlink()
    assert [file.name for file in (*run.glob("rollouts/*"), *run.glob("checkpoints/*"))] == ["step_000001.parquet"]
    assert yaml.safe_load((run / "recipe.yaml").read_text())["method"] == "rlcr"
    assert json.loads((run / "summary.json").read_text())["steps"] == 1


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("mine", ["model/config.json", "recipe.yaml", "rollouts/mine.parquet", "summary.json"])
def test_what_no_run_wrote_is_never_written_over(mine, overwrite, tmp_path):
    file = tmp_path / "mine" / mine
    file.parent.mkdir(parents=True)
    file.write_text("steps: 3")
    with pytest.raises(DataError, match=mine.split("/")[0]):
        check_free(tmp_path / "mine", overwrite=overwrite)
    assert file.read_text() == "steps: 3"


def test_a_start_that_fails_leaves_no_folder(first, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    for output in ("out", "mine", None):
        recipe = load(None, {"model": str(first / "model"), "dataset": "nowhere.jsonl", "output": output})
        with pytest.raises(DataError, match="is neither in"):
            train(recipe)
    # A fault in the objectives is met before anything is built.
    monkeypatch.setattr("spanwise.commands.train.train.make_task", lambda *_: pytest.fail("the task was built"))
    entry = {"reward": "judge", "pays": "solution", "options": {"model": "m", "base_url": "http://127.0.0.1:9/v1"}}
    recipe = load(None, {**SMALL, "objectives": [{**entry, "criteria": "rubrik.yaml"}]})
    with pytest.raises(RecipeError, match="rubrik"):
        train(recipe)
    assert sorted(place.name for place in tmp_path.rglob("*")) == ["mine", "runs"]


def test_a_run_goes_on_from_its_own_files_under_its_own_recipe_alone_and_for_more_steps(run):
    before = files_of(run)
    for changes, difference, output, resume in (
        ({"method": "rlcr"}, "method was 'bae' and is 'rlcr' now, objectives differs", str(run), "last"),
        ({"steps": 1}, "steps was 2 and is 1 now", "elsewhere", str(run / "checkpoints" / "checkpoint-1")),
    ):
        with pytest.raises(DataError, match=re.escape(f"another recipe: {difference}")):
            retrain(**changes, output=output, resume=resume)
    assert files_of(run) == before
    first, last = (run / "checkpoints" / f"checkpoint-{step}" / "optimizer.pt" for step in (1, 2))
    own = last.read_bytes()
    shutil.copy(first, last)  # of the same size
    before = files_of(run)
    with pytest.raises(DataError, match=r"checkpoint-2/optimizer\.pt'"):
        retrain(resume=str(run))
    assert files_of(run) == before
    last.write_bytes(own)
    retrain(steps=3, resume=str(run))
    assert [line["step"] for line in records(run / "metrics.jsonl") if "loss" in line] == [1, 2, 3]
    manifest = json.loads((run / "checkpoints" / "checkpoint-3" / "spanwise.json").read_text())
    assert manifest["settings"]["steps"] == 3


def test_a_recipe_that_was_edited_in_its_folder_is_refused(run):
    file = run / "recipe.yaml"
    recipe = yaml.safe_load(file.read_text())
    halved = [{"reward": "correct", "pays": ["solution"], "weight": 0.5}]
    for edit in ({"seed": 7}, {"objectives": halved}, {"steps": 3, "trainer": {"lr_scheduler_type": "linear"}}):
        file.write_text(yaml.safe_dump({**recipe, **edit}, sort_keys=False))
        before, differences = files_of(run), ".*".join(edit)
        with pytest.raises(DataError, match=rf"checkpoint-2' .*another recipe: {differences}.*was edited after"):
            train(load(file, {"output": str(run)}), resume=str(run))
        assert files_of(run) == before


def test_the_last_run_of_a_name_says_nothing_of_where_it_is_and_goes_on_to_the_same_end(first, tmp_path, monkeypatch):
    assert "output" not in yaml.safe_load((first / "recipe.yaml").read_text())
    assert not [file for file in first.glob("*.*") if str(first) in file.read_text(errors="replace")]
    monkeypatch.chdir(tmp_path)
    other, run = (Path(shutil.copytree(first, tmp_path / "runs" / f"digits-bae-0-{number}")) for number in (1, 2))
    shutil.rmtree(run / "checkpoints" / "checkpoint-2")
    (run / "rollouts" / "step_000002.parquet").write_text("cut off")
    before = files_of(other)
    retrain(resume="last", keep_rollouts=0, eval_every=1, threads=1)  # settings of watching may change
    assert files_of(other) == before
    assert (run / "checkpoints" / "checkpoint-2").is_dir()
    finished, resumed = (json.loads((folder / "summary.json").read_text()) for folder in (first, run))
    assert [resumed[name] for name in ("start", "final")] == [finished[name] for name in ("start", "final")]
    # What was kept after the checkpoint is gone.
    kept = [str(file.relative_to(run)) for file in sorted(run.glob("*/step_*.parquet"))]
    assert kept == ["one_prompt/step_000000.parquet", "rollouts/step_000001.parquet"]
    for name in ("model/model.safetensors", "rollouts/step_000001.parquet"):
        assert files_of(run)[name] == before[name]


def test_a_model_outlives_its_last_evaluation_which_may_be_made_smaller(run, monkeypatch):
    (run / "summary.json").unlink()
    weights = load_file(run / "model" / "model.safetensors")
    shutil.rmtree(run / "model")
    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "summary", Mock(side_effect=torch.OutOfMemoryError))
        with pytest.raises(torch.OutOfMemoryError):
            retrain(output=str(run), resume="last")
    assert (run / "model" / "model.safetensors").is_file()
    shutil.rmtree(run / "checkpoints" / "checkpoint-2")
    summary = retrain(output=str(run), resume="last", eval_samples=1, micro_batch=4)  # one step more, in two halves
    assert summary["steps"] == 2
    for name, weight in load_file(run / "model" / "model.safetensors").items():
        torch.testing.assert_close(weight, weights[name], atol=1e-6, rtol=1e-4)


def test_a_moved_run_is_evaluated_and_reported_where_it_is(run):
    for place in (run, run / "model", run / "checkpoints" / "checkpoint-1"):
        model, recipe = run_or_model(place, None, {})
        assert model == (run / "model" if place == run else place)
        assert (recipe.steps, recipe.start_steps) == (2, 2)
    shutil.rmtree(run / "model")
    with pytest.raises(DataError, match="checkpoint-2"):
        run_or_model(run, None, {})
    assert report_folder(run) == run / "report.html"


def test_a_full_disk_ends_a_run_in_one_sentence_and_takes_nothing_with_it(run):
    """No file can have more than a megabyte: the weights have 1.6, all other files of this run less."""
    shutil.rmtree(run / "checkpoints" / "checkpoint-2")
    files = files_of(run / "checkpoints")
    says = rf"^'{run}/checkpoints/checkpoint-2' .* Resume from checkpoint-1: spanwise train --resume {run}\.$"
    with full_disk(1_000_000), pytest.raises(DataError, match=says):
        retrain(output=str(run), resume="last")
    assert files_of(run / "checkpoints") == files
    assert not [path.name for path in run.glob(".*") if path.name != ".lock"]
    assert not (run / "summary.json").exists()


@pytest.mark.long
def test_a_step_is_a_generation_batch_however_often_it_is_passed_over(tmp_path):
    """Two mini-batches, two passes: four optimizer steps on each of two batches, and one line of each."""
    twice = {"mini_batches": 2, "trainer": {"num_iterations": 2}, "eval_every": 1, "output": str(tmp_path / "run")}
    summary = retrain(**twice)
    place = tmp_path / "run"
    expected = timeless_metrics(place)
    kinds = [(line["step"], next((k for k in ("evaluation", "final") if k in line), "batch")) for line in expected]
    assert kinds == [(0, "evaluation"), (1, "batch"), (1, "evaluation"), (2, "batch"), (2, "final")]
    assert [batch["step"] for batch in summary["batches"]] == [1, 2]
    assert all("credit/no_signal" in line for line, (_, kind) in zip(expected, kinds, strict=True) if kind == "batch")
    assert sorted(path.name for path in (place / "checkpoints").glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-8"]
    rows = [pq.read_table(file).to_pylist() for file in sorted((place / "rollouts").iterdir())]
    assert [{row["step"] for row in batch} for batch in rows] == [{1}, {2}]
    assert {row[schema.PROMPT] for row in rows[0]}.isdisjoint(row[schema.PROMPT] for row in rows[1])
    tokens = sum(sum(row[schema.TRAINABLE]) for batch in rows for row in batch)
    assert summary["tokens_per_second"] * summary["step_seconds"] == pytest.approx(tokens)
    shutil.rmtree(place / "checkpoints" / "checkpoint-8")
    retrain(**twice, resume="last")
    assert timeless_metrics(place) == expected
    with pytest.raises(RecipeError, match="num_iterations is 0"):
        retrain(output=str(tmp_path / "other"), trainer={"num_iterations": 0})
    assert not (tmp_path / "other").exists()


def test_the_demo_refuses_before_it_trains(run, tmp_path):
    (tmp_path / "demo").mkdir()
    run.rename(tmp_path / "demo" / "blockwise")
    with pytest.raises(DataError, match="demo/blockwise"):
        run_demo(DIGITS, output="demo", seeds=[0], choices={"steps": 1})
    assert not (tmp_path / "demo" / "scalar").exists()


@pytest.mark.parametrize("rule", ["brier", "log_score"])
def test_the_calibration_of_a_batch_is_that_of_what_was_stated(rule):
    # Bins [0, .1): reports 0, 0 and .001, all wrong: .001/3 off on average. [.7, .8): .7 and .7, one right: .2 off.
    # [1, 1.1): 100 %, right. The rest states nothing or cannot be judged.
    stated = [("5", "0"), ("5", "0"), ("5", "0.001"), ("4", "0.7"), ("5", "70%"), ("4", "100%")]
    unstated = [("4", "high"), ("4", None)]
    objectives = [Objective("correct", pays="solution"), Objective(rule, pays="confidence", given="correct")]

    def scores_of(rows):
        sure = [None if q is None else {"": "", "confidence": q} for _, q in rows]
        text = [{"solution": {"": "", "answer": rows[n][0]}, "confidence": sure[n]} for n in range(len(rows))]
        return score_all(objectives, text, columns={"answer": ["4"] * len(rows)})

    assert batch_ece(scores_of(stated + unstated), 0, 1) == pytest.approx((3 * 0.001 / 3 + 2 * 0.2 + 0) / 6, abs=1e-12)
    nothing = scores_of(unstated)
    assert batch_ece(nothing, 0, 1) is None
    assert batch_ece(Scores(nothing.names, nothing.reward_nm, nothing.status_nm, nothing.by_outcome_nmo), 0, 1) is None


ONE = {"eval_every": 1, "eval_prompts": 4, "eval_samples": 1, "learning_rate": 1e-3, "seed": 3, "save_every": 0}
SAE = {"method": "sae", "critic": {"learning_rate": 1e-3}, "trainer": {"num_iterations": 2}, "start_steps": 20}
METHODS = {"bae": {"task": "invoices", "start_steps": None}, "sae": SAE}


@pytest.mark.long
@pytest.mark.parametrize("name", METHODS)
def test_one_prompt_is_kept_at_each_evaluation_and_training_is_the_same(tmp_path, name):
    for folder, keep in (("kept", 1), ("bare", 0)):
        kept = {"keep_rollouts": keep, "report": keep == 1, "output": str(tmp_path / folder)}
        train(load(None, {**SMALL, **ONE, **METHODS[name], **kept}))
    assert timeless_metrics(tmp_path / "kept") == timeless_metrics(tmp_path / "bare")
    assert not (tmp_path / "bare" / "one_prompt").exists()
    files = sorted((tmp_path / "kept" / "one_prompt").iterdir())
    assert [file.name for file in files] == ["step_000000.parquet", "step_000001.parquet", "step_000002.parquet"]
    tables = [pq.read_table(file).to_pydict() for file in files]
    (prompt,) = {prompt for table in tables for prompt in table["prompt"]}
    for file in (tmp_path / "kept" / "rollouts").iterdir():
        assert prompt not in pq.read_table(file)["prompt"].to_pylist()
    assert [table["step"] for table in tables] == [[0] * 4, [1] * 4, [2] * 4]
    for table in tables:
        blocks = [column.removeprefix("credit/bae/") for column in table if column.startswith("credit/bae/")]
        for block in {*blocks} & {column.removeprefix("reward/equals.") for column in table}:
            rewards = table[f"reward/equals.{block}"]
            if None in rewards:  # a completion without the field
                continue
            expected = [reward - sum(rewards) / 4 for reward in rewards]
            assert table[f"credit/bae/{block}"] == pytest.approx(expected, abs=1e-6)
    if name == "sae":
        assert all(value is not None for table in tables for values in table["values"] for value in values)
    view = data_of((tmp_path / "kept" / "report.html").read_text(), view=1)
    assert (view["by_step"], view["steps"]) == (True, [0] * 4 + [1] * 4 + [2] * 4)
