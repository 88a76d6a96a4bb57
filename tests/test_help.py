"""`--help`: quick, whole at 80 columns, with the defaults of a recipe; and what a bare install says."""

import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import yaml
from packaging.requirements import Requirement

from forked import module, run
from spanwise.cli import app
from spanwise.modes import MODES
from spanwise.recipe import HUB, Recipe

COMMANDS = ("train", "eval", "reference", "compare", "fidelity", "credit", "why", "report", "demo", "methods", "doctor")
CORE = ("torch", "numpy", "jaxtyping")
SOURCE = Path(__file__).parents[1] / "src"
CLI = ("cyclopts", "rich", "pydantic", "pyyaml", "pyarrow", "filelock")


def helped(*words):
    environment = {**os.environ, "COLUMNS": "80"}
    text = subprocess.check_output([sys.executable, "-m", "spanwise", *words], env=environment, text=True)
    assert max(map(len, text.splitlines())) <= 80
    return text


def test_help_and_completion_name_every_command_in_a_second_of_work_and_load_no_torch():
    before = os.times()
    text = helped("--help")
    after = os.times()  # of this process's children, so that what else runs here does not count
    assert after.children_user + after.children_system - before.children_user - before.children_system < 1.5
    assert all(name in text for name in (*COMMANDS, "--install-completion"))
    code = "import sys; import spanwise.cli; print({'torch', 'pydantic', 'pyarrow', 'transformers'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"
    assert all(word in app.generate_completion(shell="bash") for word in (*COMMANDS, "--columns"))


def test_the_fields_in_the_help_are_those_of_the_recipe():
    text = " ".join(helped("train", "--help").split())
    listed = re.search(r"Recipe fields and their defaults: (.*)\. For a model by name: (.*?)\. ╭", text)
    fields, by_name = ([entry.partition("=") for entry in listed[part].split(", ")] for part in (1, 2))
    assert [name for name, _, _ in fields] == [*Recipe.model_fields, *MODES]
    for name, _, default in fields:
        field = Recipe.model_fields.get(name)
        assert yaml.safe_load(default) == (field and field.get_default(call_default_factory=True)), name
    assert {name: yaml.safe_load(value) for name, _, value in by_name} == dict(HUB)


def test_a_folder_with_a_command_is_a_command(tmp_path):
    """Its arguments, its help and the extra of pip that it needs stand in its folder, and nothing else knows of it."""
    (tmp_path / "greet").mkdir()
    (tmp_path / "greet" / "__init__.py").touch()
    (tmp_path / "greet" / "command.py").write_text(
        'EXTRA = "report"\n\n\ndef command(name: str, /, *, twice: bool = False) -> None:\n    """Greet somebody."""\n'
        '    print("hello", name, twice)\n    raise ModuleNotFoundError(name="altair")\n'
    )
    code = (
        f"import spanwise.commands; spanwise.commands.__path__.append({str(tmp_path)!r})\n"
        "import sys; from spanwise.cli import main; main(sys.argv[1:])"
    )
    words = [sys.executable, "-c", code]
    done = subprocess.run([*words, "greet", "you", "--twice"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "hello you True\n")
    assert done.stderr.endswith("Install it with: pip install 'spanwise[report]'\n")
    assert "Greet somebody." in subprocess.check_output([*words, "--help"], text=True)


def closure(names):
    """The distributions of some packages and of all that they require here."""
    distributions, waiting = {}, list(names)
    for name in waiting:
        if name in distributions:
            continue
        try:
            distributions[name] = distribution(name)
        except PackageNotFoundError:  # what another system would need
            continue
        needed = map(Requirement, distributions[name].requires or ())
        waiting += [each.name for each in needed if each.marker is None or each.marker.evaluate({"extra": ""})]
    return distributions.values()


def bare_environment(folder, *names):
    """A folder of links that `run` takes for all that is installed."""
    folder.mkdir(parents=True, exist_ok=True)
    for package in closure(names):
        for top in {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
            if not (folder / top).exists():
                (folder / top).symlink_to(Path(package.locate_file(top)).resolve())
    return folder


def run_bare(folder, codes, *, cwd, imports="import torch"):
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "OMP_NUM_THREADS") if name in os.environ}
    environment = {**kept, "PYTHONPATH": os.pathsep.join((str(folder), str(SOURCE))), "COLUMNS": "200"}
    return [run(code, python=(sys.executable, "-S"), environment=environment, cwd=cwd, imports=imports) for code in codes]


def test_a_bare_install_says_what_it_needs(tmp_path):
    rooms = {
        "engines.trl": ("trl", "train"), "measure": ("scipy", "measure"), "report": ("altair", "report"),
        "rollouts": ("pyarrow", "cli"), "testing": ("hypothesis", "testing"),
    }  # fmt: skip
    codes = [module("spanwise", "credit", "x.csv"), "import spanwise; print(spanwise.Batch)"]
    codes += [f"import spanwise.{room}" for room in rooms]
    command, core, *imports = run_bare(bare_environment(tmp_path / "core", *CORE), codes, cwd=tmp_path)
    assert (command.returncode, command.stdout) == (1, "")
    assert command.stderr.startswith("The command line needs 'cyclopts'. To train with TRL: pip install 'spanwise[train]'")
    assert core.stderr == ""
    for (room, (package, extra)), done in zip(rooms.items(), imports, strict=True):
        sentence = f"spanwise.{room} needs '{package}'. Install it with: pip install 'spanwise[{extra}]'"
        assert done.stderr.splitlines()[-1] == f"ModuleNotFoundError: {sentence}"


def test_each_command_says_what_it_needs_more(tmp_path):
    (tmp_path / "a.csv").write_text("prompt,completion,acc\np,a,1\np,b,0\n")
    needs = {("report", "."): "report", ("train",): "train", ("reference",): "train"}
    place = bare_environment(tmp_path / "cli", *CORE, *CLI)
    codes = [module("spanwise", *words) for words in (("why", "a.csv"), ("credit", "a.csv"), *needs)]
    why, credit, *refused = run_bare(place, codes, cwd=tmp_path, imports="import spanwise.cli, spanwise.commands.why.why")
    # Both run beside any engine: one writes no page, the other leaves its page out and says so.
    assert (why.returncode, why.stderr, credit.returncode, credit.stderr) == (0, "", 0, "")
    assert "why a token gets nothing" in why.stdout
    assert "No report: it needs '" in credit.stdout
    assert (tmp_path / "runs" / "credit" / "credit.parquet").is_file()
    for words, done in zip(needs, refused, strict=True):
        assert done.returncode == 1
        assert done.stderr.startswith(f"Error: spanwise {words[0]} needs '")
        assert done.stderr.endswith(f"Install it with: pip install 'spanwise[{needs[words]}]'\n")
