"""docs/comparison.md: what TRL's own trainer gives the four completions, and what the table says."""

import re

import pytest
from trl import GRPOTrainer

from pages import DOCS
from trl_small import THIRD_PARTY, config, plain, policy, prompts, say, scripted, tokenizer

pytestmark = THIRD_PARTY
PAGE = DOCS / "comparison.md"
FOUR = [say("", "4", 0.9, 1.0), say("", "4", 0.1, 1.0), say("", "3", 0.9, 0.0), say("", "3", 0.1, 0.0)]


def table():
    rows = re.findall(r"^\| ([^|]+) \| (-?[\d.]+) \| (-?[\d.]+) \| (-?[\d.]+) \| (-?[\d.]+) \|$", PAGE.read_text(), re.M)
    return {name: [float(cell) for cell in cells] for name, *cells in rows}


def right(completions, answer, **columns):
    return [float(f"<answer>{gold}" in text) for text, gold in zip(completions, answer, strict=True)]


def brier(completions, answer, **columns):
    stated = [float(re.findall(r"<confidence>([\d.]+)", text)[0]) for text in completions]
    return [-((q - c) ** 2) for q, c in zip(stated, right(completions, answer), strict=True)]


@pytest.mark.parametrize(
    ("aggregation", "row"),
    [
        ("sum_then_normalize", "TRL's default, `sum_then_normalize`"),
        ("normalize_then_sum", "GDPO: TRL's `normalize_then_sum`, verl's `gdpo`"),
    ],
)
def test_trls_own_advantages_are_those_of_the_table(tmp_path, aggregation, row):
    args = config(tmp_path, per_device_train_batch_size=4, multi_objective_aggregation=aggregation)
    usual = {"train_dataset": prompts(1), "processing_class": tokenizer(), "rollout_func": scripted(FOUR)}
    run = GRPOTrainer(model=policy(), reward_funcs=[right, brier], args=plain(args), **usual)
    run.train()
    assert list(run._logs["advantages"]) == pytest.approx(table()[row], abs=0.006)


def test_the_table_has_the_rows_that_are_run():
    assert len(table()) == 8
    assert table()["RLCR: sum minus mean"] == [0.9, 0.1, -0.9, -0.1]
    assert table()["spanwise, the confidence"] == [0.4, -0.4, -0.4, 0.4]
