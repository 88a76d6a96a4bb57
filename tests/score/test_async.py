"""Rewards that are awaited, and reward functions for one completion at a time as other libraries write them."""

import asyncio
import math
import multiprocessing
import os
import signal
import threading
import time
import warnings

import pandas as pd
import pytest
import torch

from score_small import ABSENT, ERROR, OK, TIMEOUT
from spanwise import Objective, RewardError, score_all
from spanwise.score import items
from spanwise.score.score import await_rewards

SIZE = 40
TEXT = [{"solution": {"": f"so {n}", "answer": f"{n}"}, "note": {"": "x"} if n % 2 else None} for n in range(SIZE)]
NUMBERS = [f"{n}" for n in range(SIZE)]
GOLDS = pd.Series(NUMBERS, index=range(SIZE - 1, -1, -1))  # its labels are not its places
COLUMNS = {"answer": GOLDS, "completions": [f"so {n}" for n in NUMBERS], "trainer_state": object()}


class Busy:
    """Counts how many calls are in flight."""

    now = most = 0

    async def wait(self, seconds=0.05):
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(seconds)
        finally:
            self.now -= 1

    def assert_idle(self):
        until = time.monotonic() + 5
        while self.now and time.monotonic() < until:
            time.sleep(0.01)
        assert self.now == 0


def rewards(*objectives, text=TEXT, columns=COLUMNS):
    return score_all(objectives, text, columns=columns)


def test_functions_of_the_whole_batch_are_awaited_together():
    both = asyncio.Event()

    async def blockwise(blocks):
        both.set()
        return [float(block["solution"]["answer"]) for block in blocks]

    async def of_trl(completions, answer, **columns):
        await asyncio.wait_for(both.wait(), 5)  # would never be set if one waited for the other
        return [len(text) if "1" in gold else None for text, gold in zip(completions, answer, strict=True)]

    class Judge:
        async def __call__(self, blocks):
            return [2.0] * len(blocks)

    scores = rewards(Objective(of_trl, "solution"), Objective(blockwise, "solution"), Objective(Judge(), "solution"))
    assert scores.reward_nm[:, 1:].tolist() == [[n, 2.0] for n in range(SIZE)]
    assert scores.reward_nm[1, 0] == 4.0
    assert scores.status_nm[:, 0].tolist() == [OK if "1" in f"{n}" else ABSENT for n in range(SIZE)]


@pytest.mark.parametrize("waits", [True, False])
def test_one_completion_at_a_time_and_a_dict_of_rewards(waits):
    texts = []

    def compute_score(data_source, solution_str, ground_truth, extra_info=None, scale=1.0):
        texts.append(solution_str)
        if ground_truth == "3":
            raise ConnectionError("reset by peer")
        return {"score": float(solution_str == f"so {ground_truth}x"), "length": scale * len(solution_str)}

    async def awaited(data_source, solution_str, ground_truth, extra_info=None, scale=1.0):
        await asyncio.sleep(0.01)
        return compute_score(data_source, solution_str, ground_truth, extra_info, scale)

    function = awaited if waits else compute_score
    fields = {"options": {"scale": 2.0}, "pays": "note"}
    scores = rewards(Objective(function, **fields), Objective(function, key="length", **fields))
    assert scores.names == (function.__name__, "length")
    assert len(texts) == SIZE // 2  # once for both keys, and not for completions that lack the block
    expected = [[math.nan] * 2 if n % 2 == 0 or n == 3 else [1.0, 2.0 * len(f"so {n}x")] for n in range(SIZE)]
    torch.testing.assert_close(scores.reward_nm, torch.tensor(expected).double(), equal_nan=True)
    assert scores.status_nm[:, 0].tolist() == [ABSENT if n % 2 == 0 else ERROR if n == 3 else OK for n in range(SIZE)]
    assert [scores.note_nm[n].tolist() for n in (1, 3)] == [[None, None], ["ConnectionError: reset by peer"] * 2]


@pytest.mark.parametrize(("fields", "calls"), [({}, 1.0), ({"scope": "turn"}, 0.0), ({"options": {"sees": "part"}}, 0.0)])
def test_a_function_of_verifiers_gets_the_messages_of_a_whole_conversation(fields, calls):
    def tool_calls(completion):
        return float(sum(message["role"] == "tool" for message in completion))

    chat = [{"role": role, "content": "4"} for role in ("assistant", "tool", "assistant")]
    columns = {"prompts": [[{"role": "user", "content": "2+2"}]] * SIZE, "completions": [chat] * SIZE}
    scores = rewards(Objective(tool_calls, "solution", **fields), columns=columns)
    assert scores.reward_nm[:, 0].tolist() == [calls] * SIZE


