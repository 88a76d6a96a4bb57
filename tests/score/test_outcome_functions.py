"""Outcomes that are not rewards: their sources and values, which of them judges a report, and what a report states."""

import hashlib
import math

import numpy as np
import pytest
import torch

from helpers import NAN, assert_close, double
from score_small import CORRECT, completion, rewarded
from spanwise.errors import AlignmentError, RecipeError, RewardError
from spanwise.layout import Layout
from spanwise.objective import Objective
from spanwise.registry import register
from spanwise.score import OUTCOMES, REWARDS, Reward, brier, complete, log_score, score_all
from spanwise.score.outcomes import judge_of, judged_column, read_outcomes
from spanwise.score.score import check_objectives, score_one
from spanwise.types import Scores


def same(tensor, expected):
    assert_close(tensor, expected, 0, equal_nan=True)


def long_answer(text, *, columns):
    return [None if blocks["solution"] is None else len(blocks["solution"]["answer"] or "") > 1 for blocks in text]


def level_of(text, *, columns):
    return columns["level"]


def of_blocks(blocks):
    return [0 for _ in blocks]


NOT_A_FUNCTION = 3
TEXT = [completion("4"), completion("44"), completion(False), completion(None)]
COLUMNS = {"answer": ["4"] * 4, "level": [1, 2, None, 2]}


@pytest.fixture
def registered():
    """Register outcomes and rewards for one test."""
    before = dict(OUTCOMES), dict(REWARDS)
    yield register
    for registry, entries in zip((OUTCOMES, REWARDS), before, strict=True):
        for name in [name for name in registry if name not in entries]:
            registry.pop(name)


class Levels:
    def of(self, text, *, columns):
        return columns["level"]


def test_all_four_ways_to_give_an_outcome_and_a_method_that_two_objectives_share(registered):
    registered("long_answer", kind="outcome")(long_answer)
    path = f"{__name__}:level_of"
    report = Objective("brier", pays="confidence", given=["correct", "long_answer", path, long_answer], baseline="outcome")
    scores = score_all([CORRECT, report], TEXT, columns=COLUMNS)
    assert scores.names == ("correct", "brier")
    assert scores.outcome_names == ("long_answer", path, f"{__name__}:long_answer")
    long = [0, 1, NAN, 0]
    same(scores.outcome_no, [[a, b, a] for a, b in zip(long, [1, 2, NAN, 2], strict=True)])
    same(scores.outcome("correct"), [1, 0, NAN, 0])
    same(scores.outcome(path), [1, 2, NAN, 2])
    levels, fields = Levels(), {"pays": "confidence", "baseline": "outcome"}
    reports = [Objective("brier", given=["correct", levels.of], name=name, **fields) for name in "ab"]
    same(score_all([CORRECT, *reports], TEXT, columns=COLUMNS).outcome_no, [[1], [2], [NAN], [2]])


def test_a_function_is_called_once_and_sees_text_and_columns():
    calls = []

    def outcome(text, *, columns):
        calls.append((text, columns))
        return [0] * len(text)

    format_ = Objective("format", pays="solution", given=["correct", outcome])
    report = Objective("brier", pays="confidence", given=[outcome, "correct", "format"])
    names, values = read_outcomes([CORRECT, format_, report], TEXT, columns=COLUMNS)
    assert (names, values.shape, calls) == ((f"{__name__}:{outcome.__qualname__}",), (4, 1), [(TEXT, COLUMNS)])


def test_one_name_is_one_thing(registered):
    def twin():
        return lambda text, *, columns: [1] * len(text)

    first, second = twin(), twin()
    objectives = [Objective("format", "solution", given, name=name) for given, name in ((first, "a"), (second, "b"))]
    with pytest.raises(RecipeError, match="Two outcome functions"):
        read_outcomes(objectives, TEXT, columns={})
    registered("mine", kind="outcome")(first)
    with pytest.raises(RecipeError, match="'mine' already"):
        registered("mine", kind="outcome")(second)
    both = [Objective("correct", "solution", name="mine"), Objective("brier", "confidence", "mine")]
    for objectives in (both, both[::-1]):
        with pytest.raises(RecipeError, match="'mine' is both"):
            score_all(objectives, TEXT, columns=COLUMNS)


@pytest.mark.parametrize(
    ("entry", "names"),
    [
        ("brier", "'brier'"), ("nowhere.at_all:f", "no module 'nowhere.at_all'"),
        (f"{__name__}:gone", "'gone'"), (f"{__name__}:NOT_A_FUNCTION", "is 3"), (f"{__name__}:of_blocks", "'columns'"),
    ],
)  # fmt: skip
def test_what_cannot_be_found_is_said_before_training(entry, names):
    layout = Layout({"solution": ["reasoning", "answer"], "confidence": ["confidence"]})
    objectives = [CORRECT, Objective("brier", pays="confidence", given=["correct", entry], baseline="outcome")]
    for meet in (
        lambda: check_objectives(objectives, layout),
        lambda: score_all(objectives, TEXT, columns=COLUMNS),
        lambda: score_one(objectives[1], TEXT, columns={}, scored={"correct": Reward.of([1.0] * 4)}),
    ):
        with pytest.raises(RecipeError, match=names):
            meet()


def test_complete_is_about_the_first_block():
    text = [completion("4", None), completion(None), completion(" "), completion("4", reasoning=None), completion(False)]
    assert complete(text, columns={}) == [True, False, False, False, None]


