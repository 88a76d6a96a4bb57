"""Rewards of one's own, in our signature and in TRL's, registered or handed over."""

import functools
import math
import os
import random
import re
import threading
import time
from contextlib import nullcontext
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from helpers import NAN, assert_close
from score_small import ABSENT, CORRECT, OK, TIMEOUT, completion, rewarded, trl_reward
from spanwise import register
from spanwise.credit import METHODS
from spanwise.errors import RecipeError, RewardError
from spanwise.layout import Layout
from spanwise.objective import Objective
from spanwise.score import Reward, custom, score_all
from spanwise.score.reward import REWARDS
from spanwise.score.score import check_objectives
from spanwise.types import Status


def test_a_trl_reward_gets_prompts_completions_ids_and_every_column():
    columns = {"prompts": ["ab"], "completions": ["abc"], "completion_ids": [[1]], "answer": ["4"], "level": [2]}
    assert_close(rewarded(trl_reward, columns=columns).value_n, [6.0], 1e-12)
    with pytest.raises(RewardError, match="TRL's signature, but there are no 'completions'"):
        rewarded(trl_reward, columns={"prompts": ["ab"]})


def test_our_reward_gets_blocks_and_only_what_it_asks_for_and_may_be_a_partial():
    def level_times(blocks, level, factor=1.0):
        return [factor * rank * len(block["solution"]["answer"]) for block, rank in zip(blocks, level, strict=True)]

    text, columns = [completion("4"), completion("44")], {"level": [2, 3], "other": [0, 0], "factor": [5, 5]}
    assert rewarded(level_times, text, columns=columns, options={"factor": 10.0}).value_n.tolist() == [20.0, 60.0]
    twice = functools.partial(level_times, factor=2.0)
    assert rewarded(twice, text, columns={"level": [2, 3]}).value_n.tolist() == [4.0, 12.0]


def test_objectives_with_long_arrays_as_options_share_no_call_if_one_number_differs():
    def highest(solution_str, levels):
        return float(levels.max())

    arrays = np.zeros(2000), np.eye(1, 2000, 1000)[0]
    objectives = [Objective(highest, "solution", name=f"{n}", options={"levels": array}) for n, array in enumerate(arrays)]
    assert score_all(objectives, [completion()], columns={"answer": ["4"]}).reward_nm.tolist() == [[0.0, 1.0]]


@pytest.mark.parametrize("saved", [None, Reward.of([0.0, -1.0, 2.0, None], status=[Status.ERROR] * 4)])
def test_a_number_for_a_block_that_is_not_there_is_no_reward_and_is_kept(saved):
    text = [completion(), completion(False), completion(), completion(False)]
    objectives = [Objective(lambda blocks: [0.0, -1.0, 2.0, None], pays="solution", name="mine"), CORRECT]
    scores = score_all(objectives, text, columns={"answer": ["4"] * 4}, recorded={} if saved is None else {"mine": saved})
    assert_close(scores.reward_nm[:, 0], [0.0, NAN, 2.0, NAN], 1e-12, equal_nan=True)
    assert scores.status_nm[:, 0].tolist() == [OK, ABSENT, OK, ABSENT]
    assert_close(scores.unused_nm[:, 0], [NAN, -1.0, NAN, NAN], 1e-12, equal_nan=True)
    assert scores.unused_nm[:, 1].isnan().all()


@pytest.mark.parametrize(
    "returned",
    [
        [math.inf, 1.0], [0.0, b"1"], [[1.0], [2.0]], [1.0, torch.zeros(2)], [1.0, 10**400], [1.0, Decimal("NaN")],
        Reward.of([1.0]), None,
    ],
)  # fmt: skip
def test_what_is_no_reward_is_refused(returned):
    with pytest.raises(RewardError):
        rewarded(lambda blocks: returned, [completion()] * 2)


