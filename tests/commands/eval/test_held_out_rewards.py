"""Every objective is measured on held-out prompts, the elements of a list by those of the gold list."""

import io
import json
import warnings

import datasets
import pytest
import torch
from rich.console import Console

import trl_small
from helpers import NAN
from spanwise.commands.eval.evaluate import _rewards, evaluate
from spanwise.commands.shared.samples import Samples, read_samples
from spanwise.commands.train.train import train
from spanwise.layout import Layout
from spanwise.objective import Objective
from spanwise.recipe import load
from spanwise.scheme import Scheme
from spanwise.segment import Vocabulary, find_blocks
from spanwise.tasks import Task, build_model, build_tokenizer

pytestmark = trl_small.THIRD_PARTY

LAYOUT = Layout({"form": [], "total": "total", "items[*].price": "items[*].price"}, segmenter="json", most=3)


def test_a_list_is_measured_by_the_elements_of_the_gold_list():
    said = [
        '{"total": 3, "items": [{"price": 1}, {"price": 2}]}',  # both right
        '{"total": 3, "items": [{"price": 1}]}',  # the second is left out
        '{"total": 4, "items": [{"price": 1}, {"price": 2}, {"price": 9}]}',  # one that the gold list does not have
        '{"items": [{"price": 7}, {"price": 2}]}',
    ]
    ids = [list(text.encode()) for text in said]
    size = max(map(len, ids))
    ids_nt = torch.tensor([row + [0] * (size - len(row)) for row in ids])
    mask_nt = torch.tensor([[True] * len(row) + [False] * (size - len(row)) for row in ids])
    _, text = find_blocks(ids_nt, mask_nt, layout=LAYOUT, vocabulary=Vocabulary(tuple(bytes([b]) for b in range(256))))
    scheme = Scheme.preset("bae", LAYOUT, objectives=[Objective("equals", each="*", if_missing=None)])
    gold = json.dumps({"total": 3, "items": [{"price": 1}, {"price": 2}]})
    rewards = _rewards(scheme.objectives, text, {"answer": [gold] * 4})
    by_hand = {
        "equals.total": [1, 1, 0, NAN],  # without if_missing a field that is left out has no reward
        "equals.items[0].price": [1, 1, 1, 0],
        "equals.items[1].price": [1, 0, 1, 1],
        "equals.items[2].price": [NAN] * 4,
    }
    assert {name: pytest.approx(reward_n.tolist(), nan_ok=True) for name, reward_n in rewards.items()} == by_hand
    every_n = torch.ones(4, dtype=torch.bool)
    found = Samples(torch.tensor([0, 0, 1, 1]), {}, {}, torch.full((4,), NAN), every_n, rewards=rewards)
    assert found.figures() == {
        "format_rate": 1.0,
        "reward/equals.total": pytest.approx(2 / 3),
        "reward/equals.items[*].price": pytest.approx(6 / 8),
    }
    prompts = found.intervals()["reward/equals.items[*].price"]
    assert prompts.count == 2  # the interval is of prompts, not of elements


def ended(completions, completion_ids, **_):
    """Tell completions with an end token apart by their ids: 1 if the text does not show it, 0 if it does."""
    pairs, end = zip(completions, completion_ids, strict=True), build_tokenizer().eos_token_id
    return [float("<eos>" not in text) if ids[-1] == end else None for text, ids in pairs]


def test_reward_functions_see_completions_as_in_training_without_the_end_token():
    tokenizer, layout = build_tokenizer(), Layout({"all": []})
    rows = datasets.Dataset.from_dict({"prompt": ["7+3="] * 2, "answer": ["0"] * 2})
    recipe = load(
        None, {"model": "m", "dataset": "d", "layout": {"all": []}, "objectives": [{"reward": "correct", "pays": ["all"]}]}
    )
    of_its_own = {"objectives": [{"reward": ended, "name": "ended", "pays": ["all"]}], "temperature": 100.0}
    task, recipe = Task("own", "m", rows, rows, layout, 56), recipe.model_copy(update=of_its_own)
    reward_n = evaluate(build_model(tokenizer, 0), tokenizer, task, recipe, prompts=2, samples=128).rewards["ended"]
    assert reward_n[~reward_n.isnan()].tolist() == [1.0] * int((~reward_n.isnan()).sum()) != []


def test_a_run_on_an_own_dataset_is_measured_by_what_it_is_trained_for(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    tokenizer = build_tokenizer()
    build_model(tokenizer, 0).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    rows = [{"question": f"{n}=", "answer": json.dumps({"total": n})} for n in range(10)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "own.py").write_text("def short(blocks):\n    return [0.25 for _ in blocks]\n")
    monkeypatch.syspath_prepend(tmp_path)
    recipe = load(None, {
        "model": str(tmp_path / "base"), "dataset": str(tmp_path / "rows.jsonl"), "instruction": "", "segmenter": "json",
        "layout": {"form": [], "total": "total"}, "method": "bae", "steps": 2, "prompts": 2, "group_size": 2,
        "objectives": [
            {"reward": "equals", "each": "*", "pays": ["own", "form"], "if_missing": 0.0},
            {"reward": "own:short", "pays": ["form"]},
        ],
        "eval_prompts": 2, "eval_samples": 2, "max_completion_length": 8, "output": str(tmp_path / "run"), "report": True,
    })  # fmt: skip
    console = Console(record=True, width=90, file=io.StringIO())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an untrained model writes no JSON, which is said
        summary = train(recipe, console=console)
    for end in ("start", "final"):
        assert summary[end] == {"format_rate": summary[end]["format_rate"], "reward/equals.total": 0.0, "reward/short": 0.25}
    assert summary["intervals"]["reward/short"] == [0.25, 0.25]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["intervals"]["reward/short"] for line in lines if "intervals" in line] == [[0.25, 0.25]] * 2
    shown = console.export_text()
    assert "mean reward, short" in shown
    assert "0.250 to 0.250" in shown
    page = (tmp_path / "run" / "report.html").read_text()
    assert "held-out prompts" in page
    assert "mean reward: short" in page
    kept = read_samples(tmp_path / "run")
    assert (kept.correct, kept.answers, kept.stated) == ({}, {}, False)
    assert kept.figures() == summary["final"]
