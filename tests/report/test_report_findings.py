"""What a report says first, and of a critic: honest where numbers are few, never calm over a failure, why not measured."""

import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from bs4 import BeautifulSoup

from helpers import NAN
from report_pages import RECIPE, Page, batch, compare_page, credit_page, fidelity_page, start, train_page
from spanwise.explain.alarms import end_alarms
from spanwise.fidelity.page import fidelity_finding
from spanwise.measure import Interval, compare_arms
from spanwise.report import compare_report, train_report
from spanwise.report.compare import compare_finding
from spanwise.report.credit import credit_finding
from spanwise.report.page import CITE
from spanwise.report.train import batch_section, glance_section, mode_headlines, mode_sections, train_finding
from spanwise.report.words import GLOSSARY, Terms

ROOT = Path(__file__).parents[2]

GOOD = {"accuracy": 0.85, "refusal_rate": 0.0, "format_rate": 1.0, "ece": 0.02, "brier": 0.1, "auroc": 0.9}
FALLEN = {"accuracy": 0.0, "refusal_rate": 1.0, "format_rate": 1.0, "ece": 0.001, "brier": 0.001, "auroc": None}


def test_a_run_that_learned_and_one_that_may_not_have():
    interval = Interval(value=0.86, low=0.83, high=0.89, sem=0.01, level=0.95, count=64)
    for before, sentence in (
        (0.33, "After 120 steps accuracy is 86.0 % [83.0 %, 89.0 %] (was 33.0 %) and the refusal rate 0 %; ECE is 0.020."),
        (0.85, "(was 85.0 %: no clear change)"),  # inside the interval
    ):
        points = [{"step": 0, **GOOD, "accuracy": before}, {"step": 120, **GOOD, "accuracy": 0.86}]
        finding = train_finding(points, steps=120, intervals={"accuracy": interval})
        assert sentence in finding
        assert finding.endswith("The run has only one seed. Other seeds may differ.")


def test_a_run_with_one_evaluation_or_none():
    for steps, changes, sentence in (
        (0, {}, "Before any training accuracy is 85.0 % and the refusal rate 0 %; ECE is 0.020. There is only one eval"),
        (2, {"accuracy": NAN, "ece": None}, "accuracy was not measured and the refusal rate 0 %; ECE was not"),
        (2, FALLEN, "Alarm: most completions refuse to answer. After 2 steps accuracy is 0 %"),
        (2, FALLEN, "Its ECE means nothing."),
        (2, {"format_rate": 0.5}, "Alarm: many completions are malformed. After 2 steps"),
        (1, None, "The policy trained for 1 step, but no evaluation shows whether it learned."),
        (3, None, "The policy trained for 3 steps, but no evaluation shows whether it learned."),
    ):
        assert sentence in train_finding([] if changes is None else [{"step": steps, **GOOD, **changes}], steps=steps)


def test_rewards_take_the_place_of_what_cannot_be_measured():
    for rewards, clause in (
        ({"short": (-0.5, -0.25), "never": ()}, "the mean reward in the last batch of short is -0.250 (was -0.500)."),
        # The ends add up to 2.5, the starts to 1; a moved by 1, e by -.5.
        (
            {"a": (0.0, 1.0), "b": (0.0, 0.5), "c": (0.5, 0.5), "d": (0.0, 0.5), "e": (0.5, 0.0)},
            "the mean of 5 rewards in the last batch is 0.500 (was 0.200); the rewards changed by -0.500 (e) to +1.000 (a).",
        ),
        (
            {"short": (-0.5, -0.25), "x": (-0.75, -0.1, None), "late": (None, 1.0)},
            "the mean reward in the last batch of short is -0.250 (was -0.500), x is not measured (was -0.750), late is 1.000.",
        ),
        (
            {**dict.fromkeys("abc", (0.0, 0.5)), "d": (1.0, 0.5), "e": (9.0, 9.0, None)},
            "the mean of 5 rewards in the last batch, of which 4 are measured, is 0.500 (was 0.250); "
            "the rewards changed by -0.500 (d) to +0.500 (a).",
        ),
        (dict.fromkeys("abcde", (0.5, None)), "none of 5 rewards in the last batch is measured."),
    ):
        finding = train_finding([{"step": 2, "accuracy": None}], steps=2, unmeasured={"accuracy": "x"}, rewards=rewards)
        assert finding == f"After 2 steps {clause}"


