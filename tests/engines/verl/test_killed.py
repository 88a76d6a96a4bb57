"""A test of whole runs that is killed leaves no process of verl or Ray behind."""

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

HERE = Path(__file__).parent
SCRIPT = """
import sys
sys.path.insert(0, {cpu!r})
from functools import partial
from pathlib import Path
import verl_runs
from spanwise.tasks import Phase, WarmStartSettings
short = WarmStartSettings(easy=Phase(steps=1, learning_rate=3e-3, matrix_learning_rate=0.03), warm_up=1)
verl_runs.digits_task = partial(verl_runs.digits_task, settings=short)
verl_runs.STEPS = 500  # so that it does not end by itself
verl_runs.whole("sync", Path({folder!r}))
"""


def wait_for(condition, seconds):
    """Wait until a condition holds; False after some seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.5)
    return False


@pytest.mark.timeout(500)
def test_nothing_is_left_of_a_run_whose_test_was_killed(tmp_path):
    script, log = SCRIPT.format(cpu=str(HERE / "cpu"), folder=str(tmp_path)), tmp_path / "log.txt"
    parent = psutil.Popen([sys.executable, "-c", script], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        assert wait_for(lambda: parent.poll() is not None or (log.exists() and "step:1 - " in log.read_text()), 300)
        assert parent.poll() is None
        processes = parent.children(recursive=True)
    finally:
        parent.kill()
        parent.wait()
    names = {process.name() for process in processes if process.is_running()}
    assert {"raylet", "gcs_server"} < names
    _, left = psutil.wait_procs(processes, timeout=60)
    assert left == []
