"""Small mistakes planted in the files of some rooms or of one engine, on a copy of the repository, and the tests that notice them.

    python .ci/mutants.py credit                       files of src/spanwise/credit, tests of tests/credit and the like
    python .ci/mutants.py recipe scheme pipeline       modules are rooms, too
    python .ci/mutants.py skyrl --count 40             with the Python of the engine's own environment
    python .ci/mutants.py trl --tests tests/engines/trl/test_trl_keeping.py

A mutant is drawn by a seed among all places of all files: another comparison, `and` for `or`, another sign, a bound of a slice one off,
another constant or key, a condition turned round, a call left out, an argument left out. Prints killed / run per file, and each survivor.
"""

# ruff: noqa: E501

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
#: Imported once for all mutants of a room that is no engine.
PACKAGES = ("hypothesis", "scipy.stats", "transformers", "altair", "openai", "trl.trainer.grpo_trainer")
#: Engine -> what is imported once for all mutants, and the tests that take seconds.
ENGINES = {
    "skyrl": (
        ("skyrl.train.trainer", "skyrl.train.generators.base"),
        ("fold", "conformance", "turns", "estimators", "critic", "config", "keeping", "laser"),
    ),
    "trl": (("trl", "transformers", "datasets"), ("conformance", "estimators", "turns", "keeping", "gradient", "critic")),
    "verl": (  # what verl imports, without verl, which would load our plug-in from the copy before it is mutated
        ("ray", "tensordict", "transformers", "datasets", "transfer_queue", "hydra", "peft"),
        ("carry", "verl_conformance", "verl_estimators", "verl_settings", "verl_weights"),
    ),
}
OTHERS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot,
    ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add,
    ast.Div: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


def other(node: ast.AST) -> Iterator[ast.AST]:
    """What may stand in place of a node."""
    mutant = copy.deepcopy(node)
    match mutant:
        case ast.Compare(ops=[op]) if type(op) in OTHERS:
            mutant.ops = [OTHERS[type(op)]()]
            yield mutant
        case ast.BinOp(op=op) | ast.BoolOp(op=op) if type(op) in OTHERS:
            mutant.op = OTHERS[type(op)]()
            yield mutant
        case ast.UnaryOp(op=ast.Not() | ast.USub() | ast.Invert()):
            yield mutant.operand
        case ast.IfExp():
            mutant.body, mutant.orelse = mutant.orelse, mutant.body
            yield mutant
        case ast.Slice(lower=lower, upper=upper) if lower or upper:
            bound = "lower" if lower else "upper"
            setattr(mutant, bound, ast.BinOp(getattr(mutant, bound), ast.Add(), ast.Constant(1)))
            yield mutant
        case ast.Constant(value=bool()):
            yield ast.Constant(not mutant.value)
        case ast.Constant(value=int() | float()):
            yield ast.Constant(mutant.value + 1)
        case ast.Subscript(slice=ast.Constant(value=str() as key)):
            mutant.slice = ast.Constant(f"{key}_")
            yield mutant
        case ast.Call(func=ast.Attribute(attr="any" | "all" | "min" | "max" as name)):
            mutant.func.attr = {"any": "all", "all": "any", "min": "max", "max": "min"}[name]
            yield mutant
        case ast.Call(func=ast.Attribute(value=value), args=[]) if not isinstance(value, ast.Name):
            yield value
        case ast.Call(keywords=[*_, ast.keyword(arg=str())]):
            mutant.keywords = mutant.keywords[:-1]
            yield mutant
        case ast.Call(func=ast.Name(), args=[only], keywords=[]):
            yield only


def mutants(file: Path) -> Iterator[tuple[Path, int, str, str, str]]:
    """(file, line, before, after, the whole text) of every mutant; neither annotations nor texts of errors are touched."""
    text = file.read_text(encoding="utf-8")
    tree = ast.parse(text)
    spared: set[ast.AST] = set()
    for node in ast.walk(tree):
        spared_nodes = [getattr(node, name, None) for name in ("annotation", "returns")]
        spared_nodes += [node] if isinstance(node, ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom) else []
        spared_nodes += node.decorator_list if isinstance(node, ast.FunctionDef | ast.ClassDef) else []
        spared |= {inner for one in spared_nodes if one is not None for inner in ast.walk(one)}
    lines = text.encode().splitlines(keepends=True)
    starts = [sum(map(len, lines[:n])) for n in range(len(lines))]
    for node in ast.walk(tree):
        if node in spared or not hasattr(node, "col_offset") or not hasattr(node, "end_lineno"):
            continue
        begin, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        before = text.encode()[begin:end].decode()
        for mutant in other(node):
            after = ast.unparse(ast.fix_missing_locations(mutant))
            after = after if isinstance(node, ast.Slice) else f"({after})"
            whole = text.encode()[:begin].decode() + after + text.encode()[end:].decode()
            yield file, node.lineno, " ".join(before.split())[:120], " ".join(after.split())[:120], whole


class SlowTests:
    """A plug-in of pytest that writes down which tests take longer than some seconds, and leaves out those in `left_out`."""

    def __init__(self, file: Path, seconds: float) -> None:
        self.file, self.seconds = file, seconds
        self.left_out: set[str] = set()

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Leave out the slow tests, by their whole names."""
        items[:] = [item for item in items if item.nodeid not in self.left_out]

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Write the name of a slow test."""
        if report.when == "call" and report.duration > self.seconds:
            with self.file.open("a", encoding="utf-8") as lines:
                lines.write(f"{report.nodeid}\n")


