"""`Step`, which every engine drives: several processes get the numbers of one, and a warning is given once."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import groupby
from threading import Barrier

import pytest
import torch

from helpers import NAN, assert_close
from spanwise import AlignmentError, Batch, Credit, DataError, Layout, Objective, Scheme, Steps, Vocabulary
from spanwise.step import Ranks, Step, gather_rows, in_useful_groups, steps_of_turns, turn_rows

ANSWERS = {"answer": ["4", "4"]}
VOCABULARY = Vocabulary((b"<answer>", b"4", b"5", b"</answer>", b"<confidence>", b"0.5", b"</confidence>", b" so"))
RIGHT, WRONG, SURE = [0, 1, 3], [0, 2, 3], [4, 5, 6]
IDS = [RIGHT, RIGHT + SURE, [*WRONG, 7, *RIGHT], [7], WRONG, RIGHT + SURE, RIGHT, [7, *WRONG]]
ONE = Layout({"all": ["answer"]})
TURN = Layout({"turn": ["answer"]})
BAE = Scheme.preset("bae", Layout({"solution": ["answer"], "confidence": ["confidence"]}))
RLOO = Scheme.preset("rloo", ONE, per="completion")
GAE = Scheme.preset("gae", ONE, lam=0.5, per=1.0)
STEPS = Scheme("bae", TURN, [Objective("correct", pays="turn", scope="turn")])
ROLLOUTS = Scheme("bae", TURN, [Objective("correct", pays="turn")])


def in_two_processes(function):
    """Call a function with the ranks of each of two processes, which are threads here."""
    barrier, room = Barrier(2), {}

    def ranks(rank):
        def gather(part):
            barrier.wait()
            room[rank] = part
            barrier.wait()
            return [room[0], room[1]]

        return Ranks(rank, gather)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(function, map(ranks, range(2))))


def talk(ids, groups, **more):
    """A batch of conversations: the environment's token separates the turns of a row."""
    sampled = [[int(i != 7) for i in row] for row in ids]
    columns = {"answer": ["4"] * len(ids), "turns": [[{} for flag, _ in groupby(row) if flag] for row in sampled]}
    return Batch.jagged(ids, groups, sampled=sampled, columns=columns | more)


def step_and_reading(scheme, ids, **tables):
    """A step, and its reading of two completions of one prompt."""
    step = Step(scheme, VOCABULARY)
    return step, step.read(Batch.jagged(ids, [0, 0], columns=ANSWERS, **tables))


def finished(scheme, rows, group_n, ranks=None):
    step, ids = Step(scheme, VOCABULARY, ranks=ranks), [IDS[n] for n in rows]
    if scheme is STEPS:
        reading = step.read(talk(ids, group_n[rows]))
    else:
        batch = Batch.jagged(ids, group_n[rows], columns={"answer": ["4"] * len(rows)})
        reading = step.read(replace(batch, value_nt=torch.linspace(0, 1, 16)[batch.ids_nt].masked_fill(~batch.mask_nt, 0.0)))
    return reading, step.finish(reading)


def test_blocks_are_numbered_from_1_and_apart_for_every_turn():
    _, plain = finished(BAE, [0, 1], torch.zeros(8, dtype=torch.long))
    assert plain.blocks_nt.tolist() == [[1, 1, 1, 0, 0, 0], [1, 1, 1, 2, 2, 2]]
    # Two turns of the block "turn" with the environment's token between them.
    _, turns = finished(STEPS, [0, 2], torch.zeros(8, dtype=torch.long))
    assert turns.blocks_nt.tolist() == [[1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 2, 2, 2]]


