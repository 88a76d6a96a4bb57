"""The road from a batch to advantages: sizes, gathers, the final mask, metrics, and what counts as a signal."""

import math
from dataclasses import replace

import pandas as pd
import pytest
import torch

from credit_batches import scores_of
from helpers import double
from spanwise import Credit, Layout, Objective, Scheme, Spans, Status, Vocabulary
from spanwise.batch import Batch, Steps, by_turn, pad_tokens
from spanwise.credit.spread import restrict
from spanwise.credit_metrics import dead_strata
from spanwise.errors import AlignmentError, DataError, DivergedError, RecipeError
from spanwise.pipeline import Reading, advantages, credit_batch, metrics, read

LAYOUT = Layout({"a": ["x"], "b": ["y"]})
TWO = Scheme("bae", LAYOUT, [Objective("format", "a", name="c"), Objective("format", "b", name="q")])
WHOLE = Layout({"b": []})


def scheme_of(method="bae", per="block", **objective):
    return Scheme(method, WHOLE, [Objective("format", "b", name="r", **objective)], per)


ONE = scheme_of()
PRICED = scheme_of(baseline="group", if_missing=-1.0)


def spans(block_nt):
    block = torch.tensor(block_nt, dtype=torch.int8)
    n = len(block)
    return Spans(("a", "b"), torch.tensor([[0, 2]] * n), torch.tensor([[2, 3]] * n), block, torch.arange(n))


def test_a_table_of_all_ranks_reads_back_as_it_was_written():
    nan = math.nan
    by_outcome_nmo = double([[[nan, nan], [-0.81, -0.01]], [[nan, nan], [nan, nan]]])
    scores = scores_of([[1.0, -0.01], [nan, nan]], ("c", "q"))
    scores = replace(scores, by_outcome_nmo=by_outcome_nmo, stated_nm=double([[nan, 0.9], [nan, nan]]))
    scores.status_nm[1, 1] = Status.UNPARSABLE
    its_spans = spans([[0, 0, 1], [0, 0, -1]])
    table = Reading(scores, its_spans.length_nk, its_spans.fault_n).pack()
    back = Reading.unpack(torch.cat([table, table]), TWO)
    assert back.scores.reward_nm[:2].flatten().tolist() == pytest.approx([1.0, -0.01, nan, nan], nan_ok=True)
    assert back.scores.status_nm[:2].tolist() == [[0, 0], [1, 2]]
    assert back.scores.by_outcome_nmo[2, 1].tolist() == pytest.approx([-0.81, -0.01])
    assert back.scores.stated_nm[2].tolist() == pytest.approx([nan, 0.9], nan_ok=True)
    assert back.length_nk.tolist() == [[2, 1], [2, 0]] * 2
    assert back.fault_n.tolist() == [0, 1, 0, 1]
    assert back.take(slice(1, 3)).fault_n.tolist() == [1, 0]
    with pytest.raises(AlignmentError, match=r"13 columns, .* need 7"):
        Reading.unpack(table, ONE)


def even(text, *, columns):
    return [None if value is None else value % 2 == 0 for value in columns["turns"]]


def test_outcomes_travel_with_the_table():
    objective = Objective("format", "b", name="q", given=["c", even], baseline="outcome")
    scheme = Scheme("bae", LAYOUT, [Objective("format", "a", name="c"), objective])
    vocabulary = Vocabulary((b"<x>", b"</x>", b"<y>", b"</y>", b"1"))
    batch = Batch.jagged([[0, 4, 1, 2, 4, 3]] * 3, [0, 0, 0], columns={"turns": [2, 3, None]})
    reading = read(batch, scheme, vocabulary)
    back = Reading.unpack(reading.pack(), scheme)
    assert scheme.outcome_names == (f"{__name__}:even",)
    for part in (reading.take([1]), Reading.joined([reading, reading])):  # their rows are not those of the text
        assert (part.spans, part.text) == (None, None)
    assert back.scores.outcome(f"{__name__}:even").tolist() == pytest.approx([1.0, 0.0, math.nan], nan_ok=True)
    credit = credit_batch(back, batch, scheme)
    assert metrics(credit, back, scheme)["credit/q/coarser"] == 1.0  # nobody shares both outcomes with another
    with_one = Scheme("bae", LAYOUT, [scheme.objectives[0], replace(objective, given=("c",))])
    assert "credit/q/coarser" not in metrics(credit_batch(reading, batch, with_one), reading, with_one)  # nothing is coarser


