"""The reports as files: what they say, what they never say, and that nothing in them reaches outside or runs."""

import base64
import hashlib
import math
import re
import zlib
from collections import Counter
from types import MappingProxyType

import altair as alt
import pytest
import torch

from helpers import NAN, double
from report_pages import HOSTILE, RECIPE, Page, compare_page, credit_page, fidelity_page, start, train_page
from spanwise.commands.shared.samples import Samples
from spanwise.measure import compare_arms, figure_intervals, reliability, voting
from spanwise.report import TokenView, compare_report, credit_report, sections
from spanwise.report.charts import bars, curves, dodged, histograms, nearest, reliability_diagram
from spanwise.report.page import Headline, Panel, Section, render, shown
from spanwise.report.sections import batch_curve, confidence_rows, figure_panel, histogram_rows, seed_curves

PAGES = {"train": train_page, "compare": compare_page, "fidelity": fidelity_page, "credit": credit_page}


@pytest.fixture(scope="module", params=PAGES)
def html(request):
    return PAGES[request.param]()


def test_nothing_reaches_outside_and_only_the_scripts_named_in_the_policy_run(html):
    page = Page(html)
    names = ("src", "href", "srcset", "action", "data", "poster", "xlink:href")
    addresses = [attributes[name] for _, attributes in page.elements for name in names if attributes.get(name)]
    assert all(address.startswith(("#", "data:")) for address in addresses)
    styles = [*re.findall(r"<style>(.*?)</style>", html, re.S), *(a.get("style") or "" for _, a in page.elements)]
    data = [text for attrs, text in page.scripts if attrs.get("type") == "application/json"]
    for words, texts in ((("url(", "@import"), styles), (("://", '"url"'), data)):
        assert not any(word in text for word in words for text in texts)
    assert len(html.encode()) < 600_000
    policy = next(a["content"] for tag, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy
    rules = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    runs = [text for attrs, text in page.scripts if attrs.get("type") is None]
    packed = [text for attrs, text in page.scripts if attrs.get("type") == "text/plain"]  # run once it is unpacked
    runs += [zlib.decompress(base64.b64decode(text)).decode() for text in packed]
    hashes = {f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in runs}
    assert hashes == set(rules["script-src"].split())  # and nothing "unsafe"
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]


def test_charts_are_valid_vega_lite_with_axes_and_their_numbers_beside_them(html):
    page = Page(html)
    assert page.specs
    for spec in page.specs:
        alt.Chart.from_dict(spec, validate=True)
        assert spec["width"] == "container"
        parts = [spec.get("encoding", {}) | part.get("encoding", {}) for part in spec.get("layer", [spec])]
        channels = [part[channel] for part in parts for channel in ("x", "y") if channel in part]
        assert any(channel.get("title") for channel in channels if channel["type"] == "quantitative")
    tags = Counter(tag for tag, _ in page.elements)
    assert min(tags["details"], tags["table"]) >= tags["figure"]
    assert tags["noscript"]


def test_train_figures_are_those_of_the_last_evaluation_and_absent_is_not_zero():
    page = Page(train_page())
    headlines = {"accuracy": "87.5 %", "ECE": "0.312", "refusal rate": "50.0 %", "malformed rate": "25.0 %"}
    headlines["AUROC"] = "not measured"
    assert {label: page.headline(label) for label in headlines} == headlines
    assert "25.0 % at the start" in page.text
    assert "2 steps of 4 prompts x 2 completions on digits, seed 7, in 12 s" in page.text
    for row in (["0", "not measured", "0.250"], ["2", "0.500", "0.875"]):  # accuracy: no batch at step 0
        assert row in page.cells
    assert not {"Later attempt minus the first", "What did the rewards cost?"} & set(page.texts)
    assert not any(words in page.text for words in ("laser", "its score", "explained variance"))


def test_train_headlines_are_those_of_the_intervals_and_credit_by_block_follows_what_batches_say():
    confidence_n, correct_n = torch.full((4,), 0.5), torch.tensor([1.0, 1.0, 1.0, 0.0])
    samples = {"confidence": confidence_n, "correct": correct_n}
    intervals = figure_intervals(confidence_n, correct_n, prompts=[0, 0, 1, 1], well_formed_n=correct_n > 0)
    credit, accuracy = {"bae": {"solution": torch.tensor([0.5, -0.5])}}, intervals["accuracy"]
    page = Page(train_page(samples=samples, intervals=intervals, credit=credit))
    assert page.headline("accuracy") == "75.0 %"
    assert f"95 %: {100 * accuracy.low:.1f} to {100 * accuracy.high:.1f} %" in page.text
    titles = [attributes["id"] for tag, attributes in page.elements if tag == "section"]
    order = ["rewards", "credit", "dead-strata", "credit-by-block", "optimiser", "tokens"]
    assert [title for title in titles if title in order] == order