def test_the_three_pictures_join_elements_of_a_list_and_five_batches_and_tell_an_objective_from_what_has_its_name():
    same = {"rewards/x[0]/mean": 0.0, "credit/x[0]/dead_strata": 0.5, "completions/mean_length": 7.0}
    lines = [{"step": step, "rewards/x[1]/mean": float(step), **same} for step in range(1, 7)]
    rewards, dead, length = glance_section(lines, ["x[0]", "x[1]"]).panels
    assert [row["x[*]"] for row in rewards.rows] == [0.5, 0.75, 1.0, 1.25, 1.5, 2.0]  # the last: 2 to 6, of two elements
    assert {row["mean over the comparisons"] for row in dead.rows} == {0.5}
    assert {row["tokens"] for row in length.rows} == {7.0}
    for name in ("length", "dead", "step"):  # of an objective, and of another number
        numbers = {f"rewards/{name}/mean": 0.5, f"credit/{name} + b/dead_strata": 0.25, "completions/mean_length": 7.0}
        lines = [{"step": step, **numbers} for step in (1, 2)]
        rewards, dead, length = glance_section(lines, [name, "b"]).panels  # the method compares the sum of two rewards
        assert {row[name] for row in rewards.rows} == {0.5}
        assert [(row["step"], row["mean over the comparisons"]) for row in dead.rows] == [(1, 0.25), (2, 0.25)]
        assert {row["tokens"] for row in length.rows} == {7.0}


def test_the_page_says_it_first():
    marks = ("<h1", 'class="finding', 'class="notice warnings"', 'class="headlines', "<figure>")
    fallen = train_page(metrics=[batch(1), {"step": 2, "final": FALLEN}])
    for page, absent in ((fallen, ()), (compare_page(), marks[2]), (fidelity_page(), marks[2])):
        assert not absent or absent not in page
        assert (places := [page.index(mark) for mark in marks if mark != absent]) == sorted(places)


def test_a_run_that_stopped_says_so_and_shows_what_there_is():
    lines, absent = [{"step": 0, "evaluation": GOOD}, batch(1), batch(2)], {"samples": None, "votes": None, "view": None}
    nothing, started, stopped, done = (Page(train_page(metrics=lines[:count], summary={}, **absent)) for count in range(4))
    assert nothing.headline("accuracy") == "not measured"
    assert "0 of 2 steps" in started.text
    assert not {"Reliability", "Voting", "Tokens", "Rewards"} & set(started.texts)
    assert "The run is not finished: 1 of 2 steps are recorded." in stopped.text
    assert ("p", {"class": "finding bad"}) in stopped.elements
    assert "is not finished" not in done.text


def arms(figure, **values):
    return compare_arms({arm: {seed: {figure: value} for seed, value in enumerate(runs)} for arm, runs in values.items()})


NOISE = {"a": [0.1, 0.3, 0.2], "b": [0.3, 0.1, 0.2]}
UNKNOWN = "ece of a minus b is unknown, because it needs at least 2 common seeds and has "


