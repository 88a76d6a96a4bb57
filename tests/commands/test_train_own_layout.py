"""A recipe in a folder of its own, with its own tags, prompts, columns and reward, from somewhere else."""

import json
import warnings

import datasets
import pytest
import yaml
from rich.console import Console

import trl_small
from spanwise.commands.eval.evaluate import evaluate_folder
from spanwise.commands.train.train import train
from spanwise.errors import DataError
from spanwise.recipe import load
from spanwise.tasks import build_model, build_tokenizer

pytestmark = trl_small.THIRD_PARTY

TRAIN = """
def code_correct(blocks, tests):
    return [float(len(checks)) for _, checks in zip(blocks, tests, strict=True)]
"""
RECIPE = {
    "model": "base",
    "dataset": "problems.jsonl",
    "answer_column": None,
    "layout": {"plan": ["plan"], "code": ["code"]},
    "objectives": [{"reward": "train:code_correct", "pays": ["plan", "code"], "baseline": "batch"}],
    "steps": 1, "prompts": 2, "group_size": 2, "eval_prompts": 2, "eval_samples": 2, "max_completion_length": 8,
    "output": "run", "report": False,
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
    asked = [{"role": "user", "content": "<plan><code>"}]
    rows = [{"prompt": asked, "tests": ["a"] * n} for n in range(6)]
    (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "train.py").write_text(TRAIN)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE, sort_keys=False))
    monkeypatch.chdir(tmp_path)
    return folder


def test_it_trains_and_the_run_is_evaluated_by_its_own_model(project):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an untrained model writes no tags, which is said
        summary = train(load("project/recipe.yaml"), console=Console(quiet=True))
    # The reward is the number of tests, in the column that the recipe's own function asks for.
    lines = map(json.loads, (project.parent / "run" / "metrics.jsonl").read_text().splitlines())
    means = [line["rewards/code_correct/mean"] for line in lines if "loss" in line]
    assert len(means) == 1
    assert means[0] > 0
    assert "accuracy" not in summary["final"], "no answers, no accuracy"
    again = load("run/recipe.yaml")
    assert (again.model, again.dataset) == ("project/base", "project/problems.jsonl")
    (project / "base").rename(project / "gone")
    found, _ = evaluate_folder(
        project.parent / "run" / "model", again, prompts=1, samples=2, seed=0, console=Console(quiet=True)
    )
    assert len(found.prompt_n) == 2
    with pytest.raises(DataError, match="The model 'project/base' is neither a folder in"):
        train(again, console=Console(quiet=True))
