"""Trainings side by side: each runs once, they stop together, and an error ends the others."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import forked
from spanwise.commands.compare.compare import side_by_side

SLEEP = "import time; time.sleep(60)"

#: `spanwise compare` itself, whose trainings are processes that write down their number and sleep.
#: A shell makes its background jobs ignore Ctrl-C, this suite too; a terminal does not.
COMPARE = """
import os, signal, sys
from pathlib import Path
from spanwise.cli import main
from spanwise.commands.compare import compare
from spanwise.commands.shared import task
os.setsid()
Path({leader!r}).write_text(str(os.getpid()))
signal.signal(signal.SIGINT, signal.default_int_handler)
stub = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)"
compare.train_command = lambda run, *, resume: [sys.executable, "-c", stub, f"{{run.folder}}.pid"]
task.make_task = lambda recipe, console: None
sys.argv = ["spanwise", "compare", "--arms", "group,outcome,rlcr", "--seeds", "0,1", "--processes", "2", "--output", {output!r}]
main()
"""
IMPORTS = "import spanwise.cli, spanwise.commands.compare.compare, spanwise.commands.shared.task"


def until(condition, seconds=60.0):
    """Wait for what another process does."""
    end = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.05)
    return result


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.long
@pytest.mark.parametrize(("stop", "whole_group", "status"), [(signal.SIGINT, True, 130), (signal.SIGTERM, False, 143)])
def test_a_stopped_comparison_leaves_no_training_behind(stop, whole_group, status, tmp_path):
    """Ctrl-C reaches every process of the terminal, a kill only the one it names."""
    output, leader = tmp_path / "out", tmp_path / "leader"
    code = COMPARE.format(leader=str(leader), output=str(output))
    with ThreadPoolExecutor(1) as thread:
        ended = thread.submit(forked.run, code, imports=IMPORTS)
        try:
            until(lambda: sum(bool(file.read_text()) for file in output.glob("*.pid")) == 2 or ended.done())
            (os.killpg if whole_group else os.kill)(int(leader.read_text()), stop)
            done = ended.result(timeout=20)
            assert done.returncode == status, done.stderr
            assert "0 of 6 runs are finished. The others train 2 at a time." in done.stdout
            assert "Stopped. Run the same command again" in done.stdout
            assert "Traceback" not in done.stderr
            started = {file.stem: int(file.read_text()) for file in output.glob("*.pid")}
            assert set(started) == {"group-0", "outcome-0"}
            assert not any(is_alive(pid) for pid in started.values())
        finally:
            if not ended.done():
                os.killpg(int(leader.read_text()), signal.SIGKILL)


def test_an_error_ends_what_runs_and_starts_nothing_more():
    started = {}

    def start(name):
        started[name] = subprocess.Popen([sys.executable, "-c", "" if name == "short" else SLEEP])
        return started[name]

    def raise_at_first_end():
        for name, status in side_by_side(["long", "short", "never"], 2, start=start):
            raise RuntimeError(f"{name} {status}")

    with pytest.raises(RuntimeError, match="short 0"):
        raise_at_first_end()
    assert {name: process.returncode for name, process in started.items()} == {"long": -signal.SIGTERM, "short": 0}


def test_each_item_once_and_so_many_at_a_time():
    running, most, finished = set(), [], []

    def start(number):
        running.add(number)
        most.append(len(running))
        return subprocess.Popen([sys.executable, "-c", f"raise SystemExit({number})"])

    before = signal.getsignal(signal.SIGTERM)
    for number, status in side_by_side([3, 0, 5, 4], 2, start=start):
        running.remove(number)
        finished.append((number, status))
    assert sorted(finished) == [(0, 0), (3, 3), (4, 4), (5, 5)]
    assert max(most) == 2
    assert signal.getsignal(signal.SIGTERM) is before
