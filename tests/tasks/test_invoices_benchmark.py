"""The benchmark of the letters: figures of one object by hand, completions to a goal, the table's differences."""

import math

import invoices as benchmark
import pytest
import scale

from spanwise.tasks.invoices import MEASURED

GOLD = {
    "invoice": 4821, "customer": "Dana Weltor", "date": None, "due": None, "currency": "EUR",
    "items": [{"name": "blue lamp", "quantity": 3, "price": 12}], "total": 36,
}  # fmt: skip
SECOND = {"name": "desk", "quantity": 1, "price": 40}


def test_an_object_is_compared_field_by_field_and_null_is_not_absence():
    right = benchmark.compared(GOLD, GOLD, "Total 36 euros.")
    assert right["fields"] == 1.0
    assert {*MEASURED} <= right.keys()
    assert (right["item count"], right["adds up"], right["due invented"]) == (True, True, False)
    assert "total computed" not in right
    assert "due stated" not in right
    without = {name: value for name, value in GOLD.items() if name != "date"}
    assert benchmark.compared(without, GOLD, "Total 36 euros.")["date"] is False
    longer = benchmark.compared({**GOLD, "items": [*GOLD["items"], SECOND], "due": "2024-01-01"}, GOLD, "Prices in euros.")
    assert (longer["item count"], longer["adds up"], longer["due invented"]) == (False, False, True)
    assert longer["total computed"] is True
    assert longer["fields"] == pytest.approx(8 / 9)
    due = {**GOLD, "due": "2024-01-01"}
    assert benchmark.compared(GOLD, due, "")["due stated"] is False


@pytest.mark.parametrize("text", ["", "[1]", '{"items": ', '{"items": [3], "total": 1}', '{"items": 4}'])
def test_what_is_no_object_has_nothing_right(text):
    figures = benchmark.compared(benchmark.parsed(text), {**GOLD, "date": "2024-01-01", "due": "2024-01-01"}, "")
    assert figures["fields"] == 0
    assert not figures["adds up"]


def test_completions_to_a_goal_count_whole_steps_of_the_running_mean():
    right = [0.0, 0.4, 0.8, 1.0, 1.0, 1.0]  # running means 0, .2, .4, .55, .64, .84
    run = {"batches": [dict.fromkeys(MEASURED, value) for value in right]}
    assert benchmark.curve(run) == pytest.approx([0, 0.2, 0.4, 0.55, 0.64, 0.84])
    assert benchmark.completions_to(run, 0.6) == 5 * 64
    assert benchmark.completions_to(run, 0.9) == math.inf
    assert benchmark.written([1.0, math.inf]) == "1 of 2 got there"


def test_the_ratio_of_two_arms_is_a_geometric_mean_over_the_seeds_that_got_there():
    def run(step):  # every field is right from this step on
        return {"batches": [{"a": float(n >= step)} for n in range(1, 20)]}

    runs = {"by_field": {0: run(1), 1: run(1), 2: run(1)}, "sum": {0: run(2), 1: run(6), 2: run(30)}}
    row = scale.ratio_rows("g4", runs)[-1]
    # 60 % of the last five batches, or of all so far: by field at the first step, the sum at the steps 3 (0 1 1) and 8, and never.
    assert [scale.invoices.completions_to(run(step), 0.6) for step in (1, 2, 6, 30)] == [64, 192, 512, math.inf]
    assert (row["reached"], row["seeds"]) == (2, 3)
    assert row["value"] == pytest.approx(math.sqrt(3 * 8))
