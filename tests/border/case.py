"""A wrong or unusual set-up and the sentence it gets: the sentence is a line of docs/border.md, what a user did stands here."""

import functools
import inspect
import io
import re
import warnings
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import yaml

from spanwise.cli import main
from spanwise.errors import SpanwiseError

PAGE = Path(__file__).parents[2] / "docs" / "border.md"
#: A training of the embedded task that ends at once.
QUICK = ("--set", "start_steps=1", "--set", "eval_prompts=2", "--set", "eval_samples=2", "--set", "report=false")


def sections() -> dict[str, dict[str, str]]:
    """Read docs/border.md: section -> set-up -> sentence."""
    by_section = {}
    for part in re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        title, *lines = part.splitlines()
        rows = [re.split(r"(?<!\\)\|", line) for line in lines if line.startswith("| ")][1:]
        plain = [
            [re.sub(r"\\([<|*])", r"\1", cell.strip()) for cell in row] for row in rows
        ]  # without Markdown's backslashes
        by_section[title] = {set_up: sentence for _, set_up, sentence, _ in plain}
    return by_section


def case(run: Callable[..., object]) -> Callable[..., Callable[..., Any]]:
    """Let calls of a function be cases: `run(x)` happens later, in the folder of its test, which a parameter `folder` gets."""
    takes_folder = "folder" in inspect.signature(run).parameters

    @functools.wraps(run)
    def later(*arguments: object, **options: object) -> Callable[..., Any]:
        return lambda folder: run(*((folder, *arguments) if takes_folder else arguments), **options)

    return later


def check(title: str, cases: Mapping[str, Callable[[Path], object]]):
    """The test of a section of docs/border.md.

    Each set-up of the cases runs in an empty folder and returns all that a user sees; a `SpanwiseError` counts as seen.
    The sentence on the page must be there whole; "..." stands for anything, and white space for any white space.
    """
    listed = sections()[title.strip().removesuffix(".")]
    assert listed.keys() == cases.keys(), f"in one of docs/border.md and the cases only: {listed.keys() ^ cases.keys()}"

    @pytest.mark.parametrize("set_up", cases)
    def test(set_up, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        seen = output_of(lambda: cases[set_up](tmp_path))
        assert "Traceback" not in seen
        parts = [r"\s+".join(map(re.escape, part.split())) for part in listed[set_up].split("...")]
        assert re.search(r"[\s\S]*?".join(parts), seen), seen

    return test


def output_of(run: Callable[[], object]) -> str:
    """Return the warnings, the printed or returned text and the final error of a piece of Python."""
    text = io.StringIO()
    with warnings.catch_warnings(record=True) as caught, redirect_stdout(text), redirect_stderr(text):
        warnings.simplefilter("always")
        try:
            result = run()
            ending = result if isinstance(result, str) else ""
        except SpanwiseError as error:
            ending = f"{error}"
    return "\n".join([*(f"{warning.message}" for warning in caught), text.getvalue(), ending])


def command(*words: str, code: int = 2) -> str:
    """What `spanwise WORDS` prints; it must end with the exit status `code`, and with 2 in one sentence that begins "Error:"."""

    def run() -> None:
        try:
            main([str(word) for word in words])
        except SystemExit as stop:
            ended.append(stop.code or 0)

    ended: list[object] = []
    seen = output_of(run)
    assert (ended or [0])[0] == code, f"ended with {ended}: {seen}"
    assert code != 2 or "Error:" in seen, seen
    return seen


@case
def trained(folder: Path, *options: str, **recipe: object) -> str:
    """What `spanwise train OPTIONS` prints of a recipe."""
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return command("train", "recipe.yaml", "--output", str(folder / "run"), *QUICK, *options)


def write_recipe(folder: Path, method: str = "bae", more: str = "", *, objective: str = "") -> Path:
    """Write the recipe of a door: one block, which the environment pays; `objective` and `more` are added to it."""
    file = folder / "recipe.yaml"
    rewards = f"objectives: [{{reward: environment, pays: solution{objective}}}]"
    file.write_text(f"layout: {{solution: [answer]}}\nmethod: {method}\n{rewards}\n{more}")
    return file
