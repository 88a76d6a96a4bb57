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


def test_a_folder_has_one_writer_until_that_process_is_gone_and_the_ranks_of_a_training_are_one(tmp_path, monkeypatch):
    command = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(DataError, match="Another process is writing into"):
            sole_writer(tmp_path / "run").__enter__()
        with sole_writer(tmp_path / "other"):
            pass
    finally:
        holder.kill()  # so that it cannot clean up
        holder.communicate()
    for _ in range(2):
        with sole_writer(tmp_path / "run"), monkeypatch.context() as patch:
            patch.setenv("RANK", "1")
            with sole_writer(tmp_path / "run"):
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
    monkeypatch.chdir(tmp_path)
    before = {tmp_path / file: b"{}" for file in ("busy/config.json", "model/config.json", "rollouts.jsonl")}
    for file, content in before.items():
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(content)
    with sole_writer(tmp_path / "busy"), pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "Error: Another process is writing into 'busy'; wait until it ends" in capsys.readouterr().err
    left = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.name != ".lock"}
    assert left == before