@pytest.mark.parametrize("scheme", [BAE, GAE, STEPS], ids=["blocks", "tokens", "turns"])
@pytest.mark.parametrize("groups", [[0] * 4 + [1] * 4, [0, 0, 1, 1, 1, 0, 0, 1]], ids=["own", "across"])
def test_processes_together_have_the_numbers_of_one(scheme, groups):
    group_n = torch.tensor(groups)
    reading, whole = finished(scheme, list(range(8)), group_n)
    rows = lambda ranks: list(range(4 * ranks.rank, 4 * ranks.rank + 4))  # noqa: E731
    parts = in_two_processes(lambda ranks: finished(scheme, rows(ranks), group_n, ranks))
    width = reading.batch.mask_nt.shape[1] if reading.turns is None else reading.turns.width
    together = torch.cat([local.put(result.advantages_nt, width=width) for local, result in parts])
    assert torch.equal(together, reading.put(whole.advantages_nt))
    assert float(together.abs().sum()) > 0
    for local, result in parts:
        assert result.metrics == pytest.approx(whole.metrics, nan_ok=True)
        assert_close(local.everyone.worth_nm(scheme), reading.everyone.worth_nm(scheme), 0.0, equal_nan=True)
        for got, want in zip(result.by_completion(), whole.by_completion(), strict=True):
            assert torch.equal(got, want) if isinstance(got, torch.Tensor) else torch.equal(got.block_nk, want.block_nk)


@pytest.mark.parametrize("described", [{"turns": [[{}, {}], [{}]]}, {}], ids=["described", "by the mask alone"])
def test_a_completion_of_several_turns_is_logged_as_one(described):
    ids, sampled = [[*RIGHT, 7, *WRONG], WRONG], [[1, 1, 1, 0, 1, 1, 1], [1, 1, 1]]
    step = Step(STEPS, VOCABULARY)
    batch = Batch.jagged(ids, [0, 0], sampled=sampled, columns={**ANSWERS, **described})
    assert Step(GAE, VOCABULARY).read(batch).turns is None  # a method over tokens takes a conversation whole
    reading = step.read(batch)
    assert reading.batch.steps.trajectory_s.tolist() == [0, 0, 1]
    assert reading.everyone.worth_nm(STEPS).flatten().tolist() == [0.5, 0.0]
    assert reading.worth_nm(ROLLOUTS).flatten().tolist() == [0.0, 0.0]  # of a whole rollout, its last turn's
    result = step.finish(reading)  # votes 1/2 and 0: the baseline is 1/4
    credit, present_nk = result.by_completion()
    assert credit.block_nk.flatten().tolist() == pytest.approx([0.25, -0.25])
    assert present_nk.all()
    adv_nt = reading.put(result.advantages_nt, width=9)
    assert adv_nt[0, :3].tolist() == pytest.approx([0.125] * 3)
    assert adv_nt[:, 3].tolist() == [0.0, 0.0]
    assert not adv_nt[:, 7:].any()


def test_the_charge_for_leaving_a_block_out_is_a_completions_whose_blocks_are_apart_in_every_turn():
    """Both are right in the end: one is half sure, Brier -1/4; the other says nothing, which stands for -1 against that -1/4."""
    step = Step(BAE, VOCABULARY)
    result = step.finish(step.read(talk([RIGHT + SURE, [*WRONG, 7, *RIGHT]], [0, 0])))
    assert result.by_completion()[0].stop_n.tolist() == [0.0, -0.75]
    assert result.blocks_nt.tolist() == [[1, 1, 1, 2, 2, 2, 0], [1, 1, 1, 0, 3, 3, 3]]


def test_a_function_that_reads_what_a_turn_says_may_take_completions_too():
    def paid(completions, won):
        return won

    scheme = Scheme("bae", Layout({"turn": []}), [Objective(paid, "turn", scope="turn")])
    batch = talk([[*RIGHT, 7, *WRONG]], [0], completions=["a b"], turns=[[{"won": 1.0}, {"won": 0.0}]])
    assert turn_rows(batch, scheme)[0].columns["won"] == [1.0, 0.0]


def test_a_column_names_the_state_of_completions_of_one_turn_alone():
    batch = Batch.jagged([RIGHT, WRONG], [0, 0], columns={"anchor": ["door", "key"]})
    assert turn_rows(batch, STEPS)[0].steps.anchor_s == ["door", "key"]
    first_flags = replace(batch, mask_nt=torch.tensor([[1, 0, 1], [1, 1, 1]]).bool())
    assert turn_rows(first_flags, STEPS)[0].steps.anchor_s is None


