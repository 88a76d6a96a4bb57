"""Rewards."""

import asyncio
import multiprocessing
import os
import re
import signal
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor, wait
from fractions import Fraction

import pytest
import torch

from faults.catches import catches, equals
from helpers import NAN, assert_close
from score_small import ABSENT, OK, completion
from spanwise import Batch, Layout, Objective, Scheme, Vocabulary, credit_batch, metrics, read
from spanwise.score import MathVerifier
from spanwise.score.score import score_one
from spanwise.types import Status

HANG = r"$9^{9^{9^{9}}}$"
GOODS = [("1/2", f"{n}/{2 * n}") for n in range(1, 4)]


@pytest.fixture(scope="module")
def verifier():
    with MathVerifier(deadline=2.0) as shared:
        yield shared


def in_thread(function):
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(function).result()


@pytest.fixture(scope="module")
def burst(verifier):
    """A hang and what waits behind it for longer than a deadline, from a thread; and then one more."""
    verdicts = in_thread(lambda: verifier.equal([("4", HANG), *GOODS]))
    later = verifier.equal([("2", "4/2")])[0]
    return [verdict.status for verdict in verdicts], [verdict.value for verdict in verdicts], later


def by_alarm(gold, answer):
    """A check under an alarm, which only a main thread can set, and `except` for whatever goes wrong."""
    try:
        before = signal.signal(signal.SIGALRM, lambda *_: None)
        try:
            return float(Fraction(gold) == Fraction(answer))
        finally:
            signal.signal(signal.SIGALRM, before)
    except Exception:
        return 0.0


def in_fork(function):
    """What a child process of this one gets."""
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    child = context.Process(target=lambda: results.put(function()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a fork beside threads, as Ray and data loaders make it
        child.start()
    child.join()
    assert child.exitcode == 0
    return results.get()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_f49_one_answer_has_one_verdict_wherever_it_is_checked(verifier):
    """verl-project/verl#5635. Math-Verify's alarm fails in Ray's threads, and `except: pass` made every score 0."""

    async def in_loop(verdict):
        return [verdict(), await asyncio.to_thread(verdict)]

    def check(verdict):
        assert {verdict(), in_thread(verdict), *asyncio.run(in_loop(verdict)), in_fork(verdict)} == {1.0}

    catches(check, lambda: verifier.equal([("1/4", "0.25")])[0].value, lambda: by_alarm("1/4", "0.25"))


def test_f50_the_deadline_holds_off_the_main_thread(burst):
    """huggingface/trl#5281, Math-Verify#50, #55. The check crashed in a worker thread; the fix took its timeout away."""

    def without_a_deadline():
        threading.Event().wait(0.05)  # for as long as it takes
        return Status.OK

    catches(equals(Status.BROKE), burst[0][0], in_thread(without_a_deadline))


def test_f51_a_boxed_answer_is_right_in_a_thread(verifier):
    """verifiers `verify_boxed_math_answer` (code). A right answer earned 1 in the main thread and 0 in a worker's."""
    text = [completion(r"\boxed{\frac{2}{8}}")]

    def ours():
        objective = Objective("correct", "solution", options={"verifier": verifier})
        return float(score_one(objective, text, columns={"answer": ["1/4"]}, scored={}).value_n[0])

    def boxed():
        top, bottom = re.findall(r"\d+", text[0]["solution"]["answer"])
        return by_alarm("1/4", f"{top}/{bottom}")

    catches(equals([1.0, 1.0]), [ours(), in_thread(ours)], [boxed(), in_thread(boxed)])


def pool_that_gives_up(size):
    """One worker that the first item hangs, and a timeout outside it that counts from submission."""
    stuck = threading.Event()
    with ThreadPoolExecutor(1) as threads:
        futures = [threads.submit(stuck.wait), *(threads.submit(str) for _ in range(size - 1))]
        statuses = [Status.OK if wait([future], timeout=0.05).done else Status.TIMEOUT for future in futures]
        stuck.set()
    return statuses


def test_f52_a_hang_costs_no_worker(burst):
    """AReaL#1426. The outer timeout gave up, its worker stayed hung, and the pool drained for the rest of the run."""
    catches(equals(Status.OK), burst[2].status, pool_that_gives_up(2)[1])
    assert burst[2].value == 1.0


def test_f53_waiting_for_a_worker_is_not_the_answers_fault(burst):
    """PrimeIntellect-ai/verifiers#831. The timeout counted time in the queue: right answers scored 0 under load."""
    catches(equals([Status.BROKE, *[Status.OK] * 3]), burst[0], pool_that_gives_up(4))
    assert burst[1][1:] == [1.0] * 3


def test_f54_a_check_that_fails_is_counted_and_the_run_goes_on(verifier):
    """hkust-nlp/simpleRL-reason#95. A timeout inside sympy's comparison ended the run."""
    layout = Layout({"all": ["answer"]})
    vocabulary = Vocabulary((b"<answer>", b"</answer>", b"0.5", b"7/2"))
    batch = Batch.jagged([[0, 2, 1], [0, 3, 1], [0, 2, 1]], [0, 0, 0], columns={"answer": ["1/2", "1/2", r"\frac{1}{"]})
    objective = Objective("correct", "all", options={"verifier": verifier})
    scheme = Scheme.preset("dr_grpo", layout, objectives=[objective], per="completion")

    def ours():
        reading = read(batch, scheme, vocabulary)
        credit = credit_batch(reading, batch, scheme)
        return credit.block_nk[:, 0], metrics(credit, reading, scheme)["credit/correct/reward_absent"]

    def unguarded():
        raise TimeoutError("sympy")

    def check(run):
        try:
            adv_n, absent = run()
        except TimeoutError as error:
            raise AssertionError("the run ended") from error
        assert_close(adv_n, [0.5, -0.5, 0.0], 1e-12)
        assert absent == 1 / 3

    catches(check, ours, unguarded)


def test_f55_one_judge_that_fails_costs_its_own_answer_only():
    """harbor#1790, stella#3264. One judge's timeout threw all results away; a reward that was absent was read as 0."""

    def judged(blocks):
        return [1.0, None, 0.0]

    reward = score_one(Objective(judged, "solution"), [completion()] * 3, columns={}, scored={})
    assert reward.status_n.tolist() == [OK, ABSENT, OK]
    for faulty in (torch.zeros(3).double(), reward.value_n.nan_to_num()):  # all thrown away; absent is 0
        catches(lambda values: assert_close(values, [1.0, NAN, 0.0], 0, equal_nan=True), reward.value_n, faulty)
