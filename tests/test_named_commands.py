"""Every command that a page, the Makefile or a docstring of a benchmark names is there, takes what it is given, and starts."""

import argparse
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from contextlib import redirect_stdout
from pathlib import Path
from unittest.mock import patch

import pytest
from cyclopts import CycloptsError, MissingArgumentError

from pages import FENCED, ROOT
from spanwise.cli import COMMANDS, app
from spanwise.commands.shared.options import recipe_fields
from spanwise.modes import MODES
from spanwise.recipe import Recipe

PAGES = sorted([
    *(page for page in ROOT.glob("*.md") if page.name != "CHANGELOG.md"),  # it names commands that are gone
    *ROOT.glob("examples/*.md"), *(page for page in (ROOT / "docs").rglob("*.md") if "_build" not in page.parts),
])  # fmt: skip
SCRIPTS = sorted([*ROOT.glob("benchmarks/*.py"), *ROOT.glob(".ci/*.py"), *ROOT.glob("tests/fuzz/*.py")])
FIRST = ("spanwise", "python", "python3", "pytest", "make", "pip", "pipx")


def commands_of(text):
    """The commands in lines of a shell: words, without what goes before them, what they are piped into, and comments."""
    commands = []
    for line in text.replace("\\\n", " ").splitlines():
        line = line.replace("$$((256 / $$size))", "64")  # what the Makefile leaves to the shell
        line = re.sub(r"(^|\s)#.*|\$\(BIN\)/|\$\(CURDIR\)/", r"\1", line.strip().removeprefix("$ ").lstrip("@-"))
        for part in re.split(r"&&|\|\||;|(?<![\w'\"])\|(?!\w)|\bdo\b|\bthen\b|\bexec\b", line):
            try:
                words = shlex.split(part)
            except ValueError:  # half a sentence
                continue
            while words and (words[0] in ("nice", "for", "if", "!") or re.match(r"[A-Z_]+=", words[0])):
                words = words[1:]
            output = any(re.fullmatch(r"\d+\.\d+", word) for word in words[2:3])  # a row of a table of times
            if words and Path(words[0]).name in FIRST and not output:
                commands.append([Path(words[0]).name, *words[1:]])
    return commands


def named():
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        parts = [code for kind, _, code in FENCED.findall(text) if kind in ("", "bash", "sh", "console", "text")]
        parts += re.findall(r"(?<!`)`([^`\n]+)`(?!`)", FENCED.sub("", text))
        parts += list(re.findall(r"^    (.+)$", FENCED.sub("", text), re.MULTILINE))
        for part in parts:
            yield from ((page.relative_to(ROOT).as_posix(), words) for words in commands_of(part))
    for name in ("Makefile", ".ci/run"):
        lines = (ROOT / name).read_text().replace("\\\n", " ").splitlines()
        for words in commands_of("\n".join(line for line in lines if name != "Makefile" or line.startswith("\t"))):
            yield name, words
    for script in SCRIPTS:
        for words in commands_of(re.match(r'"""(.*?)"""', script.read_text(), re.DOTALL)[1]):
            yield script.relative_to(ROOT).as_posix(), words


NAMED = sorted({(place, shlex.join(words)) for place, words in named()})


def words_of(first):
    """(place, further words) of the commands that begin so."""
    return [(place, shlex.split(text)[1:]) for place, text in NAMED if shlex.split(text)[0] == first]


#: Script -> the arguments that it is named with.
SCRIPTS_NAMED = {}
for _, words in [*words_of("python"), *words_of("python3")]:
    if words and words[0].endswith(".py") and "/" in words[0]:
        SCRIPTS_NAMED.setdefault(words[0], set()).add(shlex.join(words[1:]))


def test_there_are_commands_on_the_pages_and_every_script_is_there():
    places = {place for place, _ in NAMED}
    assert len(NAMED) > 200
    assert {"README.md", "Makefile", ".ci/run", "docs/speed.md", "benchmarks/kills.py"} <= places
    assert len(SCRIPTS_NAMED) > 25
    assert {script for script in SCRIPTS_NAMED if not (ROOT / script).is_file()} == set()
    assert {name for name, _ in SPANWISE if name.isalpha() and name.islower()} == set(COMMANDS)


def fitting(words):
    """Return the words as a user would type them: placeholders filled in, no brackets and dots."""
    words = [word.removeprefix("[") if word.startswith("[-") else word for word in words]
    words = [word.removesuffix("]") if "[" not in word else word for word in words]
    values = {"N": "0", "S": "0", "$$seed": "0", "$$score": "brier", "parts|total": "parts"}
    return [values.get(word, word) for word in words if word not in ("...", "…")]


SPANWISE = sorted({(words[0], shlex.join(fitting(words))) for _, words in words_of("spanwise") if words})


@pytest.mark.parametrize("text", [text for name, text in SPANWISE if name in COMMANDS])
def test_spanwise_takes_what_it_is_given(text):
    try:
        _, bound, _ = app.parse_args(shlex.split(text), print_error=False, exit_on_error=False)
    except MissingArgumentError:
        return  # as in `spanwise eval --samples 16`: the folder is not what the sentence is about
    except CycloptsError as error:
        if "..." not in text:
            pytest.fail(f"spanwise {text}: {error}")
        return
    assert set(recipe_fields(bound.arguments.get("set_"))) <= {*Recipe.model_fields, *MODES}, text


