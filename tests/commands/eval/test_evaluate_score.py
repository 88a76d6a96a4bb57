"""What `evaluate` reads of a model: the log-probability after each end, one completion at a time as the oracle."""

import json
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset

from rollout_files import quiet
from spanwise.commands.eval.evaluate import evaluate
from spanwise.commands.shared.samples import Samples
from spanwise.commands.train import train as room
from spanwise.commands.train.train import Recorder
from spanwise.engines.sample import prompt_ids, sample
from spanwise.engines.trl import SpanGRPOTrainer
from spanwise.modes.laser.config import Laser
from spanwise.recipe import load
from spanwise.rollouts.folder import RunFolder
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
