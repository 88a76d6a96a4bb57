"""The public face: what a first hour needs comes from one import, and no signature changes by accident."""

import ast
import re

import public_face
import spanwise
from forked import run_each
from spanwise.credit import METHODS

FIRST_HOUR = (
    "find_blocks", "score_all", "credit_batch", "spread", "Layout", "Objective", "Scheme", "register", "read", "advantages",
)  # fmt: skip


def test_signatures_are_frozen():
    frozen = public_face.FILE.read_text(encoding="utf-8").splitlines()
    now = public_face.lines()
    changed = [f"- {line}" for line in frozen if line not in now] + [f"+ {line}" for line in now if line not in frozen]
    assert not changed, "\n".join(
        ["Public signatures changed. Say it in CHANGELOG.md, then run: python tests/public_face.py", *changed]
    )


def test_a_first_hour_comes_from_one_import():
    for name in FIRST_HOUR:
        assert callable(getattr(spanwise, name)), name
    assert {"bae", "grpo", "rlcr", "rloo", "dr_grpo"} <= set(spanwise.__all__)
    assert spanwise.find_blocks.__module__ == "spanwise.segment.place"


def test_names_are_known_whatever_was_imported_before_and_rooms_stay_beside_functions_of_their_name():
    found = run_each([
        "from spanwise import Layout; Layout(['price'], segmenter='json')",
        "from spanwise import Objective; Objective('correct', pays='solution')",
        "from spanwise import register; register('mine', kind='reward')(lambda text, **_: None)",
        "from spanwise import register; register('mine', kind='completion', paper='')(lambda reward_n, group_n: reward_n)",
        "import spanwise, sys; from spanwise.credit import grpo; from spanwise.segment import Vocabulary; "
        "from spanwise.score import brier; from spanwise.credit.methods._group_relative import grpo as own; assert grpo is own",
    ])  # fmt: skip
    assert [(done.returncode, done.stderr) for done in found] == [(0, "")] * 5


def test_modules_of_methods_do_not_shadow_their_functions():
    for known in METHODS.values():
        module = known.estimator.__module__.rsplit(".", 1)[1]
        assert module.startswith("_") or not known.estimator.__module__.startswith("spanwise."), known.name


def test_every_method_says_where_its_formula_comes_from():
    contrib = {name for name, known in METHODS.items() if ".contrib." in known.estimator.__module__}
    assert contrib == {"ha_dw", "grpo_verif", "gagpo"}
    for name, known in METHODS.items():
        if known.estimator.__module__.startswith("spanwise."):
            assert known.source, name
            assert known.source.startswith("notes") == (name in contrib or name == "sae"), name


def test_no_import_inside_a_function_dodges_a_circle():
    """Rooms that the core may be imported without load inside functions; no function imports a room of its own road."""
    import pathlib

    source = pathlib.Path(spanwise.__file__).parent
    late = []
    for file in source.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                for inner in ast.walk(node):
                    if isinstance(inner, ast.ImportFrom) and (inner.module or "").startswith("spanwise."):
                        late.append((file.relative_to(source).as_posix(), inner.module))
    # A command loads what it needs when it is called, a comparison its trainings' start when there is one to make; the report's
    # packages are optional, and so is SciPy, which figures need; the end of a run loads them.
    optional = ("report", "page", "shared.task", "spanwise.measure")
    commands = re.compile(r"cli\.py|commands/\w+/command\.py")
    assert [
        entry for entry in late if not commands.fullmatch(entry[0]) and not any(part in entry[1] for part in optional)
    ] == []
