"""The warm start: what is trained on, and a cache that is shared, checked and rebuilt."""

import functools
import logging
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from agent_start import AGENT, AgentSettings
from field_kinds import Chain, Total
from transformers import AutoModelForCausalLM, AutoTokenizer

from spanwise.errors import DataError
from spanwise.tasks import DIGITS_LAYOUT, Fields, Phase, WarmStartSettings, digits_task, warm_start
from spanwise.tasks.digits import DIGITS, LONG, LONG_LAYOUT, LONG_POSITIONS, LONGEST
from spanwise.tasks.embedded import STARTS, build_model, build_tokenizer, embedded
from spanwise.tasks.warm_start import (
    Float32Muon,
    _folder_name,
    _train,
    default_cache_folder,
    matrix_optimizer,
    save,
    shortened,
)

TINY = WarmStartSettings(easy=Phase(3, 3e-3, 0.03), hard=Phase(2, 2e-3, 0.02), batch=8, warm_up=1)


class Steps(list):
    def __call__(self, step: int, total: int, loss: float) -> None:
        self.append((step, total))
        assert np.isfinite(loss)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    # cloned, because loaded weights are mapped from the very file that the tests damage
    return {name: weight.clone() for name, weight in AutoModelForCausalLM.from_pretrained(folder).state_dict().items()}


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.fixture(scope="module")
def easy(tmp_path_factory) -> Path:
    return warm_start("easy", cache_folder=tmp_path_factory.mktemp("cache"), settings=TINY)


def test_first_call_trains_and_second_reads(tmp_path) -> None:
    threads, first, second = torch.get_num_threads(), Steps(), Steps()
    folder = warm_start("easy", cache_folder=tmp_path, settings=TINY, progress=first)
    assert first == [(1, 3), (2, 3), (3, 3)]
    assert warm_start("easy", cache_folder=tmp_path, settings=TINY, progress=second) == folder
    assert second == []
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]  # nothing half-written stays behind
    assert AutoTokenizer.from_pretrained(folder).tokenize("1+2=") == ["1", "+2", "="]
    assert not equal(weights(folder), build_model(build_tokenizer(), 0).state_dict())
    assert torch.get_num_threads() == threads


def test_hard_continues_easy_and_shares_its_cache(easy, tmp_path) -> None:
    steps, all_steps = Steps(), Steps()
    hard = warm_start("hard", cache_folder=easy.parent, settings=TINY, progress=steps)
    assert steps == [(1, 2), (2, 2)]
    assert not equal(weights(hard), weights(easy))
    scratch = warm_start("hard", cache_folder=tmp_path, settings=TINY, progress=all_steps)
    assert all_steps == [(step, 5) for step in range(1, 6)]
    assert equal(weights(scratch), weights(hard))
    assert {path.name for path in tmp_path.iterdir()} == {easy.name, hard.name}


@pytest.mark.long
@pytest.mark.parametrize("start", ["easy", "long", "invoices", Fields(2)])
def test_training_stays_on_the_device_of_the_model(start, monkeypatch) -> None:
    item = torch.Tensor.item
    monkeypatch.setattr(torch.Tensor, "item", lambda number: 1.0 if number.is_meta else item(number))  # these have no values
    course = embedded(start).course
    # Building the tokenizer of letters takes seconds; the model that comes with the package has it.
    tokenizer = AutoTokenizer.from_pretrained(warm_start(start)) if start == "invoices" else course.tokenizer()
    model = course.model(tokenizer, 0, **course.shape).to("meta")
    settings = replace(shortened(2), batch=8)
    losses = list(_train(model, tokenizer, course.stretches[0], 0, settings, centred=True))
    assert losses == [1.0, 1.0]  # an operation between it and another device is refused


def test_every_setting_and_seed_has_its_own_folder(easy) -> None:
    other_hard, other_batch = replace(TINY, hard=Phase(1, 2e-3, 0.02)), replace(TINY, batch=9)
    assert warm_start("easy", cache_folder=easy.parent, settings=other_hard) == easy  # it does not depend on the hard phase
    assert warm_start("easy", cache_folder=easy.parent, settings=other_batch) != easy
    seeded = warm_start("easy", cache_folder=easy.parent, settings=TINY, seed=1)
    assert seeded != easy
    assert not equal(weights(seeded), weights(easy))


