"""A user's own script leaves the folder of `spanwise train`: same files and columns, credit by hand, however it ends."""

import importlib.util
import json
from collections import defaultdict, deque

import pyarrow.parquet as pq
import pytest
import torch
import yaml
from rich.console import Console
from transformers import TrainerCallback

import opened_folder
from spanwise.commands.credit.credit import credit_rollouts
from spanwise.commands.shared.task import make_task
from spanwise.engines.trl.keeping import log_credit, steps_per_batch
from spanwise.errors import DataError, RecipeError
from spanwise.objective import Objective
from spanwise.recipe import load
from spanwise.types import Credit
from trl_small import LAYOUT, SAID, config, credit, plain, prompts, scheme, scripted, token_advantages, trainer, weights

KEEP = {"max_steps": 3, "learning_rate": 0.01, "keep_rollouts": 1}


def solved(completions, answer, **columns):
    return [float(f"<answer>{right}</answer>" in text) for text, right in zip(completions, answer, strict=True)]


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def names_in(folder):
    return sorted(file.name for file in (folder / "rollouts").glob("*"))


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """A run of three steps that keeps every second batch."""
    folder = tmp_path_factory.mktemp("own")
    trainer(folder, **{**KEEP, "keep_rollouts": 2}).train()
    return folder


def test_the_folder_holds_what_spanwise_train_leaves_and_the_rule_it_was_trained_with(ran):
    names = {"metrics.jsonl", "recipe.yaml", "rollouts", "summary.json", "tokenizer"}
    assert {file.name for file in ran.iterdir()} - {".lock", "report.html"} == names  # another test makes a report
    assert names_in(ran) == ["step_000002.parquet"]
    assert [line["step"] for line in lines(ran)] == [1, 2, 3]
    assert {"loss", "credit/malformed", "rewards/correct/mean", "spanwise/seconds"} <= set(lines(ran)[0])
    assert lines(ran)[0]["rewards/correct/mean"] == pytest.approx(sum(completion.right for completion in SAID) / 8)
    summary = json.loads((ran / "summary.json").read_text())
    assert (summary["task"], summary["method"], summary["steps"]) == ("own", "bae", 3)
    recipe = load(ran / "recipe.yaml")
    assert recipe.own_layout == LAYOUT
    assert (recipe.task, recipe.steps, recipe.prompts, recipe.group_size) == ("own", 3, 2, 4)
    assert list(yaml.safe_load((ran / "recipe.yaml").read_text())["layout"]) == ["solution", "confidence"]
    with pytest.raises(RecipeError, match="script"):  # which alone knows its prompts
        make_task(recipe, Console(quiet=True))


def test_the_credit_of_every_block_is_that_of_the_definitions_and_every_command_reads_it(ran):
    table = opened_folder.check(ran, token_advantages(SAID), [[1] * len(said.blocks) for said in SAID], step=3)
    for row, completion, (solution, confidence, stop) in zip(table, SAID, credit(SAID), strict=True):
        assert row["credit/bae/solution"] == pytest.approx(solution, abs=1e-6)
        recorded = row["credit/bae/confidence"]
        assert recorded is None if completion.confidence is None else recorded == pytest.approx(confidence, abs=1e-6)
        assert row["credit/bae/stop"] == pytest.approx(stop, abs=1e-6)
        assert row["text"] == "".join(completion.pieces)
    page = (ran / "report.html").read_text()
    assert "is not finished" not in page
    assert "a script trained this run and gave no held-out prompts" in page


def test_rewards_of_the_script_are_read_and_its_code_is_not_run(tmp_path):
    objectives = [Objective(solved, pays="solution"), Objective("format", pays="confidence", if_missing=0.0)]
    trainer(tmp_path, extra={"objectives": objectives}, **KEEP).train()
    file = tmp_path / "recipe.yaml"
    file.write_text(file.read_text().replace(f"{__name__}:solved", "no_such_script:solved"))
    assert "no_such_script" in file.read_text()
    assert credit_rollouts(tmp_path, methods=["recipe"]).applied[0].credit.block_nk.shape == (24, 2)


def test_nothing_else_changes(tmp_path):
    args = plain(config(tmp_path / "plain", max_steps=3, learning_rate=0.01))
    runs, logged = [], []
    for folder, options in (("plain", {"extra": {"args": args}}), ("kept", KEEP)):
        run = trainer(tmp_path / folder, **options)  # a trainer sets the seed, so each one trains before the next is made
        run.train()
        timed = ("spanwise/seconds", "step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second")
        logged.append([{k: v for k, v in line.items() if k not in timed} for line in run.state.log_history])
        runs.append(weights(run.model))
    assert logged[0] == logged[1]
    assert all(torch.equal(runs[0][name], value) for name, value in runs[1].items())
    assert not (tmp_path / "plain" / "recipe.yaml").exists()


def test_a_line_for_each_batch_however_rarely_the_trainer_logs(tmp_path):
    several = {"per_device_train_batch_size": 4, "steps_per_generation": 2, "num_iterations": 2, "max_steps": 8}
    run = trainer(tmp_path, **{**KEEP, **several, "logging_steps": 100})
    assert steps_per_batch(run.args) == 4
    run.train()
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]
    assert names_in(tmp_path) == ["step_000001.parquet", "step_000002.parquet"]
    assert "credit/solution/mean_abs" in lines(tmp_path)[0]


