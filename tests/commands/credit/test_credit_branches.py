"""Branches of one trace under several methods: one vote per rollout, a shared turn credited once, the trainer's own beside it."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import trl_small
from rollout_files import LAYOUT, episode, node, quiet, said, trace, write_lines
from spanwise.commands.credit.credit import credit, credit_rollouts
from spanwise.errors import RecipeError
from spanwise.rollouts import read_rollouts

WRITTEN = Path(__file__).parents[2] / "rollouts" / "written" / "verifiers_branches"


def recipe(folder):
    (folder / "recipe.yaml").write_text(f"layout: {LAYOUT}\n")
    return folder / "recipe.yaml"


def tree(first, second, right):
    """A trace of two branches from one prompt, with the reward of the whole."""
    other = node("assistant", second, parent=0, sampled=True)
    return trace(first, "4", {"correct": {"score": right, "weight": 1.0}}, extra=[other])


def test_a_rollout_of_several_branches_has_one_vote(tmp_path):
    """Rewards 1 (two branches), 0, 0: leave-one-out of three rollouts, not of four rows."""
    traces = [tree(said("4", "0.9"), said("4", "0.8"), 1.0)]
    traces += [trace(said("5", "0.5"), "4", {"correct": {"score": 0.0, "weight": 1.0}}) for _ in range(2)]
    file = write_lines(tmp_path / "traces.jsonl", [episode(one) for one in traces])
    result = credit_rollouts(file, recipe=recipe(tmp_path), methods=["rloo", "grpo"])
    rloo = result.applied[0].credit.block_nk
    torch.testing.assert_close(rloo, torch.tensor([[1.0], [1.0], [-0.5], [-0.5]]).double().expand_as(rloo))
    grpo = result.applied[1].credit.block_nk[:, 0]
    torch.testing.assert_close(grpo[0], grpo[1])
    torch.testing.assert_close(grpo[1] + grpo[2] + grpo[3], torch.tensor(0.0).double())
    flat = result.applied[1].advantages(result.table, 0, 4)
    edges = result.table.tokens.offsets
    weight = [flat[first:last].sum() for first, last in ((0, edges[2]), (edges[2], edges[3]), (edges[3], edges[4]))]
    np.testing.assert_allclose(weight, grpo[1:], rtol=1e-5)  # two branches together weigh what a completion of one does


@pytest.fixture
def written(tmp_path):
    """Options for the traces that verifiers wrote."""
    trl_small.tokenizer().save_pretrained(tmp_path / "model")
    return {"tokenizer": tmp_path / "model", "recipe": recipe(tmp_path), "reward": {"correct": "exact"}}


def test_what_the_trainer_gave_stands_beside_what_another_method_would(written):
    result = credit_rollouts(WRITTEN, methods=["grpo", "recorded"], **written)
    grpo, held = result.applied
    assert held.credit.block_nk[:, 1].tolist() == [0.5, 0.5, -0.5, -0.5]
    np.testing.assert_allclose(grpo.credit.block_nk[:, 0], np.array([1, 1, -1, -1]) / 2**0.5, rtol=1e-3)  # (1 - .5) / std
    ours, theirs = (one.advantages(result.table, 0, 4) for one in (grpo, held))
    np.testing.assert_allclose(ours, 2**0.5 * theirs, rtol=1e-3)  # token by token, 0 at what no model sampled
    assert (theirs == 0).sum() == 2 * 3
    assert len(set(np.abs(theirs[theirs != 0]).round(7))) == 1  # 20 tokens of each rollout share one vote
    np.testing.assert_allclose(np.abs(theirs).max(), 0.5 / 20, rtol=1e-6)


def test_an_export_remembers_whose_a_row_is(written, tmp_path):
    result = credit(WRITTEN, methods=["rloo"], output=tmp_path / "out", console=quiet(), **written)
    file = tmp_path / "out" / "credit.parquet"
    assert pq.read_table(file)["rollout"].to_pylist() == [0, 0, 1, 1]
    again = credit_rollouts(file, recipe=written["recipe"], methods=["rloo"], tokenizer=written["tokenizer"])
    assert again.table.rollout_n.tolist() == [0, 0, 1, 1]
    torch.testing.assert_close(again.applied[0].credit.block_nk, result.applied[0].credit.block_nk)
    assert "rollout" not in again.table.columns


def test_a_group_size_counts_rollouts(tmp_path):
    traces = [tree(said("4", "0.9"), said("4", "0.8"), right) for right in (1.0, 0.0, 1.0, 0.0)]
    file = write_lines(tmp_path / "traces.jsonl", [episode(one) for one in traces])
    result = credit_rollouts(file, recipe=recipe(tmp_path), methods=["rloo"], overrides={"group_size": 2})
    assert result.group_n.tolist() == [0] * 4 + [1] * 4


def test_a_method_over_tokens_needs_one_row_per_rollout(written):
    with pytest.raises(RecipeError, match=r"Method 'gae' .*branches"):
        credit_rollouts(WRITTEN, methods=["gae"], **written)
    assert read_rollouts(WRITTEN.parent / "verifiers").rollout_n is None  # without branches nothing changes