def test_at_most_so_many_at_once_and_each_has_its_own_deadline():
    busy = Busy()

    async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        await busy.wait(0.02 if ground_truth != "7" else 60.0)
        return 1.0

    scores = rewards(Objective(compute_score, "solution", options={"max_concurrent": 8, "timeout": 0.2}))
    assert busy.most == 8
    assert scores.status_nm[:, 0].tolist() == [TIMEOUT if n == 7 else OK for n in range(SIZE)]  # no time-out from queueing


def test_batches_on_one_loop_share_the_limit_and_processes_their_share(monkeypatch):
    busy = Busy()

    async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        await busy.wait()
        return 1.0

    objective, columns = Objective(compute_score, "solution", options={"max_concurrent": 12}), {"answer": ["0"]}

    async def batches():
        items.REWARD_WORKERS.set(4)
        return await asyncio.gather(*[await_rewards([objective], TEXT[:1], columns) for _ in range(9)])

    assert [reward["compute_score"].value_n.item() for reward in asyncio.run(batches())] == [1.0] * 9
    assert busy.most == 3
    monkeypatch.setenv("WORLD_SIZE", "5")
    assert [items.requests_per_process(number) for number in (64, 5, 1)] == [13, 1, 1]


def test_what_sees_the_part_and_what_sees_the_whole():
    def verifier(completion, prompt, **others):
        return float(len(completion if isinstance(prompt, str) else completion[0]["content"]))

    columns = {"prompts": ["q"] * SIZE}
    part = Objective(verifier, "note", name="part", options={"sees": "part"})
    assert rewards(Objective(verifier, "note"), part, columns=columns).reward_nm[1].tolist() == [5.0, 1.0]  # "so 1x", "x"
    block = Objective(verifier, ["solution", "note"], options={"sees": "part", "block": "note"})
    assert rewards(block, columns=columns).status_nm[:2, 0].tolist() == [ABSENT, OK]
    chat = {"prompts": [[{"role": "user", "content": "q"}]] * SIZE}
    assert rewards(Objective(verifier, "note"), columns=chat).reward_nm[1].tolist() == [5.0]


def test_if_every_call_fails_the_run_ends_and_nothing_stays_in_flight():
    busy = Busy()

    async def compute_score(data_source, solution_str, ground_truth):
        await busy.wait(0.01)
        raise ConnectionError("refused")

    async def wrong_size(blocks):
        await busy.wait(60)

    with pytest.raises(RewardError) as error:
        rewards(Objective(compute_score, "solution"), Objective(wrong_size, "solution"))
    assert isinstance(error.value.__cause__, ConnectionError)
    assert str(error.value).count(__file__) == 1
    busy.assert_idle()


def test_an_interrupt_cancels_what_is_in_flight():
    busy = Busy()

    async def slow(blocks):
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        await busy.wait(60)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a test runner may ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            rewards(Objective(slow, "solution"))
    finally:
        signal.signal(signal.SIGINT, before)
    busy.assert_idle()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_has_a_loop_of_its_own():
    async def plain(blocks):
        await asyncio.sleep(0)
        return [1.0] * len(blocks)

    def child(queue):
        queue.put(rewards(Objective(plain, "solution")).reward_nm.sum().item())

    assert rewards(Objective(plain, "solution")).reward_nm.sum() == SIZE
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a fork beside threads, as data loaders make it
        process = context.Process(target=child, args=(queue,))
        process.start()
    assert queue.get(timeout=60) == SIZE
    process.join()


def test_a_function_of_verifiers_gets_the_right_answer_from_the_column_that_holds_it():
    def contains(completion, answer, state):
        return float(answer in completion and answer == state["answer"])

    columns = {"ground_truth": ["so", "4"], "prompt": ["2+2"] * 2}
    assert rewards(Objective(contains, "solution"), text=TEXT[:2], columns=columns).reward_nm[:, 0].tolist() == [1.0, 0.0]


def test_a_function_for_one_completion_sees_its_text_without_end_tokens():
    texts = []

    def compute_score(data_source, solution_str, ground_truth, extra_info):
        texts.append(solution_str)
        return 1.0

    said = ["so 4<|im_end|><|endoftext|>", "a <|b|> c</s>", "not <s>5</s>", "not <s>5</s></s>", "<s>5</s> 4 \ud800</s>"]
    score_all([Objective(compute_score, "a")], [{"a": {"": text}} for text in said], columns={"ground_truth": ["4"] * 5})
    assert texts == ["so 4", "a <|b|> c", "not <s>5</s>", "not <s>5</s>", "<s>5</s> 4 \ud800"]
