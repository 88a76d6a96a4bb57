"""The killable verifier and the rule that decides without it, on real hostile answers."""

import math
import os
import signal
import subprocess
import sys
import threading
from datetime import datetime

import numpy as np
import pytest
import torch

from helpers import NAN
from spanwise.errors import RecipeError, RewardError
from spanwise.score import MathVerifier, judge
from spanwise.score import workers as worker_module
from spanwise.score.fields import SchemaChecker
from spanwise.score.workers import Worker, cores
from spanwise.types import Status

HANG = r"$9^{9^{9^{9}}}$"
PAIR = (r"\frac{1}{3}", r"$\frac{2}{6}$")
#: Schemas that every value and no value fits. The same workers check them, and their processes start five times as fast.
ANY, NONE = "{}", '{"not": {}}'


@pytest.mark.parametrize(
    ("gold", "answer", "right"),
    [
        ("1/2", "0.50", 1.0), (r"\frac{1}{3}", "1/3", 1.0), ("x^2+2x+1", "(x+1)^2", 1.0), (r"\{1,2\}", r"\{2,1\}", 1.0),
        ("3", r"\frac{1}{3}", 0.0),  # read as bare text, the last number would be 3
        ("5", r"So the result is $x = 5$, thus \boxed{5}.", 1.0), ("Paris", r"\boxed{\text{Paris}}", 1.0),
        (1e-5, "0.00001", 1.0), (1e-5, "0.00002", 0.0), (1e16, "10000000000000000", 1.0), ("3e2", "300", 1.0), ("1E3", "999", 0.0),
        ("6.02e23", r"6.02 \times 10^{23}", 1.0), ("1e-7", "3e-7", 0.0), ("2e", "2", 0.0), ("0", r"\sqrt{2}^2 - 2", 1.0),
        (r"1.6 \times 10^{-19}", r"9.1 \times 10^{-31}", 0.0), (r"1.6 \times 10^{-19}", r"1.60 \cdot 10^{-19}", 1.0),
        (1e-7, "0.0000001", 1.0), ("1.6e-19", r"1.6 \times 10^{-19}", 1.0), ("1.6e-19", "9.1e-31", 0.0), (1e100, "10^{100}", 1.0),
        ("0", "1e-9", 0.0), ("0", r"\sin(\pi)", 1.0), (r"\sin(\pi)", "0", 1.0),
        ("0.0000002", "0.0000003", 0.0), ("0.0833333333", "0.083333", 1.0), ("x^2", "x^2", 1.0),
        ("Zürich", r"\text{Zürich}", 1.0), ("北京", "北京!", 0.0), ("2π", r"2\pi", 1.0), ("αβ", "βα", 1.0),
        ("2024-01-05", r"\text{2024-01-05}", 1.0), ("2024-01-05", "5 + 2013", 0.0),
        ("Paris", "so it is $Pairs$", 0.0),  # letters as factors commute
        ("4", r"\frac{1}{", 0.0), ("4", "unable, sorry!", 0.0), ("4", "\ud800", 0.0),
    ],
)  # fmt: skip
def test_math_verify_reads_gold_and_answer_as_people_write_them(verifier, gold, answer, right):
    (verdict,) = judge([gold], [answer], verifier=verifier)
    assert (verdict.status, verdict.value) == (Status.OK, right)


TEXT_ONLY = [
    ("4", " 4 ", 1.0), ("4", "004", 1.0), ("0", "-0", 1.0), ("4", "-4", 0.0), ("+4", "4", 1.0), ("40", "4", 0.0),
    ("4", r"$\boxed{4}$", 1.0), (r"\frac{1}{3}", r"\boxed{\frac{1}{3}}", 1.0), ("4", "unable to determine", 0.0),
    ("Paris", "Pairs", 0.0), ("São Paulo", "Paulo São", 0.0), ("北京", "上海", 0.0), ("是", "是", 1.0), ("是", "否", 0.0),
    ("Москва", r"\boxed{Москва}", 1.0), ("हिन्दी", "தமிழ்", 0.0), ("Zürich", "42", 0.0), ("2024-01-05", "2024-05-01", 0.0),
    ("2024-01-05", "2018", 0.0), ("1/2/2024", "2/4/2024", 0.0), ("2024-01-05", "$2024-01-05$", 1.0),
    ("01/05/2024", "1/5/2024", 1.0), ("2024-01-05", "2024-1-5", 1.0), ("2024/01/05", "2024-01-05", 1.0),
    ("2024/01/05", "2024/05/01", 0.0), ("05-02-2024", "04-01-2024", 0.0), ("2024-10-20", "2024-1-2", 0.0),
    ("caf\u00e9", "cafe\u0301", 1.0), ("\u00e9", "\u00e8", 0.0),
    ("4", "", 0.0), ("4", None, 0.0), (7, "7", 1.0), ("9" * 5000, "9" * 4999 + "8", 0.0),
    (np.float32(1234567.9), "1234567.9", 1.0), (torch.tensor([3.1]), "3.1", 1.0), (datetime(2024, 1, 5), "2024-01-05", 1.0),
    (10**5000, "1" + "0" * 5000, 1.0), (True, "True", 1.0),  # more digits than Python writes
]  # fmt: skip