def test_every_target_is_one():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([\w./-]+):", makefile, re.MULTILINE))
    calls = {word for _, words in words_of("make") for word in words if re.fullmatch(r"[a-z][\w./-]*", word)}
    assert calls - targets <= {"it", "a", "of", "an"}  # prose
    assert set(re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)[1].split()) <= targets


def test_every_file_of_tests_is_there():
    commands = [*words_of("pytest"), *(entry for entry in words_of("python") if entry[1][:2] == ["-m", "pytest"])]
    for place, word in ((place, word) for place, words in commands for word in words):
        path, _, name = word.partition("::")
        if "/" in path and not path.startswith(("-", "<")):
            assert (ROOT / path).exists(), (place, word)
            assert not name or f"def {name}" in (ROOT / path).read_text(), (place, word)


def test_every_module_and_extra_is_there():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    names = {extra for _, text in NAMED for group in re.findall(r"spanwise\[([\w,]+)\]", text) for extra in group.split(",")}
    assert set() < names <= set(extras)
    modules = {words[1] for _, words in words_of("python") if words[:1] == ["-m"] and words[1].startswith("spanwise")}
    for module in modules:
        place = ROOT / "src" / Path(*module.split("."))
        assert place.with_suffix(".py").is_file() or (place / "__main__.py").is_file(), module


#: These import verl or SkyRL before they read their words, so that here only their files are looked for.
ELSEWHERE = {"benchmarks/skyrl_agent.py", "benchmarks/skyrl_turns.py", "benchmarks/driver.py"}
NO_OPTIONS = {"benchmarks/verifier.py", "benchmarks/fixed_points.py", "tests/fuzz/linear.py"}
PARSED = sorted(
    (script, text)
    for script, texts in SCRIPTS_NAMED.items()
    if script.startswith(("benchmarks/", "tests/fuzz/", ".ci/")) and script not in ELSEWHERE | NO_OPTIONS
    for text in texts
    if text or len(texts) == 1
)


class Parsed(BaseException):
    """Raised when the words were understood."""


@pytest.fixture
def as_it_was(monkeypatch):
    """Restore path, modules and arguments after the test."""
    modules = set(sys.modules)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with patch.dict(os.environ):
        yield
    for name in set(sys.modules) - modules:
        file = str(getattr(sys.modules[name], "__file__", None) or "")
        if file.startswith((str(ROOT / "benchmarks"), str(ROOT / "tests" / "fuzz"))):
            del sys.modules[name]


def started(script, words, monkeypatch):
    """Run a script in this process as `python script words` would."""
    monkeypatch.setattr(sys, "argv", [script, *words])
    for folder in ((ROOT / script).parent, ROOT / "tests", ROOT / "examples"):
        monkeypatch.syspath_prepend(str(folder))
    with redirect_stdout(io.StringIO()) as out:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    return out.getvalue()


@pytest.mark.usefixtures("as_it_was", "unchecked_shapes")
@pytest.mark.parametrize(("script", "text"), PARSED)
def test_a_script_takes_what_it_is_given(script, text, monkeypatch):
    parse = argparse.ArgumentParser.parse_args

    def parse_only(self, args=None, namespace=None):
        parse(self, args, namespace)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    with pytest.raises(Parsed):
        started(script, fitting(shlex.split(text)), monkeypatch)


#: script -> the words that make it small, and a word of what it then prints.
SMALL = {
    "benchmarks/estimators.py": ("--completions 16 --tokens 16 --repeats 1", "bae"),
    "benchmarks/segment_credit.py": ("--completions 16 --tokens 64 --repeats 1", "segment + credit"),
    "benchmarks/segmenters.py": ("--tokens 4000 --repeats 1 --only tags,json", "json"),
    "benchmarks/chain.py": ("--table", ""),
    "benchmarks/critic.py": ("--table", ""),
    "benchmarks/fields.py": ("--table", ""),
}


@pytest.mark.usefixtures("as_it_was", "unchecked_shapes")
@pytest.mark.parametrize("script", SMALL)
def test_a_benchmark_runs_at_its_smallest_size(script, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    words, printed = SMALL[script]
    assert printed in started(script, shlex.split(words), monkeypatch)


#: The same, in a process of its own: they train, start processes of their own, or take a while at any size.
SLOW = {
    "benchmarks/estimators.py": ("--completions 16 --tokens 16 --repeats 1 --growth", "bae"),
    "benchmarks/credit_files.py": ("--completions 64 --tokens 200 --files 2 --text", "spanwise credit"),
    "benchmarks/first_report.py": ("", "the path to one report"),
    "tests/fuzz/run.py": ("--completions 240 --giants 0 --segmenters 240 --no-linear", "two blocks"),
    "benchmarks/coverage.py": ("--trials 2 --resamples 20", "2 trials in each of"),
}


@pytest.mark.long
@pytest.mark.parametrize("script", SLOW)
def test_a_slow_benchmark_runs_at_its_smallest_size(script, tmp_path):
    words, printed = SLOW[script]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(ROOT / name) for name in ("src", "tests", "examples"))}
    settings = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run([sys.executable, ROOT / script, *shlex.split(words)], **settings, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert printed in done.stdout
