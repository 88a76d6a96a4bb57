"""The rollouts of `conformance.json` get its advantages from the pipeline and from files."""

import json
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import conformance
from spanwise.commands.credit.credit import credit_rollouts
from spanwise.rollouts import schema

SAVED = conformance.load()


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
