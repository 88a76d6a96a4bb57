"""`spanwise credit --write`: traces with new advantages, which a trainer reads back, and dumps of slime."""

from pathlib import Path

import numpy as np
import pytest
import torch

import trl_small
from rollout_files import LAYOUT, tagged
from spanwise.commands.credit.credit import credit
from spanwise.errors import DataError, RecipeError
from spanwise.rollouts import read_rollouts, read_traces

FILE = Path(__file__).parents[2] / "rollouts" / "written" / "verifiers_branches" / "traces.jsonl"


@pytest.fixture
def tokenizer(tmp_path):
    trl_small.tokenizer().save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def write(source, folder, method="recipe", **options):
    rule = {"layout": LAYOUT, "method": "rloo", "per": "completion"}
    usual = {"methods": ["recipe", "bae"], "overrides": rule, "reward": {"correct": "exact"}}
    return credit(source, output=folder, write=method, **{**usual, **options})


def test_what_was_written_is_read_back_as_the_recorded_advantages(tmp_path, tokenizer):
    result = write(FILE, tmp_path / "out", "bae", tokenizer=tokenizer)
    table = read_rollouts(tmp_path / "out" / "traces.jsonl", tokenizer=tokenizer)
    (arm,) = [arm for arm in result.applied if arm.name == "bae"]
    expected = arm.advantages(result.table, 0, len(result.table))
    assert table.as_recorded.value == pytest.approx(expected)
    assert len(set(expected.tolist())) > 2
    turns = read_traces(tmp_path / "out" / "traces.jsonl")[0].turns
    assert [len(turn.per_token["advantages"]) for turn in turns] == [2, 9, 9]


def test_a_recipe_that_is_a_preset_is_written_by_either_name(tmp_path, tokenizer):
    for name in ("bae", "recipe"):
        write(FILE, tmp_path / name, name, tokenizer=tokenizer, methods=["recipe"], overrides={"layout": LAYOUT})
    assert (tmp_path / "bae" / "traces.jsonl").read_bytes() == (tmp_path / "recipe" / "traces.jsonl").read_bytes()


def test_what_cannot_be_written_is_refused_before_anything_is(tmp_path, tokenizer):
    copy = tmp_path / "out" / "traces.jsonl"
    copy.parent.mkdir()
    copy.write_text(FILE.read_text())
    with pytest.raises(RecipeError):
        write(FILE, copy.parent, "grpo", tokenizer=tokenizer)
    for source, options in ((FILE, {}), (copy, {"tokenizer": tokenizer})):
        with pytest.raises(DataError):
            write(source, copy.parent, **options)
    assert list(copy.parent.glob("[!.]*")) == [copy]
    assert copy.read_text() == FILE.read_text()


def test_dumps_of_slime_are_written_with_advantages_and_read_back_equal(tmp_path, tokenizer):
    """Right and wrong, leave-one-out over the tokens that were sampled; what was left out of the loss, and tool output, gets 0."""
    texts = [tagged("4", "0.9"), tagged("5", "0.9"), tagged("5", "0.8")]
    samples = []
    for n, text in enumerate(texts):
        ids = trl_small.tokenizer()(text)["input_ids"]
        mask = [0, *[1] * (len(ids) - 1)] if n == 0 else None
        samples.append({
            "group_index": 0, "prompt": "2+2=", "response": text, "tokens": [5, *ids], "response_length": len(ids),
            "loss_mask": mask, "reward": 1.0 * (n == 0), "label": "4", "remove_sample": n == 2, "metadata": {"level": [1]},
        })  # fmt: skip
    (tmp_path / "dumps").mkdir()
    for number in (0, 1):
        torch.save({"rollout_id": number, "samples": samples, "more": "x"}, tmp_path / "dumps" / f"{number}.pt")
    rule = {"methods": ["rloo"], "reward": {"correct": "reward"}, "overrides": {"layout": LAYOUT}}
    result = write(tmp_path / "dumps", tmp_path / "out", "rloo", tokenizer=tokenizer, **rule)
    expected = result.applied[0].advantages(result.table, 0, 6)
    tables = [read_rollouts(tmp_path / "out" / f"{number}.pt", tokenizer=tokenizer) for number in (0, 1)]
    assert np.concatenate([table.as_recorded.value for table in tables]) == pytest.approx(expected)
    assert np.unique(expected).size >= 3
    for number in (0, 1):
        dump = torch.load(tmp_path / "out" / f"{number}.pt", weights_only=True)
        for before, after in zip(samples, dump.pop("samples"), strict=True):
            advantages = after["metadata"].pop("spanwise_advantages")
            assert len(advantages) == after["response_length"]
            assert any(advantages) != after["remove_sample"]
            assert after == before
        assert dump == {"rollout_id": number, "more": "x"}
    assert torch.load(tmp_path / "out" / "0.pt", weights_only=True)["samples"][0]["metadata"]["spanwise_advantages"][0] == 0