def test_a_comparison_says_which_way_and_what_is_noise():
    for comparison, sentence in (
        (arms("accuracy", a=[0.9, 0.91, 0.92], b=[0.5, 0.5, 0.53]), "a is better than b in accuracy by 0.400 ["),
        (arms("ece", a=[0.1, 0.1, 0.11], b=[0.3, 0.31, 0.3]), "a is better than b in ECE by 0.200 ["),  # less is better
        (arms("tokens", a=[10.0, 11.0, 10.0], b=[30.0, 31.5, 30.0]), "b is higher than a in tokens by 20.167 ["),
        (arms("ece", **NOISE), "ece of a minus b: +0.000 ["),
        (arms("ece", a=[0.1], b=[0.3]), f"{UNKNOWN}1."),
        (arms("ece", a=[0.1, 0.2], b=[0.1, 0.2]), "ece of a minus b is 0 in each of 2 seeds."),
        (arms("ece", a=[0.1, 0.2], b=[None, NAN]), f"{UNKNOWN}0."),
        (arms("ece", **NOISE, c=[0.2, 0.1, 0.3]), "In ECE all differences are inside the noise."),
    ):
        assert sentence in compare_finding(comparison)


def row(baseline, value, low, high, size=4):
    return {"figure": "correlation", "group_size": size, "baseline": baseline, "value": value, "low": low, "high": high}


def test_fidelity():
    rows = [row("blended", 0.8, 0.7, 0.9), row("outcome", 0.75, 0.65, 0.85), row("group", 0.9, 0.8, 1.0, size=16)]
    pair = row("", 0.05, 0.01, 0.09) | {"a": "blended", "b": "outcome"}
    best, then = "0.800 [0.700, 0.900]", "0.750 [0.650, 0.850]"
    finding = f"In groups of 4, blended correlates best with Monte Carlo: {best}; next is outcome with {then}."
    assert fidelity_finding(rows, [pair]) == finding
    for pairs in ([pair | {"low": -0.01}], ()):  # without pairs their intervals overlap
        assert fidelity_finding(rows, pairs).endswith(". The difference between blended and outcome is within the noise.")
    nothing = "In groups of 4, no baseline clearly correlates with the Monte Carlo advantages. "
    nothing += "The highest correlation is that of a: 0.100 [-0.100, 0.300]."
    assert fidelity_finding([row("a", 0.1, -0.1, 0.3)]) == nothing
    assert fidelity_finding([row("a", None, None, None)]).startswith("Nothing was measured: no correlation")
    token = {"critic": "fitted", "estimator": "SAE", "value": 0.4, "low": 0.3, "high": 0.5}
    sentence = "The token advantages of SAE with the critic fitted correlate best with the Monte Carlo advantages: "
    sentence += "0.400 [0.300, 0.500]."
    assert fidelity_finding([], (), [token]) == sentence


def test_every_place_that_the_docs_send_a_reader_to_is_there():
    columns = {"confidence": torch.full((8,), 0.5).double(), "correct": (torch.arange(8) % 2).double()}
    batches = [batch(1), batch(2) | {"critic/explained_variance": 0.5}]
    lines = [{"step": 0, "evaluation": GOOD}, *batches, {"step": 2, "final": GOOD}]
    pages = [train_page(samples=columns, metrics=lines, command="again"), compare_page(), fidelity_page(), credit_page()]
    ids = {attributes.get("id") for html in pages for _, attributes in Page(html).elements}
    named = set(re.findall(r"`#([a-z-]+)`", (ROOT / "docs" / "report.md").read_text()))
    assert len(named) > 10
    assert named <= ids


def test_what_is_to_be_cited_is_what_the_citation_file_says():
    paper = yaml.safe_load((ROOT / "CITATION.cff").read_text())["preferred-citation"]
    names = [author["family-names"] for author in paper["authors"]]
    for words in (paper["title"], str(paper["year"]), paper["identifiers"][0]["value"], *names):
        assert words in CITE


def test_what_improved_is_the_first_tenth_against_the_last():
    lines = [{**batch(step), "rewards/correct/mean": step / 20, "rewards/brier/mean": None} for step in range(1, 21)]
    objectives = [{"reward": "correct", "pays": ["solution"]}, {"reward": "brier", "pays": ["confidence"]}]
    page = Page(train_page(metrics=lines, recipe={"method": "bae", "objectives": objectives}))
    assert ["correct", "solution", "0.075", "0.975", "+0.900"] in page.cells  # (.05 + .1) / 2 and (.95 + 1) / 2
    assert ["brier", "confidence", "not measured", "not measured", "not measured"] in page.cells


