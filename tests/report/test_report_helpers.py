"""Small helpers of the pages: numbers in words, rows of tables, sums as text."""

import math

import altair as alt
import torch

from spanwise.report.charts import nearest, said
from spanwise.report.sections import figure, figure_name, figures_of, grouped, merged, percent, wide
from spanwise.report.why import shown
from spanwise.report.words import FIGURES

MINUS = "\N{MINUS SIGN}"


def test_numbers_are_written_for_a_reader():
    values = [said({"value": 0.25}), said({"value": 0.25, "low": 0.2, "high": 0.3}), said({"value": 0.25}, percent=True)]
    assert values == ["0.25", "0.25 [0.2, 0.3]", "25 %"]
    assert said({"value": None}) == "none"
    assert [percent(share) for share in (0.8906, 0.00049, 0.0, 1.0)] == ["89.1 %", "0.05 %", "0 %", "100 %"]
    assert (shown(-0.81239), shown(None)) == (f"{MINUS}0.8124", "none")
    assert (shown(0.5, sign=True), shown(0.0, sign=True)) == ("+0.5", "0")


def test_a_band_reaches_half_way_to_its_neighbour():
    rows = [{"x": x, "series": "a", "value": 0.5} for x in (0, 2)]
    chart = nearest(rows, x=alt.X("left:Q"), title="step").to_dict()
    bands = [(row["left"], row["right"], row["s0"]) for row in next(iter(chart["datasets"].values()))]
    assert bands == [(0, 1.0, "0.5"), (1.0, 2, "0.5")]


def test_figures_have_names():
    assert [name for name in figures_of([{"step": 0, "second_accuracy": 0.5}]) if name not in FIGURES] == ["second_accuracy"]
    names = [figure_name(name) for name in ("ece", "second_accuracy", "laser_ece", "laser_coverage")]
    assert names == ["ECE", "second accuracy", "ECE of its score", "has a score"]
    assert figure({"format_rate": 0.75}, "malformed") == 0.25
    assert figure({}, "malformed") is None
    assert figure({"ece": math.nan}, "ece") is None


def test_rows_become_tables():
    rows = [{"x": 1, "series": "a", "value": 2.0}, {"x": 1, "series": "b", "value": 3.0, "low": 1.0, "high": 4.0}]
    assert wide(rows, key="x") == [{"x": 1, "a": 2.0, "b": "3.000 [1.000, 4.000]"}]
    assert merged([{"n": 1, "a": 2}, {"n": 1, "b": 3}], key="n") == [{"n": 1, "a": 2, "b": 3}]
    columns = grouped({"a": torch.tensor([1.0]), "b[0]": torch.tensor([2.0]), "b[1]": torch.tensor([3.0])})
    assert {name: column.tolist() for name, column in columns.items()} == {"a": [1.0], "b[*]": [2.0, 3.0]}