def test_train_with_two_attempts_shows_what_the_second_is_better_by_and_adds_up_what_rewards_cost():
    # Two prompts x 2 samples. First attempts: right, right / wrong, wrong. Second: right, right / right, wrong.
    attempts = {"first": ("aaxx", [1, 1, 0, 0]), "second": ("aabx", [1, 1, 1, 0])}
    nothing_n, options = torch.full((4,), NAN).double(), {"prompts": [0, 0, 1, 1], "resamples": 20}
    votes = {n: voting([*text], nothing_n, torch.tensor(right).double(), **options) for n, (text, right) in attempts.items()}
    costs = [{"step": 1, "cost/judge.a/calls": 3.0, "cost/judge.a/seconds": 0.25}, {"step": 2, "cost/judge.a/calls": 4.0}]
    page = Page(train_page(votes=votes, metrics=[*costs, {"step": 2, "final": start() | {"second_accuracy": 0.75}}]))
    assert {"Later attempt minus the first", "Second accuracy", "What did the rewards cost?"} <= set(page.texts)
    assert ["judge.a", "7", "0.250"] in page.cells
    first = page.cells.index(["n", "second - first"]) + 1
    rows = [(row[0], row[1].split(" ")[0]) for row in page.cells[first : first + 2]]
    assert rows == [("1", "0.250"), ("2", "0.250")]  # a tie of b and x is half right


def test_compare_shows_cells_verdicts_missing_seeds_and_curves_between_the_lowest_and_the_highest_seed():
    page = Page(compare_page())
    rows = {row[0]: row[1:] for row in page.cells if row and row[0] in ("blended", "outcome", "never")}
    assert rows["blended"][0].startswith("0.064 ± 0.013")  # mean of .0625 .07 .06; t(2) = 4.303, sd .0052
    assert rows["blended"][1].endswith("(n=2)")
    assert rows["never"] == ["not measured", "0.500 (n=1)"]
    assert all(words in page.text for words in ("ece of blended minus outcome: -0.061", "beyond the noise"))
    assert not any(words in page.text for words in ("laser", "its score"))
    assert page.headline("seeds per arm") == "3"
    assert page.headline("not beaten in ECE") == "1 of 2"  # the arm that measured no ECE is not beaten, and not counted
    assert ["9", "0.240 [0.230, 0.250]", "0.240 [0.230, 0.250]"] in page.cells
    runs = {"a": {0: {"ece": 0.1}, 1: {"ece": 0.2}}, "b": {0: {"ece": 0.1}}}
    curves = {arm: {seed: [{"step": 0, **figures}] for seed, figures in seeds.items()} for arm, seeds in runs.items()}
    uneven = Page(compare_report(title="Uneven", recipe={}, comparison=compare_arms(runs), curves=curves))
    assert uneven.headline("seeds per arm") == "1 to 2"
    assert "2 arms were trained from the same start, 1 to 2 seeds each: a, b." in uneven.text


def test_fidelity_figures():
    page = Page(fidelity_page())
    assert (page.headline("blended, G = 4"), page.headline("completions used")) == ("0.812", "98.4 %")
    points, token = ["0.100", "0.100", "0.101"], ["SAE", "0.438", "0.375", "0.500"]
    for row in (["4", "0.500 [0.438, 0.562]", "0.812 [0.750, 0.875]"], points, token):
        assert row in page.cells
    assert "A simulated confidence has a standard error of up to 0.0040" in page.text
    assert "64 completions of 8 prompts; 512 re-rolls of 16 distinct prefixes." in page.text


