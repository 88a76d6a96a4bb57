"""A wrong or unusual set-up and the sentence it gets: each is a test and a line of docs/border.md."""

import io
import re
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest

from spanwise.cli import main
from spanwise.errors import SpanwiseError


@dataclass(frozen=True)
class Case:
    """What a user did, and what they are told.

    Attributes:
        setup: in their words.
        run: does it in an empty folder and returns all that they see; a `SpanwiseError` counts as seen.
        says: what must be there, whole; "..." stands for anything, and white space for any white space.
    """

    setup: str
    run: Callable[[Path], str]
    says: str


def check(cases: Sequence[Case]):
    """The test of some cases."""

    @pytest.mark.parametrize("case", cases, ids=[case.setup for case in cases])
    def test(case, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        seen = said(lambda: case.run(tmp_path))
        assert "Traceback" not in seen
        parts = [r"\s+".join(map(re.escape, part.split())) for part in case.says.split("...")]
        assert re.search(r"[\s\S]*?".join(parts), seen), seen

    return test


def said(run: Callable[[], object]) -> str:
    """What a piece of Python says: its warnings, what it prints or returns as text, and the error that ends it."""
    text = io.StringIO()
    with warnings.catch_warnings(record=True) as told, redirect_stdout(text), redirect_stderr(text):
        warnings.simplefilter("always")
        try:
            result = run()
            ending = result if isinstance(result, str) else ""
        except SpanwiseError as error:
            ending = f"{error}"
    return "\n".join([*(f"{one.message}" for one in told), text.getvalue(), ending])


def command(*words: str, code: int = 2) -> str:
    """What `spanwise WORDS` prints; it must end with the exit status `code`, and with 2 in one sentence that begins "Error:"."""

    def run() -> None:
        try:
            main([str(word) for word in words])
        except SystemExit as stop:
            ended.append(stop.code or 0)

    ended: list[object] = []
    seen = said(run)
    assert (ended or [0])[0] == code, f"ended with {ended}: {seen}"
    assert code != 2 or "Error:" in seen, seen
    return seen