@pytest.mark.parametrize(
    "returned",
    [
        [True, np.bool_(False)], (np.float32(1), np.int64(0)), [Decimal(1), Fraction(0)], [torch.tensor(1.0), torch.tensor(0)],
        torch.tensor([1.0, 0.0], requires_grad=True), torch.tensor([1, 0], dtype=torch.bfloat16),
        np.array([1, 0], dtype=np.int8), np.array([True, False]),
    ],
)  # fmt: skip
def test_every_kind_of_number_is_a_reward(returned):
    assert rewarded(lambda blocks: returned, [completion()] * 2).value_n.tolist() == [1.0, 0.0]


def test_a_reward_that_ends_the_process_is_named_and_its_error_chained():
    def ends(blocks):
        raise SystemExit(0)

    line = ends.__code__.co_firstlineno + 1
    with pytest.raises(RewardError, match=f"'ends'.*SystemExit: 0.*{__file__}, line {line}") as caught:
        rewarded(ends)
    assert isinstance(caught.value.__cause__, SystemExit)


def test_parameters_by_position_alone_are_refused_before_anything_runs_and_any_option_of_one_that_takes_all_is_not():
    layout = Layout({"a": ["answer"]})
    with pytest.raises(RecipeError, match="only by position"):
        check_objectives([Objective(lambda blocks, /: [], pays="a")], layout)
    check_objectives([Objective(trl_reward, pays="a", options={"anything": 1})], layout)


@pytest.mark.parametrize(("slow", "seconds"), [(0.05, 0.3), (0.5, 0.0)])
def test_a_reward_that_takes_long_is_named_while_it_runs_and_a_quick_one_is_not(monkeypatch, slow, seconds):
    monkeypatch.setattr(custom, "SLOW", slow)
    warned, ended = [], []
    monkeypatch.setattr(custom.warnings, "warn", lambda *words: warned.append((time.monotonic(), *words)))

    def sleepy(blocks):
        time.sleep(seconds)
        ended.append(time.monotonic())
        return [1.0]

    assert rewarded(sleepy).value_n.tolist() == [1.0]
    time.sleep(0.0 if seconds else slow + 0.1)
    assert [when < ended[0] for when, *_ in warned] == [True] * bool(seconds)
    assert all(kind is UserWarning and "'sleepy'" in text for _, text, kind in warned)


def test_rewards_that_are_quick_start_no_thread_each(monkeypatch):
    rewarded(lambda blocks: [1.0])  # starts the one that watches
    monkeypatch.setattr(threading, "Thread", None)
    monkeypatch.setattr(threading, "Timer", None)
    assert rewarded(lambda blocks: [1.0]).value_n.tolist() == [1.0]


def test_a_reward_pairs_numbers_with_ok_only():
    one, row = torch.ones(1, dtype=torch.float64), torch.full((1, 2), NAN, dtype=torch.float64)
    cases = [(one, TIMEOUT, r"1\.0, but its status is TIMEOUT"), (one * NAN, OK, "nan, but its status is OK")]
    for value_n, status, numbers in cases:
        with pytest.raises(RewardError, match=numbers):
            Reward(value_n, torch.tensor([status]), row)
    with pytest.raises(RewardError, match="completion 1 is nan"):
        Reward.of([None, NAN])


def test_a_reward_that_changes_what_it_is_given_changes_nothing_for_the_next():
    def cheats(blocks, solution, ids, level=(), seen=None):
        for block, gold in zip(blocks, solution, strict=True):
            gold["answer"] = block["solution"]["answer"] = "changed"
        blocks.clear()
        ids[0].append(9)
        seen.append(1)
        return [0.0]

    def right(blocks, solution):
        return [float(block["solution"]["answer"] == gold["answer"]) for block, gold in zip(blocks, solution, strict=True)]

    def outcome(text, *, columns):
        columns["solution"][0]["answer"] = text[0]["solution"]["answer"] = "changed"
        return [True]

    @register("spoils", kind="reward")
    def spoils(text, *, pays, columns, scored):
        scored["right"].value_n.fill_(7.0)
        columns["ids"][0].clear()
        return Reward.of([0.0])

    columns, options = {"solution": [{"answer": "4"}], "ids": [[1, 2]]}, {"seen": []}
    wrong = [completion("5")]
    objectives = [
        Objective(cheats, pays="solution", options=options),
        Objective(right, pays="solution", given=[outcome]),
        Objective("spoils", pays="solution"),
    ]
    assert score_all(objectives, wrong, columns=columns).reward_nm.tolist() == [[0.0, 0.0, 0.0]]
    assert (columns, options) == ({"solution": [{"answer": "4"}], "ids": [[1, 2]]}, {"seen": []})
    assert wrong == [completion("5")]
    REWARDS.pop("spoils")