def test_a_line_holds_its_own_batch_and_not_the_mean_that_the_trainer_logs(tmp_path):
    """Half of the first batch says 4, and a quarter of the second; TRL logs their mean, 0.375."""
    batches = [[SAID[0], SAID[3]] * 4, [SAID[0], *[SAID[3]] * 3] * 2]
    says_4 = Objective(lambda completions: [float("4" in text) for text in completions], pays="solution", name="says_4")
    extra = {"rollout_func": lambda *call: scripted(batches.pop(0))(*call), "objectives": [says_4]}
    trainer(tmp_path, extra=extra, **{**KEEP, "max_steps": 2, "logging_steps": 2}).train()
    assert [line["rewards/says_4/mean"] for line in lines(tmp_path)] == [0.5, 0.25]
    assert "loss" in lines(tmp_path)[1]


def stopped(folder, *, after, **options):
    class Stops(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == after:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trainer(folder, extra={"callbacks": [Stops()]}, **options).train()


@pytest.mark.long
def test_an_interrupted_run_has_its_data_and_a_report_that_says_so_and_is_gone_on_with(tmp_path):
    saved = {**KEEP, "report": True, "save_strategy": "steps", "save_steps": 2}
    stopped(tmp_path, after=2, **saved)
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]
    assert names_in(tmp_path) == ["step_000001.parquet", "step_000002.parquet"]
    assert not (tmp_path / "summary.json").exists()
    page = (tmp_path / "report.html").read_text()
    assert "The run is not finished: 2 of 3 steps are recorded. The run was stopped, or still trains." in page
    assert "spanwise train --resume" not in page  # that command does not know the script
    (tmp_path / "rollouts" / "step_000003.parquet").write_text("of what was lost")
    trainer(tmp_path, **{**saved, "report": False}).train(resume_from_checkpoint=True)
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3]
    assert len(pq.read_table(tmp_path / "rollouts" / "step_000003.parquet")) == 8
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 3


def test_a_run_that_stopped_within_its_first_batch_is_gone_on_with(tmp_path):
    options = {**KEEP, "num_iterations": 2, "max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    stopped(tmp_path, after=1, **options)
    trainer(tmp_path, **options).train(resume_from_checkpoint=True)
    assert [line["step"] for line in lines(tmp_path)] == [1]
    assert names_in(tmp_path) == ["step_000001.parquet"]


def test_other_files_stay_and_a_report_that_fails_ends_no_training_without_rollouts(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.warns(UserWarning, match=r"could not be made: exit status 1\. All data"):
        trainer(tmp_path, **{**KEEP, "keep_rollouts": 0, "report": True}).train()
    assert {"config.json", "summary.json"} <= {file.name for file in tmp_path.iterdir()}
    assert not (tmp_path / "rollouts").exists()


def test_an_evaluation_between_two_passes_over_a_batch_leaves_its_rollouts(tmp_path):
    """The second pass ends the batch. What is kept then was trained, and not the one held-out prompt."""
    passes = {"num_iterations": 2, "max_steps": 2, "keep_rollouts": 1, "eval_strategy": "steps", "eval_steps": 1}
    extra = {"eval_dataset": prompts().select([1, 1])}
    trainer(tmp_path, extra=extra, per_device_eval_batch_size=8, **passes).train()
    (file,) = (tmp_path / "rollouts").glob("*.parquet")
    assert set(pq.read_table(file)["prompt"].to_pylist()) == {"2+2=", "1+2="}


def test_a_run_that_is_there_is_not_written_over(ran):
    before = {file: file.read_bytes() for file in ran.rglob("*") if file.is_file() and file.name != ".lock"}
    with pytest.raises(DataError, match="already holds a run"):
        trainer(ran, **KEEP).train()
    assert {file: file.read_bytes() for file in before} == before


def test_what_cannot_be_kept_is_refused(tmp_path, monkeypatch):
    """Also a report without what draws it, and batches that no step ends."""
    for name, value in (("keep_rollouts", -1), ("keep_rollouts", True), ("keep_rollouts", 1.5), ("report", 3)):
        with pytest.raises(RecipeError, match=name):
            config(tmp_path, **{name: value})
    batches = {"per_device_train_batch_size": 4, "steps_per_generation": 3, "gradient_accumulation_steps": 2}
    with pytest.raises(RecipeError, match="must be a positive multiple of"):
        trainer(tmp_path, **KEEP, **batches, num_generations=6)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("spanwise.engines.shared.find_spec", lambda name: None if name == "altair" else find_spec(name))
    with pytest.raises(RecipeError, match="not installed: altair"):
        config(tmp_path, report=True)
    assert config(tmp_path, keep_rollouts=1).keep_rollouts == 1


def test_a_table_of_completions_that_trl_no_longer_keeps_is_a_remark():
    assigned = Credit(torch.tensor([[0.5, -0.5]]), torch.zeros(1), torch.zeros(2).long(), torch.zeros(2).long())
    present = torch.ones(1, 2, dtype=torch.bool)
    assert "lacks 'advantages', so" in log_credit({"extra": {}}, assigned, present, scheme())
    logs = {"advantages": deque([9.0]), "extra": defaultdict(deque)}
    assert log_credit(logs, assigned, present, scheme()) == ""
    assert (list(logs["extra"]["credit/confidence"]), list(logs["advantages"])) == ([-0.5], [0.0])
