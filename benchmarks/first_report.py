"""A stranger's path to the first report: clone, install, `spanwise credit FILE`, for files of TRL, verl, verifiers and a CSV table.

    make first-report                       # installs into .venv as it is
    python benchmarks/first_report.py --folder /tmp/fresh     # clones this repository there and installs into its own .venv

Prints the seconds of each step; fails where a report does not exist or does not hold the credit, or where ten minutes are over.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 600.0
#: Writes the files as the four leave them; the builders are those of the tests.
MAKE = """
import sys, pathlib
root, out = map(pathlib.Path, sys.argv[1:3])
sys.path[:0] = [str(root / "tests")]
from plain_files import save
from rollout_files import WELL_FORMED, episode, tagged, trace, trl_file, verl_rows, write_lines
(out / "trl" / "completions").mkdir(parents=True)
trl_file(out / "trl" / "completions" / "completions_00001.parquet", WELL_FORMED, step=[1] * 4, correct=[1.0, 1.0, 1.0, 0.0],
         advantage=[0.5, 0.5, 0.5, -1.5])
write_lines(out / "verl" / "9.jsonl", verl_rows())
write_lines(out / "verifiers" / "traces.jsonl", [episode(trace(tagged(a, q), "4", {"correct": float(a == "4")}))
                                                 for a, q in (("4", .9), ("4", .6), ("5", .8), ("5", .1))])
save(out, [{"question": "2+2=", "response": text, "answer": "4"} for text in WELL_FORMED], "csv")
"""
FILES = {"TRL": "trl", "verl": "verl", "verifiers": "verifiers", "CSV": "mine.csv"}


def timed(command: Sequence[str | Path], cwd: Path) -> float:
    """Run a command, which must work; its seconds."""
    started = time.perf_counter()
    process = subprocess.run([str(word) for word in command], cwd=cwd, capture_output=True, text=True, check=False)
    if process.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{process.stdout}{process.stderr}")
    return time.perf_counter() - started


def main() -> None:
    """Walk the path, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder", type=Path, help="clone and install there; without it the environment of this process is used"
    )
    folder = parser.parse_args().folder
    took: dict[str, float] = {}
    root, python = ROOT, Path(sys.executable)
    if folder is not None:
        took["git clone"] = timed(["git", "clone", "-q", ROOT, folder], Path.cwd())
        root, python = folder.resolve(), folder.resolve() / ".venv" / "bin" / "python"
        took["make .venv/train.stamp"] = timed(["make", ".venv/train.stamp"], root)
    with tempfile.TemporaryDirectory() as place:
        out = Path(place)
        timed([python, "-c", MAKE, root, out], root)
        for name, file in FILES.items():
            words = [python, "-m", "spanwise", "credit", out / file, "--output", out / f"of_{name}"]
            took[f"spanwise credit, {name}"] = timed(words, root)
            page = (out / f"of_{name}" / "report.html").read_text(encoding="utf-8")
            for needed in ("bae", "grpo", "solution", "confidence"):
                if needed not in page:
                    sys.exit(f"The report of {name} does not hold '{needed}'.")
    longest = max(took[name] for name in took if name.startswith("spanwise"))
    path = sum(seconds for name, seconds in took.items() if not name.startswith("spanwise")) + longest
    for name, seconds in {**took, "the path to one report": path}.items():
        print(f"{name:28} {seconds:8.1f} s")
    if path > LIMIT:
        sys.exit(f"That is more than {LIMIT:.0f} s.")


if __name__ == "__main__":
    main()