def test_credit_keeps_absent_failed_and_zero_apart_and_shows_stopping_where_there_is_any():
    page = Page(credit_page())
    assert page.headline("mean reward: correct") == "0.500"  # of 0 and 1; the absent and the failed one do not count
    assert page.headline("mean reward: never") == "not measured"
    assert "2 ok, 1 absent, 1 timeout" in page.text
    for row in (
        ["correct", "2", "1", "1", "0.500"],
        ["never", "0", "4", "0", "not measured"],
        ["bae: confidence", "3", "0.083", "0.667", "0", "0.250"],  # of 0, .25, 0
        ["never", "not measured", "1"],  # dead strata: grpo has no such objective
    ):
        assert row in page.cells
    assert "for leaving out every block" not in page.text
    page = Page(credit_page(stop=torch.tensor([0.0, 0.0, -0.25, -0.75])))
    stops = [row for row in page.cells if row and row[0].endswith(": stop")]
    assert stops == [["bae: stop", "2", "0.500", "0", "-0.750", "-0.250"]]
    assert "stop" in page.texts  # the title of its histogram
    assert "for leaving out every block that an objective pays" in page.text


def test_hostile_text_stays_text():
    bar = {"name": f"{HOSTILE}<!--\u2028\u2029&'", "series": HOSTILE, "value": 1.5}
    panel = Panel(HOSTILE, (bars([bar], names=[HOSTILE], x=HOSTILE),), [bar])
    pages = [
        credit_page(text=HOSTILE, source=HOSTILE),
        train_page(recipe={**RECIPE, "method": HOSTILE, "task": HOSTILE}),
        render(
            title=HOSTILE, lead=HOSTILE, command=HOSTILE, headlines=[Headline(HOSTILE, HOSTILE, HOSTILE)],
            sections=[Section(HOSTILE, HOSTILE, [HOSTILE], points=[HOSTILE], tables=[[{HOSTILE: HOSTILE}]], panels=[panel])],
            recipe={HOSTILE: HOSTILE},
        ),
    ]  # fmt: skip
    for html in pages:
        page = Page(html)
        assert "<script>window.hacked" not in html
        assert not any(tag == "img" for tag, _ in page.elements)
        assert HOSTILE in page.text
    assert [*page.specs[-1]["datasets"].values()] == [[bar]]
    (data,) = re.findall(r'id="spec-[^>]*>(.*?)</script>', html, re.S)
    assert not set("<>&'\u2028\u2029") & set(data)


def test_numbers_are_written_for_a_reader():
    assert [shown(value) for value in (None, NAN)] == ["not measured"] * 2
    assert [shown(value) for value in (0.0, -0.25, 0.00049, 12345.6)] == ["0", "-0.250", "0.00049", "12,346"]
    assert [sections.percent(share) for share in (0.8906, 0.00049, 0.0, 1.0)] == ["89.1 %", "0.05 %", "0 %", "100 %"]


def test_a_band_reaches_half_way_to_its_neighbour_and_says_its_value():
    rows = [{"x": x, "series": "a", "value": value} for x, value in ((0, 0.5), (2, None))]
    chart = nearest(rows, x=alt.X("left:Q"), title="step").to_dict()
    bands = [(row["left"], row["right"], row["s0"]) for row in next(iter(chart["datasets"].values()))]
    assert bands == [(0, 1.0, "0.5"), (1.0, 2, "none")]


def test_a_section_without_anything_is_left_out():
    html = render(title="t", lead="l", sections=[Section("Empty", "words"), Section("Full now", points=["a"])])
    assert ("Empty" in html, 'id="full-now"' in html) == (False, True)
    assert len(html) < 30_000  # no charts: no Vega


def test_charts_never_draw_nan_as_a_number_and_series_keep_their_colour_whatever_is_drawn():
    rows = [{"x": 0, "value": NAN, "low": NAN, "high": math.inf, "series": "a"}]
    for chart in (curves(rows, names=["a"], y="y"), dodged(rows, names=["a"], y="y")):
        assert all(row.get("value") is None for values in chart.to_dict()["datasets"].values() for row in values)
    spec = curves([{"x": 0, "value": 1.0, "series": "b"}], names=["a", "b"], y="y").to_dict()
    *layers, _ = spec["layer"]  # the last says values
    assert {tuple(layer["encoding"]["color"]["scale"]["domain"]) for layer in layers} == {("a", "b")}
    assert "config" not in spec or "range" not in spec["config"]


