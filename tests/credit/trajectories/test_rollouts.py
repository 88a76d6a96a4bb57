"""Credit where rows are turns: one vote per rollout, returns of steps, against loops that know nothing of tensors."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from credit_batches import scores_of, step_batches
from helpers import NAN
from oracles import average, slow_returns
from spanwise import AlignmentError, Batch, Layout, Objective, RecipeError, Scheme, Spans, Status, Steps
from spanwise.credit import assign_turns, centred, dr_grpo, gigpo, split_turns, step_returns
from spanwise.pipeline import Reading, credit_batch, metrics
from spanwise.types import Zero

BLOCKS = ("call", "note")


def scores(columns, names):
    """Rewards by objective; None is absent, "failed" a check that died."""
    rows = list(zip(*columns, strict=True))
    by_objective = scores_of([[NAN if v in (None, "failed") else v for v in row] for row in rows], tuple(names))
    by_objective.status_nm[torch.tensor([[v == "failed" for v in row] for row in rows])] = int(Status.ERROR)
    return by_objective


def turns(columns, group, trajectory, step, objectives, length=None, **more):
    places = {"trajectory_s": torch.tensor(trajectory), "step_s": torch.tensor(step)}
    rule = {"objectives": objectives, "block_names": BLOCKS}
    rewards, length_sk = scores(columns, [o.name for o in objectives]), torch.tensor(length or [[2, 1]] * len(group))
    return assign_turns(rewards, torch.tensor(group), length_sk, **places, **rule, **more)


def test_the_last_turn_that_has_the_reward_speaks_for_the_rollout():
    # 0 answers at turn 1 and goes on without an answer; 1 answers twice; the answer of 2 could not be checked.
    credit = turns(
        [[1, None, 1, 0, "failed", 0]], [0] * 6, [0, 0, 1, 1, 2, 3], [0, 1, 0, 1, 0, 0], [Objective("correct", pays="call")]
    )
    assert credit.block_nk[:, 0].tolist() == pytest.approx([2 / 3, 2 / 3, -1 / 3, -1 / 3, 0.0, -1 / 3])


def test_what_no_turn_holds_is_missing_once():
    objective = Objective("correct", pays="note", if_missing=-1.0)
    # Rollout 0 never gives a note. The mean of the others is 1/2, so stopping without one costs 1.5, at its last trainable token.
    for last, stop in ((3, [0.0, -1.5, 0.0, 0.0]), (0, [-1.5, 0.0, 0.0, 0.0])):  # the second: its last turn has no token
        length = [[2, 0], [last, 0], [1, 1], [1, 1]]
        assert turns([[None, None, 1, 0]], [0] * 4, [0, 0, 1, 2], [0, 1, 0, 0], [objective], length).stop_n.tolist() == stop


def test_a_turn_pays_for_what_it_leaves_out():
    objective = Objective("format", pays="note", scope="turn", if_missing=-1.0)
    credit = turns([[1, None, 0]], [0] * 3, [0, 0, 1], [0, 1, 0], [objective], [[2, 1], [3, 0], [1, 1]])
    assert credit.block_nk[:, 1].tolist() == [0.5, 0.0, -0.5]
    assert credit.stop_n.tolist() == [0.0, -1.5, 0.0]


def test_a_turn_is_compared_by_its_own_outcome():
    def short(text, *, columns):
        """An outcome function; the test gives what it returns."""

    objective = Objective("format", pays="note", scope="turn", given=short, baseline="outcome", back_off=False)
    (name,) = objective.outcomes
    rewards, outcome_no = scores([[1, 5, 2, 7, 4, 6]], ["format"]), torch.tensor([[1.0], [0.0], [1.0], [0.0], [1.0], [1.0]])
    places = {"trajectory_s": torch.tensor([0, 0, 1, 1, 2, 2]), "step_s": torch.tensor([0, 1] * 3)}

    def credit(outcome_no):
        rule = {"objectives": [objective], "block_names": BLOCKS}
        told = replace(rewards, outcome_names=(name,), outcome_no=outcome_no.double())
        return assign_turns(told, torch.zeros(6).long(), torch.ones(6, 2).long(), **places, **rule).block_nk[:, 1].tolist()

    # Outcome 1: the rollouts' means are 1, 2 and (4 + 6) / 2, whose mean is 8/3. Outcome 0: the mean of 5 and 7.
    assert credit(outcome_no) == pytest.approx([1 - 8 / 3, -1.0, 2 - 8 / 3, 1.0, 4 - 8 / 3, 6 - 8 / 3])
    # What is known only at a later turn holds for the whole rollout: 1, 2 and 4 meet 5, 7 and 6 in the rollouts' means.
    outcome_no[::2] = NAN
    outcome_no[-1] = 0.0
    assert credit(outcome_no) == pytest.approx([reward - 12.5 / 3 for reward in (1, 5, 2, 7, 4, 6)])


def loop(rewards, group, trajectory):
    """Turn rewards, compared with the mean over the rollouts of the group of the mean over their turns."""
    compared = []
    for s, value in enumerate(rewards):
        votes = {}
        for u, other in enumerate(rewards):
            if group[u] == group[s] and other == other:
                votes.setdefault(trajectory[u], []).append(other)
        means = [average(values) for values in votes.values()]
        compared.append(value - average(means) if value == value and len(means) > 1 else 0.0)
    return compared


def ragged(seed):
    """Groups of rollouts of 1 to 6 turns, shuffled, with ids of any sign and rewards that are absent here and there."""
    generator = torch.Generator().manual_seed(seed)
    group, trajectory, step = [], [], []
    for j, (g, count) in enumerate([(0, 1), (0, 6), (0, 3), (1, 2), (1, 2), (2, 4), (3, 1), (3, 5)]):
        group += [g] * count
        trajectory += [j] * count
        step += [3 * s - 4 for s in range(count)]
    order = torch.randperm(len(group), generator=generator)
    reward = torch.rand(len(group), generator=generator).double()
    reward[torch.rand(len(group), generator=generator) < 0.2] = NAN
    return reward[order], *(torch.tensor(x)[order] for x in (group, trajectory, step))


def at_last_turns(value_j, trajectory_s, step_s):
    """The value of each rollout at its last turn, None at the others."""
    last = [int(step_s[trajectory_s == j].max()) for j in range(len(value_j))]
    return [float(value_j[j]) if last[j] == s else None for j, s in zip(trajectory_s.tolist(), step_s.tolist(), strict=True)]


def test_equal_votes_give_exactly_nothing():
    centred_s = centred(torch.full((6,), 0.1), torch.zeros(6).long(), voter_n=torch.tensor([0, 0, 0, 0, 1, 1]))
    assert centred_s.tolist() == [0.0] * 6


@pytest.mark.parametrize("seed", range(5))
def test_a_conditional_turn_reward_is_compared_where_the_outcome_agrees(seed):
    reward_s, group_s, trajectory_s, step_s = ragged(seed)
    right_j = torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0])
    correct, note = at_last_turns(right_j, trajectory_s, step_s), [None if r != r else r for r in reward_s.tolist()]
    objectives = [
        Objective("correct", pays="call"),
        Objective("format", pays="note", given="correct", baseline="outcome", scope="turn", name="note", back_off=False),
    ]
    credit = turns([correct, note], group_s.tolist(), trajectory_s.tolist(), step_s.tolist(), objectives)
    strata = [(g, float(right_j[j])) for g, j in zip(group_s.tolist(), trajectory_s.tolist(), strict=True)]
    assert credit.block_nk[:, 1].tolist() == pytest.approx(loop(reward_s.tolist(), strata, trajectory_s.tolist()), abs=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_a_completion_method_sees_rollouts(seed):
    reward_s, group_s, trajectory_s, step_s = ragged(seed)
    turn = [None if r != r else r for r in reward_s.tolist()]
    right = [float(j % 2) for j in range(8)]
    correct = at_last_turns(right, trajectory_s, step_s)
    objectives = [Objective("correct", pays=BLOCKS), Objective("format", pays=BLOCKS, scope="turn", name="turn", weight=0.5)]
    credit = turns([correct, turn], group_s.tolist(), trajectory_s.tolist(), step_s.tolist(), objectives, method="dr_grpo")
    totals, groups = [], []
    for j in range(8):
        rewards = [r for r, t in zip(turn, trajectory_s.tolist(), strict=True) if t == j and r is not None]
        totals.append(right[j] + 0.5 * sum(rewards) if rewards else NAN)
        groups.append(int(group_s[trajectory_s == j][0]))
    adv_j = dr_grpo(torch.tensor(totals, dtype=torch.float64), torch.tensor(groups))
    assert credit.block_nk.flatten().tolist() == pytest.approx(adv_j[trajectory_s].repeat_interleave(2).tolist(), abs=1e-9)


@pytest.mark.parametrize("method", ["rloo", "gdpo"])
def test_a_sum_over_turns_says_which_check_failed(method):
    """The first of two turns has no verdict, the last one does: the sum has none, for the reason of the first."""
    objective = Objective("correct", pays=BLOCKS, scope="turn")
    credit = turns([["failed", 1.0, 0.0, 1.0]], [0] * 4, [0, 0, 1, 2], [0, 1, 0, 0], [objective], method=method)
    reasons = [Zero(reason) for reason in credit.comparison.reason_nm.flatten().tolist()]
    assert reasons == [Zero.ERROR, Zero.ERROR, Zero.CREDITED, Zero.CREDITED]
    assert credit.block_nk[:2].flatten().tolist() == [0.0] * 4
    assert credit.absent_m.tolist() == [1]


def test_a_step_method_takes_rewards_where_they_stand():
    # An outcome at the end, a reward at one turn, none at the others: the returns of the paper.
    places, anchors = ([0] * 5, [0, 0, 0, 1, 1], [0, 1, 2, 0, 1]), ["a", "b", "c", "a", "b"]
    late = Objective("format", pays="call", scope="rollout", name="late", weight=2.0)
    objectives, columns = (
        [Objective("correct", pays="call"), late],
        [[None, None, 1, None, 0], [None, 0.25, None, None, None]],
    )
    # `late` of rollout 1 is absent: nothing is known of what it would have been.
    for used, rewards in ((1, [0.0, 0.0, 1.0, 0.0, 0.0]), (2, [0.0, 0.0, 1.5, 0.0, NAN])):
        expected = gigpo(torch.tensor(rewards).double(), *map(torch.tensor, places), anchors).tolist()
        credit = turns(columns[:used], *places, objectives[:used], method="gigpo", inputs={"anchor_s": anchors})
        assert credit.block_nk[:, 0].tolist() == pytest.approx(expected)
        assert used == 2 or all(expected)


@pytest.mark.parametrize("scope", [None, "turn"])
@pytest.mark.parametrize("method", ["gigpo", "dr_grpo"])
def test_a_rollout_that_never_writes_the_paid_block_pays_with_its_last_turn(method, scope):
    # Rollout 0 writes its note at the second turn and is right, rollout 1 writes none in two turns: 1 and -1, mean 0. In scope
    # turn each turn without a note pays: 0 and -2, mean -1.
    objectives = [Objective("correct", pays="note", if_missing=-1.0, scope=scope)]
    places, lengths = ([0] * 4, [0, 0, 1, 1], [0, 1, 0, 1]), [[2, 0], [2, 1], [2, 0], [2, 0]]
    steps = {"inputs": {"anchor_s": [None] * 4}, "over": "trajectories"} if method == "gigpo" else {}
    credit = turns([[None, 1, None, None]], *places, objectives, lengths, method=method, **steps)
    assert credit.block_nk.tolist() == [[0, 0], [0, 1], [0, 0], [0, 0]]
    assert credit.stop_n.tolist() == [0, 0, 0, -1]


LAYOUT = Layout({"call": ["call"], "note": ["note"]})
TWO = [
    Objective("format", pays="call", scope="turn", options={"tags": ["call"]}, name="valid"),
    Objective("format", pays="note"),
]


def test_the_road_takes_steps_and_counts_votes():
    scheme = Scheme("bae", LAYOUT, TWO)
    assert scheme.needs == {"steps"}
    steps = Steps(torch.tensor([0, 0, 1]), torch.tensor([0, 1, 0]))
    votes = scores([[1, 0, 0], [None, 1, None]], ("valid", "format"))
    reading = Reading(votes, torch.tensor([[2, 1], [1, 1], [1, 1]]), torch.zeros(3).long())
    credit = credit_batch(reading, Batch([4, 4, 4], steps=steps), scheme)
    assert credit.block_nk[:, 0].tolist() == pytest.approx([0.75, -0.25, -0.25])
    logged = metrics(credit, reading, scheme)
    assert logged["credit/format/reward_absent"] == 0.5  # of two rollouts
    assert logged["credit/valid/reward_absent"] == 0.0
    with pytest.raises(RecipeError, match="valid"):
        credit_batch(reading, Batch([4, 4, 4]), scheme)


def test_a_method_of_tokens_is_refused_on_turns_and_runs_on_whole_rollouts():
    objectives = [Objective("correct", pays="all", options={"tag": ""})]
    scheme = Scheme("reinforce++", Layout({"all": []}), objectives, per="completion")
    plain = Reading(scores([[0.0, 1.0, 1.0]], ("correct",)), torch.tensor([[2], [1], [2]]), torch.zeros(3).long())
    spans = Spans.of_blocks(["all"], torch.tensor([[0, 0], [0, -1], [0, 0]]))
    batch = Batch([0, 0, 0], torch.zeros(3, 2).long(), spans.block_nt >= 0)
    split = Steps(torch.tensor([0, 1, 0]), torch.tensor([0, 0, 1]))
    with pytest.raises(RecipeError, match=r"\[0, 2\]"):
        credit_batch(replace(plain, spans=spans), replace(batch, steps=split), scheme)
    apart = Steps(torch.tensor([0, 1, 2]), torch.tensor([5, 0, 1]))
    alone = credit_batch(replace(plain, spans=spans), replace(batch, steps=apart), scheme)
    assert torch.equal(alone.token_nt, credit_batch(replace(plain, spans=spans), batch, scheme).token_nt)


@pytest.mark.parametrize(
    ("fields", "method"),
    [({"scale": "std"}, "bae"), ({"given": "correct", "baseline": "blended"}, "bae"), ({}, "dcpo"), ({}, "gae")],
)
def test_a_scope_that_cannot_be_is_refused(fields, method):
    rule = {"pays": "all", "options": {"tag": ""}, "scope": "turn", **fields}
    with pytest.raises(RecipeError):
        Scheme(method, Layout({"all": []}), [Objective("correct", **rule)], per="completion")


def test_turns_by_id_may_touch_and_hold_tool_tokens():
    mask_nt = torch.tensor([[1, 1, 0, 1, 0], [0, 0, 1, 1, 1]]).bool()
    turn_nt = torch.tensor([[5, -3, 5, 5, -1], [-1, 2, 2, 8, 8]])
    turn_nt[0, 1] = 2  # the lower id is the earlier turn, wherever it stands
    split = split_turns(mask_nt, turn_nt)
    assert split.place_su.tolist() == [[1, -1, -1], [0, 2, 3], [1, 2, -1], [3, 4, -1]]
    assert split.row_s.tolist() == [0, 0, 1, 1]
    assert split.step_s.tolist() == [0, 1, 0, 1]
    value = torch.arange(10.0).reshape(2, 5)
    assert torch.equal(split.put(split.take(value), rows=2), torch.where(turn_nt >= 0, value, 0.0))
    with pytest.raises(AlignmentError, match="Token 1 of sequence 0"):
        split_turns(mask_nt, torch.where(turn_nt == 2, -1, turn_nt))


def test_rows_without_a_sampled_token_have_no_turn():
    split = split_turns(torch.tensor([[0, 0], [1, 0], [0, 0]]).bool())
    assert split.row_s.tolist() == [1]
    assert split.put(torch.tensor([[3.0]]), rows=3).tolist() == [[0.0, 0.0], [3.0, 0.0], [0.0, 0.0]]


@given(batch=step_batches(), gamma=st.sampled_from([0.0, 0.5, 0.95, 1.0]))
@settings(max_examples=60, deadline=None)
def test_step_returns_equal_the_slow_oracle(batch, gamma):
    expected = torch.tensor(slow_returns(batch, gamma), dtype=torch.float64)
    actual = step_returns(batch[0], *batch[2:4], gamma=gamma)
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=0, equal_nan=True)