def test_finished_warm_starts_keep_their_cache() -> None:
    """Another name would train every start again, in all caches."""
    courses = {name: (task.course, WarmStartSettings()) for name, task in STARTS.items()}
    courses["agent"] = AGENT, AgentSettings()
    assert {name: _folder_name(course, len(course.stretches) - 1, 0, its) for name, (course, its) in courses.items()} == {
        "invoices": "invoices_clerk-0-a0ed61271943",
        "easy": "digits-easy-0-ffa9c4402686",
        "hard": "digits-hard-0-fdae0b15b4a9",
        "twice": "digits-twice-0-edc41e500e19",
        "long": "digits-long-0-fe51cfa0404c",
        "agent": "digits-agent-0-2295b91365da",
    }


@pytest.mark.long
def test_another_course_has_its_own_cache_and_leaves_the_others_alone(tmp_path) -> None:
    two, steps = shortened(2), Steps()
    folder = warm_start("long", cache_folder=tmp_path, settings=two, progress=steps)
    assert steps == [(step, 6) for step in range(1, 7)]
    assert {path.name.split("-")[1] for path in tmp_path.iterdir()} == {"long_tables", "long_early", "long"}
    config = AutoModelForCausalLM.from_pretrained(folder).config
    assert (config.num_hidden_layers, config.max_position_embeddings) == (3, LONG_POSITIONS)
    longer_easy, longer_last = replace(two, easy=replace(two.easy, steps=3)), replace(two, long=replace(two.long, steps=3))
    assert warm_start("long", cache_folder=tmp_path, settings=longer_easy) == folder
    steps.clear()
    assert warm_start("long", cache_folder=tmp_path, settings=longer_last, progress=steps) != folder
    assert steps == [(1, 3), (2, 3), (3, 3)]  # the parts before came from the cache