def values_of(returned, size=None):
    objective = Objective("format", pays="solution", given=lambda text, columns: returned)
    size = len(returned) if size is None else size
    return read_outcomes([objective], [completion()] * size, columns={})[1][:, 0]


def test_numbers_stand_for_themselves_and_what_is_unknown_is_no_zero():
    for container in (list, np.array, torch.tensor):
        same(values_of(container([0.0, 1.0, -2.5])), [0, 1, -2.5])
        same(values_of(container([True, False])), [1, 0])
    same(values_of([None, False, 0, True, np.bool_(True), np.int64(7), 2**52 - 1]), [NAN, 0, 0, 1, 1, 7, 2**52 - 1])
    same(values_of([None, None]), [NAN, NAN])
    same(values_of([*range(16), None]), [*range(16), NAN])
    with pytest.raises(RecipeError):  # an outcome is discrete
        values_of([*range(17), None])


def test_strings_are_the_same_numbers_in_every_run_and_process():
    words = ["wrong", "right", "", "日本🙂", "wrong", "\ud800"]
    codes = values_of(words).tolist()
    for word, code in zip(words, codes, strict=True):
        digest = hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
        # exact in float64, and no number that a function may return
        assert 2**52 <= code == 2**52 + int(digest, 16) // 2**12 < 2**53
    assert len(set(codes)) == len(set(words)) == 5


@pytest.mark.parametrize("value", [[1], {}, object(), NAN, math.inf, -math.inf, 2**52, -(2**52), 1e300, 1j, b"x"])
def test_what_is_no_outcome_is_refused_with_its_place(value):
    with pytest.raises(RewardError, match="of completion 1 is"):
        values_of([0, value, 0])


def test_a_function_that_fails_or_returns_too_few_is_named():
    with pytest.raises(RewardError, match="2 values for 3"):
        values_of([0, 1], size=3)

    def broken(text, *, columns):
        return [columns["answr"] for _ in text]

    with pytest.raises(RewardError, match=r"broken'.*KeyError: 'answr'"):
        read_outcomes([Objective("format", pays="solution", given=broken)], TEXT, columns={})


@pytest.mark.parametrize(
    ("given", "of", "judge", "column"),
    [
        (None, {}, "correct", None), ("correct", {}, "correct", 0), (["complete", "right"], {}, "right", 1),
        (["complete", math.sqrt], {}, "correct", None), (["first", "complete", "correct"], {}, "correct", 2),
        (["first", "correct"], {"of": "first"}, "first", 0), (["first", "second"], {"of": "second"}, "second", 1),
        (["first", "second"], {"of": "third"}, "third", None), ("first", {"of": "third"}, "third", None),
        ("first", {"of": None}, "first", 0),
    ],
)  # fmt: skip
def test_who_judges_a_report(unchecked_shapes, given, of, judge, column):
    objective = Objective("brier", pays="confidence", given=given, options=of)
    assert judge_of(objective) == judge
    assert judged_column(objective) == column


def test_a_plugins_own_default_judges(registered):
    def rated(text, *, pays, columns, scored, by="verdict"):
        return Reward.of([float(value) for value in scored[by].value_n])

    registered("rated", kind="reward", judged_by="by")(rated)
    for given, judge in ((None, "verdict"), (["one", "verdict"], "verdict")):
        assert judge_of(Objective("rated", pays="a", given=given)) == judge
    with pytest.raises(RecipeError, match="by: one"):
        judge_of(Objective("rated", pays="a", given=["one", "correct"]))


def test_a_report_says_what_it_read(unchecked_shapes):
    text = [completion(confidence=q) for q in ("0.7", "0", "100%", "high", None, False)]
    scored = {"correct": Reward.of([1.0, None, 0.0, 1.0, 1.0, 1.0])}
    for rule in (brier, log_score):
        reward = rule(text, pays=("confidence",), columns={}, scored=scored)
        same(reward.stated_n, [0.7, 0.0, 1.0, NAN, NAN, NAN])  # as stated: not clipped, whatever the verdict
    returned = Reward.of([1.0, 1.0], stated=[0.4, 0.6], by_outcome=[(0.0, 1.0)] * 2)
    own = rewarded(lambda blocks: returned, [completion(), completion(confidence=False)], pays="confidence")
    same(own.stated_n, [0.4, NAN])  # the second one has not the paid block
    same(own.by_outcome_n2, [[0, 1], [NAN, NAN]])
    with pytest.raises(AlignmentError, match=r"2 values.*stated_n has 1"):
        Reward.of([1.0, 2.0], stated=[0.5])
    assert Reward.of([1.0]).stated_n is None


def test_scores_know_their_rewards_first_and_then_their_outcomes():
    made_of = ("a",), double([[1.0]]), torch.zeros(1, 1, dtype=torch.int8), double([[[0.0, 0.0]]])
    scores = Scores(*made_of)
    assert (scores.outcome_names, scores.outcome_no, scores.stated_nm) == ((), None, None)
    with pytest.raises(RecipeError, match=r"no outcome 'b'\. Known: a"):
        scores.outcome("b")
    with pytest.raises(AlignmentError, match="There are 1 names for 0 outcomes"):
        Scores(*made_of, outcome_names=("o",))
    more = Scores(*made_of, ("a", "b"), double([[2.0, 2.0]]))
    assert (more.outcome("a").tolist(), more.outcome("b").tolist()) == ([1], [2])
