"""`evaluate`: scores against one completion at a time, rewards by the gold list, and embedding rows without a token."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset

import trl_small
from helpers import NAN
from rollout_files import quiet
from spanwise.batch import Batch
from spanwise.commands.eval.evaluate import compute_rewards, evaluate
from spanwise.commands.shared.samples import Samples
from spanwise.commands.shared.task import task_roller
from spanwise.commands.train import train as room
from spanwise.commands.train.train import Recorder
from spanwise.engines.sample import prompt_ids, sample
from spanwise.engines.trl import SpanGRPOTrainer
from spanwise.fidelity.rerolls import Roller, collect_tokens
from spanwise.layout import Layout
from spanwise.modes.laser.config import Laser
from spanwise.objective import Objective
from spanwise.recipe import load
from spanwise.rollouts.folder import RunFolder
from spanwise.scheme import Scheme
from spanwise.segment import Vocabulary, find_blocks
from spanwise.tasks import DIGITS_LAYOUT, Task
from spanwise.tasks.embedded import build_model, build_tokenizer
from tokenizers_small import last_token_model

PROMPTS = ["7+3*4____=", "2-5="]
PUZZLE_ROWS = Dataset.from_dict({"prompt": PROMPTS, "answer": ["0", "1"]})
PUZZLES = Task("digits", "", PUZZLE_ROWS, PUZZLE_ROWS, DIGITS_LAYOUT, 6)
LASER = Laser("<unk>", reference=-12.0)


def test_scores_are_those_of_each_completion_by_itself():
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, 0)
    options = {"samples": 8, "seed": 3}
    recipe = load(None).model_copy(update={"max_completion_length": 24, "temperature": 200.0})  # some end, some do not
    measured = evaluate(model, tokenizer, PUZZLES, recipe, prompts=2, scored=LASER, **options)
    ids_nt, mask_nt = sample(model, tokenizer, PROMPTS, max_new_tokens=24, temperature=200.0, **options)
    starts = prompt_ids(tokenizer, PROMPTS)
    for n in range(16):
        ids = ids_nt[n][mask_nt[n]].tolist()
        if ids[-1] != tokenizer.eos_token_id:
            assert bool(measured.score_n[n].isnan())  # cut off
            continue
        logits = model(input_ids=torch.tensor([starts[n // 8] + ids])).logits[0, -1].detach()
        logp = 200.0 * float((logits / 200.0).log_softmax(dim=0)[tokenizer.unk_token_id])
        assert float(measured.score_n[n]) == pytest.approx(0.1 * (logp + 12.0), rel=1e-5)
    assert 0 < int(measured.score_n.isnan().sum()) < 16
    assert evaluate(model, tokenizer, PUZZLES, recipe, prompts=2, **options).score_n is None


def test_the_recorder_reads_scores_once_the_reference_is_known_and_leaves_it_behind(tmp_path, monkeypatch):
    read_by = []
    nothing_n = torch.zeros(1, dtype=torch.float64)
    nothing = Samples(nothing_n.long(), {"a": [None]}, {"a": nothing_n}, nothing_n, nothing_n == 0)
    monkeypatch.setattr(room, "evaluate", lambda *_, scored, **__: read_by.append(scored) or nothing)
    recipe = load(None, {"keep_rollouts": 0})
    recorder = Recorder(recipe, PUZZLES, RunFolder(tmp_path), quiet(), "", per_batch=1)
    trainer = SpanGRPOTrainer.__new__(SpanGRPOTrainer)  # nothing is trained
    trainer.accelerator = SimpleNamespace(is_main_process=True, unwrap_model=lambda model: model)
    trainer.model = trainer.processing_class = trainer.state = trainer._trained_rollouts = None
    recorder.trainer = trainer
    files = {"laser.json": json.dumps({"token": "<unk>", "id": 2, "reference": -12.0})}
    fresh, measured = SimpleNamespace(mode=Laser("<unk>"), files={}), SimpleNamespace(mode=LASER, files=files)
    for parts, mode in (({}, None), ({"laser": fresh}, None), ({"laser": measured}, LASER)):
        assert not (tmp_path / "laser.json").exists()
        trainer.parts = parts
        recorder.on_step_end(None, SimpleNamespace(global_step=1), None)
        recorder.evaluations.clear()
        recorder.on_train_begin(None, SimpleNamespace(global_step=0), None)
        assert read_by.pop() is mode
    assert '"reference": -12.0' in (tmp_path / "laser.json").read_text()
    # Of several processes, each evaluates while the policy trains. They may share its weights.
    trainer.accelerator.is_main_process = False
    state = SimpleNamespace(is_world_process_zero=False, global_step=10, log_history=[])
    recorder.on_log(None, state, None, logs={"loss": 0.0})
    assert (read_by, recorder.evaluations[-1]["step"]) == ([LASER], 10)


LAYOUT = Layout({"form": [], "total": "total", "items[*].price": "items[*].price"}, segmenter="json", most=3)


def test_a_list_is_measured_by_the_elements_of_the_gold_list():
    texts = [
        '{"total": 3, "items": [{"price": 1}, {"price": 2}]}',  # both right
        '{"total": 3, "items": [{"price": 1}]}',  # the second is left out
        '{"total": 4, "items": [{"price": 1}, {"price": 2}, {"price": 9}]}',  # one that the gold list does not have
        '{"items": [{"price": 7}, {"price": 2}]}',
    ]
    vocabulary = Vocabulary(tuple(bytes([b]) for b in range(256)))
    batch = Batch.jagged([list(text.encode()) for text in texts], ["invoice"] * 4)
    _, text = find_blocks(batch.ids_nt, batch.mask_nt, layout=LAYOUT, vocabulary=vocabulary)
    scheme = Scheme.preset("bae", LAYOUT, objectives=[Objective("equals", each="*", if_missing=None)])
    gold = json.dumps({"total": 3, "items": [{"price": 1}, {"price": 2}]})
    rewards = compute_rewards(scheme.objectives, text, {"answer": [gold] * 4})
    by_hand = {
        "equals.total": [1, 1, 0, NAN],  # without if_missing a field that is left out has no reward
        "equals.items[0].price": [1, 1, 1, 0],
        "equals.items[1].price": [1, 0, 1, 1],
        "equals.items[2].price": [NAN] * 4,
    }
    assert {name: pytest.approx(reward_n.tolist(), nan_ok=True) for name, reward_n in rewards.items()} == by_hand
    every_n = torch.ones(4, dtype=torch.bool)
    samples = Samples(torch.tensor([0, 0, 1, 1]), {}, {}, torch.full((4,), NAN), every_n, rewards=rewards)
    means = {"reward/equals.total": pytest.approx(2 / 3), "reward/equals.items[*].price": pytest.approx(6 / 8)}
    assert samples.figures() == {"format_rate": 1.0, **means}
    assert samples.intervals()["reward/equals.items[*].price"].count == 2  # the interval is of prompts, not of elements


def logged(prompts, completions, completion_ids, trainer_state, log_metric, log_extra, **_):
    """The trainer's step, plus 1 for a text or message with the answer 2 whose end token is in the ids alone."""
    log_metric("digits", 1.0)
    log_extra("prompt", prompts)
    texts = [
        said if isinstance(prompt, str) else said[0]["content"] for prompt, said in zip(prompts, completions, strict=True)
    ]
    ended = [ids[-1] == build_tokenizer().eos_token_id for ids in completion_ids]
    right = ["2" in text and "<eos>" not in text and end for text, end in zip(texts, ended, strict=True)]
    return [float(flag) + trainer_state.global_step for flag in right]