def reading_of(reward_n, present_nk, fault_n):
    return Reading(scores_of([[r] for r in reward_n], ("r",)), torch.tensor(present_nk).long(), torch.tensor(fault_n))


def test_metrics_of_a_block_nobody_has_and_a_token_alone_is_a_signal():
    credit = Credit(torch.zeros(2, 1).double(), torch.zeros(2).double(), torch.tensor([0]), torch.tensor([2]))
    logged = metrics(credit, reading_of([math.nan] * 2, [[0], [0]], [1, 1]), ONE)
    assert math.isnan(logged["credit/b/mean_abs"])
    assert [logged[f"credit/{name}"] for name in ("no_signal", "malformed", "r/reward_absent")] == [1, 1, 1]
    assert pad_tokens([])[0].shape == (0, 0)
    nothing = (torch.zeros(1, 1).double(), torch.zeros(1).double(), torch.tensor([0]), torch.tensor([0]))
    assert not Credit(*nothing, token_nt=torch.zeros(1, 3)).has_signal
    assert Credit(*nothing, token_nt=torch.tensor([[0.0, 0.1, -0.1]])).has_signal  # though their mean is 0


def reading_of_lengths(reward_n, lengths):
    block_nt = torch.tensor([[0] * length + [-1] * (max(lengths) - length) for length in lengths], dtype=torch.int8)
    its_spans = Spans.of_blocks(("b",), block_nt)
    return replace(reading_of(reward_n, its_spans.length_nk.tolist(), [0] * len(lengths)), spans=its_spans), its_spans


@pytest.mark.parametrize("method", ["bae", "reinforce++"])
def test_a_share_of_the_batch_is_the_token_mean(method):
    scheme = scheme_of(method, "batch")
    reading, its_spans = reading_of_lengths([1.0, 0.0, 3.0, 0.0], [1, 2, 5, 0])
    credit = credit_batch(reading, Batch([0, 0, 1, 1], mask_nt=its_spans.block_nt >= 0), scheme)
    adv_nt = advantages(credit, its_spans, scheme)
    per_one = advantages(credit, its_spans, scheme_of(method, 1))
    # 8 tokens, 4 completions: the mean over completions of the sum over tokens of A / 2 is the mean over tokens of A.
    assert torch.allclose(adv_nt.sum() / 4, per_one.sum() / 8)
    assert torch.allclose(adv_nt, per_one / 2)
    if method == "bae":
        assert adv_nt[:, 0].tolist() == [0.25, -0.25, 0.75, 0.0]
    # The rows that a rank holds, and rows that the trainer leaves out, keep the batch's share.
    part = Spans.of_blocks(("b",), its_spans.block_nt[1:3])
    assert torch.equal(advantages(credit.take(slice(1, 3)), part, scheme), adv_nt[1:3])
    mask_nt = its_spans.block_nt >= 0
    mask_nt[2] = False
    kept_nt = advantages(credit, its_spans, scheme, mask_nt=mask_nt)
    assert torch.equal(kept_nt[:2], adv_nt[:2])
    assert not kept_nt[2].any()


def test_an_advantage_that_its_dtype_cannot_hold_is_refused_and_a_sum_of_them_is_not():
    reading, its_spans = reading_of_lengths([0.0, 1.0], [2, 2])
    credit = credit_batch(reading, Batch([0, 0]), ONE)  # -.5 and .5, each shared by two tokens
    large, huge = (replace(credit, block_nk=credit.block_nk * factor) for factor in (1.2e39, 4e40))
    torch.testing.assert_close(advantages(large, its_spans, ONE), torch.tensor([[-3e38] * 2, [3e38] * 2]))
    with pytest.raises(DivergedError, match="completion 0 of 2 at token 0"):
        advantages(huge, its_spans, ONE)
    assert advantages(huge, its_spans, ONE, dtype=torch.float64)[1].tolist() == [1e40, 1e40]
    with pytest.raises(RecipeError, match="mean_length_n"):  # a share of the batch needs the batch
        advantages(replace(credit, mean_length_n=None), its_spans, scheme_of(per="batch"))