def test_terms_are_marked_once_in_a_text_and_only_as_words():
    terms = Terms()
    marked = str(terms.marked("The ECE, blocks, the ece again; a blocked road, <b>, my-block."))
    assert re.findall(r">([^<]+)</span>", marked) == ["ECE", "blocks"]
    assert "&lt;b&gt;" in marked
    assert terms.met == {name: GLOSSARY[name] for name in ("block", "ECE")}


OWN = {"solution": [0.5, 0.5, -0.5, NAN], "confidence": [0.2, -0.3, NAN, NAN], "stop": [NAN, NAN, -9.0, NAN]}


def test_two_methods_are_compared_by_the_signs_of_their_blocks_and_one_that_gives_nothing_is_an_alarm():
    for left, sentence in (
        # Against the whole completion: the second confidence is pushed the other way; a stop is no block.
        ({"completion": [0.5, 0.5, -1.0, 1.0]}, "in 1 of 4 completions (25.0 %), most often in the block confidence (1)."),
        ({"completion": [0.5, 0.5, 1.0, 1.0]}, "in 2 of 4 completions (50.0 %), most often in the block solution (1)."),
        ({"completion": [0.0, 0.0, -1.0, 1.0]}, "in none of 4 completions."),
        # Block by block, where both have blocks.
        ({"solution": [-1.0, -1.0, -1.0, NAN], "confidence": [1.0, 1.0, NAN, NAN]}, "in 2 of 4 completions (50.0 %)"),
    ):
        credit = {method: {k: torch.tensor(x) for k, x in columns.items()} for method, columns in (("a", left), ("b", OWN))}
        for a, b in ("ab", "ba"):
            assert f"{a} and {b} disagree on the sign of a block's credit {sentence}" in credit_finding(credit, a, b)
    finding = credit_finding({"a": {"x": torch.tensor([0.0, NAN])}}, "a", "a")
    assert finding == "Alarm: nothing would be learned. The method a gives credit to 0 of 2 completions."


def cards(html):
    """Label -> whether the card is marked, and all that it says."""
    found = BeautifulSoup(html, "html.parser").select("dl.headlines > div")
    return {Page(str(card.dt)).text: (" ".join(card.get("class", ())), Page(str(card)).text) for card in found}


def test_a_collapsed_run_has_no_calm_card_and_a_good_one_no_warning():
    lines = [{"step": 0, "evaluation": start() | {"accuracy": 0.33}}, batch(1), {"step": 2, "final": FALLEN}]
    html = train_page(metrics=lines, samples=None, votes=None)
    by_label = cards(html)
    for label in ("accuracy", "ECE", "Brier score", "refusal rate"):
        assert by_label[label][0] == "wrong"
        assert "⚠ most completions refuse to answer" in by_label[label][1]
    assert by_label["malformed rate"][0] == ""
    assert (
        "Most completions refuse to answer. Do not rely on these figures: accuracy, refusal rate, ECE, Brier score."
        in Page(html).text
    )
    assert '<p class="finding bad">Alarm: most completions refuse' in html
    # On own data nobody says what a refusal is: the interval is undefined, and no evaluation has the figure.
    good = {name: value for name, value in GOOD.items() if name != "refusal_rate"}
    lines = [{"step": 0, "evaluation": good}, batch(1), {"step": 2, "final": good}]
    html = train_page(metrics=lines, samples=None, votes=None, intervals={"refusal_rate": None})
    assert {mark for mark, _ in cards(html).values()} == {""}
    assert "refusal rate" not in cards(html)
    assert 'aria-label="what is wrong"' not in html
    assert '<p class="finding">After 2 steps' in html


