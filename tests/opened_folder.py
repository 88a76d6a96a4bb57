"""A run folder that a trainer wrote: it holds the numbers handed over, and our commands open it."""

import json
from itertools import chain, compress

import pyarrow.parquet as pq
import pytest
import yaml

from border.case import command
from spanwise.rollouts.schema import column


def numbers(folder):
    """The rows of the folder, and the advantages of every token that was sampled, end to end."""
    files = sorted((folder / "rollouts").glob("step_*.parquet"))
    rows = [row for file in files for row in pq.read_table(file).to_pylist()]
    method = yaml.safe_load((folder / "recipe.yaml").read_text())["method"]
    return rows, [*chain(*(compress(row[column("advantages", method)], row["trainable"]) for row in rows))]


def check(folder, advantages, sampled, *, step=1):
    """Compare the folder, whose metrics end with `step`, with the advantages of sampled tokens; open it; return its rows."""
    rows, stored = numbers(folder)
    expected = [compress(values, flags) for values, flags in zip(advantages, sampled, strict=True)]
    assert stored == pytest.approx([*chain(*expected)], abs=1e-6)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [*range(step - len(lines) + 1, step + 1)]
    assert "credit/no_signal" in lines[-1]
    assert f"{len(rows)} completions" in " ".join(command("why", folder, code=0).split())
    command("report", folder, code=0)
    assert (folder / "report.html").is_file()
    return rows
