"""A SkyRL run leaves the folder of `spanwise train`: the advantages in it are those that it trained with."""

import json

import pyarrow.parquet as pq
import pytest
import skyrl_small as small

from rollout_files import records
from spanwise.rollouts import read_rollouts

OWN = "trainer.algorithm.spanwise."


@pytest.mark.parametrize(("recipe", "layout"), [(small.BROADCAST, "flat"), (small.BY_TURN, "stepwise")])
def test_the_folder_holds_what_was_trained(data, tmp_path, recipe, layout):
    keep = {f"{OWN}folder": str(tmp_path / "run"), f"{OWN}keep_rollouts": 2}
    trainer = small.trainer(small.config(data, recipe=recipe, layout=layout, steps=2, **keep), dp=2)
    small.run(trainer)
    folder = tmp_path / "run"
    lines, summary = records(folder / "metrics.jsonl"), json.loads((folder / "summary.json").read_text())
    assert [line["step"] for line in lines] == [1, 2]
    for line, logged in zip(lines, trainer.tracker.logged, strict=True):
        assert line["loss"] == logged["policy/final_loss"]
        assert line["grad_norm"] == logged["policy/grad_norm"] > 0
        assert line["completions/mean_length"] == logged["generate/avg_num_tokens"] >= 1
    assert [file.name for file in (folder / "rollouts").iterdir()] == ["step_000002.parquet"]
    rows = pq.read_table(folder / "rollouts" / "step_000002.parquet").to_pylist()
    method = summary["method"]
    assert summary["steps"] == 2
    trained = sum(abs(value) for row in rows for value in row[f"advantages/{method}"] or [] if value is not None)
    assert trained > 0
    assert trained == pytest.approx(float(trainer.last_advantages.abs().sum()), rel=1e-5)
    credited = [(row[f"parts/{method}"], row[f"credit/{method}/turn"]) for row in rows if layout == "flat"]
    # rloo divides by nothing
    assert all(part["worth"] - part["baseline"] == pytest.approx(credit) for (part,), credit in credited)
    assert all(row["prompt"].startswith("q") for row in rows)
    table = read_rollouts(folder)
    assert (table.source, table.has_ids, len(table)) == ("spanwise", True, len(rows))