def test_malformed_completions_of_every_engine_are_drawn_and_said_and_silent_batches_are():
    lines = [{"step": step, "credit/malformed": step / 4} for step in (1, 2)]
    (panel,) = batch_section("Dropped", lines).panels
    assert [row["malformed"] for row in panel.rows] == [0.25, 0.5]
    final = {**FALLEN, "refusal_rate": 0.0, "format_rate": 0.25}
    html = train_page(metrics=[{**batch(1), "credit/no_signal": 1.0}, {"step": 2, "final": final}], samples=None)
    assert "⚠ many completions are malformed" in cards(html)["malformed rate"][1]
    assert "⚠ hardly any answer is right" in cards(html)["ECE"][1]
    assert "In 100 % of the training batches nothing was learned" in Page(html).text


def test_what_cannot_be_measured_is_one_sentence_and_the_rewards_are_there():
    why = "no block has the tag <answer>, only <plan>"
    absent = dict.fromkeys(("accuracy", "ece", "auroc", "brier", "refusal_rate", "coverage"), why)
    final = {**dict.fromkeys(absent), "format_rate": 1.0, "coverage": 0.0}
    means = {1: -0.5, 2: -0.75, 3: -0.25}
    batches = [{"step": step, "rewards/short/mean": mean, "malformed": 0.0} for step, mean in means.items()]

    def page_of(*lines, **more):
        return train_page(metrics=lines, samples=None, votes=None, unmeasured=absent, **more)

    html = page_of({"step": 0, "evaluation": final}, *batches, {"step": 3, "final": final})
    by_label = cards(html)
    assert set(by_label) == {"malformed rate", "mean reward: short"}
    assert by_label["mean reward: short"][1] == "mean reward: short -0.250 -0.500 in the first batch"
    held_out = [{"step": 0, "evaluation": {"reward/short": -0.9}}, *batches, {"step": 3, "final": {"reward/short": -0.1}}]
    assert cards(page_of(*held_out))["mean reward: short"][1] == "mean reward: short -0.100 -0.900 at the start"
    later = {"reward/short": Interval(-0.2, -0.3, -0.1, sem=0.05, level=0.95, count=9)}  # of a later `spanwise eval`
    measured = page_of(*held_out, intervals=later)
    assert cards(measured)["mean reward: short"][1].endswith("short -0.200 95 %: -0.300 to -0.100\n-0.900 at the start")
    assert "the mean reward on held-out prompts of short is -0.200 (was -0.900)" in Page(measured).text
    gone = cards(page_of(*batches[:2], {"step": 3, "malformed": 1.0}))["mean reward: short"]
    assert gone[1] == "mean reward: short not measured -0.500 in the first batch"
    assert "not measured" not in " ".join(text for _, text in by_label.values())
    assert f"Not measured: accuracy, ECE, AUROC, brier, refusal rate, coverage; {why}." in Page(html).text
    assert "few completions state a confidence" not in html


def test_a_title_names_a_baseline_only_where_the_method_has_one():
    for baselines, method, title in (
        (["outcome"], "bae", "Training bae with the outcome baseline"),
        (["outcome"], "rlcr", "Training rlcr"),
        (["group", "outcome", "group"], "bae", "Training bae with the group and outcome baselines"),
        (["outcome", "none", None], "bae", "Training bae with the outcome baseline"),
        (["none"], "bae", "Training bae"),
    ):
        objectives = [{"reward": "brier", "pays": ["confidence"], "baseline": baseline} for baseline in baselines]
        html = train_report(recipe={**RECIPE, "method": method, "objectives": objectives}, metrics=[], summary={})
        assert f"<title>{title}</title>" in html