STATES = {
    "torch's default dtype (torch.float64)": lambda: torch.set_default_dtype(torch.float64),
    "whether torch computes gradients (False)": lambda: torch.set_grad_enabled(False),
    "torch's seed (77)": lambda: torch.manual_seed(77),
    "the working directory (/)": lambda: os.chdir("/"),
}


def everywhere():
    """What code of the whole process may change, and all states of random numbers."""
    generators = random.getstate(), str(np.random.get_state(legacy=False)), torch.get_rng_state().tolist()  # noqa: NPY002
    return torch.get_default_dtype(), torch.is_grad_enabled(), os.getcwd(), generators


@pytest.mark.usefixtures("unchecked_shapes")  # checking them draws random numbers
@pytest.mark.parametrize("named", STATES)
def test_what_a_reward_changes_in_the_process_is_put_back_and_named(named, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(77)  # the seed that one of `STATES` sets
    torch.rand(1000)

    def sets(blocks):
        STATES[named]()
        random.seed(3)
        np.random.seed(3)  # noqa: NPY002
        return [1.0]

    def raises(blocks):
        raise ValueError(sets(blocks))

    before = everywhere()
    for reward, ends in ((sets, nullcontext()), (raises, pytest.raises(RewardError))):
        with pytest.warns(UserWarning, match="changed") as warned, ends:
            rewarded(reward)
        assert [f"changed {named} for the whole process" in str(warning.message) for warning in warned] == [True]
        assert everywhere() == before


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("draws", [1, 700, 100_000])
def test_a_reward_draws_other_numbers_each_time_and_none_of_those_of_the_training(draws):
    def noise(blocks):
        numbers = [random.random() for _ in range(draws)]
        return [numbers[-1] + float(np.random.rand(draws)[-1]) + float(torch.rand(draws)[-1])]  # noqa: NPY002

    before = everywhere()
    assert rewarded(noise).value_n != rewarded(noise).value_n
    assert everywhere() == before


@pytest.mark.parametrize("stand_in", ["<hidden>", ["<hidden>"], {"key": "<hidden>"}])
def test_a_stand_in_for_a_secret_never_reaches_a_reward(stand_in):
    objective = Objective(lambda blocks, api_key: [1.0], "solution", name="asks", options={"api_key": stand_in})
    with pytest.raises(RecipeError, match=r"'asks' has the option 'api_key.*<hidden>"):
        score_all([objective], [completion()], columns={})
    assert score_all([objective], [completion()], columns={}, recorded={"asks": Reward.of([1.0])}).reward_nm.item() == 1.0


@pytest.mark.parametrize("value", [1e308, -1e31])
def test_a_reward_whose_squares_or_float32_overflow_is_refused_by_name_completion_and_number(value):
    text = [completion()] * 2
    for recorded in ({}, {"huge": Reward.of([1.0, value])}):
        huge = Objective(lambda blocks: [1e30, value], pays="solution", name="huge")
        with pytest.raises(RewardError, match=f"'huge' .* completion 1 of 2 .* {re.escape(f'{value:g}')}"):
            score_all([huge], text, columns={}, recorded=recorded)
    reward_n = rewarded(lambda blocks: [1e30, -1e30], text).value_n
    for method in ("grpo", "rloo", "dr_grpo"):
        adv_n = METHODS[method].estimator(reward_n, torch.zeros(2, dtype=torch.long)).float()
        assert math.inf > adv_n[0] > 0 > adv_n[1] > -math.inf