#: What comes after what, with certainty; two of the tokens are rows that the tokenizer does not know.
CHAIN = {
    "=": "<reasoning>", "<reasoning>": 62, 62: "</reasoning>", "</reasoning>": "<answer>", "<answer>": "2",
    "2": "</answer>", "</answer>": "<analysis>", "<analysis>": 63, 63: "</analysis>", "</analysis>": "<confidence>",
    "<confidence>": "1", "1": "</confidence>", "</confidence>": "<eos>",
}  # fmt: skip
ROWS = Dataset.from_dict({"prompt": ["1+1=", "1+2="], "answer": ["2", "3"]})
(TRL_NOTICE,) = trl_small.THIRD_PARTY
TASK = Task("digits-easy", "nowhere", ROWS, ROWS, DIGITS_LAYOUT, 16)


@pytest.fixture(scope="module")
def padded():
    """A model of 64 rows, of which the tokenizer names 61."""
    vocabulary, logits_fv = build_tokenizer().get_vocab(), torch.zeros(64, 64)
    assert len(vocabulary) == 61
    for before, after in CHAIN.items():
        logits_fv[vocabulary.get(before, before), vocabulary.get(after, after)] = 64.0
    return last_token_model(logits_fv)


def test_they_are_read_as_nothing_and_answers_are_judged_as_the_objective_says_wherever_they_stand(padded):
    """The dataset has the gold answers in a column of another name, and the answer stands in the second block."""
    samples = evaluate(*padded, TASK, load(None), prompts=2, samples=2)
    assert (samples.answers["solution"], samples.correct["solution"].tolist()) == (["2"] * 4, [1, 1, 0, 0])
    assert samples.confidence_n.tolist() == [1.0] * 4
    layout = {"thought": ["reasoning"], "solution": ["answer"], "confidence": ["analysis", "confidence"]}
    objective = {"reward": "correct", "pays": "solution", "options": {"column": "gold", "verify": "exact"}}
    thinking = {"reward": "correct", "name": "thinking", "pays": "thought", "options": {"tag": "reasoning"}}
    recipe = load(None, {"layout": layout, "objectives": [thinking, objective]})
    rows = ROWS.add_column("gold", ["2", "4"])
    samples = evaluate(*padded, replace(TASK, evaluation=rows, layout=recipe.own_layout), recipe, prompts=2, samples=1)
    assert (samples.correct["solution"].tolist(), samples.refusal_n.tolist()) == ([1, 0], [False] * 2)  # the model answers 2


