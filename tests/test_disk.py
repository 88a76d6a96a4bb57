"""A full disk: every kind of file is one sentence with its name, and leaves what was there and nothing else."""

import errno
import os
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models

from full_disk import full_disk
from rollouts_cases import Case, completion
from spanwise.commands.fidelity.fidelity import write_fidelity
from spanwise.commands.shared.folder import write_page
from spanwise.commands.shared.samples import Samples
from spanwise.disk import refusal, whole_file, whole_folder, writing
from spanwise.errors import DataError
from spanwise.rollouts import write_rollouts
from spanwise.rollouts.folder import RunFolder

LONG = {"name": "x" * 5000}
N = 2000


def many_rollouts():
    return Case([completion(range(n % 4), prompt=str(n)) for n in range(N)]).parts()


def samples():
    half_n = torch.rand(N, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return Samples(torch.arange(N), {"solution": ["1"] * N}, {"solution": half_n}, half_n, torch.ones(N).bool(), None)


#: File -> what writes it. The page and the parquet files hold more than the kilobyte that is left.
WRITERS = {
    "recipe.yaml": lambda run: RunFolder(run).write_recipe(LONG),
    "metrics.jsonl": lambda run: RunFolder(run).add_metrics(LONG),
    "rollouts/step_000001.parquet": lambda run: RunFolder(run).write_rollouts(many_rollouts(), step=1),
    "summary.json": lambda run: RunFolder(run).write_summary(LONG),
    "report.html": lambda run: write_page(run, "x" * 5000),
    "evaluation.parquet": lambda run: samples().write(run),
    "fidelity.json": lambda run: write_fidelity(run, source="x", recipe=LONG),
    "credit.parquet": lambda run: write_rollouts(run / "credit.parquet", many_rollouts()),
}


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_is_one_sentence_and_leaves_the_file_that_was_there(name, exists, tmp_path):
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    if exists:
        file.write_bytes(b"before")
    with full_disk(1000), pytest.raises(DataError) as error:
        WRITERS[name](tmp_path)
    says = rf"'{file}' cannot be written: File too large; [\d.]+ (GB|MB|bytes) are free there\. Make room there\."
    assert re.fullmatch(says, str(error.value))
    left = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert left == ({Path(name): b"before"} if exists else {} if name != "metrics.jsonl" else {Path(name): b""})
    WRITERS[name](tmp_path)  # with room it goes on
    assert file.stat().st_size > 200


BIG = torch.randn(5000, generator=torch.Generator().manual_seed(0))
#: What the libraries raise: a RuntimeError, errors of Rust with and without a class of their own, OSErrors.
LIBRARIES = {
    "torch": lambda file: torch.save({"a": BIG}, file),
    "safetensors": lambda file: save_file({"a": BIG}, file),
    "tokenizers": lambda file: Tokenizer(models.WordLevel({str(n): n for n in range(999)}, unk_token="0")).save(str(file)),
    "pyarrow": lambda file: pq.write_table(pa.table({"a": BIG.numpy()}), file),
    "text": lambda file: file.write_text("x" * 5000),
}


@pytest.mark.parametrize("name", LIBRARIES)
def test_whatever_a_library_raises_on_a_full_disk(name, tmp_path):
    folder, says = tmp_path / "model", r"^'.*/model' cannot be written: (File too large|PyTorch could not write all)"
    folder.mkdir()
    with full_disk(1000), pytest.raises(DataError, match=says), whole_folder(folder):
        LIBRARIES[name](folder / "weights")
    assert not list(tmp_path.iterdir())
    with whole_folder(folder):
        folder.mkdir()
        LIBRARIES[name](folder / "weights")


def test_a_device_that_is_full():
    """The same with the number of a full disk itself, where the system has a device that is always full."""
    with pytest.raises(OSError, match=r"No space|/dev/full") as full, open("/dev/full", "w") as stream:
        stream.write("x")
    assert refusal(full.value) == ("No space left on device" if full.value.errno == errno.ENOSPC else None)
    with pytest.raises(DataError, match=r"^'run' cannot be written: No space left on device; "), writing("run"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_other_errors_go_on_as_they_are(tmp_path):
    for error in (RuntimeError("shapes differ"), ValueError("x"), KeyError("y")):
        assert refusal(error) is None

        def half(error=error):
            with whole_file(tmp_path / "a") as beside:
                beside.write_text("half")
                raise error

        with pytest.raises(type(error)):
            half()
    assert not list(tmp_path.iterdir())
    ring = RuntimeError("a")
    ring.__cause__ = ValueError("b")
    ring.__cause__.__context__ = ring
    assert refusal(ring) is None
