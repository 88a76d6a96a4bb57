"""What `evaluate` reads of a model: scores, against one completion at a time, and rewards, by the elements of the gold list."""

import json
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset

from helpers import NAN
from rollout_files import quiet
from spanwise.batch import Batch
from spanwise.commands.eval.evaluate import _rewards, evaluate
from spanwise.commands.shared.samples import Samples
from spanwise.commands.train import train as room
from spanwise.commands.train.train import Recorder
from spanwise.engines.sample import prompt_ids, sample
from spanwise.engines.trl import SpanGRPOTrainer
from spanwise.layout import Layout
from spanwise.modes.laser.config import Laser
from spanwise.objective import Objective
from spanwise.recipe import load
from spanwise.rollouts.folder import RunFolder
from spanwise.scheme import Scheme
from spanwise.segment import Vocabulary, find_blocks
from spanwise.tasks import Task, build_model, build_tokenizer
from spanwise.tasks.digits import DIGITS_LAYOUT

PROMPTS = ["7+3*4____=", "2-5="]
LASER = Laser("<unk>", reference=-12.0)


def small():
    tokenizer = build_tokenizer()
    return build_model(tokenizer, 0), tokenizer


def test_scores_are_those_of_each_completion_by_itself():
    model, tokenizer = small()
    rows = Dataset.from_dict({"prompt": PROMPTS, "answer": ["0", "1"]})
    task = Task("digits", "", rows, rows, DIGITS_LAYOUT, 6)
    options = {"samples": 8, "seed": 3}
    recipe = load(None).model_copy(update={"max_completion_length": 24, "temperature": 200.0})  # some end, some do not
    found = evaluate(model, tokenizer, task, recipe, prompts=2, scored=LASER, **options)
    ids_nt, mask_nt = sample(model, tokenizer, PROMPTS, max_new_tokens=24, temperature=200.0, **options)
    starts = prompt_ids(tokenizer, PROMPTS)
    for n in range(16):
        ids = ids_nt[n][mask_nt[n]].tolist()
        if ids[-1] != tokenizer.eos_token_id:
            assert bool(found.score_n[n].isnan())  # cut off
            continue
        logits = model(input_ids=torch.tensor([starts[n // 8] + ids])).logits[0, -1].detach()
        logp = 200.0 * float((logits / 200.0).log_softmax(dim=0)[tokenizer.unk_token_id])
        assert float(found.score_n[n]) == pytest.approx(0.1 * (logp + 12.0), rel=1e-5)
    assert 0 < int(found.score_n.isnan().sum()) < 16
    assert evaluate(model, tokenizer, task, recipe, prompts=2, **options).score_n is None


def test_the_recorder_reads_scores_once_the_reference_is_known_and_leaves_it_behind(tmp_path, monkeypatch):
    read_by = []
    nothing_n = torch.zeros(1, dtype=torch.float64)
    nothing = Samples(nothing_n.long(), {"a": [None]}, {"a": nothing_n}, nothing_n, nothing_n == 0)
    monkeypatch.setattr(room, "evaluate", lambda *_, scored, **__: read_by.append(scored) or nothing)
    rows = Dataset.from_dict({"prompt": PROMPTS, "answer": ["0", "1"]})
    task = Task("digits", "", rows, rows, DIGITS_LAYOUT, 6)
    recorder = Recorder(load(None, {}), task, RunFolder(tmp_path), quiet(), "", per_batch=1)
    trainer = SpanGRPOTrainer.__new__(SpanGRPOTrainer)  # nothing is trained
    trainer.accelerator = SimpleNamespace(is_main_process=True, unwrap_model=lambda model: model)
    trainer.model = trainer.processing_class = trainer.last_rollouts = None
    trainer.parts = {}
    recorder.trainer = trainer
    state = SimpleNamespace(global_step=1)
    recorder.on_step_end(None, state, None)
    recorder._measure(2)
    assert read_by.pop() is None
    trainer.parts = {"laser": SimpleNamespace(mode=Laser("<unk>"), files={})}
    recorder.on_step_end(None, state, None)
    recorder._measure(2)
    assert read_by.pop() is None
    assert not (tmp_path / "laser.json").exists()
    measured = {"token": "<unk>", "id": 2, "reference": -12.0}
    trainer.parts = {"laser": SimpleNamespace(mode=LASER, files={"laser.json": json.dumps(measured)})}
    recorder.on_step_end(None, state, None)
    recorder._measure(2)
    assert read_by.pop() is LASER
    assert '"reference": -12.0' in (tmp_path / "laser.json").read_text()


LAYOUT = Layout({"form": [], "total": "total", "items[*].price": "items[*].price"}, segmenter="json", most=3)


def test_a_list_is_measured_by_the_elements_of_the_gold_list():
    said = [
        '{"total": 3, "items": [{"price": 1}, {"price": 2}]}',  # both right
        '{"total": 3, "items": [{"price": 1}]}',  # the second is left out
        '{"total": 4, "items": [{"price": 1}, {"price": 2}, {"price": 9}]}',  # one that the gold list does not have
        '{"items": [{"price": 7}, {"price": 2}]}',
    ]
    vocabulary = Vocabulary(tuple(bytes([b]) for b in range(256)))
    batch = Batch.jagged([list(text.encode()) for text in said], ["invoice"] * 4)
    _, text = find_blocks(batch.ids_nt, batch.mask_nt, layout=LAYOUT, vocabulary=vocabulary)
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
    rows = Dataset.from_dict({"prompt": ["7+3="] * 2, "answer": ["0"] * 2})
    recipe = load(
        None, {"model": "m", "dataset": "d", "layout": {"all": []}, "objectives": [{"reward": "correct", "pays": ["all"]}]}
    )
    of_its_own = {"objectives": [{"reward": ended, "name": "ended", "pays": ["all"]}], "temperature": 100.0}
    task, recipe = Task("own", "m", rows, rows, layout, 56), recipe.model_copy(update=of_its_own)
    reward_n = evaluate(build_model(tokenizer, 0), tokenizer, task, recipe, prompts=2, samples=128).rewards["ended"]
    assert reward_n[~reward_n.isnan()].tolist() == [1.0] * int((~reward_n.isnan()).sum()) != []