@pytest.mark.parametrize("prompt", ["1+1=", [{"role": "user", "content": "1+1="}]])
def test_reward_functions_get_what_the_trainer_passes_as_in_training(prompt, padded):
    model, tokenizer = padded[0], build_tokenizer()
    tokenizer.chat_template = "{{ messages[0].content }}"
    rows = Dataset.from_dict({"prompt": [prompt], "answer": ["2"]})
    task = Task("sums", "m", rows, rows, Layout({"all": []}), 16)
    objectives = [{"reward": logged, "name": "logged", "pays": ["all"]}]
    recipe = load(None, {"model": "m", "dataset": "d", "layout": {"all": []}, "objectives": objectives})
    state = SimpleNamespace(global_step=3)
    samples = evaluate(model, tokenizer, task, recipe, prompts=1, samples=2, state=state)
    assert samples.rewards["logged"].tolist() == [4.0, 4.0]


def test_evaluations_sample_as_the_trainer_section_says(padded):
    model, tokenizer = padded[0], build_tokenizer()
    tokenizer.chat_template = "1+1{% if short %}={% endif %}"
    suppressed = {"suppress_tokens": [tokenizer.vocab["2"]], "do_sample": True}
    trainer = {"generation_kwargs": json.dumps(suppressed), "top_k": 5, "chat_template_kwargs": {"short": True}}
    rows = Dataset.from_dict({"prompt": [[{"role": "user", "content": "1+1"}]], "answer": ["2"]})
    roller = task_roller(model, tokenizer, TASK, load(None, {"trainer": trainer}))
    assert tokenizer.decode(roller.prompt_ids(rows)[0]) == "1+1="
    assert roller.generation == {"top_k": 5, **suppressed}
    ids_nt, _, _ = roller.completions(rows, samples=2, seed=0)
    assert (ids_nt[:, 0] == tokenizer.vocab["<reasoning>"]).all()
    assert tokenizer.vocab["2"] not in ids_nt
    on_vllm = load(None, {"trainer": {**trainer, "use_vllm": True, "top_k": -1}})  # with -1 vLLM draws from all tokens
    assert task_roller(model, tokenizer, TASK, on_vllm).generation == {"top_k": 0}


def test_token_rollouts_read_them_as_nothing_with_one_vocabulary(padded, monkeypatch):
    calls = []
    of = Vocabulary.of
    monkeypatch.setattr(Vocabulary, "of", lambda *inputs: calls.append(inputs) or of(*inputs))
    blocks, trajectories, again_ntm = collect_tokens(Roller(*padded, TASK, 1.0, 16), ROWS, samples=2, rerolls=3)
    assert blocks.ids_nt[0, 1] == 62
    assert blocks.reward_n.tolist() == [1, 1, 0, 0]
    assert trajectories.value_nt[:, :6].tolist() == [[1] * 6] * 2 + [[0] * 6] * 2
    assert again_ntm[:2, :6].unique().tolist() == [1]
    assert len(calls) == 1


@TRL_NOTICE
def test_the_trainer_knows_them_too(tmp_path):
    model = trl_small.policy()
    model.resize_token_embeddings(32, mean_resizing=False)
    run = trl_small.trainer(tmp_path, extra={"model": model})
    assert run.step.vocabulary.pieces[22:] == (b"b", *[b""] * 9)
