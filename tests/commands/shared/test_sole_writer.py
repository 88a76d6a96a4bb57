"""A run folder has one writer."""

import subprocess
import sys

import pytest

from spanwise.commands.shared.folder import sole_writer
from spanwise.errors import DataError

HOLD = """
import sys, time
from spanwise.commands.shared.folder import sole_writer
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
        with pytest.raises(
            DataError, match=r"^Another process is training into '.*run'; wait until it ends, end it, or give"
        ):
            sole_writer(tmp_path / "run").__enter__()
        with sole_writer(tmp_path / "other"):
            pass
    finally:
        holder.kill()  # which no process can clean up after
        holder.communicate()
    for _ in range(2):
        with sole_writer(tmp_path / "run"):
            pass


def test_the_ranks_of_one_training_are_one_writer(tmp_path, monkeypatch):
    with sole_writer(tmp_path):
        monkeypatch.setenv("RANK", "1")
        with sole_writer(tmp_path):
            pass


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"The output folder '.*file/run' cannot be written: Not a directory"):
        sole_writer(tmp_path / "file" / "run").__enter__()
