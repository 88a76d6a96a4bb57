"""The rewards that are built in: correctness, confidence, format, a second attempt."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import NAN, assert_close
from score_small import ABSENT, BYTES, CORRECT, ERROR, OK, byte_group, completion, rewarded
from spanwise import Layout, Scheme, read
from spanwise.errors import AlignmentError, DataError, RecipeError, RewardError
from spanwise.objective import Objective
from spanwise.score import parse_confidence, score_all
from spanwise.score.answers import LONGEST


def test_log_score_is_clipped_on_both_sides():
    text = [completion("4", "1"), completion("5", "1"), completion("5", "0"), completion("4", "0.25")]

    def scored(**options):
        objective = Objective("log_score", pays="confidence", options=options)
        return score_all([CORRECT, objective], text, columns={"answer": ["4"] * 4})

    rewards = scored(clip=0.1)
    assert_close(rewards.reward_nm[:, 1], [math.log(0.9), math.log(0.1), math.log(0.9), math.log(0.25)], 1e-12)
    assert_close(rewards.by_outcome_nmo[3, 1], [math.log(0.75), math.log(0.25)], 1e-12)
    assert_close(scored().reward_nm[1, 1], math.log(0.01), 1e-12)
    with pytest.raises(RecipeError, match=r"'clip'.*0\.5"):
        scored(clip=0.5)


def test_the_charge_for_length_is_dapos():
    text = [completion("4")] * 5 + [completion(False, "0.5")]
    columns = {"completion_ids": [[5] * length for length in (0, 6, 7, 10, 14, 9)]}

    def charged(**options):
        return rewarded("overlong", text, columns=columns, options=options)

    # verl's manager `dapo`: min(-(length - (longest - buffer)) / buffer, 0); no answer to charge in the last one.
    reward = charged(longest=10, buffer=4)
    assert_close(reward.value_n, [0, 0, -0.25, -1, -1, NAN], 0, equal_nan=True)
    assert reward.status_n.tolist() == [OK] * 5 + [ABSENT]
    for options in ({}, {"longest": 4}, *({"longest": 4, "buffer": size} for size in (0, 5)), {"longest": 4.0, "buffer": 2}):
        with pytest.raises(RecipeError):
            charged(**options)


def test_a_reward_that_pays_every_block_reads_its_tag_where_it_is():
    pays = ("solution", "confidence")
    objectives = [Objective("correct", pays=pays), Objective("brier", pays=pays)]
    text = [completion("4", "0.6"), completion(False, "0.6")]
    scores = score_all(objectives, text, columns={"answer": ["4", "4"]})
    assert_close(scores.reward_nm, [[1, -0.16], [0, -0.36]], 1e-12)  # the second one has a paid block and no answer: wrong


def test_brier_is_judged_by_the_objective_it_names_and_by_a_probability_only():
    half = Objective(lambda blocks: [0.5] * len(blocks), pays=("solution",), name="half")
    double = Objective(lambda blocks: [2.0] * len(blocks), pays=("solution",), name="double")
    text, columns = [completion("4", "0.7")], {"answer": ["4"]}
    by_half = Objective("brier", pays=("confidence",), given="correct", options={"of": "half"})
    assert_close(score_all([CORRECT, half, by_half], text, columns=columns).reward_nm[:, 2], [-0.04], 1e-12)
    with pytest.raises(RewardError, match=r"'double' gives completion 0 the outcome 2\.0"):
        score_all([double, Objective("brier", pays=("confidence",), given="double")], text, columns=columns)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.7", 0.7), (" 0.7\n", 0.7), ("70%", 0.7), ("70 %", 0.7), ("0.7.", 0.7), ("70%.", 0.7), ("1", 1.0), ("1.", 1.0),
        ("1.0", 1.0), ("0", 0.0), (".5", 0.5), ("7e-1", 0.7), ("100%", 1.0), ("0.5%", 0.005),
        *((text, None) for text in (
            "70", "high", "", ".", "%", "nan", "inf", "0.7 or 0.8", "-0.1", "-0", "+0.7", "1.2", "101%", "0,7", "7/10", "0.7..",
            "\u0660.\u0667", "0.7%%", "1e999", "0_1", "0.7 (sure)", "²",
        )),
    ],
)  # fmt: skip
def test_confidence_is_one_plain_number(text, value):
    assert parse_confidence(text) == (None if value is None else pytest.approx(value, abs=1e-15))


@given(st.floats(0.0, 1.0))
def test_every_probability_that_is_written_is_read(q):
    assert parse_confidence(repr(q)) == q
    assert parse_confidence(f"{q:.17f}") == pytest.approx(q, abs=1e-16)
    assert parse_confidence(f"{100 * q:.15f}%") == pytest.approx(q, abs=1e-15)


@given(st.text())
@settings(max_examples=300)
def test_no_text_reads_as_anything_but_a_probability(text):
    value = parse_confidence(text)
    assert value is None or 0.0 <= value <= 1.0


def tagged(text, **tags):
    return {"solution": {"": text, **tags}}


@pytest.mark.parametrize(
    ("blocks", "value"),
    [
        (tagged("<a>1</a> <b>2</b>", a="1", b="2"), 1),
        (tagged("1</a><b>2</b>", a="1", b="2"), 1),  # the prompt holds <a>
        (tagged("<a>1</a>", a="1", b=None), 0),
        (tagged("<a>1</a><b> </b>", a="1", b=" "), 0),
        ({**tagged("<a>1</a><b>2</b>", a="1", b="2"), "next": {"": "<c>3</c>", "c": "3"}}, 1),
        ({**tagged("<a>1</a><b>2</b><c>", a="1", b="2"), "next": {"": "<c>3</c>", "c": "3"}}, 0),
        ({"solution": None}, NAN),
    ],
)
def test_format_counts_only_tags_that_open_and_close_once_in_order(blocks, value):
    assert_close(rewarded("format", [blocks]).value_n, [value], 1e-12, equal_nan=True)


def test_format_over_two_blocks_and_over_chosen_tags():
    text = [completion(), completion("4", False), completion(False, False), completion("4", None)]
    for options, expected in (({}, [1, 0, NAN, 0]), ({"tags": ["answer"]}, [1, 0, NAN, 1])):
        reward = rewarded("format", text, pays=("solution", "confidence"), options=options)
        assert_close(reward.value_n, expected, 1e-12, equal_nan=True)


@pytest.mark.parametrize(
    ("written", "value"),
    [("<answer>4</answer>", 1), ("<sure>1</sure><answer>4</answer>", 0), ("<answer>4</answer></sure>", 0)],
)
def test_format_in_a_scheme_counts_the_tags_of_a_block_that_is_left_out(written, value):
    layout = Layout({"solution": ["answer"], "report": ["sure"]})
    scores = read(byte_group(written), Scheme("bae", layout, [Objective("format", "solution")]), BYTES).scores
    assert scores.reward_nm.tolist() == [[value]]


def attempts(first, second):
    block = lambda answer: None if answer is False else {"": "", "answer": answer}  # noqa: E731
    return {"first": block(first), "second": block(second)}


def test_second_attempt_pays_one_tenth_for_something_else_and_nothing_for_the_same(verifier):
    cases = [
        (("3", "4"), 1.0), (("4", "4"), 1.0), (("3", "5"), 0.1), (("4", "5"), 0.1), (("5", "5"), 0.0), (("5", "05"), 0.0),
        ((r"\frac{1}{2}", "0.5"), 0.0), (("0.5", r"\frac{1}{3}"), 0.1), (("@#!", "5.5"), 0.1), (("1+" * LONGEST, "5/7"), 0.1),
        (("3", None), 0.0), (("3", " "), 0.0), ((None, "5"), 0.1), ((False, "5"), 0.1), (("4", False), NAN),
    ]  # fmt: skip
    text = [attempts(*pair) for pair, _ in cases]
    fields = {"pays": "second", "options": {"verifier": verifier}}
    reward = rewarded("second_attempt", text, columns={"answer": ["4"] * len(text)}, **fields)
    assert_close(reward.value_n, [value for _, value in cases], 1e-12, equal_nan=True)
    assert reward.status_n.tolist() == [OK] * (len(text) - 1) + [ABSENT]
    no_gold = rewarded("second_attempt", [attempts("3", "5")], columns={"answer": [None]}, **fields)
    assert no_gold.status_n.tolist() == [ERROR]


def test_correct_reads_another_tag_and_column_or_the_whole_block(verifier):
    steps = "Then $x = 3$ and so on.\n" * 2000  # of a long text its end is compared
    texts = [{"all": {"": f"{steps}The answer is \\boxed{{4}}."}}, {"all": {"": steps}}]
    options = {"tag": "", "column": "gold", "verifier": verifier}
    assert rewarded("correct", texts, columns={"gold": [4, 4]}, pays="all", options=options).value_n.tolist() == [1, 0]
    with pytest.raises(DataError):
        rewarded("correct", columns={"gold": ["4"]})
    with pytest.raises(AlignmentError, match="3 rows for 1"):
        rewarded("correct", columns={"answer": ["4"] * 3})
