"""A whole run whose test is killed is interrupted, and Ray then takes its processes down."""

import multiprocessing
import sys
import time

import run_verl

#: In verl's place a process that says that it runs, and that it was interrupted.
VERL = """#!{python}
import time
from pathlib import Path

try:
    Path("started").touch()
    time.sleep(200)
except KeyboardInterrupt:
    Path("interrupted").touch()
"""


def wait_for(file):
    deadline = time.monotonic() + 60
    while not file.exists():
        assert time.monotonic() < deadline, f"there is no {file.name}"
        time.sleep(0.1)


def test_a_run_is_interrupted_when_its_test_is_killed(tmp_path):
    verl = tmp_path / "verl"
    verl.write_text(VERL.format(python=sys.executable))
    verl.chmod(0o700)
    options = {"timeout": 200, "python": str(verl)}
    parent = multiprocessing.get_context("spawn").Process(target=run_verl.run, args=(tmp_path, []), kwargs=options)
    parent.start()
    try:
        wait_for(tmp_path / "started")
    finally:
        parent.kill()
        parent.join()
    wait_for(tmp_path / "interrupted")
