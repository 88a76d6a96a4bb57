"""The self-rewarding score as the confidence of an evaluation: figures, votes, the file, what it is counted from."""

import json

import pyarrow.parquet as pq
import pytest
import torch

from helpers import NAN, assert_close, double
from spanwise.commands.shared.display import vote_table
from spanwise.commands.shared.samples import FILE, Samples, read_samples
from spanwise.commands.shared.task import run_above
from spanwise.errors import DataError, RecipeError
from spanwise.explain.alarms import CALIBRATION, alarms
from spanwise.recipe import load


def samples(score_n, *, stated=(0.9, 0.9, 0.1, 0.9), right=(1.0, 0.0, 1.0, 0.0), answers="abac", prompts=(0, 0, 1, 1)):
    return Samples(
        torch.tensor(prompts), {"solution": list(answers)}, {"solution": double(right)}, double(stated),
        torch.ones(len(right)).bool(), score_n=None if score_n is None else double(score_n),
    )  # fmt: skip


def test_the_figures_of_the_score_stand_beside_those_of_the_confidence():
    figures = samples([1.4, -0.2, 0.6, NAN]).figures()
    hand = {"coverage": 3 / 4, "brier": 0.16 / 3, "ece": 0.4 / 3, "auroc": 1.0, "mean_confidence": 1.6 / 3}
    hand["sharpness"] = 1.36 / 3 - (1.6 / 3) ** 2
    assert {name: figures[f"laser_{name}"] for name in hand} == pytest.approx(hand)
    assert set(hand) == {"coverage", *CALIBRATION}
    assert figures["brier"] == pytest.approx((0.01 + 0.81 + 0.81 + 0.81) / 4)  # of the stated confidences
    without = samples(None).figures()
    assert without == {name: value for name, value in figures.items() if not name.startswith("laser_")}
    intervals = samples([1.4, -0.2, 0.6, NAN]).intervals(resamples=20)
    assert {name: None if i is None else i.value for name, i in intervals.items()} == pytest.approx(figures)


def test_both_ways_of_weighing_a_vote_are_there_and_one_where_there_is_one():
    def votes(scores, stated):
        answers = {"answers": "aab", "right": (0.0, 0.0, 1.0), "prompts": (0, 0, 0)}
        curves = samples(scores, stated=stated, **answers).votes(budgets=(3,), resamples=2)
        return {way: float(curve.value_pb) for way, curve in curves.items()}, vote_table("", curves)

    ways = {"pass@1": pytest.approx(1 / 3), "pass@k": 1.0, "majority": 0.0}
    both, _ = votes([0.2, 0.3, 1.7], (0.9, 0.9, 0.1))  # spoken: a 1.8 > b .1; score: a .5 < b 1
    assert both == {**ways, "weighted": 0.0, "maxconf": 0.0, "laser_weighted": 1.0, "laser_maxconf": 1.0}
    score_alone, table = votes([0.2, 0.3, 1.7], (NAN,) * 3)
    assert score_alone == {**ways, "weighted": 1.0, "maxconf": 1.0}
    assert [str(cell) for cell in table.columns[0].cells][-2:] == ["weighted", "maxconf"]
    assert votes([0.2, 0.3, NAN], (NAN,) * 3)[0]["weighted"] == 0.0  # a completion that was cut off has no weight


def test_what_is_missing_is_null_in_the_file_and_older_files_have_no_score(tmp_path):
    written = samples([1.4, -0.2, 0.6, NAN], stated=(0.9, NAN, 0.1, 0.9), right=(1.0, 0.0, NAN, 0.0))
    written.write(tmp_path)
    columns = pq.read_table(tmp_path / FILE).to_pydict()
    assert columns["self_reward"] == [1.4, -0.2, 0.6, None]  # not clipped
    assert (columns["confidence"], columns["correct/solution"]) == ([0.9, None, 0.1, 0.9], [1.0, 0.0, None, 0.0])
    reread = read_samples(tmp_path)
    for column in (lambda of: of.score_n, lambda of: of.confidence_n, lambda of: of.correct["solution"]):
        assert_close(column(reread), column(written), equal_nan=True)
    pq.write_table(pq.read_table(tmp_path / FILE).drop(["self_reward"]), tmp_path / FILE)
    older = read_samples(tmp_path)
    assert (older.score_n, older.by_score()) == (None, None)
    with pytest.raises(DataError, match=r"nowhere.* does not exist"):
        read_samples(tmp_path / "nowhere")


def test_a_score_that_says_nothing_is_not_read_calmly():
    for scores, why in (
        ([-0.5, -0.1, 0.0, NAN], "every score is 0, after clipping"),
        ([1.5, 1.1, 1.0, NAN], "every score is 1, after clipping"),
        ([0.5, 0.5, 0.5, 0.5], "every completion has the same score"),
        ([0.5, NAN, NAN, NAN], "few completions have a score, because the others were cut off"),
    ):
        causes = alarms(samples(scores).figures())
        assert (causes["laser_ece"], "ece" in causes) == (why, False)
    good = {"laser_coverage": 1.0, "laser_mean_confidence": 0.5, "laser_sharpness": 0.04, "laser_ece": 0.1}
    assert alarms(good) == {}
    assert alarms({**good, "refusal_rate": 0.6})["laser_ece"] == "most completions refuse to answer"


def laser_of(folder, **laser):
    mode = load(None, {"laser": {"self_rewarding_warmup": 0, "token": "<unk>", **laser}}).modes["laser"]
    return mode.as_trained([folder, *run_above(folder)])


MEASURED = {"token": "<unk>", "id": 2, "reference": -18.98, "std": 2.38, "completions": 256, "temperature": 1.0}


@pytest.mark.parametrize("place", ["", "model", "checkpoints/checkpoint-3"])
def test_the_reference_is_that_of_the_run(place, tmp_path):
    (tmp_path / "laser.json").write_text(json.dumps(MEASURED))
    references = [laser_of(tmp_path / place, **laser).reference for laser in ({}, {"token": 2}, {"reference": -12.0})]
    assert references == [-18.98, -18.98, -12.0]


def test_no_reference_another_token_or_out_of_reach(tmp_path):
    for measured, token, names in (
        (None, "<unk>", "left a laser.json .* Set laser.reference"),
        (MEASURED, "<pad>", r"'<pad>', .* says that the run trained '<unk>' \(id 2\)"),
        (MEASURED | {"reference": -3.0}, "<unk>", "the score is at most"),
        ({"token": "<unk>", "id": 2}, "<unk>", "the file has no 'reference'"),
    ):
        if measured is not None:
            (tmp_path / "laser.json").write_text(json.dumps(measured))
        with pytest.raises((DataError, RecipeError), match=names):
            laser_of(tmp_path, token=token)
