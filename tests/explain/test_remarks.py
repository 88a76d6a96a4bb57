"""Warnings about a batch: tags nobody writes, rewards nobody gets, blocks that are left out for free."""

import re

import pytest

from spanwise import Batch, Layout, Objective, Reading, Scheme, Vocabulary, credit_batch, metrics, read, setup_warnings
from spanwise.explain.alarms import habits
from spanwise.explain.remarks import Watch
from spanwise.score import Reward
from spanwise.types import Status

VOCABULARY = Vocabulary(tuple(b"<answer> </answer> <sure> </sure> 4 5 0.9 <plan> </plan> much".split()))
LAYOUT = Layout({"solution": ["answer"], "report": ["sure"]})
WHOLE, SILENT, VAGUE, PLAN = [0, 4, 1, 2, 6, 3], [0, 5, 1], [0, 4, 1, 2, 9, 3], [7, 4, 8]


def scheme(*more, **changes):
    report = {"given": "correct", "options": {"tag": "sure"}, **changes}
    objectives = [Objective("correct", "solution", if_missing=0.0), Objective("brier", "report", **report), *more]
    return Scheme("bae", LAYOUT, objectives)


def reading_of(ids, rule, **options):
    """The reading of completions of one group whose gold answer is 4."""
    return read(Batch.jagged(ids, [0] * len(ids), columns={"answer": ["4"] * len(ids)}), rule, VOCABULARY, **options)


def warnings_of(ids, rule=None, **options):
    rule = rule or scheme()
    return setup_warnings(reading_of(ids, rule, **options), rule)


def test_other_tags_than_the_layouts():
    """Different completions that all end at one length were cut off there; equal ones, or ones of many lengths, were not."""
    assert list(warnings_of([PLAN, PLAN, []])) == ["tags"], "what follows from it is not said again"
    assert "2 malformed completions ended inside " in warnings_of([[0, 4], [0, 4], PLAN])["tags"]
    most_of_one_length = [[4, 4, 5], [4, 5, 4], [5, 4, 4], [4, 5]]
    assert "3 malformed completions with different texts are 3 tokens long, " in warnings_of(most_of_one_length)["tags"]
    assert "2 malformed completions with different texts are " in warnings_of([[4, 5], [5, 4]])["tags"]
    for ids in ([[0, 4], PLAN, PLAN], [[4, 4, 5]] * 2, [[4], [4, 5], [4, 5, 4], [4, 5, 4, 4]]):
        assert "cut off" not in warnings_of(ids)["tags"]


def test_leaving_a_block_out_costs_nothing_without_if_missing():
    for ids, counts in (
        ([WHOLE, SILENT, []], ["1 of 3 completions leave out"]),
        ([WHOLE, VAGUE], ["1 of 2 completions write"]),
        ([WHOLE, SILENT, VAGUE], ["1 of 3 completions leave out", "1 of 3 completions write"]),
    ):
        ((name, sentence),) = warnings_of(ids).items()
        assert name == "free/brier"
        assert re.findall(r"\d of \d completions (?:leave out|write)", sentence) == counts
        assert warnings_of(ids, scheme(if_missing=-1.0)) == {}


def test_parts_of_one_reward_that_are_left_out_have_one_sentence():
    layout = Layout({name: [name] for name in ("answer", "sure", "plan")})

    def objective(name):
        return Objective(lambda blocks: [1.0 if block.get(name) else None for block in blocks], name, name=f"own.{name}")

    parts = [objective(name) for name in layout.names]
    rule = Scheme("bae", layout, parts)
    watch, completions = Watch(rule), [[0, 4, 1], [2, 6, 3], [7, 4, 8]]
    ((sentence,), _) = watch.of_reading(reading_of(completions, rule))
    assert sentence.startswith("Up to 2 of 3 completions lack a block (answer, sure, plan)")
    assert watch.of_reading(reading_of([*completions, [0, 4, 1]], rule))[0] == [], "neither again, nor of a part alone"
    garbled = {"own.all": Reward.of([1.0, 1.0, None], status=[Status.OK, Status.OK, Status.UNPARSABLE])}
    rule = Scheme("bae", layout, [*parts, Objective(paying(), layout.names, name="own.all")], recorded=frozenset(garbled))
    own = warnings_of(completions, rule, recorded=garbled)
    assert own.pop("free/own.all").startswith("1 of 3 completions write answer and sure and plan "), "it is not left out"
    assert own == {"free/own": sentence}