def tests_of(name: str) -> Iterator[str]:
    """The test files that mirror a room or a module; those that need a browser are left out."""
    tests = Path("tests")
    every = sorted([*(tests / name).rglob("test_*.py"), *tests.glob(f"test_{name}*.py")])
    return (str(file) for file in every if "browser" not in file.name)


def killed(tests: list[str], seconds: int, plugin: SlowTests) -> bool:
    """Whether the tests of the copy fail, in a process that has the needed packages already."""
    child = os.fork()
    if child == 0:
        os.setsid()
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        words = ["-x", "-q", "--assert=plain", "-p", "no:cacheprovider", "-m", "not long", "-k", "not fresh_worker"]
        words += ["-W", "ignore::pytest.PytestAssertRewriteWarning", "--hypothesis-profile=ci", "--doctest-modules"]
        words += ["-o", "python_functions=[t]est test_*"]  # no function `tests` of a file that is asked for its doctests
        code = pytest.main([*words, *tests], plugins=[plugin])
        os._exit(int(code))
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    print("(stopped by the clock)", end=" ")
    return True


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rooms", nargs="+", help="rooms or modules, or one engine")
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--files", nargs="*", help="below src/spanwise; default: those of the rooms")
    parser.add_argument("--tests", nargs="*", help="default: those of the rooms, or of the engine, that take seconds")
    parser.add_argument("--seconds", type=int, default=120, help="a mutant that takes longer is killed")
    parser.add_argument("--slow", type=float, default=1.0, help="leave out tests that take longer; not with an engine")
    options = parser.parse_args()
    label, engine = " ".join(options.rooms), ENGINES.get(options.rooms[0])
    if len(options.rooms) > 1 and ENGINES.keys() & {*options.rooms}:
        parser.error("name one engine alone, or rooms")
    with tempfile.TemporaryDirectory() as place:
        clone = Path(place)
        for name in ("src", "tests", "docs", "recipes", "examples", "benchmarks"):
            shutil.copytree(ROOT / name, clone / name, ignore=shutil.ignore_patterns("__pycache__", "_build"))
        for name in ("README.md", "CITATION.cff", "conftest.py"):
            shutil.copy(ROOT / name, clone)
        settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8").splitlines()
        settings = ['addopts = "--strict-markers"' if line.startswith("addopts") else line for line in settings]
        (clone / "pyproject.toml").write_text("\n".join(settings), encoding="utf-8")
        os.chdir(clone)
        sys.path.insert(0, str(clone / "src"))
        os.environ["PYTHONPATH"] = str(clone / "src")
        for name in engine[0] if engine else PACKAGES:
            import_module(name)
        assert "spanwise" not in sys.modules, "each mutant imports its own"
        sources = Path("src/spanwise")
        stages = [options.tests] if options.tests else []  # each runs if those before it notice nothing
        if engine:
            folder = Path("tests/engines", label)
            prefix = "test_" if label == "verl" else f"test_{label}_"
            stages = stages or [[str(folder / f"{prefix}{name}.py") for name in engine[1]]]
            files = sorted((sources / "engines" / label).glob("[!_]*.py"))
        else:
            stages = stages or [
                [*dict.fromkeys(file for name in options.rooms for file in tests_of(name))],
                ["tests/border"],
            ]
            files = [
                path for name in options.rooms for path in [sources / f"{name}.py", *sorted((sources / name).rglob("*.py"))]
            ]
            files = [file for file in files if file.exists() and file.name != "__init__.py"]
        files = [sources / file for file in options.files] if options.files else files
        if not files:
            sys.exit(f"src/spanwise has no files of {label}.")
        every = [mutant for file in files for mutant in mutants(file)]
        chosen = random.Random(options.seed).sample(every, min(options.count, len(every)))
        slow = SlowTests(Path("slow.txt").absolute(), float("inf") if engine else options.slow)
        if any(
            killed(tests, 10 * options.seconds, slow)
            for tests in [[] if engine else list(map(str, files)), *stages]
            if tests
        ):
            sys.exit("The tests fail without any mutant.")
        slow.left_out = set(slow.file.read_text(encoding="utf-8").splitlines()) if slow.file.exists() else set()
        print(f"Left out as slow: {len(slow.left_out)} tests", flush=True)
        sys.dont_write_bytecode, os.environ["PYTHONDONTWRITEBYTECODE"] = True, "1"
        table: dict[str, list[bool]] = {}
        for file, line, before, after, text in chosen:
            original = file.read_text(encoding="utf-8")
            file.write_text(text, encoding="utf-8")
            nearest = [name for name in stages[0] if file.stem.strip("_") in name]
            doctests = [] if engine else [str(file)]
            nearest_first = [[*doctests, *nearest], [name for name in stages[0] if name not in nearest], *stages[1:]]
            noticed = any(killed(tests, options.seconds, slow) for tests in nearest_first if tests)
            file.write_text(original, encoding="utf-8")
            shown = str(file.relative_to(sources))
            table.setdefault(shown, []).append(noticed)
            print(f"{'killed  ' if noticed else 'SURVIVED'} {shown}:{line}: {before}  ->  {after}", flush=True)
        for name, outcomes in sorted(table.items()):
            print(f"{name:40} {sum(outcomes):3} / {len(outcomes):3}")
        killed_ones = sum(map(sum, table.values()))
        print(f"{label}: {killed_ones} / {len(chosen)}, of {len(every)} there could be, seed {options.seed}")


if __name__ == "__main__":
    main()