def test_the_bin_of_exactly_1_is_drawn_and_confidences_of_right_and_wrong_answers_are_shares():
    upper, lower = reliability_diagram(reliability(torch.tensor([0.75, 0.25, 1.0]), torch.tensor([1.0, 0.0, 1.0])))
    bins = [row for values in lower.to_dict()["datasets"].values() for row in values]
    assert all(row["high"] > row["low"] for row in bins)  # it has no width of its own
    assert len(upper.to_dict()["layer"]) == 4  # the diagonal, whiskers, points, and what says the values
    rows = confidence_rows(torch.tensor([0.3, 0.7, 0.7, 1.0], dtype=torch.float32), torch.tensor([0.0, 0.0, 1.0, 1.0]))
    shares = {(row["series"], round(row["low"], 1)): row["share"] for row in rows if row["count"]}
    sides = (("right answers", 0.7), ("right answers", 1.0), ("wrong answers", 0.3), ("wrong answers", 0.7))
    assert shares == dict.fromkeys(sides, 0.5)


def test_histograms_share_their_bins_and_hold_every_value():
    columns = {"a": torch.tensor([0.0, 0.0, 2.0, NAN]), "b": torch.tensor([-1.0]), "none": torch.tensor([NAN])}
    rows = histogram_rows(columns, bins=5)
    assert {row["series"] for row in rows} == {"a", "b"}
    assert sum(row["count"] for row in rows if row["series"] == "a") == 3
    middle = [row for row in rows if row["low"] < 0 < row["high"]]
    assert [(row["series"], row["count"]) for row in middle] == [("a", 2), ("b", 0)]
    assert {row["low"] for row in rows if row["series"] == "a"} == {row["low"] for row in rows if row["series"] == "b"}
    assert histograms(rows, names=["a", "b"]).to_dict()["layer"]
    assert histogram_rows({"a": torch.zeros(3)}, bins=3)[1]["count"] == 3
    joined = sections.grouped({"a": torch.tensor([1.0]), "b[0]": torch.tensor([2.0]), "b[1]": torch.tensor([3.0])})
    assert {name: column.tolist() for name, column in joined.items()} == {"a": [1.0], "b[*]": [2.0, 3.0]}


def test_curves_average_what_is_there():
    figures = {0: (0.5, 0.1), 1: (None,), 2: (0.3,)}  # a later line of a step replaces an earlier one
    points = {seed: [{"step": 0, "ece": ece} for ece in values] for seed, values in figures.items()}
    assert seed_curves(points, "ece", "a") == [{"series": "a", "x": 0, "value": pytest.approx(0.2), "low": 0.1, "high": 0.3}]
    steps = [{"step": n, "loss": None if n == 1 else float(n)} for n in range(1, 6)]
    assert [(row["x"], row["value"]) for row in batch_curve(steps, "loss", "b", most=3)] == [(2, 2.0), (4, 3.5), (5, 5.0)]
    often = {0: [{"step": step, "ece": 0.1} for step in range(5001)]}  # eval_every: 1
    evaluated = [row["x"] for row in seed_curves(often, "ece", "a")]
    assert (len(evaluated), evaluated[0], evaluated[-1]) == (100, 0, 5000)


def test_bars_keep_their_order_and_shares_their_axis():
    rows = [{"name": "z", "series": "a", "value": 0.25}, {"name": "b", "series": "a", "value": 0.5}]
    encoding = bars(rows, names=["a"], x="share", percent=True, stacked=False).to_dict()["encoding"]
    assert encoding["y"]["sort"] == ["z", "b"]
    assert encoding["x"]["scale"]["domain"] == [0, 1]
    assert encoding["x"]["stack"] is None
    point = [{"series": "a", "x": 0, "value": 0.5}]
    charts = [figure_panel(name, point, ["a"])[0].charts[0].to_json() for name in ("accuracy", "ece")]
    assert ["share of completions" in chart for chart in charts] == [True, False]


def credit_of(credit, *, rewards=MappingProxyType({}), statuses=MappingProxyType({})):
    """The report of some credit without anything to show of a token."""
    given = {"credit": credit, "rewards": rewards, "statuses": statuses, "methods": list(credit)}
    return credit_report(source="x", note="", dead={}, view=TokenView(("grpo",), []), **given)