def test_dead_strata_are_counted_where_nobody_moves():
    reading, batch = reading_of([1.0, 0.0, 1.0, 1.0, 0.5], [[1]] * 5, [0] * 5), Batch([7, 7, -3, -3, 2])
    credit = credit_batch(reading, batch, ONE)
    logged = metrics(credit, reading, ONE, group_n=batch.group_n)
    assert logged["credit/r/unanimous"] == logged["credit/unanimous"] == 0.5  # one group in two: nobody agrees alone
    assert credit.singleton_m.tolist() == [1]
    uncompared, rloo = scheme_of(baseline="none"), scheme_of("rloo", "completion")
    for scheme, dead in ((ONE, {"r": (3, 2)}), (uncompared, {}), (rloo, {"r": (3, 2)})):
        assert dead_strata(credit_batch(reading, batch, scheme), scheme) == dead


@pytest.mark.parametrize(
    ("method", "scope", "rewards", "rollouts", "share"),
    [
        ("rloo", None, [0.0, 1.0, 1.0, 1.0], [0, 0, 1, 1], 1.0),  # both rollouts end with 1
        ("rloo", None, [1.0, 0.0, 0.0, 1.0], [0, 0, 1, 1], 0.0),
        ("rloo", "turn", [1.0, 0.0, 0.0, 1.0], [0, 0, 1, 1], 1.0),  # both sums are 1
        ("rloo", "turn", [1.0, 1.0, 1.0], [0, 0, 1], 0.0),  # the sums are 2 and 1
        ("bae", "turn", [1.0, 0.0, 0.0, 1.0], [0, 0, 1, 1], 0.0),  # turns differ from the mean 1/2 of their rollouts
        ("bae", "turn", [1.0, 1.0, 1.0], [0, 0, 1], 1.0),
        ("bae", "turn", [1.0, 0.0], [0, 0], math.nan),  # one rollout has nobody to agree with
        ("gigpo", "rollout", [1.0, 0.0, 0.0], [0, 0, 1], 1.0),
        ("gigpo", None, [1.0, 0.0, 0.0], [0, 0, 1], 0.0),
    ],
)
def test_groups_of_turns_are_unanimous_in_what_the_method_compares(method, scope, rewards, rollouts, share):
    reading = reading_of(rewards, [[1]] * len(rewards), [0] * len(rewards))
    scheme = scheme_of(method, "completion", scope=scope)
    steps = Steps(torch.tensor(rollouts), torch.arange(len(rewards)), ["s"] * len(rewards))
    batch = Batch([7] * len(rewards), steps=steps)
    logged = metrics(credit_batch(reading, batch, scheme), reading, scheme, group_n=batch.group_n, steps=steps)
    assert logged["credit/r/unanimous"] == pytest.approx(share, nan_ok=True)


def test_a_group_in_which_a_missing_reward_has_a_price_is_neither_unanimous_nor_dead():
    # By hand: the group [1, 1, -1 for the block that is left out] credits the last completion with -1 - 1 = -2.
    reading = reading_of([1.0, 1.0, math.nan], [[1], [1], [0]], [0] * 3)
    credit = credit_batch(reading, Batch([7] * 3), PRICED)
    assert credit.stop_n.tolist() == [0.0, 0.0, -2.0]
    assert metrics(credit, reading, PRICED, group_n=torch.tensor([7] * 3))["credit/unanimous"] == 0.0
    # By hand: 1 is alone with its prompt and gets 0; what left the block out stands for -1, and stopping pays -1 - 1 = -2.
    reading = reading_of([1.0, math.nan], [[1], [0]], [0] * 2)
    credit = credit_batch(reading, Batch([7, 7]), PRICED)
    assert (credit.block_nk.tolist(), credit.stop_n.tolist()) == ([[0.0], [0.0]], [0.0, -2.0])
    assert dead_strata(credit, PRICED) == {"r": (1, 0)}
    logged = metrics(credit, reading, PRICED)
    assert [logged[f"credit/{name}"] for name in ("r/dead_strata", "no_signal", "stop/mean_abs")] == [0.0, 0.0, 1.0]
    # The charge is of its own stratum: the completions of the other prompt are equal, so theirs is dead.
    assert dead_strata(credit_batch(reading.take([0, 1, 0, 0]), Batch([7, 7, 8, 8]), PRICED), PRICED) == {"r": (2, 1)}


