"""The one writer: without any trainer, part by part, whole or not at all; a training batch by hand."""

import json
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from forked import run
from rollouts_cases import Case, completion
from rollouts_cases import trained_batch as batch
from spanwise.batch import Batch
from spanwise.errors import AlignmentError
from spanwise.rollouts import write_rollouts
from spanwise.rollouts.rows import stop_credit
from spanwise.types import Spans

NAN = float("nan")


def test_the_credit_for_stopping_is_a_column_if_one_completion_has_some():
    assert torch.equal(stop_credit(torch.tensor([0.0, 0.5]))["stop"].nan_to_num(9), torch.tensor([9.0, 0.5]))
    assert stop_credit(torch.zeros(2)) == {}


def test_a_run_folder_is_written_without_a_trainer(tmp_path):
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
for name in ("trl", "transformers", "accelerate", "datasets", "peft"):
    sys.modules[name] = None
from rollouts_cases import trained_batch
from spanwise.rollouts.folder import RunFolder
RunFolder({str(tmp_path)!r}).write_rollouts([trained_batch().recorded(step=7)], step=7)
assert not any(name.startswith("spanwise.engines") for name in sys.modules), "an engine was imported"
"""
    done = run(code)
    assert done.returncode == 0, done.stderr
    assert pq.read_table(tmp_path / "rollouts" / "step_000007.parquet").num_rows == 4


def test_a_training_batch_by_hand():
    """The file holds no padding and no tool output at the end; null means absent, 0 is a credit of 0."""
    rows = batch().recorded(step=7).to_pylist()
    assert [(row["step"], row["group"]) for row in rows] == [(7, 4), (7, 4), (7, 5), (7, 5)]
    assert [row["prompt"] for row in rows[:2]] == ["1+1="] * 2
    assert json.loads(rows[2]["prompt"]) == [{"role": "user", "content": 'say "é"\nnow'}]
    assert [row["completion_ids"] for row in rows] == [[0, 1, 2], [5, 6], [10, 11, 12, 13, 14], []]
    assert [row["trainable"] for row in rows] == [[True, False, True], [True, True], [True] * 5, []]
    assert [(row["text"], row["fault"]) for row in rows] == [("so .5", 0), ("no", 1), ("so .5", 17), ("", 32)]
    assert [(row["start/confidence"], row["end/confidence"]) for row in rows] == [(2, 3), (2, 2), (0, 0), (0, 0)]
    assert [row["credit/bae/solution"] for row in rows] == [0.5, -0.5, 0.25, None]
    assert [row["credit/bae/confidence"] for row in rows] == [0.0, None, -0.25, None]  # there and worth 0; absent
    assert [row["credit/bae/stop"] for row in rows] == [0.0, -1.0, 0.0, 0.0]
    assert [row["advantages/bae"] for row in rows] == [[0.5, 0.0, 0.25], [-0.25, -1.25], [None] * 5, []]
    correct = [(row["reward/correct"], row["status/correct"]) for row in rows]
    assert correct == [(1.0, "ok"), (0.0, "ok"), (None, "timeout"), (None, "absent")]
    assert [row["status/brier"] for row in rows] == ["ok", "absent", "ok", "absent"]
    assert not {"values", "logprobs"} & rows[0].keys()  # there is no critic


def test_a_batch_without_any_token():
    full = batch()
    none = Batch(full.batch.group_n, full.batch.ids_nt[:, :0], full.batch.mask_nt[:, :0])
    spans = Spans(full.spans.names, full.spans.start_nk, full.spans.end_nk, full.spans.block_nt[:, :0], full.spans.fault_n)
    rows = replace(full, batch=none, advantages_nt=full.advantages_nt[:, :0], spans=spans).recorded(step=1).to_pylist()
    assert [row["completion_ids"] for row in rows] == [[]] * 4


POISON = torch.tensor([[0.5, 1e9, 0.25, 1e9, NAN], [0.75, NAN, 1e9, NAN, 1e9], [0.125] * 5, [1e9] * 5])
VALUES = [[0.5, None, 0.25], [0.75, None], [0.125] * 5, []]


def with_values(*, value_names=(), **fields):
    full = batch()
    return replace(full, batch=replace(full.batch, **fields), value_names=value_names).recorded(step=7)


@pytest.mark.parametrize("names", [None, (), ("return",), ("correct", "brier")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_per_token_stand_at_the_tokens_that_the_model_sampled(names, dtype):
    """A tool's token and padding have none, whatever stands there; a sampled one of which nothing is known has none either."""
    several = names is not None and len(names) == 2
    value_nt = POISON if names is None else torch.stack([POISON, 2 * POISON][: 1 + several], dim=2)
    logp = {} if several else {"logp_nt": -POISON.to(dtype)}
    table = with_values(value_nt=value_nt.to(dtype), value_names=names or (), **logp).to_pydict()
    columns = {name: column for name, column in table.items() if name.startswith(("values", "logprobs"))}
    times = [[None if x is None else (2 if several else -1) * x for x in row] for row in VALUES]
    first, second = ("values/correct", "values/brier") if several else ("values", "logprobs")
    assert columns == {first: VALUES, second: times}


def test_values_that_do_not_fit_are_refused(unchecked_shapes):
    with pytest.raises(AlignmentError, match=r"2 values .* 0 names .*\(none\)"):
        with_values(value_nt=torch.zeros(4, 5, 2))
    with pytest.raises(AlignmentError, match=r"1 values .* 2 names .*\(a, b\)"):
        with_values(value_nt=torch.zeros(4, 5), value_names=("a", "b"))


def test_parts_are_written_as_they_come(tmp_path):
    """No more than one part is held: when the second is asked for, the first is on the disk."""
    sizes = []

    def parts():
        for part in Case([completion(range(n % 4)) for n in range(2000)]).parts() * 2:
            yield part
            sizes.append(sum(file.stat().st_size for file in tmp_path.iterdir()))

    write_rollouts(tmp_path / "a.parquet", parts())
    assert sizes[0] > 1000


def test_what_does_not_fit_the_tokens_is_refused_and_a_prompt_that_no_file_can_hold_is_mended(unchecked_shapes):
    assert Case([completion(prompt="a\ud800b")]).part(0, 1)["prompt"].to_pylist() == ["a\ufffdb"]
    with pytest.raises(AlignmentError, match="3 tokens and 4 entries of 'advantages/bae'"):
        Case([completion(**{"advantages/bae": [0.5] * 4})]).part(0, 1)


def test_what_stands_at_a_masked_token_need_not_be_an_id(tmp_path):
    """Token 1 and token 3 of the first completion were written by a tool; any value may stand there."""
    part = batch()
    part.batch.ids_nt[0, 1] = -100
    part.batch.ids_nt[1, 1] = 10**9
    file = tmp_path / "step_000001.parquet"
    write_rollouts(file, [part.recorded(step=1)], pieces=[f"{n} ".encode() for n in range(20)])
    assert pq.read_table(file)["tokens"].to_pylist() == [
        ["0 ", "", "2 "],
        ["5 ", ""],
        ["10 ", "11 ", "12 ", "13 ", "14 "],
        [],
    ]
