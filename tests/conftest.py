"""Shared settings: one torch thread, no hub, one cache of warm starts, and a switch for the run-time shape checks."""

import functools
import gc
import importlib.util
import itertools
import os
import pathlib

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import dill.detect
import jaxtyping
import pytest
import torch
from hypothesis import Phase

SOURCE = pathlib.Path(importlib.util.find_spec("spanwise").origin).parent
#: Only modules whose annotations name shapes are checked at run time: pyright knows the other types, and each check costs time.
SHAPED = [
    ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts)
    for path in SOURCE.rglob("*.py")
    if "jaxtyping" in path.read_text(encoding="utf-8")
]
jaxtyping.install_import_hook(SHAPED, "beartype.beartype")

from browser import browser, chromium  # noqa: E402, F401  (the fixtures)

#: They import a trainer that has an environment of its own: make test-swift, make test-unsloth.
collect_ignore = ["foreign/foreign_swift.py", "foreign/foreign_swift_conformance.py", "foreign/foreign_unsloth.py"]

torch.set_num_threads(1)
#: `datasets` asks it of each function that a mapped one refers to, every time; under the shape checks these are hundreds.
dill.detect.nestedglobals = functools.cache(dill.detect.nestedglobals)
#: Examples of a property test that run under the shape checks.
CHECKED = 10


@pytest.fixture(scope="session", autouse=True)
def warm_starts(tmp_path_factory):
    """Trainings of this process's tests share their warm starts, and none reads or fills the cache of the user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPANWISE_CACHE", str(tmp_path_factory.mktemp("warm-starts")))
        yield


@pytest.fixture
def unchecked_shapes():
    """Users run without the shape checks; the sentences they get must come from our own code."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def unshrunk_examples(monkeypatch):
    """The conformance checks raise for the first failing example, not for the smallest one."""
    monkeypatch.setattr("spanwise.testing.search.PHASES", (Phase.generate,))


def pytest_collection_finish():
    """What is imported by now stays to the end: the garbage collector need not look at it again and again."""
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Property tests have their first examples under the shape checks, which take most of their time; the others without."""
    drawn, handle = itertools.count(), getattr(getattr(item, "obj", None), "hypothesis", None)
    if handle is None or jaxtyping.config.jaxtyping_disable:
        return (yield)
    whole = handle.inner_test

    @functools.wraps(whole)
    def example(*args, **kwargs):
        jaxtyping.config.update("jaxtyping_disable", next(drawn) >= CHECKED)
        try:
            whole(*args, **kwargs)
        finally:
            jaxtyping.config.update("jaxtyping_disable", False)

    handle.inner_test = example
    try:
        return (yield)
    finally:
        handle.inner_test = whole