def test_the_price_of_a_missing_reward_is_that_of_a_whole_rollout_where_steps_are_compared():
    """Both rollouts get 1 in their last turn, and the first turns cost nothing; without the reward one rollout has -1."""
    scheme = scheme_of("gigpo", "completion", if_missing=-1.0)
    steps = Steps(torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 0, 1]), ["s", "t"] * 2)
    for last_reward, share in ((1.0, 1.0), (math.nan, 0.0)):
        reading = reading_of([math.nan, 1.0, math.nan, last_reward], [[1]] * 4, [0] * 4)
        credit = credit_batch(reading, Batch([7] * 4, steps=steps), scheme)
        assert bool((credit.block_nk == 0).all()) == bool(share)
        assert metrics(credit, reading, scheme, group_n=torch.tensor([7] * 4), steps=steps)["credit/r/unanimous"] == share


def test_a_completion_without_a_reward_takes_no_part_in_a_token_method():
    scheme = replace(scheme_of("reinforce++", "completion"), options={"whiten": False})
    reading, its_spans = reading_of_lengths([math.nan, 2.0], [2, 2])
    credit = credit_batch(reading, Batch([0, 0], torch.zeros(2, 2).long(), torch.ones(2, 2).bool()), scheme)
    assert credit.token_nt.tolist() == [[0.0, 0.0], [2.0, 2.0]]
    assert advantages(credit, its_spans, scheme).tolist() == [[0.0, 0.0], [1.0, 1.0]]


def test_a_method_with_a_critic_has_no_strata_that_could_be_dead():
    """A new critic expects 0 everywhere, so wrong answers get exactly 0, and nothing is said about sizes of groups."""
    scheme = scheme_of("gae", "completion")
    reading, _ = reading_of_lengths([0.0, 0.0], [2, 2])
    batch = Batch([0, 0], torch.zeros(2, 2).long(), torch.ones(2, 2).bool(), value_nt=torch.zeros(2, 2))
    credit = credit_batch(reading, batch, scheme)
    logged = metrics(credit, reading, scheme, group_n=batch.group_n)
    assert logged["credit/no_signal"] == 1.0
    assert "credit/r/dead_strata" not in logged
    assert dead_strata(credit, scheme, group_n=batch.group_n) == {}  # as `spanwise credit` asks


def test_sentences(unchecked_shapes):
    with pytest.raises(AlignmentError, match=r"mask_nt has the shape \(1, 3\), which does not fit 2 group ids"):
        Batch([0, 1], mask_nt=torch.ones(1, 3))
    with pytest.raises(AlignmentError, match="Column 'answer' has 1 values for 2 completions"):
        Batch([0, 1], columns={"answer": ["4"]})
    with pytest.raises(AlignmentError, match="Completion 1 has 1 tokens, but its tool mask has 2 values"):
        Batch.jagged([[1], [2]], [0, 0], sampled=[[1], [1, 0]])
    with pytest.raises(RecipeError, match="no token ids or no mask"):
        read(Batch([0]), ONE, Vocabulary((b"a",)))
    with pytest.raises(AlignmentError, match=r"2 completions .* 3 group ids"):
        credit_batch(reading_of([1.0, 0.0], [[1], [1]], [0, 0]), Batch([0, 0, 0]), ONE)
    with pytest.raises(RecipeError, match="Method 'sae' needs log-probabilities"):
        credit_batch(reading_of([1.0], [[1]], [0]), Batch([0]), scheme_of("sae"))
    gathered = reading_of([1.0], [[1]], [0])
    with pytest.raises(DataError, match="spans is None"):
        advantages(credit_batch(gathered, Batch([0]), ONE), gathered.spans, ONE)
    with pytest.raises(AlignmentError, match="3 tokens wide, but the trainer's mask is only 2 wide"):
        restrict(spans([[0, 0, 1]]), torch.ones(1, 2).bool())
    with pytest.raises(AlignmentError, match="int64"):
        restrict(spans([[0, 0, 1]]), torch.ones(1, 3).long())


