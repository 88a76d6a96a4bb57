"""The walls of the house: no name twice, no function with a room's name, nothing that nobody calls.

`lint-imports` holds that no room imports a room to its right, and that there is no circle. What is listed below as left over is
to go; nothing may join it.
"""

import ast
import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from jaxtyping import TypeCheckError

import spanwise
import spanwise.losses
from spanwise.cli import COMMANDS

ROOT, SOURCE = Path(__file__).parents[1], Path(spanwise.__file__).parent
#: Started by a command line (`python -m`), or loaded by a user or an engine.
STARTED_FROM_OUTSIDE = {
    "spanwise", "spanwise.__main__", "spanwise.cli", "spanwise.commands.doctor.__main__", "spanwise.engines.nemo_rl",
    "spanwise.engines.prime_rl", "spanwise.engines.slime", "spanwise.engines.swift", "spanwise.engines.swift.trainer",
    "spanwise.engines.tinker", "spanwise.engines.unsloth", "spanwise.engines.verl.legacy", "spanwise.engines.verl.plugin",
    "spanwise.engines.verl.reward", "spanwise.engines.verl.trainer",
}  # fmt: skip


def imported_names(tree):
    """Return every module that a file imports, and every imported name, which may be a module."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names


@pytest.fixture(scope="module")
def trees():
    files = {path: ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts) for path in sorted(SOURCE.rglob("*.py"))}
    return {name.removesuffix(".__init__"): ast.parse(path.read_text(encoding="utf-8")) for path, name in files.items()}


def test_the_suite_checks_shapes_at_run_time():
    with pytest.raises(TypeCheckError):
        spanwise.grpo(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64))


def test_no_class_name_twice_and_no_function_with_the_name_of_a_room(trees):
    rooms = {path.name for path in SOURCE.rglob("*") if path.is_dir()} | {path.stem for path in SOURCE.glob("*.py")}
    homes = {}
    for module, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(module)
            if isinstance(node, ast.FunctionDef) and not module.startswith(("spanwise.commands", "spanwise.cli")):
                assert node.name not in rooms, module
    assert {name: where for name, where in homes.items() if len(where) > 1} == {}


#: Packages that need an environment of their own.
ELSEWHERE = ("verl", "skyrl", "swift")


def test_what_benchmarks_examples_and_tests_import_is_there():
    missing = []
    for folder in ("benchmarks", "examples", "docs/_ext", "tests"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                if not isinstance(node, ast.ImportFrom) or not f"{node.module}.".startswith("spanwise."):
                    continue
                if not any(f"spanwise.engines.{name}" in str(node.module) for name in ELSEWHERE):
                    room = import_module(str(node.module))
                    names = {alias.name for alias in node.names} - {*ELSEWHERE, *dir(room)}
                    missing += [f"{file.name}: {name}" for name in names if not is_module(room, name)]
    assert missing == []


def is_module(package, name):
    return hasattr(package, "__path__") and find_spec(f"{package.__name__}.{name}") is not None


def test_every_module_has_an_importer(trees):
    used = {*STARTED_FROM_OUTSIDE, *(f"spanwise.commands.{name}.command" for name in COMMANDS)}
    for module, tree in trees.items():
        used |= imported_names(tree) - {module}
        texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        for text in texts:  # loaded late by its name, or run by its path
            used |= {text.partition(":")[0], f"{module.rsplit('.', 1)[0]}.{text.removesuffix('.py')}"}
    packages = {name.rsplit(".", 1)[0] for name in trees if "." in name}  # a package lives while something in it does
    assert sorted(set(trees) - used - packages) == []


def test_no_import_inside_a_function_dodges_a_circle(trees):
    """Rooms that the core may be imported without load inside functions; no function imports a room of its own road."""
    late = {
        (module, inner.module)
        for module, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for inner in ast.walk(node)
        if isinstance(inner, ast.ImportFrom) and (inner.module or "").startswith("spanwise.")
    }
    # A command loads what it needs when it is called, a comparison its trainings' start when there is one to make; the report's
    # packages are optional, and so is SciPy, which figures need; the end of a run loads them.
    optional = ("report", "page", "shared.task", "spanwise.measure")
    commands = re.compile(r"spanwise\.(cli|commands\.\w+\.command)")
    dodging = [entry for entry in late if not any(part in entry[1] for part in optional)]
    assert [entry for entry in dodging if not commands.fullmatch(entry[0])] == []


def names_used(tree):
    """The names that code reads, without its imports, `__all__` and annotations."""
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def test_every_loss_is_called_by_an_engine(trees):
    """By an engine or a mode itself, or through another loss."""
    rooms = [tree for module, tree in trees.items() if module.startswith(("spanwise.engines.", "spanwise.modes."))]
    bodies = {getattr(node, "name", None): node for node in trees["spanwise.losses"].body}
    called, waiting = set(), [name for tree in rooms for name in names_used(tree) & set(bodies)]
    while waiting:
        name = waiting.pop()
        if name not in called:
            called.add(name)
            waiting += names_used(bodies[name]) & set(bodies)
    assert set(spanwise.losses.__all__) <= called