DAMAGES = {
    "missing": lambda folder: (folder / "model.safetensors").unlink(),
    "truncated": lambda folder: os.truncate(folder / "model.safetensors", 1000),
    "altered": lambda folder: (folder / "tokenizer.json").write_text(
        (folder / "tokenizer.json").read_text().replace("+1", "+0")
    ),
    "unreadable": lambda folder: (folder / "warm_start.json").write_text("{"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_cache_is_rebuilt_with_a_notice(easy, tmp_path, caplog, damage) -> None:
    folder, steps = shutil.copytree(easy, tmp_path / easy.name), Steps()
    DAMAGES[damage](folder)
    with caplog.at_level(logging.WARNING, logger="spanwise"):
        assert warm_start("easy", cache_folder=tmp_path, settings=TINY, progress=steps) == folder
    assert len(steps) == 3
    assert caplog.text.count("is damaged") == 1
    assert str(folder) in caplog.text
    assert equal(weights(folder), weights(easy))


def test_a_folder_that_another_process_has_finished_stays_for_its_readers(easy, tmp_path) -> None:
    file = shutil.copytree(easy, tmp_path / easy.name) / "model.safetensors"
    inode = file.stat().st_ino
    tokenizer = build_tokenizer()
    save(build_model(tokenizer, 0), tokenizer, file.parent, record={})
    assert file.stat().st_ino == inode


def test_cache_folder_follows_the_environment_and_one_that_cannot_be_written_is_named(monkeypatch, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"file/digits-easy-0-"):
        warm_start("easy", cache_folder=tmp_path / "file", settings=TINY)
    monkeypatch.delenv("SPANWISE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    places = {"HOME": ".cache/spanwise", "XDG_CACHE_HOME": "spanwise", "SPANWISE_CACHE": ""}
    for name, place in places.items():  # each goes before those before it
        monkeypatch.setenv(name, str(tmp_path / name))
        assert default_cache_folder() == tmp_path / name / place


EMBEDDED = {**STARTS, **{kind.__class__.__name__: embedded(kind) for kind in (Fields(4), Chain(3), Total(3))}}


#: Long texts come in smaller batches.
DRAWN = {"easy": 64, "twice": 64, "long": 32, "invoices": 16}


@pytest.mark.parametrize("name", EMBEDDED)
def test_held_out_prompts_are_different_nested_and_never_trained_on(unchecked_shapes, name) -> None:
    task = EMBEDDED[name]
    source, held_out = task.source, task.source.held_out_prompts
    assert len(held_out) == 512
    assert source.held_out(40).prompts == source.held_out().prompts[:40]
    assert task.answers(source.held_out(40)) == task.answers(source.held_out())[:40]

    again = functools.partial(np.random.default_rng, source.held_out_seed)
    assert set(source.draw(512, rng=again()).prompts) <= held_out  # without the exclusion they would meet
    training = source.training(512, rng=again()).prompts
    assert (len(training), held_out & set(training)) == (512, frozenset())
    for stretch in task.course.stretches:
        size = 512 * 64 // len(stretch.draw(64, again()))  # of so many texts 512 are drawn, as of the held-out ones
        assert not held_out & {prompt for prompt, _ in stretch.draw(size, again())}
    assert len(task.course.stretches[-1].draw(64, again())) == DRAWN.get(name, 64)
    for size in (0, 513):
        with pytest.raises(DataError):
            source.held_out(size)


@pytest.mark.long
def test_training_learns_the_order_of_the_tags(tmp_path) -> None:
    losses, settings = [], WarmStartSettings(easy=Phase(40, 3e-3, 0.03), batch=16, warm_up=5)
    folder = warm_start("easy", cache_folder=tmp_path, settings=settings, progress=lambda *step: losses.append(step[2]))
    assert np.mean(losses[-5:]) < 0.6 * losses[0]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    text = "7+3*4~2___=<reasoning>088</reasoning><answer>8</answer><analysis>*4~2</analysis><confidence>0.7</confidence>"
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        following = tokenizer.convert_ids_to_tokens(model(ids).logits[0].argmax(-1).tolist())
    written = tokenizer.tokenize(text)
    after = {written[i]: following[i] for i in range(7, len(written))}
    order = ["=", "<reasoning>", "</reasoning>", "<answer>", "</answer>", "<analysis>", "</analysis>", "<confidence>"]
    signs = dict(zip(order[::2], order[1::2], strict=True)) | {"</confidence>": tokenizer.eos_token}
    assert {sign: after[sign] for sign in signs} == signs


@pytest.mark.parametrize(
    ("start", "layout", "source"),
    [("easy", DIGITS_LAYOUT, DIGITS), ("long", LONG_LAYOUT, LONG), (Total(3), None, Total.source)],
)
def test_a_task_keeps_its_evaluation_prompts_apart(tmp_path, start, layout, source) -> None:
    settings = replace(shortened(1), batch=4)
    options = {"train_size": 300, "eval_size": 64, "cache_folder": tmp_path, "settings": settings}
    task, same_seed, other_seed = (digits_task(start, seed=seed, **options) for seed in (5, 5, 6))
    assert task.train.column_names == task.evaluation.column_names == ["prompt", "answer"]
    assert (len(task.train), len(task.evaluation)) == (300, 64)
    assert task.train["prompt"][:] == same_seed.train["prompt"][:] != other_seed.train["prompt"][:]
    assert task.evaluation["prompt"][:] == other_seed.evaluation["prompt"][:] == source.held_out().prompts[:64]
    assert not set(task.train["prompt"]) & source.held_out_prompts
    assert Path(task.model, "config.json").is_file()
    if isinstance(start, str):
        longest = LONGEST if start == "long" else 32
        assert (task.name, task.layout, task.max_completion_length) == (f"digits-{start}", layout, longest)
        assert task.evaluation["answer"][:] == source.held_out().answers[:64]
    with pytest.raises(DataError, match="train_size is 0"):
        digits_task(start, **{**options, "train_size": 0})


@pytest.mark.parametrize("shape", [(16, 16), (16, 48), (48, 16)])
def test_steps_of_the_matrices_are_those_of_torchs_muon(shape):
    draw = torch.Generator().manual_seed(0)
    start, grads = torch.randn(shape, generator=draw), [torch.randn(shape, generator=draw) for _ in range(4)]
    ended = []
    for make in (Float32Muon, torch.optim.Muon):
        weight = torch.nn.Parameter(start.clone())
        optimizer = make([weight], lr=0.1, weight_decay=0.01)
        for grad in grads:
            weight.grad = grad.clone()
            optimizer.step()
        ended.append(weight.detach() - start)
    ours, theirs = ended
    assert (ours - theirs).norm() < 0.02 * theirs.norm()  # bfloat16 has 8 bits
    assert theirs.norm() > 0.5


def test_a_processor_without_bfloat16_gets_float32(monkeypatch):
    weight = torch.nn.Parameter(torch.eye(2))
    for capability, kind in (("AVX2", Float32Muon), ("DEFAULT", Float32Muon), ("AVX512", torch.optim.Muon)):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda name=capability: name)
        assert type(matrix_optimizer([weight], lr=0.1)) is kind