def test_values_come_one_by_one_or_one_per_stream(unchecked_shapes):
    ids, mask = torch.zeros(2, 3).long(), torch.ones(2, 3).bool()
    for shape in ((2, 3), (2, 3, 1), (2, 3, 4)):
        assert "value_nt" in Batch([0, 0], ids, mask, value_nt=torch.zeros(shape)).provides
    for shape in ((2,), (2, 4), (3, 3), (2, 4, 2), (2, 3, 1, 1)):
        with pytest.raises(AlignmentError, match=r"value_nt .* does not fit 2 group ids\. The token ids have the shape"):
            Batch([0, 0], ids, mask, value_nt=torch.zeros(shape))
    for shape in ((2,), (2, 4)):
        assert "bootstrap_n" in Batch([0, 0], ids, mask, bootstrap_n=torch.zeros(shape)).provides
    for shape in ((3,), (1, 2), (2, 1, 1)):
        with pytest.raises(AlignmentError, match=r"bootstrap_n .* does not fit 2 group ids"):
            Batch([0, 0], ids, mask, bootstrap_n=torch.zeros(shape))
    with pytest.raises(AlignmentError, match=r"logp_nt .* does not fit"):
        Batch([0, 0], ids, mask, logp_nt=torch.zeros(2, 3, 1))


def test_values_and_what_comes_after_go_with_their_turns(unchecked_shapes):
    ids, sampled = [[5, 6, 7, 8], [9]], [[1, 1, 0, 1], [1]]
    value_nts = torch.arange(16.0).reshape(2, 4, 2)
    more = {"value_nt": value_nts, "bootstrap_n": torch.tensor([[0.5, 0.25], [0.0, 2.0]]), "logp_nt": value_nts[..., 1]}
    about = {"columns": {"answer": ["4", "5"], "kept": [7, 8]}, "extras": {"state": "s"}}
    whole = Batch.jagged(ids, [0, 0], sampled=sampled, **more, **about)
    turns, _ = by_turn(whole, columns={"answer": ["4", "5", "6"]}, anchor_s=["door", "key", "door"])
    assert (turns.columns, turns.extras) == ({"answer": ["4", "5", "6"], "kept": [7, 7, 8]}, {"state": "s"})
    shuffled = pd.Series(["4", "5"], index=[1, 0])  # pandas looks a row up by its label, but a column goes by places
    assert by_turn(replace(whole, columns={"answer": shuffled}))[0].columns == {"answer": ["4", "4", "5"]}
    assert turns.steps.anchor_s == ["door", "key", "door"]
    assert turns.logp_nt.tolist() == [[1, 3], [7, 0], [9, 0]]
    assert turns.value_nt.tolist() == [[[0, 1], [2, 3]], [[6, 7], [0, 0]], [[8, 9], [0, 0]]]
    assert turns.bootstrap_n.tolist() == [[0, 0], [0.5, 0.25], [0, 2]]  # a turn that another one follows had ended
    alone, _ = by_turn(Batch.jagged(ids, [0, 0], sampled=sampled, bootstrap_n=torch.tensor([math.nan, 0.5])))
    assert alone.bootstrap_n.tolist() == pytest.approx([0, math.nan, 0.5], nan_ok=True)