def test_what_a_trainer_leaves_out_learns_nothing_and_another_mask_is_refused():
    tables = {"value_nt": torch.ones(2, 3), "logp_nt": torch.zeros(2, 3)}
    step, reading = step_and_reading(RLOO, [RIGHT, WRONG], **tables)
    mask_nt = torch.tensor([[1, 1, 1, 0], [0, 0, 0, 0]]).bool()
    result = step.finish(reading, mask_nt=mask_nt)
    assert result.advantages_nt.tolist() == [pytest.approx([1 / 3] * 3 + [0]), [0.0] * 4]
    assert result.spans.end_nk.tolist() == [[3], [0]]
    rollouts = step.rollouts(result, number=3, prompts=["p", "p"], columns={"answer": ("4", "4")})
    assert rollouts.batch.ids_nt.shape == rollouts.batch.mask_nt.shape == (2, 4)
    assert rollouts.batch.value_nt[0].tolist() == pytest.approx([1, 1, 1, NAN], nan_ok=True)
    assert rollouts.batch.logp_nt is None  # the method needs none
    assert (rollouts.mode, rollouts.step, rollouts.batch.columns) == ("train", 3, {"answer": ["4", "4"]})
    with pytest.raises(AlignmentError, match="Completion 0 trains on 2 tokens"):
        step.finish(reading, mask_nt=torch.tensor([[1, 1, 0], [1, 1, 1]]).bool())


@pytest.mark.parametrize(("elsewhere", "warnings"), [([1.0, 0.0], 0), ([None, None], 1)])
def test_a_reward_is_missing_if_the_completions_of_all_processes_lack_it(elsewhere, warnings):
    scheme = Scheme.preset("rloo", ONE, objectives=[Objective("environment", "all", weight=0.5)], per="completion")

    def process(ranks):
        step, columns = Step(scheme, VOCABULARY, ranks=ranks), {"environment": [[None, None], elsewhere][ranks.rank]}
        return step.finish(step.read(Batch.jagged([RIGHT, WRONG], torch.tensor([ranks.rank] * 2), columns=columns)))

    first, _ = in_two_processes(process)
    assert sum("has no reward for any of 4 " in sentence for sentence in first.warnings) == warnings


@pytest.mark.parametrize("lacking", [None, "three turns", [0, 1]], ids=["none", "a text", "numbers"])
def test_one_completion_without_its_turns_is_refused_and_not_the_turns_of_all_forgotten(lacking):
    with pytest.raises(DataError, match="Completion 1 has turns"):
        Step(BAE, VOCABULARY).read(talk([[*WRONG, 7, *RIGHT], RIGHT], [0, 0], turns=[[{}, {}], lacking]))


@pytest.mark.parametrize("column", [[3, 4], [["a"], []]], ids=["counts", "texts"])
def test_a_column_of_another_meaning_splits_no_completion(column):
    batch = Batch.jagged([RIGHT, WRONG], [0, 0], columns={**ANSWERS, "turns": column})
    assert Step(BAE, VOCABULARY).read(batch).turns is None


def test_a_batch_without_signal_is_counted_and_said_once_and_an_evaluation_is_neither():
    step, reading = step_and_reading(RLOO, [RIGHT, RIGHT])
    assert step.finish(reading, learn=False).warnings == []
    assert step.zero_batches == 0
    (sentence,) = step.finish(reading, number=7).warnings
    assert sentence.startswith("Every advantage of the batch at step 7 is zero")
    assert step.finish(reading, number=8).warnings == []
    assert step.zero_batches == 2


def test_an_evaluation_and_a_look_for_useful_groups_change_no_memory():
    step, reading = step_and_reading(Scheme.preset("ha_dw", ONE), [RIGHT, WRONG])
    memory = step.scheme.entry.estimator.state_dict
    for look in (lambda: step.finish(reading, learn=False), lambda: step.useful(reading)):
        step.finish(reading)
        before = memory()
        look()
        assert memory() == before != {}


def test_an_evaluation_uses_up_no_warning_of_the_training():
    step, reading = step_and_reading(BAE, [[7], [7]])  # no tags
    (sentence,) = step.finish(reading, learn=False).warnings
    assert step.finish(reading, learn=False).warnings == []
    assert sentence in step.finish(reading).warnings
    assert sentence not in step.finish(reading).warnings


