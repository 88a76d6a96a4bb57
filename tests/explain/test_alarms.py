"""The figures of a failed policy carry a sentence that says what is wrong with it."""

from spanwise.explain.alarms import alarms, batch_alarms
from spanwise.measure import compare_arms

#: An evaluation of a policy that is as it should be.
GOOD = {
    "accuracy": 0.85, "refusal_rate": 0.01, "format_rate": 0.99, "coverage": 1.0, "verdict_rate": 1.0, "ece": 0.03, "brier": 0.1,
    "auroc": 0.8, "mean_confidence": 0.8, "sharpness": 0.04,
}  # fmt: skip
CALIBRATION = {"ece", "brier", "auroc", "mean_confidence", "sharpness"}


def test_each_failure_is_named_at_every_figure_that_it_empties():
    for changes, figures, why in (
        ({"refusal_rate": 0.51}, {"refusal_rate", "accuracy", *CALIBRATION}, "most completions refuse to answer"),
        ({"accuracy": 0.049}, {"accuracy", *CALIBRATION}, "hardly any answer is right"),
        ({"verdict_rate": 0.49}, {"verdict_rate", "accuracy", *CALIBRATION}, "most answers could not be judged"),
        ({"coverage": 0.49}, {"coverage", *CALIBRATION}, "few completions state a confidence"),
        ({"sharpness": 9e-5}, CALIBRATION, "every completion states the same confidence"),
        ({"format_rate": 0.89}, {"format_rate"}, "many completions are malformed"),
        ({"refusal_rate": 0.5, "accuracy": 0.05, "verdict_rate": 0.5}, (), ""),
        ({"coverage": 0.5, "sharpness": 1e-4, "format_rate": 0.9}, (), ""),
        ({"accuracy": None, "coverage": float("nan")}, (), ""),
    ):
        assert alarms({**GOOD, **changes}) == dict.fromkeys(figures, why)


def test_batches_that_teach_nothing():
    line = {"credit/no_signal": 0.0, "credit/correct/reward_absent": 0.25}
    assert batch_alarms([line] * 3) == batch_alarms([]) == []
    silent = [{"credit/no_signal": value} for value in (1.0, 1.0, 0.25, None)]
    assert batch_alarms(silent) == ["In 75 % of the training batches nothing was learned: every advantage was 0."]
    assert batch_alarms([{"credit/no_signal": 1.0}, {"credit/no_signal": 0.0}]) == []
    never = [{**line, "credit/brier/reward_absent": 1.0}] * 2
    assert batch_alarms(never) == ["No completion of any training batch has the reward 'brier'."]


def test_a_comparison_says_which_arm_and_in_how_many_seeds():
    bad = {"accuracy": 0.0, "refusal_rate": 1.0, "ece": 0.001}
    runs = {"good": {0: GOOD, 1: GOOD}, "scalar": {0: bad, 1: {**GOOD, "accuracy": 0.01}, 2: GOOD}}
    comparison = compare_arms(runs, figures=["accuracy", "ece"])
    why = "most completions refuse to answer in 1 of 3 seeds, hardly any answer is right in 1 of 3 seeds"
    assert comparison.wrong == {("scalar", "accuracy"): why, ("scalar", "ece"): why}
    assert comparison.warnings() == [f"scalar: {why}. Do not rely on these figures: accuracy, ece."]
    good, scalar = (line for line in comparison.markdown().splitlines() if line.startswith(("| good", "| scalar")))
    assert ("!" in good, scalar.count(" ! |")) == (False, 2)
    assert all(f"(scalar: {why})" in sentence for sentence in comparison.sentences())
    failed = compare_arms({"scalar": {0: {"accuracy": 0.01}, 1: bad, 2: {"accuracy": 0.02}}}).wrong["scalar", "accuracy"]
    assert failed == "hardly any answer is right in 2 of 3 seeds, most completions refuse to answer in 1 of 3 seeds"
    alone = compare_arms({"alone": {0: bad}}, figures=["ece"])
    assert alone.wrong["alone", "ece"] == "most completions refuse to answer in the only seed"
