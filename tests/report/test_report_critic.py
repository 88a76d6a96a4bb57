"""What a report says of a critic: its charts, that no failure of it looks calm, and that nothing is said without one."""

import json

import pytest

from helpers import NAN
from report_pages import Page, batch, train_page
from spanwise.explain.alarms import end_alarms
from spanwise.report.train import mode_headlines, mode_sections


def lines(explained, *, stream="", **more):
    """A line of metrics per explained variance, with errors that are told apart by their size."""
    errors = {"error_point": 0.375, "error_mean": 0.25, "error_within": 0.125, "value_mean": 0.5, "target_mean": 0.75}
    common = {"critic/share": 0.25, **more, **{f"critic/{stream}{name}": number for name, number in errors.items()}}
    key = f"critic/{stream}explained_variance"
    return [{"step": step, **common, key: value} for step, value in enumerate(explained, start=1)]


def points(panel):
    """What the charts of a panel draw: series -> (x, value)."""
    series = {}
    for rows in (rows for chart in panel.charts for rows in chart.to_dict()["datasets"].values()):
        for row in (row for row in rows if "series" in row):
            series.setdefault(row["series"], []).append((row["x"], row["value"]))
    return series


def test_the_charts_show_the_metrics():
    (section,) = mode_sections(lines([0.25, NAN, 0.5]))
    explained, error, level = section.panels
    assert points(explained) == {"critic": [(1, 0.25), (3, 0.5)]}  # NaN is not there, and not 0
    same = {name: [(step, value) for step in (1, 2, 3)] for name, value in (
        ("of a completion's mean", 0.25), ("within a completion", 0.125), ("expected", 0.5), ("earned", 0.75),
    )}  # fmt: skip
    assert points(error) | points(level) == same
    assert (explained.legend, error.legend) == ((), ["of a completion's mean", "within a completion"])
    assert "This mode adds 25.0 % to the time of a step (median)." in section.text
    assert [row["step"] for row in explained.rows] == [1, 3]


def test_a_wild_start_does_not_flatten_the_rest():
    panel, calm = (mode_sections(lines(explained))[0].panels[0] for explained in ([-40.0, 0.25, 0.5], [-0.5, 0.25]))
    spec = panel.charts[0].to_dict()
    assert spec["layer"][0]["encoding"]["y"]["scale"] == {"clamp": True, "domainMin": -1.0, "zero": True}
    assert panel.rows[0]["critic"] == -40.0  # the numbers are what they are
    assert "Values below -1 are drawn at -1." in panel.note
    assert "domainMin" not in json.dumps(calm.charts[0].to_dict())
    assert "drawn there" not in calm.note


def test_every_stream_has_its_own():
    log = [a | b for a, b in zip(lines([0.5, 0.5], stream="correct/"), lines([-0.5, -0.5], stream="brier/"), strict=True)]
    (section,) = mode_sections(log)
    each = [f"{title}: {name}" for name in ("correct", "brier") for title in ("Error of the critic", "Expected and earned")]
    assert [panel.title for panel in section.panels] == ["Explained variance", *each]
    assert points(section.panels[0]) == {"correct": [(1, 0.5), (2, 0.5)], "brier": [(1, -0.5), (2, -0.5)]}
    (warning,) = section.warnings
    assert (
        warning
        == "The critic of 'brier' knows nothing: its explained variance is -0.50 at the end (mean of the last batch)."
    )
    assert [(line.label, line.wrong) for line in mode_headlines(log)] == [
        ("explained variance: correct", ""), ("explained variance: brier", "the critic knows nothing"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("explained", "sentence"),
    [
        ([0.9, 0.8, 0.0], "is 0.00 at the end (mean of the last batch)"),  # knows no more than one number for all
        ([0.9] * 4 + [-1.0] * 4, "is -1.00 at the end (mean of the last 2 batches)"),  # forgot
        ([-9.0] * 40 + [0.1] * 10, None),  # learned
        ([0.5] * 90 + [-0.1, 0.05] * 5, "is -0.03 at the end (mean of the last 10 batches)"),
        ([0.5, NAN, None], None),  # the last one that has any
        ([NAN, None], "cannot be judged"),
        ([], None),
    ],
)
def test_a_critic_that_knows_nothing_is_an_alarm(explained, sentence):
    alarms = end_alarms(lines(explained))
    assert (list(alarms) == ["critic/explained_variance"]) == (sentence is not None)
    if sentence:
        assert sentence in alarms["critic/explained_variance"]


@pytest.mark.parametrize(("explained", "headline"), [(-0.25, "-0.25"), (0.75, "0.75"), (None, "not measured")])
def test_no_report_is_calm_over_a_critic_that_knows_nothing_or_cannot_be_judged(explained, headline):
    html = train_page(metrics=[batch(1) | lines([explained])[0]])
    section = html.split('<section id="critic">')[1].split("</section>")[0]
    assert Page(html).headline("explained variance") == headline
    assert ("cannot be judged: no batch has an explained variance" in section) == (explained is None)
    assert ('class="wrong"' in html) == (headline != "0.75")
    sentence = "The critic knows nothing: its explained variance is -0.25 at the end (mean of the last batch)."
    assert html.count(sentence) == (2 if explained == -0.25 else 0)  # at the top of the page and of the section
    if explained == -0.25:
        assert section.index(sentence) < section.index("GAE and SAE") < section.index("<figure>")
        assert "the critic knows nothing" in html.split('class="wrong"')[1].split("</div>")[0]
    else:
        assert "knows nothing" not in section


def test_a_run_without_a_critic_has_no_section_of_one():
    (section,) = mode_sections([batch(1)])
    assert (end_alarms([batch(1)]), mode_headlines([batch(1)]), [*section.panels]) == ({}, [], [])