def paying(*values):
    def mine(blocks):
        return list(values)

    return mine


def with_function(function, **changes):
    return Scheme("bae", LAYOUT, [Objective(function, "report", name="mine", **changes)])


@pytest.mark.parametrize(
    ("values", "if_missing", "count", "numbers", "first"),
    [
        ((0.5, -1.0, -1.0), None, 2, "-1", 1),
        ((0.5, 0, None), None, 1, "0", 1),
        ((0.5, -1.0, -0.25), -1.0, 1, "-0.25", 2),
        ((0.5, -2.0, 7.5), 0.0, 2, "-2 to 7.5", 1),
        ((0.5, -1.0, -1.0), -1.0, 0, "", 0),
        ((0.5, None, -1.0), -1.0, 0, "", 0),
        ((0.5, None, None), 0.0, 0, "", 0),
    ],
)
def test_a_number_for_a_block_that_is_not_there(values, if_missing, count, numbers, first):
    warnings = warnings_of([WHOLE, SILENT, SILENT], with_function(paying(*values), if_missing=if_missing))
    assert list(warnings) == (["unused/mine"] if count else [])
    if count:
        where = rf"{numbers} \(from its reward function\)\. The first of these completions is completion {first}\."
        assert re.search(rf"{count} of 3 completions have no block .*: {where}", warnings["unused/mine"])
        # Different numbers: none of them is right for every completion that lacks the block.
        assert ("set if_missing=" in warnings["unused/mine"]) == ("to" not in numbers)


def warnings_of_recorded(ids, reward):
    rule = Scheme("bae", LAYOUT, [Objective(paying(), "report", name="mine")], recorded=frozenset({"mine"}))
    return warnings_of(ids, rule, recorded={"mine": reward})


def test_of_a_recorded_reward_is_said_where_its_number_is_from_and_nothing_of_what_is_not_kept():
    sentence = warnings_of_recorded([WHOLE, SILENT], Reward.of([1.0, 0.0]))["unused/mine"]
    assert (
        "1 of 2 completions have no block report, but have a reward of objective 'mine': 0 (recorded in the file)."
        in sentence
    )
    # A completion that broke its check counts as 0, which is the alarm of another metric; a block is left out as ever.
    assert warnings_of_recorded([WHOLE, WHOLE], Reward.of([0.0, 0.0], status=[Status.BROKE] * 2)) == {}
    some = Reward.of([0.0, None], status=[Status.BROKE, Status.ABSENT])
    assert list(warnings_of_recorded([WHOLE, SILENT], some)) == ["free/mine"]
    rule = with_function(paying(0.5, -1.0))  # what is not kept is not said
    reading = reading_of([WHOLE, SILENT], rule)
    assert list(setup_warnings(Reading.unpack(reading.pack(), rule), rule)) == ["free/mine"]


def test_an_objective_that_scores_nobody():
    rule = Scheme("bae", LAYOUT, [Objective(paying(None, None), "solution", if_missing=0.0)])
    assert "'mine' has no reward for any of 2 completions (2 absent)" in warnings_of([WHOLE, SILENT], rule)["scored/mine"]
    for status in (Status.ERROR, Status.TIMEOUT):
        failed = Reward.of([None, None], status=[status] * 2)
        assert "The check itself failed" in warnings_of_recorded([WHOLE, WHOLE], failed)["scored/mine"]


def test_an_adaptive_lambda_that_is_zero_for_most_completions():
    critic = Scheme("gae", LAYOUT, [Objective("correct", "solution")], options={"length_adaptive_alpha": 0.2})
    five, six = [0, *[4] * 3, 1], [0, *[4] * 4, 1]  # 1 - 1 / (.2 * 5) = 0, and 1/6
    assert warnings_of([five, five, [4], six, []], critic)["lambda"].startswith(
        "length_adaptive_alpha=0.2 sets GAE's lambda to 0 in completions of at most 5 tokens. "
        "These are 3 of 4 completions (median length: 5 tokens). "
    )
    assert "lambda" not in warnings_of([five, six], critic)


