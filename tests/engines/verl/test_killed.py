"""A whole run whose test is killed is interrupted, and Ray then takes its processes down."""

import subprocess
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
PARENT = """
import sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])
import run_verl

run_verl.run(Path(sys.argv[2]), [], timeout=200, python=sys.argv[3])
"""


def wait_for(file):
    deadline = time.monotonic() + 60
    while not file.exists():
        assert time.monotonic() < deadline, f"there is no {file.name}"
        time.sleep(0.1)


def test_a_run_is_interrupted_when_its_test_is_killed(tmp_path):
    (tmp_path / "verl").write_text(VERL.format(python=sys.executable))
    (tmp_path / "verl").chmod(0o700)
    parent = subprocess.Popen([sys.executable, "-c", PARENT, run_verl.HERE, tmp_path, tmp_path / "verl"])
    try:
        wait_for(tmp_path / "started")
    finally:
        parent.kill()
        parent.wait()
    wait_for(tmp_path / "interrupted")
