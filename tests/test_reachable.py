"""No method and no loss without a caller: each is trained by an engine, or says that it is a function to call."""

import ast
from pathlib import Path

import pytest

import spanwise
import spanwise.losses
from spanwise.credit import METHODS
from spanwise.engines.trl.trainer import PROVIDES
from spanwise.modes.critic.config import CriticConfig
from spanwise.scheme import Scheme
from spanwise.tasks import DIGITS_LAYOUT

SOURCE = Path(spanwise.__file__).parent
OURS = sorted(name for name, known in METHODS.items() if known.estimator.__module__.startswith("spanwise."))
TO_CALL = "A function to call from Python"


@pytest.mark.parametrize("name", OURS)
def test_a_method_is_trained_or_says_that_it_is_a_function_to_call(name):
    known = METHODS[name]
    contrib = ".contrib." in known.estimator.__module__
    if known.kind == "refinement":
        scheme = Scheme.preset("grpo", DIGITS_LAYOUT, refine=name, longest=32)
    elif known.preset is not None:
        scheme = Scheme.preset(name, DIGITS_LAYOUT, longest=32)
    else:
        assert contrib
        assert known.summary.startswith(TO_CALL)
        return
    assert not known.summary.startswith(TO_CALL)
    scheme.check((*PROVIDES, *CriticConfig.adds))


def names_used(tree):
    """The names that code reads, without its imports, `__all__` and annotations."""
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def called_by_engines(losses):
    """Of some names those that an engine or a mode in it calls, by itself or through another loss."""
    called = set()
    for file in (*(SOURCE / "engines").rglob("*.py"), *(SOURCE / "modes").rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        imported = {
            alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("spanwise.losses")
            for alias in node.names
        }
        called |= imported & names_used(tree)
    bodies = {
        node.name: node
        for node in ast.parse(Path(spanwise.losses.__file__).read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    waiting = list(called)
    while waiting:
        further = (names_used(bodies[waiting.pop()]) & set(bodies)) - called
        called |= further
        waiting += further
    return called & set(losses)


def test_every_loss_is_called_by_an_engine():
    losses = set(spanwise.losses.__all__)
    assert called_by_engines(losses) == losses
