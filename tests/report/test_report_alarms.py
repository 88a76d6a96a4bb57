"""No report is calm over a failure, and what cannot be measured says why."""

from report_pages import RECIPE, Page, batch, start, train_page
from spanwise.measure import compare_arms
from spanwise.report import compare_report
from spanwise.report.compare import compare_finding

COLLAPSED = {"accuracy": 0.0, "refusal_rate": 1.0, "format_rate": 1.0, "ece": 0.001, "brier": 0.001, "auroc": None}


def cards(html):
    """Label -> (class, all that the card says)."""
    page = Page(html)
    marks = [attributes.get("class") for tag, attributes in page.elements if tag == "div"]
    found, inside = {}, html.split('<dl class="headlines">')[1].split("</dl>")[0]
    for card in inside.split("<div")[1:]:
        text = Page(f"<div{card}").text
        found[Page(card.split("<dt>")[1].split("</dt>")[0]).text] = ("wrong" if 'class="wrong"' in card else "", text)
    assert marks.count("wrong") == sum(mark == "wrong" for mark, _ in found.values())
    return found


def test_a_collapsed_run_has_no_calm_card():
    lines = [{"step": 0, "evaluation": start() | {"accuracy": 0.33}}, batch(1), {"step": 2, "final": COLLAPSED}]
    html = train_page(metrics=lines, samples=None, votes=None)
    found = cards(html)
    for label in ("accuracy", "ECE", "Brier score", "refusal rate"):
        assert found[label][0] == "wrong"
        assert "⚠ most completions refuse to answer" in found[label][1]
    assert found["malformed rate"][0] == ""
    assert "Most completions refuse to answer (accuracy, refusal rate, ECE, Brier score)." in Page(html).text


def test_a_good_run_has_no_warning():
    final = {**COLLAPSED, "accuracy": 0.8, "refusal_rate": 0.0}
    html = train_page(metrics=[batch(1), {"step": 2, "final": final}], samples=None)
    assert {mark for mark, _ in cards(html).values()} == {""}
    assert 'aria-label="what is wrong"' not in html


def test_malformed_completions_and_silent_batches_are_said():
    final = {**COLLAPSED, "refusal_rate": 0.0, "format_rate": 0.25}
    html = train_page(metrics=[{**batch(1), "credit/no_signal": 1.0}, {"step": 2, "final": final}], samples=None)
    found = cards(html)
    assert "⚠ many completions are malformed" in found["malformed rate"][1]
    assert "⚠ hardly any answer is right" in found["ECE"][1]
    assert "In 100 % of the training batches nothing was learned" in Page(html).text


def test_what_cannot_be_measured_is_one_sentence_and_the_rewards_are_there():
    why = "no block has the tag <answer>, only <plan>"
    absent = dict.fromkeys(("accuracy", "ece", "auroc", "brier", "refusal_rate", "coverage"), why)
    final = {**dict.fromkeys(absent), "format_rate": 1.0, "coverage": 0.0}
    batches = [{"step": step, "rewards/short/mean": mean, "malformed": 0.0} for step, mean in ((1, -0.5), (2, -0.25))]
    lines = [{"step": 0, "evaluation": final}, *batches, {"step": 2, "final": final}]
    html = train_page(metrics=lines, samples=None, votes=None, unmeasured=absent)
    found = cards(html)
    assert set(found) == {"malformed rate", "mean reward: short"}
    assert found["mean reward: short"][1] == "mean reward: short -0.250 -0.500 in the first batch"
    assert "not measured" not in " ".join(text for _, text in found.values())
    assert f"Not measured: accuracy, ECE, AUROC, brier, refusal rate, coverage; {why}." in Page(html).text
    assert "few completions state a confidence" not in html


def test_a_title_names_a_baseline_only_where_the_method_has_one():
    objectives = [{"reward": "brier", "pays": ["confidence"], "baseline": "outcome"}]
    for method, title in (("bae", "Training bae with the outcome baseline"), ("rlcr", "Training rlcr")):
        assert f"<title>{title}</title>" in train_page(recipe={**RECIPE, "method": method, "objectives": objectives})


def test_a_collapsed_arm_is_marked_where_it_looks_best():
    runs = {
        "scalar": {s: {**COLLAPSED, "ece": 0.001 + s / 1e5} for s in range(3)},
        "blockwise": {s: {"accuracy": 0.85 + s / 100, "refusal_rate": 0.0, "ece": 0.05 + s / 100} for s in range(3)},
    }
    points = {arm: {s: [{"step": 0, **values}] for s, values in seeds.items()} for arm, seeds in runs.items()}
    comparison = compare_arms(runs, figures=["accuracy", "ece", "refusal_rate"])
    html = compare_report(title="Two arms", recipe=RECIPE, comparison=comparison, curves=points)
    page = Page(html)
    rows = {row[0]: row[1:] for row in page.cells if row and row[0] in runs}
    assert all("⚠" in cell for cell in rows["scalar"])
    assert not any("⚠" in cell for cell in rows["blockwise"])
    assert "scalar: most completions refuse to answer in 3 of 3 seeds (accuracy, ece, refusal_rate)." in page.text
    assert cards(html)["not beaten in ECE"][0] == "wrong"
    assert cards(html)["not beaten in accuracy"][0] == ""
    said = compare_finding(comparison)  # no arm wins by a figure that means nothing
    assert said.startswith("Alarm for scalar: most completions refuse to answer in 3 of 3 seeds. ")
    assert "blockwise is better than scalar in accuracy by 0.860" in said
    assert said.endswith("The ECE of scalar means nothing.")
    assert "scalar is better" not in said
