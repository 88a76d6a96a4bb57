"""Rewards on hand-worked numbers, with absent, failed and zero kept apart."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spanwise.errors import AlignmentError, DataError, RecipeError, RewardError
from spanwise.layout import Layout
from spanwise.objective import Objective
from spanwise.score import MathVerifier, Reward, check_objectives, parse_confidence, register, score, score_one
from spanwise.score.reward import REWARDS
from spanwise.segment import Vocabulary, segment
from spanwise.types import Status

NAN = math.nan
OK, ABSENT, UNPARSABLE, TIMEOUT, ERROR = (int(status) for status in Status)


def completion(answer="4", confidence="0.7"):
    """A block is left out with False, a tag without a pair is None."""
    solution = {"": f"<reasoning>r</reasoning><answer>{answer}</answer>", "reasoning": "r", "answer": answer}
    report = {"": f"<analysis>a</analysis><confidence>{confidence}</confidence>", "analysis": "a", "confidence": confidence}
    return {"solution": None if answer is False else solution, "confidence": None if confidence is False else report}


def assert_same(tensor, expected):
    torch.testing.assert_close(tensor, torch.tensor(expected, dtype=torch.float64), rtol=0.0, atol=1e-12, equal_nan=True)


CORRECT = Objective("correct", pays=("solution",))
BRIER = Objective("brier", pays=("confidence",), given="correct", baseline="outcome")


def test_correct_and_brier_keep_absent_failed_and_zero_apart():
    text = [
        completion("4", "0.7"),  # right: -(0.7 - 1)^2
        completion("5", "0.7"),  # wrong: -(0.7 - 0)^2
        completion(None, "0"),  # a block without an answer is wrong: -(0 - 0)^2, a reward of zero
        completion(False, "0.5"),  # no solution: nothing to judge the confidence by
        completion("4", "high"),  # there and cannot be read
        completion("4", None),  # block there, tag not
        completion("4", False),  # block not there
        completion("4", "100%"),  # no gold answer: never zero
    ]
    scores = score([CORRECT, BRIER], text, columns={"answer": ["4"] * 7 + [None]})
    assert scores.names == ("correct", "brier")
    assert_same(scores.reward_nm[:, 0], [1, 0, 0, NAN, 1, 1, 1, NAN])
    assert scores.status_nm[:, 0].tolist() == [OK, OK, OK, ABSENT, OK, OK, OK, ERROR]
    assert_same(scores.reward_nm[:, 1], [-0.09, -0.49, 0, NAN, NAN, NAN, NAN, NAN])
    assert scores.status_nm[:, 1].tolist() == [OK, OK, OK, ABSENT, UNPARSABLE, ABSENT, ABSENT, ERROR]
    missing = [NAN, NAN]
    assert_same(
        scores.by_outcome_nmo[:, 1],
        [[-0.49, -0.09], [-0.49, -0.09], [0, -1], [-0.25, -0.25], missing, missing, missing, [-1, 0]],
    )
    assert scores.by_outcome_nmo[:, 0].isnan().all()


def test_log_score_is_clipped_on_both_sides():
    text = [completion("4", "1"), completion("5", "1"), completion("5", "0"), completion("4", "0.25")]
    objectives = [CORRECT, Objective("log_score", pays=("confidence",), options={"clip": 0.1})]
    rewards = score(objectives, text, columns={"answer": ["4"] * 4})
    assert_same(rewards.reward_nm[:, 1], [math.log(0.9), math.log(0.1), math.log(0.9), math.log(0.25)])
    assert_same(rewards.by_outcome_nmo[3, 1], [math.log(0.75), math.log(0.25)])
    default = score([CORRECT, Objective("log_score", pays=("confidence",))], text, columns={"answer": ["4"] * 4})
    assert_same(default.reward_nm[1, 1], math.log(0.01))
    with pytest.raises(RecipeError, match=r"'clip'.*not 0\.5"):
        score_one(Objective("log_score", pays=("confidence",), options={"clip": 0.5}), text, columns={}, scored={})


def test_a_reward_that_pays_every_block_reads_its_tag_where_it_is():
    pays = ("solution", "confidence")
    objectives = [Objective("correct", pays=pays), Objective("brier", pays=pays)]
    text = [completion("4", "0.6"), completion(False, "0.6")]
    scores = score(objectives, text, columns={"answer": ["4", "4"]})
    assert_same(scores.reward_nm, [[1, -0.16], [0, -0.36]])  # the second one has a paid block and no answer: wrong


def test_brier_is_judged_by_the_objective_it_names_and_by_a_probability_only():
    half = Objective(lambda blocks: [0.5] * len(blocks), pays=("solution",), name="half")
    double = Objective(lambda blocks: [2.0] * len(blocks), pays=("solution",), name="double")
    text, columns = [completion("4", "0.7")], {"answer": ["4"]}
    by_half = Objective("brier", pays=("confidence",), given="correct", options={"of": "half"})
    assert_same(score([CORRECT, half, by_half], text, columns=columns).reward_nm[:, 2], [-0.04])
    with pytest.raises(RewardError, match=r"'double' gives completion 0 the outcome 2\.0"):
        score([double, Objective("brier", pays=("confidence",), given="double")], text, columns=columns)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.7", 0.7), (" 0.7\n", 0.7), ("70%", 0.7), ("70 %", 0.7), ("0.7.", 0.7), ("70%.", 0.7), ("1", 1.0), ("1.", 1.0),
        ("1.0", 1.0),         ("0", 0.0), (".5", 0.5), ("7e-1", 0.7), ("100%", 1.0), ("0.5%", 0.005),
        ("70", None), ("high", None), ("", None), (".", None), ("%", None), ("nan", None), ("inf", None), ("0.7 or 0.8", None),
        ("-0.1", None), ("-0", None), ("+0.7", None), ("1.2", None), ("101%", None), ("0,7", None), ("7/10", None), ("0.7..", None),
        ("\u0660.\u0667", None), ("0.7%%", None), ("1e999", None), ("0_1", None), ("0.7 (sure)", None), ("²", None),
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
        (tagged("<a>1</a> <b>2</b>", a="1", b="2"), 1.0),
        (tagged("1</a><b>2</b>", a="1", b="2"), 1.0),  # the prompt holds <a>
        (tagged("<a>1</a>", a="1", b=None), 0.0),
        (tagged("<a>1</a><b> </b>", a="1", b=" "), 0.0),
        (tagged("<a>1</a><b>2</b><b>3</b>", a="1", b="3"), 0.0),
        (tagged("<a>1<b>2</b></a>", a="1<b>2</b>", b="2"), 0.0),
        (tagged("<b>2</b><a>1</a>", a="1", b="2"), 0.0),
        ({**tagged("<a>1</a><b>2</b>", a="1", b="2"), "next": {"": "<c>3</c>", "c": "3"}}, 1.0),
        ({**tagged("<a>1</a><b>2</b><c>", a="1", b="2"), "next": {"": "<c>3</c>", "c": "3"}}, 0.0),
        ({"solution": None}, NAN),
    ],
)
def test_format_counts_only_tags_that_open_and_close_once_in_order(blocks, value):
    assert_same(score_one(Objective("format", pays=("solution",)), [blocks], columns={}, scored={}).value_n, [value])


def test_format_over_two_blocks_and_over_chosen_tags():
    both = Objective("format", pays=("solution", "confidence"))
    text = [completion(), completion("4", False), completion(False, False), completion("4", None)]
    assert_same(score_one(both, text, columns={}, scored={}).value_n, [1, 0, NAN, 0])
    answer_only = Objective("format", pays=("solution", "confidence"), options={"tags": ["answer"]})
    assert_same(score_one(answer_only, [completion("4", None)], columns={}, scored={}).value_n, [1])


def attempts(first, second):
    block = lambda answer: None if answer is False else {"": "", "answer": answer}  # noqa: E731
    return {"first": block(first), "second": block(second)}


def test_second_attempt_pays_one_tenth_for_something_else_and_nothing_for_the_same():
    cases = [
        (("3", "4"), 1.0), (("4", "4"), 1.0), (("3", "5"), 0.1), (("4", "5"), 0.1), (("5", "5"), 0.0), (("5", "05"), 0.0),
        ((r"\frac{1}{2}", "0.5"), 0.0), (("0.5", r"\frac{1}{3}"), 0.1), (("@#!", "5.5"), 0.1),
        (("3", None), 0.0), (("3", " "), 0.0), ((None, "5"), 0.1), ((False, "5"), 0.1), (("4", False), NAN),
    ]  # fmt: skip
    text = [attempts(*pair) for pair, _ in cases]
    with MathVerifier(deadline=20.0) as verifier:
        objective = Objective("second_attempt", pays=("second",), options={"verifier": verifier})
        reward = score_one(objective, text, columns={"answer": ["4"] * len(text)}, scored={})
        assert_same(reward.value_n, [value for _, value in cases])
        assert reward.status_n.tolist() == [OK] * (len(text) - 1) + [ABSENT]
        no_gold = score_one(objective, [attempts("3", "5")], columns={"answer": [None]}, scored={})
    assert no_gold.status_n.tolist() == [ERROR]


def test_a_hang_is_a_timeout_and_a_gold_that_cannot_be_read_an_error():
    with MathVerifier(deadline=1.0) as verifier:
        objective = Objective("correct", pays=("solution",), options={"verifier": verifier})
        text = [completion(r"$9^{9^{9^{9}}}$"), completion("4.0"), completion("4.0")]
        reward = score_one(objective, text, columns={"answer": ["4", "@#!", "4"]}, scored={})
    assert_same(reward.value_n, [NAN, NAN, 1.0])
    assert reward.status_n.tolist() == [TIMEOUT, ERROR, OK]


def test_correct_reads_another_tag_and_column_or_the_whole_block():
    whole = [{"all": {"": "The answer is \\boxed{4}."}}, {"all": {"": "\\boxed{5}"}}]
    with MathVerifier(deadline=20.0) as verifier:
        options = {"tag": "", "column": "gold", "verifier": verifier}
        reward = score_one(Objective("correct", pays=("all",), options=options), whole, columns={"gold": [4, 4]}, scored={})
    assert_same(reward.value_n, [1.0, 0.0])
    with pytest.raises(DataError, match="no column 'answer'; its columns are gold"):
        score_one(CORRECT, [completion()], columns={"gold": ["4"]}, scored={})
    with pytest.raises(AlignmentError, match="3 rows for 1"):
        score_one(CORRECT, [completion()], columns={"answer": ["4"] * 3}, scored={})


def trl_reward(prompts, completions, completion_ids, **kwargs):
    assert set(kwargs) == {"answer", "level"}
    return [float(len(p) + len(c) + len(i)) for p, c, i in zip(prompts, completions, completion_ids, strict=True)]


def test_a_trl_reward_gets_prompts_completions_ids_and_every_column():
    columns = {"prompts": ["ab"], "completions": ["abc"], "completion_ids": [[1]], "answer": ["4"], "level": [2]}
    objective = Objective(trl_reward, pays=("solution",))
    assert_same(score_one(objective, [completion()], columns=columns, scored={}).value_n, [6.0])
    with pytest.raises(RewardError, match="TRL's signature and there are no 'completions'"):
        score_one(objective, [completion()], columns={"prompts": ["ab"]}, scored={})


def test_our_reward_gets_blocks_and_only_what_it_asks_for():
    def level_times(blocks, level, factor=1.0):
        return [factor * rank * len(block["solution"]["answer"]) for block, rank in zip(blocks, level, strict=True)]

    objective = Objective(level_times, pays=("solution",), options={"factor": 10.0})
    columns = {"level": [2, 3], "other": [0, 0], "factor": [5, 5]}
    assert_same(score_one(objective, [completion("4"), completion("44")], columns=columns, scored={}).value_n, [20.0, 60.0])
    with pytest.raises(DataError, match=r"needs the column 'level'; the dataset has factor, other\."):
        score_one(objective, [completion()], columns={"other": [0]}, scored={})


@pytest.mark.parametrize("container", [list, tuple, np.array, torch.tensor])
def test_none_is_absent_zero_is_zero_and_a_missing_block_is_absent_whatever_is_returned(container):
    text = [completion(), completion(False), completion()]
    values = score_one(Objective(lambda blocks: container([0.0, 1.0, 2.0]), pays=("solution",)), text, columns={}, scored={})
    assert_same(values.value_n, [0.0, NAN, 2.0])
    none = score_one(Objective(lambda blocks: [0.0, 1.0, None], pays=("solution",)), text, columns={}, scored={})
    assert none.status_n.tolist() == [OK, ABSENT, ABSENT]
    own = Reward.of([1.0] * 3, by_outcome=[(0.0, 1.0)] * 3)
    returned = score_one(Objective(lambda blocks: own, pays=("solution",)), text, columns={}, scored={})
    assert_same(returned.by_outcome_n2, [[0, 1], [NAN, NAN], [0, 1]])


@pytest.mark.parametrize(
    ("returned", "sentence"),
    [
        ([1.0, NAN], r"Objective 'mine' gives completion 1 of 2 the reward nan"),
        ([math.inf, 1.0], r"gives completion 0 of 2 the reward inf"),
        (["high", 1.0], r"gives completion 0 of 2 the reward 'high'"),
        ([1.0], r"'mine': its reward function returned 1 rewards for 2 completions"),
        (1.0, r"returned float; return a list of 2 numbers"),
        (Reward.of([1.0]), r"returned 1 rewards for 2"),
    ],
)
def test_what_is_no_reward_is_refused_with_its_place(returned, sentence):
    with pytest.raises(RewardError, match=sentence):
        score_one(
            Objective(lambda blocks: returned, pays=("solution",), name="mine"), [completion()] * 2, columns={}, scored={}
        )


def test_an_exception_in_a_reward_is_named_and_chained():
    def broken(blocks):
        return 1 / 0

    with pytest.raises(RewardError, match="'broken': its reward function raised ZeroDivisionError") as caught:
        score_one(Objective(broken, pays=("solution",)), [completion()], columns={}, scored={})
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_reward_pairs_numbers_with_ok_only():
    one, row = torch.ones(1, dtype=torch.float64), torch.full((1, 2), NAN, dtype=torch.float64)
    with pytest.raises(RewardError, match=r"1\.0 with status TIMEOUT"):
        Reward(one, torch.tensor([TIMEOUT]), row)
    with pytest.raises(RewardError, match="nan with status OK"):
        Reward(one * NAN, torch.tensor([OK]), row)
    with pytest.raises(RewardError, match="completion 1 is nan"):
        Reward.of([None, NAN])


def test_no_completion_gives_empty_scores():
    scores = score([CORRECT, BRIER], [], columns={"answer": []})
    assert (scores.reward_nm.shape, scores.by_outcome_nmo.shape) == ((0, 2), (0, 2, 2))


def test_a_registered_reward_works_by_name_and_names_are_taken_once():
    try:

        @register("length_of_answer", tags=("tag",))
        def length_of_answer(text, *, pays, given, columns, scored, tag="answer"):
            return Reward.of([float(len(blocks[pays[0]][tag])) for blocks in text])

        objective = Objective("length_of_answer", pays=("solution",))
        assert_same(score_one(objective, [completion("444")], columns={}, scored={}).value_n, [3.0])
        with pytest.raises(RecipeError, match="already a reward 'length_of_answer'"):
            register("length_of_answer")(length_of_answer)
    finally:
        REWARDS.pop("length_of_answer", None)


LAYOUT = Layout({"solution": ["reasoning", "answer"], "confidence": ["analysis", "confidence"]})


def build(*objectives):
    return [Objective(**{"pays": ("solution",), **objective}) for objective in objectives]


@pytest.mark.parametrize(
    ("objectives", "sentence"),
    [
        ([], "no objective"),
        ([{"reward": "correct"}, {"reward": "correct"}], "Two objectives are called 'correct'"),
        ([{"reward": "corect"}], "no reward 'corect'. Did you mean 'correct'"),
        ([{"reward": "correct", "pays": ("solutoin",)}], "pays 'solutoin'.*Did you mean 'solution'"),
        ([{"reward": "correct", "options": {"tga": "answer"}}], "called 'tga'.*Did you mean 'tag'"),
        ([{"reward": "correct", "options": {"tag": "reply"}}], "tag 'reply' in solution, which has reasoning, answer"),
        ([{"reward": "correct", "pays": ("confidence",)}], "tag 'answer' in confidence"),
        ([{"reward": "brier", "pays": ("confidence",)}], "'brier' is given 'correct', which is not an objective before it"),
        ([{"reward": "brier", "pays": ("confidence",), "given": "correct"}, {"reward": "correct"}], "Put 'correct' first"),
        ([{"reward": "correct"}, {"reward": "brier", "pays": ("confidence",), "options": {"of": "c"}}], "is given 'c'"),
        ([{"reward": "second_attempt"}], "reads block 'first'"),
        ([{"reward": "second_attempt", "options": {"first": "confidence"}}], "tag 'answer' in confidence"),
    ],
)
def test_objectives_that_cannot_work_are_refused_before_training(objectives, sentence):
    with pytest.raises(RecipeError, match=sentence):
        check_objectives(build(*objectives), LAYOUT)


def test_objectives_that_work_pass():
    check_objectives([CORRECT, BRIER, Objective(trl_reward, pays=("solution", "confidence"))], LAYOUT)
    check_objectives(build({"reward": "correct", "pays": ("all",), "options": {"tag": ""}}), Layout({"all": []}))
    two = Layout({"first": ["answer"], "second": ["answer"]})
    check_objectives([Objective("correct", pays=("first",)), Objective("second_attempt", pays=("second",))], two)


def test_score_refuses_what_check_would_have():
    text, columns = [completion()], {"answer": ["4"]}
    with pytest.raises(RecipeError, match="not an objective before it"):
        score([BRIER, CORRECT], text, columns=columns)
    with pytest.raises(RecipeError, match="no block 'solutoin'"):
        score([Objective("correct", pays=("solutoin",))], text, columns=columns)
    with pytest.raises(RecipeError, match="called 'tga'"):
        score([Objective("correct", pays=("solution",), options={"tga": "x"})], text, columns=columns)


def test_from_token_ids_to_rewards():
    texts = [
        "<reasoning>1+3</reasoning><answer> 4\n</answer><analysis>sure</analysis><confidence>80%</confidence>",
        "<reasoning>1+3</reasoning><answer>4</answer>",
        "<reasoning>1+3</reasoning><answer>5</answer><analysis>hm</analysis><confidence>0.1",
    ]
    length = max(map(len, texts))
    ids = torch.tensor([list(text.encode().ljust(length, b"\0")) for text in texts])
    _, text = segment(ids, ids > 0, layout=LAYOUT, vocabulary=Vocabulary(tuple(bytes([byte]) for byte in range(256))))
    objectives = [CORRECT, BRIER, Objective("format", pays=("solution", "confidence"))]
    scores = score(objectives, text, columns={"answer": ["4"] * 3})
    assert_same(scores.reward_nm, [[1, -0.04, 1], [1, NAN, 0], [0, NAN, 0]])
    assert scores.status_nm[:, 1].tolist() == [OK, ABSENT, ABSENT]
