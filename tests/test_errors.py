"""Errors are of this package and, where an argument is wrong, of Python's own kind."""

import inspect
import pickle
import re
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, packages_distributions, requires

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from spanwise import AlignmentError, DataError, DivergedError, LayoutError, RecipeError, RewardError, SpanwiseError, errors
from spanwise.commands.shared.folder import read_fields
from spanwise.recipe import load

VALUE_ERRORS = {AlignmentError, LayoutError, RecipeError, RewardError}


def test_a_wrong_argument_is_a_value_error():
    ours = {kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, SpanwiseError)}
    assert {kind for kind in ours if issubclass(kind, ValueError)} == VALUE_ERRORS
    assert ours - VALUE_ERRORS == {SpanwiseError, DataError, DivergedError}
    for kind in ours:
        assert str(pickle.loads(pickle.dumps(kind("in a worker")))) == "in a worker"


def test_sentences_go_through_pydantic_once_and_together_and_an_unread_file_is_not_called_nonsense(tmp_path):
    with pytest.raises(RecipeError) as caught:
        load(None, {"method": "bea", "steps": 0})
    first, second = str(caught.value).split("; ")
    assert first.startswith("There is no method 'bea'. Did you mean 'bae'?")
    assert second == "steps is 0, but must be at least 1 (generation batches)"
    with pytest.raises(DataError, match=r"nowhere\.json' cannot be read") as caught:
        read_fields(tmp_path / "nowhere.json")
    assert "not a JSON object" not in str(caught.value)


def test_each_package_is_brought_by_the_extra_that_is_named():
    """The extras of the installed distribution bring each package, directly or through a requirement."""
    declared = {}
    for line in requires("spanwise"):
        for extra in re.findall(r"extra == [\"']([\w-]+)[\"']", line):
            declared.setdefault(extra, set()).add(canonicalize_name(Requirement(line).name))
    brought = packages_distributions()
    for package, extra in errors.EXTRAS.items():
        listed = declared[extra]
        through = set()
        for name in listed:
            with suppress(PackageNotFoundError):  # for another system
                through |= {canonicalize_name(Requirement(line).name) for line in requires(name) or []}
        assert {canonicalize_name(name) for name in brought[package]} & (listed | through), (package, listed)


def test_the_sentence_for_a_missing_package_and_the_first_line_of_an_error_or_its_type():
    missing = errors.lacking("spanwise.measure", ModuleNotFoundError(name="scipy.stats"))
    assert str(missing) == "spanwise.measure needs 'scipy'. Install it with: pip install 'spanwise[measure]'"
    missing = errors.lacking("this command", ModuleNotFoundError(name="my_rewards"), extra="train")
    assert "'my_rewards', which does not come with spanwise" in str(missing)
    lines = [errors.first_line(error) for error in (OSError("\nno file: \n at line 3"), ValueError("a.b."), EOFError())]
    assert lines == ["no file", "a.b", "EOFError"]
