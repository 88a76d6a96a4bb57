"""What a run with a critic keeps: `spanwise credit` makes of its file the advantages that every token was trained with."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
from rich.console import Console

import trl_small
from spanwise.commands.credit.credit import credit_rollouts
from spanwise.commands.train.train import train
from spanwise.recipe import load

pytestmark = trl_small.THIRD_PARTY

ALONE = {
    "layout": {"solution": ["answer"]},
    "objectives": [{"reward": "correct", "pays": "solution", "if_missing": 0.0}],
}
BOTH = {
    "layout": {"solution": ["reasoning", "answer"], "confidence": ["analysis", "confidence"]},
    "objectives": [
        {"reward": "correct", "pays": "solution", "if_missing": 0.0},
        {"reward": "brier", "pays": "confidence", "given": "correct", "if_missing": -1.0},
    ],
}
SMALL = {
    "steps": 2, "prompts": 2, "group_size": 4, "keep_rollouts": 1, "eval_prompts": 2, "eval_samples": 2, "eval_every": 0,
    "start_steps": 64, "critic": {"learning_rate": 1e-3},
}  # fmt: skip


@pytest.mark.parametrize(
    ("method", "options", "task"),
    [
        ("gae", {"lam": 0.9}, ALONE),
        ("sae", {"threshold": 0.7, "boundary": "end", "lam": 0.8}, ALONE),
        ("sae", {"threshold": 0.7}, BOTH),
        ("sae", {"threshold": 0.7}, {**BOTH, "values": "shared"}),
    ],
    ids=["gae", "sae", "a value per objective", "one value of all blocks"],
)
def test_the_file_of_a_run_says_what_every_token_was_trained_with(method, options, task, tmp_path):
    recipe = load(None, {"method": method, "options": options, **task, **SMALL, "output": str(tmp_path / "run")})
    train(recipe, console=Console(quiet=True))
    kept = [pq.read_table(file).to_pylist() for file in sorted((tmp_path / "run" / "rollouts").glob("*.parquet"))]
    rows = [row for part in kept for row in part]
    assert len(rows) == 16
    result = credit_rollouts(tmp_path / "run", methods=["recipe"])
    found = result.applied[0].advantages(result.table, 0, len(rows))
    trained = np.concatenate([row[f"advantages/{method}"] for row in rows]).astype(np.float32)
    np.testing.assert_array_equal(found, trained)
    assert np.unique(trained).size > 8
    names = ["values"] if len(task["objectives"]) == 1 or "values" in task else ["values/correct", "values/brier"]
    assert [name for name in rows[0] if name.startswith("values")] == names
    blocks = {"values/correct": "solution", "values/brier": "confidence"}
    for row in rows:
        for name in names:
            known = [value is not None for value in row[name]]
            if (
                name in blocks and row[f"end/{blocks[name]}"]
            ):  # of an objective: in the blocks that it pays, and nowhere else
                span = range(row[f"start/{blocks[name]}"], row[f"end/{blocks[name]}"])
                assert known == [t in span for t in range(len(known))]
            elif name not in blocks:
                assert known == row["trainable"]
    html = (tmp_path / "run" / "report.html").read_text()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert any(key.endswith("explained_variance") for line in lines for key in line)
    assert '<section id="critic">' in html