@pytest.mark.parametrize("scope", [None, "turn"])
def test_what_counts_for_right_rollouts_only_counts_in_their_earlier_turns(scope):
    """Plans p, q, p stand in first turns, answers right, right, wrong in second ones: 1 and 0 are compared, the third is out."""
    vocabulary = Vocabulary((b"<plan>", b"p", b"q", b"</plan>", b"<answer>", b"4", b"5", b"</answer>", b"tool"))
    ids = [[0, plan, 3, 8, 4, answer, 7] for plan, answer in ((1, 5), (2, 5), (1, 6))]
    whole = Batch.jagged(ids, ["a"] * 3, sampled=[[1, 1, 1, 0, 1, 1, 1]] * 3, columns={"answer": ["4"] * 3})
    layout = Layout({"plan": ["plan"], "solution": ["answer"]})

    def is_p(blocks):
        return [None if block["plan"] is None else float(block["plan"]["plan"] == "p") for block in blocks]

    objectives = [Objective("correct", "solution"), Objective(is_p, "plan", only="correct", scope=scope)]
    scheme = Scheme("bae", layout, objectives, per="completion")
    rows, _ = by_turn(whole)
    credit = credit_batch(read(rows, scheme, vocabulary), rows, scheme).block_nk[:, 0]
    assert credit.tolist() == [0.5, 0.0, -0.5, 0.0, 0.0, 0.0]
    if scope is None:  # the same as without turns
        assert credit_batch(read(whole, scheme, vocabulary), whole, scheme).block_nk[:, 0].tolist() == [0.5, -0.5, 0.0]


JUDGED = Layout({"guess": ["answer"], "confidence": ["confidence"]})
CORRECT = Objective("correct", "guess", options={"verify": "exact"})
BRIER = Objective("brier", "confidence", given="correct", baseline="group")


def judged(objectives, ids, steps):
    """The rewards of the confidences in rows of one group, and what they are credited with."""
    scheme = Scheme("bae", JUDGED, objectives)
    batch = Batch.jagged(ids, [7] * len(ids), columns={"answer": ["4"] * len(ids)}, steps=steps)
    reading = read(batch, scheme, Vocabulary((b"<answer>", b"4", b"5", b"</answer>", b"<confidence>0.9</confidence>")))
    return reading.scores.reward_nm[:, -1].tolist(), credit_batch(reading, batch, scheme).block_nk[:, 1].tolist()


@pytest.mark.parametrize(
    ("judge_scope", "rewards", "credit"),
    [
        # c is the last guess of the rollout, right or wrong: -(.9 - 1)^2 and -(.9 - 0)^2, whose mean is -.41
        (None, [-0.01, math.nan, -0.81, math.nan], [0.4, 0.0, -0.4, 0.0]),
        ("turn", [math.nan] * 4, [0.0] * 4),  # the turns with a confidence have no guess
    ],
)
def test_a_confidence_before_the_answer_is_judged_by_the_rollouts_outcome(judge_scope, rewards, credit):
    steps = Steps(torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 0, 1]))
    paid, credited = judged([replace(CORRECT, scope=judge_scope), BRIER], [[4], [0, 1, 3], [4], [0, 2, 3]], steps)
    assert paid == pytest.approx(rewards, nan_ok=True)
    assert credited == pytest.approx(credit)


def test_a_confidence_whose_judge_counts_for_some_completions_only_is_judged_there_only_in_turns_too():
    """`correct` counts where `length_ok` is 1, so a confidence elsewhere has no judge, whether or not rows are turns."""
    length_ok = Objective(lambda blocks: [1.0, 0.0, 1.0], "guess", name="length_ok")
    objectives = [length_ok, replace(CORRECT, only="length_ok"), BRIER]
    for steps in (None, Steps(torch.arange(3), torch.zeros(3).long())):
        rewards, _ = judged(objectives, [[0, 1, 3, 4], [0, 1, 3, 4], [0, 2, 3, 4]], steps)
        assert rewards == pytest.approx([-0.01, math.nan, -0.81], nan_ok=True)


def test_a_confidence_in_turns_may_be_compared_by_other_objectives_than_its_judge():
    short = Objective(lambda blocks: [None if block["guess"] is None else 1.0 for block in blocks], "guess", name="short")
    brier = replace(BRIER, given=["correct", "short"], options={"of": "correct"}, baseline="outcome")
    rewards, _ = judged([CORRECT, short, brier], [[4], [0, 1, 3]], Steps(torch.zeros(2).long(), torch.arange(2)))
    assert rewards == pytest.approx([-0.01, math.nan], nan_ok=True)
