"""The one table of completions: some of its rows are a table with all that is known of them."""

import numpy as np
import pytest
import torch

from spanwise.rollouts import read_rollouts, rollout_table, write_rollouts
from spanwise.rollouts.rows import credited_units
from spanwise.rollouts.table import fitting_runs, gather

LENGTHS = (3, 0, 2, 4)


def table(folder):
    """Four completions of three rollouts, the third left out of the loss, with whatever a file may hold of them."""
    tokens = sum(LENGTHS)
    columns = {
        "step": [1, 1, 2, 2], "group": [0, 0, 1, 1], "rollout": [0, 0, 0, 1], "prompt": ["a", "a", "b", "b"],
        "answer": ["4", {"x": 1}, None, "5"], "start/all": [0] * 4, "end/all": [3, 0, 0, 4],
        "self_reward": [0.5, np.nan, 0.25, 1.0], "reward/correct": [1.0, 0.0, np.nan, 1.0],
        "status/correct": ["ok", "ok", "timeout", "ok"],
        "completion_ids": np.arange(tokens), "trainable": np.arange(tokens) % 4 != 1, "logprobs": -np.arange(tokens) / 8,
        "advantages/bae": np.arange(tokens) / 4,
    }  # fmt: skip
    part = rollout_table(columns, np.cumsum([0, *LENGTHS]))
    write_rollouts(folder / "a.parquet", [part], pieces=[f"{n} ".encode() for n in range(tokens)])
    return read_rollouts(folder / "a.parquet")


def test_a_table_holds_all_that_its_file_says(tmp_path):
    """What `test_what_is_written_is_read` (of readers_own) has no columns of; a run numbers the rollouts of each step from 0."""
    rollouts = table(tmp_path)
    assert rollouts.columns["answer"] == ["4", '{"x": 1}', None, "5"]
    assert rollouts.rollout_n.tolist() == [0, 0, 1, 2]
    assert rollouts.score_n.nan_to_num(nan=9.0).tolist() == [0.5, 9.0, 0.25, 1.0]
    assert rollouts.as_recorded.value.tolist() == [n / 4 for n in range(9)]


@pytest.mark.parametrize(("first", "last"), [(0, 4), (1, 3), (2, 4), (3, 3)])
def test_some_rows_side_by_side_are_padded(first, last, tmp_path):
    rollouts = table(tmp_path)
    spoken = [[0, 1, 2], [], [3, 4], [5, 6, 7, 8]][first:last]
    width = max(map(len, spoken), default=0)
    for rows in (slice(first, last), list(range(first, last))):
        places = rollouts.tokens.places(np.array(rows, dtype=np.int64) if isinstance(rows, list) else rows)
        assert places.tolist() == [[*row, *[-1] * (width - len(row))] for row in spoken]
        logp_nt = gather(places, rollouts.token_values["logprobs"], 9.0)
        assert logp_nt.tolist() == [[*(-n / 8 for n in row), *[9.0] * (width - len(row))] for row in spoken]


def test_runs_of_rows_fit_a_size_and_a_longer_row_is_its_own():
    assert list(fitting_runs(np.array([3, 1, 4]), 6)) == [(0, 2), (2, 3)]
    assert list(fitting_runs(np.array([4, 1, 9]), 6)) == [(0, 1), (1, 2), (2, 3)]


def test_credit_that_all_blocks_share_is_that_of_the_completion():
    credit = {"a": torch.tensor([0.5, torch.nan]), "b": torch.tensor([0.5, -0.5])}
    assert credited_units(credit, "completion")["completion"].tolist() == [0.5, -0.5]
    assert list(credited_units(credit, "block")) == ["a", "b"]