def test_methods_with_other_blocks_have_a_table_of_their_own():
    credit_n = torch.tensor([0.5, -0.5])
    html = credit_of({
        "grpo": {"completion": credit_n}, "bae": {"answer": credit_n, "confidence": credit_n, "stop": credit_n},
        "rloo": {"completion": credit_n}, "gdpo": {"answer": credit_n, "confidence": credit_n},  # stopping is no block
    })  # fmt: skip
    summary = re.search(r'<section id="summary">(.*?)</section>', html, re.S)[1]
    tables = [re.findall(r"<th scope=row>(.*?)</th>", table) for table in summary.split("<table>")[1:]]
    by_block = ["bae: answer", "bae: confidence", "bae: stop", "gdpo: answer", "gdpo: confidence"]
    assert tables == [["grpo: completion", "rloo: completion"], by_block]
    assert Page(credit_of({"grpo": {}})).headline("completions") == "0"


def test_a_completion_that_broke_its_check_has_a_reward_and_is_not_ok():
    for ok, mean, statuses in ((6, "0.750", {"ok": 6, "broke": 2}), (0, "0", {"broke": 8})):
        page = Page(credit_of({"grpo": {}}, rewards={"runs": torch.arange(8) < ok}, statuses={"runs": statuses}))
        assert (page.headline("mean reward: runs"), f"{ok} ok, {8 - ok} broke" in page.text) == (mean, True)
        assert "No completion has the reward" not in page.text


CORRECT = double([1, 0, 0, 1, 1, 0, 0, 1])
SCORE = double([0.9, 0.1, 0.3, 0.8, 1.0, 0.0, NAN, 0.6])
NOTHING = torch.full((8,), NAN).double()


def columns(confidence_n):
    prompt_n = torch.arange(8) // 4
    return {"confidence": confidence_n, "correct": CORRECT, "score": SCORE, "prompt": prompt_n}


def page_of(confidence_n, *, by_score=False):
    lines = [{"step": 0, "evaluation": start()}, {"step": 2, "final": start() | {"laser_ece": 0.5, "laser_coverage": 1.0}}]
    curves = voting(list("abcaaabb"), SCORE, CORRECT, prompts=[0] * 4 + [1] * 4, resamples=5)
    rows = Samples(torch.arange(8) // 4, {"s": list("abcaaabb")}, {"s": CORRECT}, confidence_n, CORRECT >= 0, score_n=SCORE)
    own = {"laser_weighted": curves["weighted"], "laser_maxconf": curves["maxconf"]} if by_score else {}
    votes = {"solution": curves | own}
    return Page(train_page(metrics=lines, samples=columns(confidence_n), intervals=rows.intervals(), votes=votes))


def test_a_panel_for_each_headlines_for_the_score_and_votes_by_it_under_names_of_their_own():
    page = page_of(double([0.75] * 8), by_score=True)
    assert page.headline("ECE of the score") == "0.157"  # (.1 + .1 + .3 + .2 + .4) / 7 of the samples, not the line's .5
    assert page.headline("AUROC of the score") == "1"
    for words in (
        "8 of 8 completions have a confidence, and are known to be right or wrong.",
        "7 of 8 completions have a score, and are known to be right or wrong.",
        "one reserved token (laser) is after the answer, clipped to between 0 and 1",
        *("Has a score", "Score of right and wrong answers", "Accuracy by score"),
        *("majority weighted by its score", "highest score"),
    ):
        assert words in page.text
    assert "votes are weighted by the model's ratings of its answers (LaSeR)" not in page.text
    text = page_of(NOTHING).text  # the score alone
    assert "have a confidence and could" not in text
    assert "7 of 8 completions have a score, and are known to be right or wrong." in text
    assert "No completion states a confidence, so votes are weighted by the model's ratings of its answers (LaSeR)." in text


def test_an_arm_with_a_score_beside_one_without():
    runs = {"with": {0: {"ece": 0.1, "laser_ece": 0.2}}, "without": {0: {"ece": 0.1}}}
    samples = {"with": columns(NOTHING), "without": {"confidence": SCORE, "correct": CORRECT}}
    page = Page(compare_report(title="Two", recipe={}, comparison=compare_arms(runs), curves={}, samples=samples))
    assert "with, by its score" in page.text
    assert "without, by its score" not in page.text
    assert "with: no completion states a confidence, so votes are weighted" not in page.text  # there are no votes
    rows = {row[0]: row[1:] for row in page.cells if row and row[0] in runs}
    assert (rows["with"], rows["without"][0]) == (["0.100", "0.200"], "0.100")
