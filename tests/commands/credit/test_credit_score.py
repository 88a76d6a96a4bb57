"""`spanwise credit` on a file with the column `self_reward`: it is a confidence, and a recipe with `laser` mixes it in."""

import json

import pyarrow as pa
import pytest
import yaml

from helpers import NAN, assert_close
from report_pages import Page, data_of
from rollout_files import quiet, write_own
from spanwise.commands.credit.credit import credit, credit_rollouts
from spanwise.commands.report.report import report_folder
from spanwise.errors import RecipeError
from spanwise.rollouts import read_rollouts

SCORES = [0.9, 0.7, 0.3, 0.1]
#: (1 - .1) z(1, 0, 0, 0) + .1 z(.9, .7, .3, .1), both divided by the sample's standard deviation: worked by hand.
MIXED = [1.4595445, -0.3952277, -0.5047723, -0.5595445]
PLAIN = [1.5, -0.5, -0.5, -0.5]


def file(folder, scores=SCORES, *, step=1, **columns):
    pieces = [["<answer>", str(n), "</answer>"] for n in range(4)]
    columns["self_reward"] = None if scores is None else pa.array(scores, pa.float64())
    right = {"reward/correct": [1.0, 0.0, 0.0, 0.0]}
    return write_own(folder / "in.parquet", pieces, key="tokens", step=[step] * 4, group=[0] * 4, **{**right, **columns})


def recipe(folder, *, method="grpo", **laser):
    fields = {"layout": {"solution": ["answer"]}, "objectives": [{"reward": "correct", "pays": ["solution"]}]}
    rule = {"method": method, **({"options": {"eps": 0.0}} if method == "grpo" else fields)}
    rule["laser"] = {"token": "<unk>", **({} if laser.get("mix") == 0 else {"self_rewarding_warmup": 0}), **laser}
    (folder / "recipe-in.yaml").write_text(yaml.safe_dump(rule))
    return folder / "recipe-in.yaml"


def test_a_recipe_with_laser_mixes_the_score_from_its_warm_up_on_and_other_methods_do_not(tmp_path):
    result = credit_rollouts(file(tmp_path), recipe=recipe(tmp_path), methods=["recipe", "grpo"])
    for arm, expected in zip(result.applied, (MIXED, PLAIN), strict=True):
        assert_close(arm.credit.block_nk[:, 0], expected, 1e-6)
    for step, expected in ((5, PLAIN), (6, MIXED)):
        options = {"recipe": recipe(tmp_path, self_rewarding_warmup=5), "methods": ["recipe"]}
        result = credit_rollouts(file(tmp_path, step=step), **options)
        assert_close(result.applied[0].credit.block_nk[:, 0], expected, 1e-6)
        early = "from step 6 on (self_rewarding_warmup). 4 of 4 completions are from earlier steps"
        assert (early in result.note) == ("warmup" in result.note) == (step == 5)


def test_a_method_per_token_mixes_whole_groups(tmp_path, monkeypatch):
    """Also if a chunk is a single completion: with lambda 1 and values of 0 every token gets the whole mixed reward."""
    monkeypatch.setattr("spanwise.commands.credit.apply.AT_A_TIME", 1)
    options = {"recipe": recipe(tmp_path, method="gae", scale="none"), "methods": ["recipe"]}
    values = {"values": pa.array([[0.0] * 3] * 4, pa.list_(pa.float32()))}
    result = credit_rollouts(file(tmp_path, **values), overrides={"options": {"lam": 1.0, "whiten": False}}, **options)
    hand = [0.9 * right + 0.1 * (score - 0.5) for right, score in zip([1, 0, 0, 0], SCORES, strict=True)]
    assert_close(result.applied[0].credit.block_nk[:, 0], hand, 1e-6)


def test_a_file_without_the_column_is_refused(tmp_path):
    with pytest.raises(RecipeError, match=r"in.parquet' has no column 'self_reward'.* or leave laser out\."):
        credit_rollouts(file(tmp_path, None), recipe=recipe(tmp_path), methods=["recipe"])
    result = credit_rollouts(file(tmp_path, None), recipe=recipe(tmp_path, mix=0.0), methods=["recipe"])  # it mixes nothing
    assert_close(result.applied[0].credit.block_nk[:, 0], PLAIN, 1e-6)
    assert result.score is None


def test_the_score_is_shown_as_a_confidence(tmp_path):
    console = quiet()
    path = file(tmp_path, [1.4, 0.2, -0.3, None])
    credit(path, output=tmp_path / "out", recipe=recipe(tmp_path), methods=["recipe"], console=console)
    figures = "ECE 0.067, Brier 0.013, AUROC 1.000"  # .2/3, .04/3
    text = f"3 completions have a score (75 %). The scores predict the reward 'correct' with {figures}."
    assert text in console.file.getvalue()
    score = json.loads((tmp_path / "out" / "summary.json").read_text())["score"]
    assert (score["completions"], score["coverage"], score["verdict"]) == (3, 0.75, "correct")
    assert score["ece"] == pytest.approx(0.2 / 3)
    html = (tmp_path / "out" / "report.html").read_text()
    assert all(
        said in Page(html).text for said in (text, "3 of 4 completions have a score, and are known to be right or wrong.")
    )
    assert data_of(html)["scores"] == [
        "says of itself 1.00 (1.4, clipped)", "says of itself 0.20", "says of itself 0.00 (-0.3, clipped)",
        "no self-rewarding score, because the completion was cut off",
    ]  # fmt: skip
    assert report_folder(tmp_path / "out").read_text() == html
    exported = read_rollouts(tmp_path / "out" / "credit.parquet")
    assert_close(exported.score_n, [1.4, 0.2, -0.3, NAN], equal_nan=True)


def test_scores_that_are_all_clipped_to_one_number_are_named(tmp_path):
    result = credit_rollouts(file(tmp_path, [1.4, 1.2, 1.3, None]), methods=["grpo"])
    assert result.note.endswith("AUROC 0.500. Every score is 1, after clipping.")
    unknown = {"reward/correct": [0.5, 0.25, 0.5, 0.5]}
    result = credit_rollouts(file(tmp_path, **unknown), methods=["grpo"])
    assert "The file does not say which completions are right" in result.note


def test_the_sum_of_a_block_says_what_was_mixed(tmp_path):
    """BAE subtracts the mean: .75 = 1 - .25; the score is compared as a reward, .9 - .5."""
    options = {"recipe": recipe(tmp_path, method="bae", scale="none"), "methods": ["recipe", "bae"]}
    credit(file(tmp_path), output=tmp_path / "out", **options)
    mixed, plain = data_of((tmp_path / "out" / "report.html").read_text())["why"][0]
    assert mixed["blocks"]["solution"]["total"] == "+0.715 = 0.9 · 0.75 (correct) + 0.1 · 0.4 (its own score)"
    for page in (mixed, plain):
        assert [term["sum"] for term in page["blocks"]["solution"]["terms"]] == ["+0.75 = 1 \u2212 0.25"]
