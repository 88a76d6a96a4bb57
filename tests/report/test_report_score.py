"""The score beside what is stated: panels, headlines, votes, and the words that say which is which."""

import torch

from helpers import NAN, double
from report_pages import Page, start, train_page
from spanwise.commands.shared.samples import Samples
from spanwise.measure import compare_arms, voting
from spanwise.report import compare_report

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
        "8 of 8 completions have a confidence and could be judged.",
        "7 of 8 completions have a score and could be judged.",
        "one reserved token (laser) is after the answer, clipped to between 0 and 1",
        *("Has a score", "Score of right and wrong answers", "Accuracy by score"),
        *("majority weighted by its score", "highest score"),
    ):
        assert words in page.text
    assert "votes are weighed by the self-rewarding score" not in page.text
    text = page_of(NOTHING).text  # the score alone
    assert "have a confidence and could" not in text
    assert "7 of 8 completions have a score and could be judged." in text
    assert "No completion states a confidence, so votes are weighed by the self-rewarding score." in text


def test_an_arm_with_a_score_beside_one_without():
    runs = {"with": {0: {"ece": 0.1, "laser_ece": 0.2}}, "without": {0: {"ece": 0.1}}}
    samples = {"with": columns(NOTHING), "without": {"confidence": SCORE, "correct": CORRECT}}
    page = Page(compare_report(title="Two", recipe={}, comparison=compare_arms(runs), curves={}, samples=samples))
    assert "with, by its score" in page.text
    assert "without, by its score" not in page.text
    assert "with: no completion states a confidence, so votes are weighed" not in page.text  # there are no votes
    rows = {row[0]: row[1:] for row in page.cells if row and row[0] in runs}
    assert (rows["with"], rows["without"][0]) == (["0.100", "0.200"], "0.100")