@pytest.mark.parametrize(
    ("metric", "share", "calm", "problem"),
    [
        ("malformed", 0.51, 0.5, "of the completions are malformed"),
        ("brier/reward_absent", 0.51, 0.5, "of the completions have no reward 'brier'"),
        ("unanimous", 0.91, 0.9, "of the groups taught nothing"),
        ("brier/dead_strata", 0.96, 0.95, "of the sets of completions that 'brier' compares (strata) give no credit"),
        ("no_signal", 1.0, 0.0, "of the batches taught nothing"),
    ],
)
def test_what_lasts_for_three_batches_is_said_with_its_cause(metric, share, calm, problem):
    key = f"credit/{metric}"
    beyond = [{"step": step, key: share} for step in range(4)]
    assert list(habits(beyond)) == [key]
    assert habits(beyond)[key].startswith(f"In 4 batches in a row (steps 0 to 3): {share:.0%}".replace("%", " %"))
    assert problem in habits(beyond)[key]
    assert f"): {100 * share:.0f} % of" in habits([*beyond, {"step": 4, key: share + 1e-4}])[key], "not 51 % to 51 %"
    assert habits(beyond[:2]) == {}
    assert habits([*beyond[:2], {"step": 2, key: calm}, *beyond[2:]]) == {}, "two, a calm one, two"
    assert habits([*beyond[:2], {"step": 2}, *beyond[2:]]) == {}, "a batch that does not say ends them too"


def test_a_training_is_told_once_and_again_of_something_else():
    # The longest run of batches is reported, and the first of two equally long ones.
    shares = [0.9] * 4 + [0.1] + [0.8] * 5 + [0.1] + [0.7] * 5
    (sentence,) = habits([{"step": step, "credit/malformed": share} for step, share in enumerate(shares)]).values()
    assert sentence.startswith("In 5 batches in a row (steps 5 to 9): 80 % of")
    watch = Watch(scheme())
    told = [watch.of_batch({"credit/malformed": 0.9}, step=step) for step in range(6)]
    assert [len(sentences) for sentences in told] == [0, 0, 1, 0, 0, 0]
    assert "(steps 0 to 2): 90 %" in told[2][0]
    both = {"credit/malformed": 0.9, "credit/unanimous": 1.0}
    assert [len(watch.of_batch(both, step=step)) for step in range(6, 10)] == [0, 0, 1, 0]


def test_a_remark_silences_the_habits_that_follow_from_it_and_no_others():
    for remark, rule, habit_names in (
        ("free/brier", scheme(), ["mine"]),
        ("scored/mine", with_function(paying(None, None, None)), ["brier"]),
        ("unused/mine", with_function(paying(0.5, -1.0, -1.0)), ["brier", "mine"]),
    ):
        watch, ids = Watch(rule), [WHOLE, SILENT, SILENT]
        assert list(warnings_of(ids, rule)) == [remark]
        assert len(watch.of_reading(reading_of(ids, rule))[0]) == 1
        absent = {f"credit/{name}/reward_absent": 1.0 for name in ("brier", "mine")}
        sentences = "".join(sentence for step in range(4) for sentence in watch.of_batch(absent, step=step))
        assert [name for name in ("brier", "mine") if f"'{name}'" in sentences] == habit_names


def test_what_a_remark_said_is_not_said_again_as_a_habit_but_a_remark_on_few_silences_no_habit_of_most():
    """Half of the first batch leaves the block out, which is no alarm, then two of three, then all."""
    watch = Watch(scheme())
    sentences, unscored = watch.of_reading(reading_of([PLAN, PLAN], scheme()))
    assert (len(sentences), unscored) == (1, True)
    assert [watch.of_batch({"credit/malformed": 1.0}, step=step) for step in range(4)] == [[]] * 4
    watch = Watch(scheme())
    for completions, count in (([WHOLE, SILENT], 1), ([WHOLE, SILENT, SILENT], 0)):
        assert len(watch.of_reading(reading_of(completions, scheme()))[0]) == count
    assert [len(watch.of_batch({"credit/brier/reward_absent": 1.0}, step=step)) for step in range(4)] == [0, 0, 1, 0]