def test_a_collapsed_arm_is_marked_where_it_looks_best():
    runs = {
        "scalar": {s: {**FALLEN, "ece": 0.001 + s / 1e5} for s in range(3)},
        "blockwise": {s: {"accuracy": 0.85 + s / 100, "refusal_rate": 0.0, "ece": 0.05 + s / 100} for s in range(3)},
    }
    points = {arm: {s: [{"step": 0, **values}] for s, values in seeds.items()} for arm, seeds in runs.items()}
    comparison = compare_arms(runs, figures=["accuracy", "ece", "refusal_rate"])
    html = compare_report(title="Two arms", recipe=RECIPE, comparison=comparison, curves=points)
    page = Page(html)
    rows = {row[0]: row[1:] for row in page.cells if row and row[0] in runs}
    assert all("⚠" in cell for cell in rows["scalar"])
    assert not any("⚠" in cell for cell in rows["blockwise"])
    assert (
        "scalar: most completions refuse to answer in 3 of 3 seeds. Do not rely on these figures: accuracy, ece, refusal_rate."
        in page.text
    )
    assert cards(html)["not beaten in ECE"][0] == "wrong"
    assert cards(html)["not beaten in accuracy"][0] == ""
    sentence = compare_finding(comparison)  # no arm wins by a figure that means nothing
    assert sentence.startswith("Alarm for scalar: most completions refuse to answer in 3 of 3 seeds. ")
    assert "blockwise is better than scalar in accuracy by 0.860" in sentence
    assert sentence.endswith("The ECE of scalar means nothing (see the alarm).")
    assert "scalar is better" not in sentence


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
    assert "Mode critic adds 25.0 % to step times (median)." in section.text
    assert [row["step"] for row in explained.rows] == [1, 3]


def test_a_wild_start_does_not_flatten_the_rest():
    panel, calm = (mode_sections(lines(explained))[0].panels[0] for explained in ([-40.0, 0.25, 0.5], [-0.5, 0.25]))
    spec = panel.charts[0].to_dict()
    assert spec["layer"][0]["encoding"]["y"]["scale"] == {"clamp": True, "domainMin": -1.0, "zero": True}
    assert panel.rows[0]["critic"] == -40.0  # the numbers are what they are
    assert "Values below -1 are drawn at -1." in panel.note
    assert "domainMin" not in json.dumps(calm.charts[0].to_dict())
    assert "are drawn at" not in calm.note


def test_every_stream_has_its_own():
    log = [a | b for a, b in zip(lines([0.5, 0.5], stream="correct/"), lines([-0.5, -0.5], stream="brier/"), strict=True)]
    (section,) = mode_sections(log)
    each = [f"{title}: {name}" for name in ("correct", "brier") for title in ("Error of the critic", "Expected and earned")]
    assert [panel.title for panel in section.panels] == ["Explained variance", *each]
    assert points(section.panels[0]) == {"correct": [(1, 0.5), (2, 0.5)], "brier": [(1, -0.5), (2, -0.5)]}
    sentence = "The critic of 'brier' knows nothing: its explained variance is -0.50 at the end (mean of the last batch)."
    assert section.warnings == [sentence]
    assert [(line.label, line.wrong) for line in mode_headlines(log)] == [
        ("explained variance: correct", ""), ("explained variance: brier", "the critic knows nothing"),
    ]  # fmt: skip


def test_a_critic_that_knows_nothing_is_an_alarm():
    for explained, sentence in (
        ([0.9, 0.8, 0.0], "is 0.00 at the end (mean of the last batch)"),  # knows no more than one number for all
        ([0.9] * 4 + [-1.0] * 4, "is -1.00 at the end (mean of the last 2 batches)"),  # forgot
        ([-9.0] * 40 + [0.1] * 10, None),  # learned
        ([0.5] * 90 + [-0.1, 0.05] * 5, "is -0.03 at the end (mean of the last 10 batches)"),
        ([0.5, NAN, None], None),  # the last one that has any
        ([NAN, None], "cannot be judged"),
        ([], None),
    ):
        alarms = end_alarms(lines(explained))
        assert list(alarms) == (["critic/explained_variance"] if sentence else [])
        assert not sentence or sentence in alarms["critic/explained_variance"]
    (section,) = mode_sections([batch(1)])  # of a run without a critic
    assert (end_alarms([batch(1)]), mode_headlines([batch(1)]), [*section.panels]) == ({}, [], [])


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
