"""Mutation testing of `spanwise.credit`, `spanwise.segment` and `spanwise.layout` with mutmut, on a copy of the repository.

    python .ci/mutation.py                                    every file of both rooms, and the layout
    python .ci/mutation.py credit/strata credit/methods/_grpo --minutes 5
    python .ci/mutation.py --report                           only the table of the last run

Prints killed / made per file and writes the survivors, as diffs, to `survivors.txt` beside the copy. A second run goes on where the
first one stopped; `--fresh` starts over. Run-time shape checks are off, so what kills a mutant is a test and not a type.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COPY = Path(os.environ.get("SPANWISE_MUTATION", tempfile.gettempdir() + "/spanwise-mutation"))
SOURCES = ("layout.py", "credit", "segment")
TESTS = ("test_layout.py", "credit", "segment")  # they mirror the sources: neither trainers, processes nor downloads
LEFT_OUT = ("registry", "presets", "__init__", "vocabulary", "merge")  # tables and tokenizer files, and their tests
CONFIG = """
[tool.mutmut]
source_paths = ["src/spanwise"]
only_mutate = {files}
also_copy = ["README.md", "docs"]
pytest_add_cli_args = ["-p", "no:cacheprovider", "--hypothesis-seed=0"]
pytest_add_cli_args_test_selection = {tests}
use_git_change_detection = false
"""


def undecorate(path: Path) -> None:
    """Mutmut leaves decorated functions alone: write `@register(...)` as a call after the function."""
    text = path.read_text(encoding="utf-8")
    lines = text.split("\n")
    for node in reversed(ast.parse(text).body):
        if isinstance(node, ast.FunctionDef) and len(node.decorator_list) == 1:
            decorator = node.decorator_list[0]
            if isinstance(decorator, ast.Call) and getattr(decorator.func, "id", "") == "register":
                lines.insert(int(node.end_lineno or 0), f"\n\n{ast.get_source_segment(text, decorator)}({node.name})")
                del lines[decorator.lineno - 1 : node.lineno - 1]
    path.write_text("\n".join(lines), encoding="utf-8")


def prepare(wanted: list[str]) -> None:
    """Copy sources and tests and write the configuration."""
    shutil.rmtree(COPY, ignore_errors=True)
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("src", "tests", "docs"):
        shutil.copytree(ROOT / name, COPY / name, ignore=ignore)
    shutil.copy(ROOT / "README.md", COPY)
    room = COPY / "src/spanwise"
    files = []
    for path in _python(room, SOURCES):
        undecorate(path)
        label = path.relative_to(room).with_suffix("").as_posix()
        if label in wanted or (not wanted and path.stem not in LEFT_OUT):
            files.append(f"src/spanwise/{label}.py")
    left_out = [f"test_{name}" for name in LEFT_OUT]
    tests = [
        path.relative_to(COPY).as_posix()
        for path in _python(COPY / "tests", TESTS)
        if path.stem.startswith("test_") and path.stem not in left_out
    ]
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8").splitlines()
    settings = ['addopts = "--strict-markers"' if line.startswith("addopts") else line for line in settings]
    text = "\n".join(settings) + CONFIG.format(files=json.dumps(files), tests=json.dumps(tests))
    (COPY / "pyproject.toml").write_text(text, encoding="utf-8")


def _python(folder: Path, names: tuple[str, ...]) -> list[Path]:
    """The files of these names, and every file below these folders."""
    return sorted(path for name in names for path in [folder / name, *(folder / name).rglob("*.py")] if path.suffix == ".py")


def report() -> None:
    """The table per file, and the survivors as diffs."""
    listed = subprocess.run(
        [sys.executable, "-m", "mutmut", "results", "--all", "True"], cwd=COPY, capture_output=True, text=True
    )
    table: dict[str, Counter[str]] = {}
    survivors = []
    for line in listed.stdout.splitlines():
        name, separator, status = line.strip().rpartition(": ")
        if not separator:
            continue
        table.setdefault(name.split(".x")[0], Counter())[status] += 1
        if status in ("survived", "no tests"):
            survivors.append(name)
    total: Counter[str] = Counter()
    for module, counts in sorted(table.items()):
        total += counts
        print(f"{module:45} {_score(counts)}")
    print(f"{'all':45} {_score(total)}")
    script = (
        "import sys\nfrom mutmut.mutation.diff_apply import get_diff_for_mutant\n"
        "for name in sys.argv[1:]:\n    print(name)\n    print(get_diff_for_mutant(name))\n"
    )
    process = subprocess.run([sys.executable, "-c", script, *survivors], cwd=COPY, capture_output=True, text=True)
    (COPY / "survivors.txt").write_text(process.stdout, encoding="utf-8")
    print(f"Survivors: {COPY / 'survivors.txt'}")


def _score(counts: Counter[str]) -> str:
    killed = counts["killed"] + counts["timeout"]
    checked = killed + counts["survived"] + counts["no tests"] + counts["suspicious"]
    rest = counts["not checked"]
    return f"{killed:5} / {checked:5}  {killed / max(checked, 1):6.1%}" + (f"   ({rest} not run)" if rest else "")


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="module by its path, such as credit/strata")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args()
    if not options.report:
        if options.fresh or not COPY.exists():
            prepare(options.files)
        command = [sys.executable, "-m", "mutmut", "run", "--max-children", "1"]
        unchecked, seconds = os.environ | {"JAXTYPING_DISABLE": "1"}, 60 * options.minutes
        with (COPY / "mutmut.log").open("w") as log:
            try:
                subprocess.run(command, cwd=COPY, env=unchecked, stdout=log, stderr=log, timeout=seconds, check=False)
            except subprocess.TimeoutExpired:
                print(f"Stopped after {options.minutes:g} minutes; run again to go on.")
    report()


if __name__ == "__main__":
    main()
