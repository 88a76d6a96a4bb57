"""benchmarks/gpu.py and gpu_training.py at their smallest sizes on the CPU; docs/gpu.md's numbers of waits are what is counted."""

import re
from types import SimpleNamespace

import gpu_training
import pytest
import torch
from estimators import Batch, rows
from gpu import Waits, estimators, moved, overlapped, waits_of
from transformers import AutoModelForCausalLM

from pages import DOCS
from spanwise.recipe import load
from spanwise.tasks.fields import FORM


def test_the_page_says_how_often_each_estimator_waits_at_any_size():
    row = r"^\| ([^|]+) \| (\d+)(?:, and (\d+) for each 32 completions)? \|"
    waits_section = (DOCS / "gpu.md").read_text().partition("## How often")[2].partition("\n## ")[0]
    written = {name: (int(count), int(more or 0)) for name, count, more in re.findall(row, waits_section, re.M)}
    for size in ((32, 16), (64, 128)):
        batch = moved(Batch(*size), torch.device("cpu"))
        waits = {name: sum(waits_of(call).values()) for name, call, _, _ in rows(batch, None)}
        assert waits == {name: count + more * size[0] // 32 for name, (count, more) in written.items()}


def test_waits_are_counted_by_hand():
    x = torch.tensor([1.0, 2.0, 3.0])
    with Waits() as waits:
        bool(x.any())  # one number is asked for
        x[x > 1]  # its size depends on the values
        x[:2] * 2
    assert waits.counts == {"_local_scalar_dense": 1, "index": 1}


def test_it_runs_at_its_smallest_size(capsys):
    estimators(Batch(32, 16), torch.device("cpu"), 1)
    overlapped(2, 64, 64, 1, torch.device("cpu"))
    seen = capsys.readouterr().out
    assert seen.count(" 0.0e+00 ") == 9  # here the device is the CPU itself
    assert "% of the segmentation is hidden" in seen


def test_a_policy_of_another_size_has_a_warm_start_and_a_learning_rate_of_its_own():
    course = gpu_training.course_of(768, 14)
    with torch.device("meta"):
        parameters = course.model(course.tokenizer(), 0, **course.shape).num_parameters()
    assert 0.95e8 < parameters < 1.05e8
    assert course.key != gpu_training.course_of(768, 2).key
    assert gpu_training.usual_rate(64, 2) == pytest.approx(1e-3)
    assert gpu_training.usual_rate(256, 8) == pytest.approx(1e-3 / 4 / 2)


def test_time_is_up_after_seconds_of_steps(monkeypatch):
    clock = iter([0.0, 3.0, 100.0, 101.0, 101.0, 102.5])  # steps of 3, 1 and 1.5 s; an evaluation between the first two
    monkeypatch.setattr(gpu_training, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    limit, control, stops = gpu_training.TimeLimit(5.0), SimpleNamespace(should_training_stop=False), []
    for _ in range(3):
        limit.on_step_begin(None, None, control)
        limit.on_step_end(None, None, control)
        stops.append(control.should_training_stop)
    assert stops == [False, False, True]


def test_the_arms_have_the_same_rewards_and_differ_in_whom_they_pay_and_in_per():
    one_number, by_field = (gpu_training.recipe_fields(arm) for arm in ("one_number", "by_field"))
    for fields in (one_number, by_field):
        load(None, {**fields, "model": "a", "dataset": "b"})  # as a recipe has them
    assert one_number["layout"] == by_field["layout"]
    assert [entry["name"] for entry in one_number["objectives"]] == [entry["name"] for entry in by_field["objectives"]]
    assert {*one_number["objectives"][2]["pays"]} == {FORM, *gpu_training.FIELDS.names}
    assert {*by_field["objectives"][2]["pays"]} == {FORM, "c"}
    assert (one_number["per"], by_field["per"]) == ("completion", "block")


def test_only_fields_that_follow_from_the_prompt_are_counted():
    figures = {f"reward/equals.{name}": 0.5 for name in gpu_training.FIELDS.names}
    assert gpu_training.fields_right({**figures, "reward/equals.b": 0.1, "reward/equals.c": 0.8}) == pytest.approx(0.52)


def test_arms_are_compared_at_completions_that_both_have():
    # the last that both have are 128; an eighth of them is 16, nearest to the start, a quarter is 32, and half 64
    one_number = {0: 0.1, 36: 0.15, 64: 0.2, 128: 0.25, 160: 0.3}
    by_field = {0: 0.1, 32: 0.21, 36: 0.22, 64: 0.3, 128: 0.4, 136: 0.45}
    arms = {
        "one_number": {"curve": one_number, "completions": 160, "seconds": 9.6, "bytes": 2_000_000_000, "format": 0.5},
        "by_field": {"curve": by_field, "completions": 136, "seconds": 10.2, "bytes": 2_340_000_000, "format": 1.0},
    }
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in gpu_training.table_lines(arms)]
    after = [f"fields right after {n} completions" for n in (0, 36, 64, 128)]
    ends = ["fields right at the end of its time", "well-formed objects at the end"]
    spent = ["completions", "seconds of steps", "peak memory, GB"]
    assert [row[0] for row in rows] == ["held-out prompts", "---", *after, *ends, *spent]
    one, by = ([float(row[arm]) for row in rows[2:]] for arm in (1, 2))
    assert one == [0.1, 0.15, 0.2, 0.25, 0.3, 0.5, 160, 10, 2]
    assert by == [0.1, 0.22, 0.3, 0.4, 0.45, 1, 136, 10, 2.34]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Step 0|Every advantage:UserWarning")  # eight steps teach no form
def test_both_arms_train_from_the_same_start_until_time_is_up(tmp_path):
    policy = gpu_training.start_policy(32, 1, tmp_path, "cpu", steps=8)
    prompts = tmp_path / "prompts.jsonl"
    gpu_training.write_prompts(prompts, 40, seed=0)
    options = {"prompts": 2, "group_size": 2, "seed": 0, "eval_every": 1, "eval_prompts": 4, "learning_rate": 1e-3}
    arms = {
        arm: gpu_training.train_arm(arm, policy, prompts, 0.0, output=str(tmp_path / arm), **options)
        for arm in gpu_training.METHODS
    }
    for arm in arms.values():
        assert arm["completions"] == 4  # no time is left after the first step
        assert arm["curve"].keys() == {0, 4}
        assert 0 < arm["seconds"] < 60
        assert arm["bytes"] > 1e7
    assert arms["one_number"]["curve"][0] == arms["by_field"]["curve"][0]
    trained = [AutoModelForCausalLM.from_pretrained(tmp_path / arm / "model").num_parameters() for arm in arms]
    assert trained == [AutoModelForCausalLM.from_pretrained(policy).num_parameters()] * 2