def test_integers_words_and_equal_text_start_no_process():
    with MathVerifier() as idle:
        verdicts = judge([g for g, _, _ in TEXT_ONLY], [a for _, a, _ in TEXT_ONLY], verifier=idle)
        assert [verdict.value for verdict in verdicts] == [right for _, _, right in TEXT_ONLY]
        assert {verdict.status for verdict in verdicts} == {Status.OK}
        assert idle._workers[0].process is None


@pytest.mark.parametrize("verify", ["auto", "exact", "math"])
@pytest.mark.parametrize("gold", [None, " ", NAN, ["4", "four"], ("4", "5"), [], {"target": "4"}, np.array(["4", "four"])])
def test_no_gold_answer_or_several_make_no_answer_wrong(gold, verify):
    """As text, a list equals no answer, and a column of numbers holds NaN where a row has none."""
    answers = ["", None, "4", "nan", "['4', 'four']"]
    assert {verdict.status for verdict in judge([gold] * 5, answers, verify=verify)} == {Status.ERROR}


GSM8K = "She answered 5 of 9.\n9 - 5 = <<9-5=4>>4\n#### 4"


@pytest.mark.parametrize("gold", [["4"], ("4",), [4], np.array(["4"]), np.int64(4), np.float64(4), torch.tensor(4), GSM8K])
def test_a_gold_answer_alone_in_a_list_or_an_array_is_the_answer(verifier, gold):
    assert [verdict.value for verdict in judge([gold] * 2, ["4", "5"], verifier=verifier)] == [1.0, 0.0]


def test_exact_compares_text_and_math_compares_everything(verifier):
    golds, answers = ["1/2", "1/2", "paris", "04"], ["0.5", " 1/2", "Paris", "4"]
    assert [v.value for v in judge(golds, answers, verify="exact")] == [0.0, 1.0, 0.0, 0.0]
    assert [v.value for v in judge(golds, answers, verify="math", verifier=verifier)] == [1.0, 1.0, 1.0, 1.0]
    for verdict in judge(["@#!", r"\frac{1}{"], ["1/2"] * 2, verifier=verifier):  # no gold answer that one can read
        assert (verdict.status, math.isnan(verdict.value), "gold" in verdict.why) == (Status.ERROR, True, True)
    solutions = [GSM8K, "4", GSM8K.replace("#### 4", "#### 5")]  # a solution equals itself
    assert [v.value for v in judge([GSM8K] * 3, solutions, verify="exact")] == [1.0, 1.0, 0.0]
    with pytest.raises(RecipeError):
        judge(golds, answers, verify="maths")


def test_a_process_that_dies_by_chance_costs_nothing():
    with SchemaChecker(workers=1, deadline=1.0) as doomed:
        assert doomed.check([(ANY, "1")])[0].value == 1.0
        victim = doomed._workers[0].process
        os.kill(victim.pid, signal.SIGSTOP)
        threading.Timer(0.3, victim.kill).start()
        assert doomed.check([(ANY, "2")]) == [(Status.OK, 1.0, "")]  # asked again in a fresh process
        doomed._workers[0].process.kill()  # it dies while idle, so no answer is lost
        doomed._workers[0].process.wait()
        assert doomed.check([(ANY, "3")])[0].value == 1.0


@pytest.mark.parametrize(("schema", "memory"), [(ANY, 1), ('{"pattern": "^(x|y)*$"}', 2**27)])
def test_an_answer_that_uses_up_the_memory_is_wrong(schema, memory):
    """It does when it is read, or when it is matched: a pattern keeps some hundred bytes for each letter."""
    with SchemaChecker(workers=1, memory=memory) as starved:
        (verdict,) = starved.check([(schema, f'"{"x" * 2_000_000}"')])
    assert (verdict.status, verdict.value) == (Status.BROKE, 0.0)


def test_without_a_limit_of_memory_answers_are_judged():
    with SchemaChecker(workers=1, memory=0) as unlimited:
        assert [verdict.value for verdict in unlimited.check([(ANY, f'"{"x" * 10_000_000}"')])] == [1.0]


@pytest.mark.parametrize(("deadly", "status"), [("deadly", Status.BROKE), (ANY, Status.ERROR)])
def test_an_answer_is_wrong_if_its_check_alone_dies_twice(monkeypatch, deadly, status):
    with SchemaChecker(workers=1, deadline=5.0) as checker:
        messages, usual = [], Worker.ask

        def ask(worker, message, seconds):
            messages.append(message or "")
            if deadly in messages[-1]:  # ANY stands in the harmless check too
                worker.process.kill()
            return usual(worker, message, seconds)

        monkeypatch.setattr(Worker, "ask", ask)
        (verdict,) = checker.check([(ANY, '"deadly"')])
        assert (verdict.status, math.isnan(verdict.value)) == (status, status == Status.ERROR)
        assert sum("deadly" in message for message in messages) == 2


