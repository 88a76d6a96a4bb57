"""Small mistakes planted in the files of one engine, on a copy of the repository, and the tests that notice them.

    python .ci/mutate_engines.py skyrl --count 40          with the Python of the engine's own environment
    python .ci/mutate_engines.py trl --tests tests/engines/trl/test_trl_keeping.py

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

ROOT = Path(__file__).resolve().parent.parent
#: Engine -> what is imported once for all mutants, and the tests that take seconds.
ENGINES = {
    "skyrl": (
        ("skyrl.train.trainer", "skyrl.train.generators.base"),
        ("fold", "conformance", "turns", "estimators", "critic_conformance", "config", "keeping", "laser"),
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
    made = copy.deepcopy(node)
    match made:
        case ast.Compare(ops=[op]) if type(op) in OTHERS:
            made.ops = [OTHERS[type(op)]()]
            yield made
        case ast.BinOp(op=op) | ast.BoolOp(op=op) if type(op) in OTHERS:
            made.op = OTHERS[type(op)]()
            yield made
        case ast.UnaryOp(op=ast.Not() | ast.USub() | ast.Invert()):
            yield made.operand
        case ast.IfExp():
            made.body, made.orelse = made.orelse, made.body
            yield made
        case ast.Slice(lower=lower, upper=upper) if lower or upper:
            bound = "lower" if lower else "upper"
            setattr(made, bound, ast.BinOp(getattr(made, bound), ast.Add(), ast.Constant(1)))
            yield made
        case ast.Constant(value=bool()):
            yield ast.Constant(not made.value)
        case ast.Constant(value=int() | float()):
            yield ast.Constant(made.value + 1)
        case ast.Subscript(slice=ast.Constant(value=str() as key)):
            made.slice = ast.Constant(f"{key}_")
            yield made
        case ast.Call(func=ast.Attribute(attr="any" | "all" | "min" | "max" as name)):
            made.func.attr = {"any": "all", "all": "any", "min": "max", "max": "min"}[name]
            yield made
        case ast.Call(func=ast.Attribute(value=value), args=[]) if not isinstance(value, ast.Name):
            yield value
        case ast.Call(keywords=[*_, ast.keyword(arg=str())]):
            made.keywords = made.keywords[:-1]
            yield made
        case ast.Call(func=ast.Name(), args=[only], keywords=[]):
            yield only


def mutants(file: Path) -> Iterator[tuple[Path, int, str, str, str]]:
    """(file, line, before, after, the whole text) of every mutant; neither annotations nor texts of errors are touched."""
    text = file.read_text(encoding="utf-8")
    tree = ast.parse(text)
    spared: set[ast.AST] = set()
    for node in ast.walk(tree):
        kept = [getattr(node, name, None) for name in ("annotation", "returns")]
        kept += [node] if isinstance(node, ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom) else []
        kept += node.decorator_list if isinstance(node, ast.FunctionDef | ast.ClassDef) else []
        spared |= {inner for one in kept if one is not None for inner in ast.walk(one)}
    lines = text.encode().splitlines(keepends=True)
    starts = [sum(map(len, lines[:n])) for n in range(len(lines))]
    for node in ast.walk(tree):
        if node in spared or not hasattr(node, "col_offset") or not hasattr(node, "end_lineno"):
            continue
        begin, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        before = text.encode()[begin:end].decode()
        for made in other(node):
            after = ast.unparse(ast.fix_missing_locations(made))
            after = after if isinstance(node, ast.Slice) else f"({after})"
            whole = text.encode()[:begin].decode() + after + text.encode()[end:].decode()
            yield file, node.lineno, " ".join(before.split())[:120], " ".join(after.split())[:120], whole


def killed(tests: list[str], seconds: int) -> bool:
    """Whether the tests of the copy fail, in a process that has the engine's packages already."""
    child = os.fork()
    if child == 0:
        os.setsid()
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        import pytest

        words = [
            "-x",
            "-q",
            "--assert=plain",
            "-p",
            "no:cacheprovider",
            "-m",
            "not long",
            "-k",
            "not fresh_worker",
            "--hypothesis-seed=0",
        ]
        code = pytest.main([*words, "-W", "ignore::pytest.PytestAssertRewriteWarning", *tests])
        os._exit(int(code))
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status != 0
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--files", nargs="*", help="below src/spanwise; default: those of the engine")
    parser.add_argument("--tests", nargs="*", help="default: those of the engine that take seconds")
    parser.add_argument("--seconds", type=int, default=120, help="a mutant that takes longer is killed")
    given = parser.parse_args()
    packages, names = ENGINES[given.engine]
    with tempfile.TemporaryDirectory() as place:
        room = Path(place)
        for name in ("src", "tests", "docs", "recipes", "examples", "benchmarks"):
            shutil.copytree(ROOT / name, room / name, ignore=shutil.ignore_patterns("__pycache__", "_build"))
        for name in ("README.md", "conftest.py"):
            shutil.copy(ROOT / name, room)
        settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8").splitlines()
        settings = ['addopts = "--strict-markers"' if line.startswith("addopts") else line for line in settings]
        (room / "pyproject.toml").write_text("\n".join(settings), encoding="utf-8")
        os.chdir(room)
        sys.path.insert(0, str(room / "src"))
        sys.dont_write_bytecode = True
        os.environ["PYTHONPATH"] = str(room / "src")
        for name in packages:
            import_module(name)
        assert "spanwise" not in sys.modules, "each mutant imports its own"
        folder = room / "tests/engines" / given.engine
        prefix = "test_" if given.engine == "verl" else f"test_{given.engine}_"
        tests = given.tests or [str(folder / f"{prefix}{name}.py") for name in names]
        files = given.files or sorted((room / "src/spanwise/engines" / given.engine).glob("[!_]*.py"))
        every = [mutant for file in files for mutant in mutants(room / "src/spanwise" / file)]
        chosen = random.Random(given.seed).sample(every, min(given.count, len(every)))
        if killed(tests, 10 * given.seconds):
            sys.exit("The tests fail without any mutant.")
        table: dict[str, list[bool]] = {}
        for file, line, before, after, text in chosen:
            original = file.read_text(encoding="utf-8")
            file.write_text(text, encoding="utf-8")
            noticed = killed(tests, given.seconds)
            file.write_text(original, encoding="utf-8")
            table.setdefault(file.name, []).append(noticed)
            print(f"{'killed  ' if noticed else 'SURVIVED'} {file.name}:{line}: {before}  ->  {after}", flush=True)
        for name, outcomes in sorted(table.items()):
            print(f"{name:20} {sum(outcomes):3} / {len(outcomes):3}")
        print(
            f"{given.engine}: {sum(map(sum, table.values()))} / {len(chosen)}, of {len(every)} there could be, seed {given.seed}"
        )


if __name__ == "__main__":
    main()