def test_a_later_element_of_a_list_may_be_absent_and_its_first_may_not():
    """Texts with one item each: a second item without rewards is no fault of the reward, a first one without rewards is."""
    layout = Layout(["items[*].price"], segmenter="json", most=2)
    lists = Scheme.preset("bae", layout, objectives=[Objective("equals", each="*")])
    first, later = lists.names
    vocabulary = Vocabulary((b'{"items": [', b'{"price": ', b"4", b"5", b"}", b"]}"))

    def watched(watch, *ids):
        gold = {"answer": ['{"items": [{"price": 4}]}'] * 2}
        return watch.of_reading(read(Batch.jagged(ids, [0, 0], columns=gold), lists, vocabulary))

    watch = Watch(lists)
    assert watched(watch, [0, 1, 2, 4, 5], [0, 1, 3, 4, 5]) == ([], False)
    absent = {f"credit/{name}/reward_absent": 1.0 for name in (first, later)}
    (repeated,) = [sentence for step in range(4) for sentence in watch.of_batch(absent, step=step)]
    assert f"'{first}'" in repeated
    sentences, unscored = watched(Watch(lists), [0, 5], [0, 5])
    assert (len(sentences), unscored) == (1, True)


def test_one_objective_that_all_earn_is_no_habit():
    """If every completion is well-formed, the format reward is unanimous and its strata are dead, as they should be."""
    tidy = {"credit/format/unanimous": 1.0, "credit/format/dead_strata": 1.0, "credit/unanimous": 0.2}
    assert habits([{"step": step, **tidy} for step in range(9)]) == {}
    split = {"credit/brier/unanimous": 0.5, "credit/brier/dead_strata": 1.0}
    assert list(habits([{"step": step, **split} for step in range(3)])) == ["credit/brier/dead_strata"]


def logged(rule, group_n):
    """The metrics of two equal completions, in groups and without any."""
    reading, batch = reading_of([WHOLE, WHOLE], rule), Batch(group_n)
    credit = credit_batch(reading, batch, rule)
    return metrics(credit, reading, rule, group_n=batch.group_n), metrics(credit, reading, rule)


def test_a_comparison_of_equal_rewards_is_not_called_too_small():
    for method, baseline, group_n, sums in (
        ("grpo", None, [0, 0], ["correct + format"]),
        ("rlcr", None, [0, 0], ["correct + format"]),
        ("bae", "batch", [0, 1], []),  # one stratum, the batch
    ):
        rule = Scheme(method, LAYOUT, [Objective(name, "solution", baseline=baseline) for name in ("correct", "format")])
        line, _ = logged(rule, group_n)
        agreed = {key for key in line if key.endswith("/unanimous") and line[key] == 1.0} - {"credit/unanimous"}
        assert agreed == {f"credit/{name}/unanimous" for name in ("correct", "format", *sums)}
        assert not [key for key in habits([{"step": step, **line} for step in range(3)]) if key.endswith("dead_strata")]


def test_an_objective_of_another_baseline_hides_none_of_the_others():
    first, second = Objective("correct", "solution", baseline="batch", if_missing=0.0), Objective("format", "solution")
    for objectives in ([first, second], [second, first]):
        line, groupless = logged(Scheme("bae", LAYOUT, objectives), [0, 0])
        # The first is unanimous in the batch, so nothing is said of groups as a whole.
        agreed = {"credit/format/unanimous": 1.0, "credit/correct/unanimous": 1.0}
        assert {name: line[name] for name in line if name.endswith("unanimous")} == agreed
        assert "credit/format/unanimous" not in groupless, "without groups nobody agrees"


def test_a_price_far_below_every_reward_is_said():
    """Brier scores lie in [-1, 0], so a price below -10 is too large; under `scale: std` any price is divided."""
    priced = scheme(Objective("format", "report"), if_missing=-1.0)  # another objective charges, so it is not for free
    assert warnings_of([WHOLE, SILENT], priced) == warnings_of([WHOLE, []]) == warnings_of([]) == {}
    for price, scale, warns in ((-1.0, None, False), (-10.0, None, False), (-11.0, None, True), (-1e6, "std", False)):
        rule = scheme(baseline="outcome", if_missing=price, scale=scale)
        assert ("dear/brier" in warnings_of([WHOLE, SILENT], rule)) is warns