def test_verdicts_are_remembered_those_of_answers_that_hang_too(verifier):
    assert [verdict.value for verdict in verifier.equal([PAIR, PAIR, ("4", "5.5")])] == [1.0, 1.0, 0.0]
    with MathVerifier(workers=1, deadline=0.5, cache=2) as small:
        assert small.equal([("4", HANG)])[0].status == Status.BROKE
        assert list(small._cache) == [("4", HANG)]
        process = small._workers[0].process
        assert small.equal([("4", HANG)])[0].status == Status.BROKE
        assert small._workers[0].process is process  # the second batch that holds it does not pay for it again
        small.equal([("4", "4.0"), ("4", "5.0"), ("4", "6.0")])
        assert list(small._cache) == [("4", "5.0"), ("4", "6.0")]


def test_the_deadline_is_of_processor_time_and_a_sleep_ends_by_the_clock(monkeypatch):
    with SchemaChecker(workers=1, deadline=0.3) as slow:
        slow.check([(ANY, "1")])
        worker = slow._workers[0]
        os.kill(worker.process.pid, signal.SIGSTOP)  # the worst that another program's load can do
        threading.Timer(1.0, os.kill, (worker.process.pid, signal.SIGCONT)).start()
        assert slow.check([(ANY, "2")])[0].value == 1.0
        worker.clock_deadline = 0.5
        os.kill(worker.process.pid, signal.SIGSTOP)
        assert slow.check([(ANY, "3")])[0].value == 1.0  # stopped by the clock, and right in a fresh process
        assert worker.process is not None


def test_checks_of_a_batch_run_side_by_side_one_check_starts_one_process_and_none_is_left(monkeypatch):
    with SchemaChecker(workers=2, deadline=20.0) as pair:
        pair.check([(ANY, "1")])
        pair.check([(ANY, "2")])
        assert [worker.process is not None for worker in pair._workers] == [True, False]
        pair.check([(ANY, f"{n}") for n in range(3, 12)])
        pids = [worker.process.pid for worker in pair._workers]
    for pid in pids:
        with pytest.raises(ProcessLookupError):  # no zombie either: it has been waited for
            os.kill(pid, 0)
    assert len(MathVerifier()._workers) == cores()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000000")
    assert cores() == 1  # the ranks of one machine share its cores


SCRIPT = """
import os, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads: the point of this test
from spanwise.score import judge
print("top", judge(["1/2"], ["0.5"])[0].value, flush=True)
child = os.fork()
print("child" if child == 0 else "parent", judge(["1/5"], ["0.2"])[0].value, flush=True)
if child:
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_an_unguarded_script_and_its_forked_child_get_the_same_verdict_and_end(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    run = subprocess.run([sys.executable, "-W", "error", script], capture_output=True, text=True, timeout=120, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    assert sorted(run.stdout.split("\n")) == ["", "child 1.0", "parent 1.0", "top 1.0"]


def test_a_verifier_none_of_whose_workers_ever_starts_says_so(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    monkeypatch.setattr(worker_module, "_PAUSE_SECONDS", 0.01)
    with MathVerifier() as broken, pytest.raises(RewardError, match="cannot start in a worker process"):
        broken.equal([("1/2", "0.5")])


@pytest.mark.parametrize("broken", ["/bin/false", "/no/such/python"])
def test_a_start_that_fails_is_tried_again_and_then_costs_its_item(monkeypatch, broken):
    monkeypatch.setattr(worker_module, "_PAUSE_SECONDS", 0.01)
    with SchemaChecker(workers=1, deadline=20.0) as checker:
        assert checker.check([(ANY, "1")])[0].value == 1.0
        checker._workers[0].stop()
        python, tries = sys.executable, []

        def fail_twice(*args, **options):
            tries.append(args)
            args = args if len(tries) > 2 else ([broken], *args[1:])
            return Popen(*args, **options)

        Popen = subprocess.Popen
        monkeypatch.setattr(worker_module.subprocess, "Popen", fail_twice)
        assert checker.check([(NONE, "1")])[0].value == 0.0
        assert len(tries) == 3
        checker._workers[0].stop()
        monkeypatch.setattr(sys, "executable", broken)
        (lost,) = checker.check([(ANY, "2")])
        assert lost.status == Status.ERROR
        assert "cannot start" in lost.why
        monkeypatch.setattr(sys, "executable", python)
        assert checker.check([(ANY, "2")])[0].value == 1.0  # nothing of it is remembered
