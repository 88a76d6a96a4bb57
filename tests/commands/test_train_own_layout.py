"""A recipe in a folder of its own, with its own blocks, prompts, columns and reward, from somewhere else."""

import io
import json
import re
import warnings

import datasets
import pytest
import yaml
from rich.console import Console

import trl_small
from rollout_files import records, write_lines
from spanwise.commands.eval.evaluate import evaluate_folder
from spanwise.commands.shared.samples import read_samples
from spanwise.commands.train.train import train
from spanwise.errors import DataError
from spanwise.recipe import load
from spanwise.tasks.embedded import build_model, build_tokenizer

pytestmark = trl_small.THIRD_PARTY

TRAIN = """
def tested(completions, tests, log_metric, trainer_state=None):
    log_metric("tests", 1.0)
    return [float(len(checks)) / 4 for (message,), checks in zip(completions, tests, strict=True) if message["role"]]
"""
RECIPE = {
    "model": "base", "dataset": "problems.jsonl", "segmenter": "json", "layout": {"form": [], "total": "total"},
    "objectives": [
        {"reward": "equals", "each": "*", "pays": ["own", "form"], "if_missing": 0.0},
        {"reward": "train:tested", "pays": ["form"], "baseline": "batch"},
    ],
    "steps": 1, "prompts": 2, "group_size": 2, "eval_prompts": 2, "eval_samples": 2, "max_completion_length": 8,
    "output": "run",
}  # fmt: skip


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    folder = tmp_path / "project"
    folder.mkdir()
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    build_model(tokenizer, 0).save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    prompts = [[{"role": "user", "content": f"{n}: {{total}}"}] for n in range(10)]
    rows = [{"prompt": prompts[n], "answer": json.dumps({"total": n}), "tests": ["a"]} for n in range(10)]
    write_lines(folder / "problems.jsonl", rows)
    (folder / "train.py").write_text(TRAIN)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE, sort_keys=False))
    monkeypatch.chdir(tmp_path)
    return folder


def test_it_trains_is_measured_by_what_it_is_trained_for_and_evaluated_by_its_own_model(project, tmp_path):
    console = Console(record=True, width=90, file=io.StringIO())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an untrained model writes no JSON, which is said
        summary = train(load("project/recipe.yaml"), console=console)
    lines = records(tmp_path / "run" / "metrics.jsonl")
    (batch,) = [line for line in lines if "loss" in line]
    assert batch["rewards/tested/mean"] == 0.25  # of a column that the function asks for
    for end in ("start", "final"):  # no block holds an answer, so there is no accuracy
        measured = {"reward/equals.total": 0.0, "reward/tested": 0.25}
        assert summary[end] == {"format_rate": summary[end]["format_rate"], **measured}
    assert summary["intervals"]["reward/tested"] == [0.25, 0.25]
    assert [line["intervals"]["reward/tested"] for line in lines if "intervals" in line] == [[0.25, 0.25]] * 2
    printed = console.export_text()
    assert re.search(r"mean reward, tested +0.250 +0.250 +unknown", printed)  # the prompts agree, so no interval is known
    page = (tmp_path / "run" / "report.html").read_text()
    assert all(words in page for words in ("held-out prompts", "mean reward: tested"))
    saved = read_samples(tmp_path / "run")
    assert (saved.correct, saved.answers, saved.stated, saved.figures()) == ({}, {}, False, summary["final"])
    recipe = load("run/recipe.yaml")
    assert (recipe.model, recipe.dataset) == ("project/base", "project/problems.jsonl")
    (project / "base").rename(project / "gone")
    options = {"prompts": 1, "samples": 2, "seed": 0, "console": Console(quiet=True)}
    samples, _ = evaluate_folder(tmp_path / "run" / "model", recipe, **options)
    assert len(samples.prompt_n) == 2
    with pytest.raises(DataError, match="project/base"):
        train(recipe)