def test_a_single_group_is_watched_for_all_but_equal_rewards():
    step, reading = step_and_reading(RLOO, [RIGHT, RIGHT])
    for warnings in (0, 0, 1):
        step.note({"credit/other/reward_absent": 1.0})
        sentences = step.finish(reading, whole_batch=False).warnings
        assert ["'other'" in sentence for sentence in sentences] == [True] * warnings


def test_what_is_noted_counts_for_the_next_training_batch_alone():
    step, reading = step_and_reading(RLOO, [RIGHT, WRONG])
    for is_noted, warnings in ((1, 0), (0, 0), (0, 0), (1, 0), (1, 0), (1, 1)):  # an alarm lasts three batches in a row
        step.note({"credit/other/reward_absent": 1.0} if is_noted else {})
        step.finish(reading, learn=False)
        assert len(step.finish(reading).warnings) == warnings


@pytest.mark.parametrize("states", [[3, 5], torch.tensor([3, 5]), torch.tensor([3, 5]).numpy()], ids=type)
def test_states_of_several_processes_are_one_list(states):
    step = Step(STEPS, VOCABULARY)
    reading = step.read(talk([RIGHT, WRONG], [0, 0]))
    reading = replace(reading, batch=replace(reading.batch, steps=replace(reading.batch.steps, anchor_s=states)))
    together = gather_rows(reading, STEPS, Ranks(1, lambda packed: [packed, (*packed[:2], (*packed[2][:2], None))]))
    assert together.gathered.batch.steps.anchor_s == [3, 5, None, None]
    assert together.here == slice(2, 4)


def test_turns_are_numbered_within_their_rollouts():
    rows_are_steps = Steps(torch.tensor([5, 5]), torch.tensor([1, 0]))
    steps = steps_of_turns(rows_are_steps, torch.tensor([0, 0, 1]), torch.tensor([0, 1, 0]), None)
    assert (steps.trajectory_s.tolist(), steps.step_s.tolist()) == ([5, 5, 5], [3, 4, 0])


@pytest.mark.parametrize(("method", "lost"), [("bae", True), ("gigpo", False)])
def test_a_higher_reward_before_the_last_turn_is_lost_only_where_one_turn_counts(method, lost):
    """Under gigpo each turn is paid by itself, also where no scope is written."""
    step = Step(Scheme(method, TURN, [Objective("correct", pays="turn")]), VOCABULARY)
    turns = [[{"anchor": 1}, {"anchor": 2}]] * 2
    result = step.finish(step.read(talk([[*RIGHT, 7, *WRONG], [*WRONG, 7, *RIGHT]], [0, 0], turns=turns)))
    assert any("an earlier turn has a higher reward 'correct'" in warning for warning in result.warnings) == lost


def test_kept_rollouts_of_turns_are_numbered_over_all_processes():
    def kept(ranks):
        step = Step(STEPS, VOCABULARY, ranks=ranks)
        result = step.finish(step.read(talk([IDS[0], IDS[2]], [0, 0])))
        return step.rollouts(result, number=1, prompts=["p"] * 3).recorded(step=1)["rollout"].to_pylist()

    assert in_two_processes(kept) == [[0, 1, 1], [2, 3, 3]]


def test_a_group_is_useful_if_one_completion_has_credit():
    none_m = torch.zeros(1).long()
    credit = Credit(torch.tensor([[0.5], [0.0], [0.0], [0.0]]), torch.zeros(4), none_m, none_m)
    assert in_useful_groups(credit, torch.tensor([3, 3, -1, -1])).tolist() == [True, True, False, False]


def test_a_reward_of_an_earlier_turn_is_logged_and_not_the_price_of_its_absence_in_the_last_turn():
    """By hand: confidence .5 and a right answer, a wrong one: -.25 and -.25; the third rollout states nothing: -1."""
    brier = Objective("brier", "confidence", given="correct", baseline="group", if_missing=-1.0)
    scheme = Scheme("bae", BAE.layout, [Objective("correct", "solution"), brier])
    own = Step(scheme, VOCABULARY).read(talk([[*SURE, 7, *RIGHT], [*SURE, 7, *WRONG], [2, 7, *RIGHT]], ["a"] * 3))
    assert own.worth_nm(scheme).tolist() == [[1.0, -0.25], [0.0, -0.25], [1.0, -1.0]]
