"""A group of completions of one held-out prompt at every evaluation: credited as in training, which goes on as without it."""

import pyarrow.parquet as pq
import pytest

from report_pages import data_of
from rollout_files import timeless_metrics
from spanwise.commands.train.train import train
from spanwise.recipe import load
from spanwise.rollouts.folder import RunFolder

SMALL = {
    "steps": 2, "prompts": 2, "group_size": 4, "eval_every": 1, "eval_prompts": 4, "eval_samples": 1,
    "learning_rate": 1e-3, "seed": 3, "save_every": 0,
}  # fmt: skip
pytestmark = pytest.mark.filterwarnings("ignore")  # the trainer warns about a weak start
METHODS = {
    "bae": {"task": "invoices"},
    "sae": {"method": "sae", "critic": {"learning_rate": 1e-3}, "trainer": {"num_iterations": 2}, "start_steps": 20},
}


@pytest.mark.long
@pytest.mark.parametrize("name", METHODS)
def test_one_prompt_is_kept_at_each_evaluation_and_training_is_the_same(tmp_path, name):
    for folder, keep in (("kept", 1), ("bare", 0)):
        choices = {**SMALL, **METHODS[name], "keep_rollouts": keep, "report": keep == 1, "output": str(tmp_path / folder)}
        train(load(None, choices))
    assert timeless_metrics(tmp_path / "kept") == timeless_metrics(tmp_path / "bare")
    assert not (tmp_path / "bare" / "one_prompt").exists()
    files = sorted((tmp_path / "kept" / "one_prompt").iterdir())
    assert [file.name for file in files] == ["step_000000.parquet", "step_000001.parquet", "step_000002.parquet"]
    tables = [pq.read_table(file).to_pydict() for file in files]
    (prompt,) = {prompt for table in tables for prompt in table["prompt"]}
    assert prompt not in {prompt for file in (tmp_path / "kept" / "rollouts").iterdir()
                          for prompt in pq.read_table(file)["prompt"].to_pylist()}  # fmt: skip
    assert [table["step"] for table in tables] == [[0] * 4, [1] * 4, [2] * 4]
    for table in tables:
        blocks = [column.removeprefix("credit/bae/") for column in table if column.startswith("credit/bae/")]
        for block in {*blocks} & {column.removeprefix("reward/equals.") for column in table}:
            rewards = table[f"reward/equals.{block}"]
            if None in rewards:  # a completion without the field
                continue
            expected = [reward - sum(rewards) / 4 for reward in rewards]
            assert table[f"credit/bae/{block}"] == pytest.approx(expected, abs=1e-6)
    if name == "sae":
        assert all(value is not None for table in tables for values in table["values"] for value in values)
    view = data_of((tmp_path / "kept" / "report.html").read_text(), view=1)
    assert (view["by_step"], view["steps"]) == (True, [0] * 4 + [1] * 4 + [2] * 4)


def test_what_was_kept_after_the_checkpoint_goes(tmp_path):
    for kind in ("rollouts", "one_prompt"):
        (tmp_path / kind).mkdir()
        for step in (2, 4):
            (tmp_path / kind / f"step_{step:06d}.parquet").touch()
    RunFolder(tmp_path).begin({}, step=2)
    assert [file.name for file in tmp_path.glob("*/*.parquet")] == ["step_000002.parquet"] * 2
