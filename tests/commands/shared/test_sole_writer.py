"""A run folder has one writer."""

import subprocess
import sys

import pytest

from spanwise.cli import main
from spanwise.errors import DataError
from spanwise.rollouts.folder import sole_writer

HOLD = """
import sys, time
from spanwise.rollouts.folder import sole_writer
with sole_writer(sys.argv[1]):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_folder_has_one_writer_until_that_process_is_gone(tmp_path):
    command = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(DataError, match="Another process is writing into"):
            sole_writer(tmp_path / "run").__enter__()
        with sole_writer(tmp_path / "other"):
            pass
    finally:
        holder.kill()  # so that it cannot clean up
        holder.communicate()
    for _ in range(2):
        with sole_writer(tmp_path / "run"):
            pass


def test_the_ranks_of_one_training_are_one_writer(tmp_path, monkeypatch):
    with sole_writer(tmp_path):
        monkeypatch.setenv("RANK", "1")
        with sole_writer(tmp_path):
            pass


@pytest.mark.parametrize(
    "words",
    [
        ["compare", "--arms", "group,rlcr", "--seeds", "0", "--output", "busy"],
        ["demo", "--output", "busy"],
        ["fidelity", "model", "--output", "busy"],
        ["credit", "rollouts.jsonl", "--output", "busy"],
        ["eval", "busy"],
    ],
    ids=lambda words: words[0],
)
def test_whatever_writes_a_folder_has_it_alone(words, tmp_path, monkeypatch, capsys):
    """Two writers would overwrite parts of each other's files."""
    monkeypatch.chdir(tmp_path)
    for place in ("busy", "model"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "config.json").write_text("{}")
    (tmp_path / "rollouts.jsonl").write_text("{}")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with sole_writer(tmp_path / "busy"), pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "Error: Another process is writing into 'busy'; wait until it ends" in capsys.readouterr().err
    left = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.name != ".lock"}
    assert left == before
