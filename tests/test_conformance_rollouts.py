"""The rollouts of `conformance.json` get its advantages from the pipeline, from files and as trajectories."""

import json
import random
from itertools import compress

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import conformance
from spanwise import Vocabulary, advantages, credit_batch, read
from spanwise.commands.credit.credit import credit_rollouts
from spanwise.credit import Trajectory, Turn, merge_counts
from spanwise.rollouts import schema
from spanwise.trajectories import onto_turns, turn_batch

SAVED = conformance.load()
VOCABULARY = Vocabulary(tuple(piece.encode() for piece in SAVED["pieces"]))
ROWS = SAVED["rollouts"]["turns"]


def test_the_file_is_what_the_definitions_say():
    assert json.loads(json.dumps(conformance.written())) == SAVED


@pytest.mark.parametrize("name", conformance.RECIPES)
def test_the_pipeline_gives_the_numbers_of_the_file(name, tmp_path):
    rows, rule = SAVED["rollouts"][conformance.ROWS[name]], conformance.scheme(name, tmp_path)
    adv_rows = conformance.by_pipeline(rows, rule)
    conformance.assert_rows(adv_rows, SAVED["advantages"][name], 1e-12)
    assert sum(value != 0 for row in adv_rows for value in row) > 20
    order = random.Random(0).sample(range(len(rows)), len(rows))
    shuffled = conformance.by_pipeline([rows[n] for n in order], rule)
    conformance.assert_rows(shuffled, [adv_rows[n] for n in order], 1e-15)


def test_a_file_of_rollouts_gives_the_numbers_of_the_file(tmp_path):
    rows = SAVED["rollouts"]["flat"]
    conformance.tokenizer().save_pretrained(tmp_path / "model")
    groups = list(dict.fromkeys(row["group"] for row in rows))
    columns = {"answer": [row["answer"] for row in rows], schema.PROMPT: [row["question"] for row in rows]}
    columns |= {schema.STEP: [1] * len(rows), schema.GROUP: [groups.index(row["group"]) for row in rows]}
    columns[schema.IDS] = pa.array([row["ids"] for row in rows], pa.list_(pa.int32()))
    columns[schema.TRAINABLE] = [[bool(flag) for flag in row["sampled"]] for row in rows]
    table = pa.table(columns)
    pq.write_table(table.replace_schema_metadata(schema.metadata(tmp_path / "model")), tmp_path / "rows.parquet")
    conformance.scheme("blocks", tmp_path)
    result = credit_rollouts(tmp_path / "rows.parquet", recipe=tmp_path / "blocks.yaml", methods=["recipe"])
    (applied,) = result.applied
    flat = iter(applied.advantages(result.table, 0, len(rows)).tolist())
    conformance.assert_rows([[next(flat) for _ in row["ids"]] for row in rows], SAVED["advantages"]["blocks"])


def trajectories_of(name):
    """Trajectories of the rows, what the environment paid with the turns; the outcome of the last turn where the recipe has it."""
    turns = []
    for n, row in enumerate(ROWS):
        about = {"anchor": row["anchor"], "rewards": {"environment": row["paid"]}, "extra": {"row": n}}
        turns.append(Turn(row["prompt"], row["ids"], row["sampled"], **about))
    last = {row["rollout"]: {"correct": row["right"]} for row in ROWS} if name == "turns" else {}
    shuffled = sorted(range(len(ROWS)), key=lambda n: (ROWS[n]["step"], -n))
    columns = ([ROWS[n][key] for n in shuffled] for key in ("rollout", "step", "group"))
    return Trajectory.of_rows([turns[n] for n in shuffled], *columns, rewards=last)


@pytest.mark.parametrize("name", ["turns", "gigpo"])
@pytest.mark.parametrize("layout", ["rows", "merged", "graph"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_every_layout_of_a_trajectory_gives_each_row_its_credit(tmp_path, name, layout, dtype, tolerance):
    rollouts, rule = trajectories_of(name), conformance.scheme(name, tmp_path)
    if layout != "rows":
        rollouts = [rollout.merged(VOCABULARY) for rollout in rollouts]
        assert merge_counts(rollouts)["branches"] < merge_counts(rollouts)["rows"]
    batch, recorded = turn_batch(rollouts)
    reading = read(batch, rule, VOCABULARY, recorded=recorded)
    adv_su = advantages(credit_batch(reading, batch, rule), reading.spans, rule, dtype=dtype)
    paid = onto_turns(rollouts, "advantages", adv_su)
    if layout == "graph":  # what is trained: the tokens of every branch
        by_row = [
            (rollout.turns[t].extra["row"], [*compress(branch.per_token["advantages"], (at == t for at in branch.turn))])
            for rollout in paid
            for branch in rollout.branches()
            for t in branch.turns
        ]
    else:
        by_row = [(turn.extra["row"], turn.per_token["advantages"]) for rollout in paid for turn in rollout.rows().turns]
    assert sorted(row for row, _ in by_row) == list(range(len(ROWS)))
    for row, values in by_row:
        assert list(values) == pytest.approx(SAVED["advantages"][name][row], abs=tolerance)
