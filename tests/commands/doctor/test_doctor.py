"""`spanwise doctor` in this environment, and its sentences on plug-ins and engines that are really broken."""

import json
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

from packages_small import package
from spanwise.commands.doctor.examine import probe_in_process, sentences_on_verl
from spanwise.engines.windows import WINDOWS, is_tested

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.long
def test_what_is_installed_here_works_and_what_is_not_is_no_fault(tmp_path):
    """Run as a module, which needs no package of the command line."""
    path = package(tmp_path, "cyclopts", "raise ModuleNotFoundError(\"No module named 'cyclopts'\", name='cyclopts')\n")
    options = {"env": {**os.environ, "PYTHONPATH": path}, "capture_output": True, "text": True, "check": False}
    result = subprocess.run([sys.executable, "-m", "spanwise.commands.doctor"], **options)
    assert result.returncode == 0, result.stderr
    text = result.stdout
    assert text.split()[:3] == ["version", "tested", "with"]
    assert re.search(rf"torch\s+{re.escape(version('torch'))}\s+ok", text)
    assert re.search(rf"TRL\s+{version('trl')}\s+{re.escape(WINDOWS['trl'])}\s+ok", text)
    assert "TRL: spanwise.engines.trl is imported" in text
    assert re.search(r"verl\s+>=0.9,<0.10\s+(not installed|ok)", text)


def test_windows_are_those_of_the_extras_and_say_which_versions_are_tested():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for engine, window in WINDOWS.items():
        requirement = next(line for line in extras[engine] if re.match(rf"{engine}\b(?!-)", line))
        assert requirement.partition(";")[0].removeprefix(engine).strip() == window
    tested = {"verl": ["0.9", "0.9.1"], "skyrl": ["0.4.0"], "trl": ["1.10.0", "1.15.1"]}
    others = {"verl": ["0.8.9", "0.10.0", "0.10.0.dev0"], "skyrl": ["0.5.0rc1", "0.2"], "trl": ["1.15.0", "2.0", "1.9.9"]}
    for engine in WINDOWS:
        assert all(is_tested(engine, installed) for installed in tested[engine])
        assert not any(is_tested(engine, installed) for installed in others[engine])


def test_an_engine_that_ends_the_process_is_broken_too(tmp_path, monkeypatch):
    path = package(tmp_path, "trl", "import os, sys; print('so long', file=sys.stderr); os._exit(7)\n")
    monkeypatch.setenv("PYTHONPATH", path)
    broken, works = probe_in_process("trl")
    assert (broken[0].endswith("the process ended with status 7: so long"), works) == (True, [])


#: verl loads every entry point of its group and logs those that fail for debugging.
AS_VERL_LOADS = """
import json, logging
from importlib.metadata import entry_points
from spanwise.commands.doctor.examine import collect_plugin_errors, plugins
failed = collect_plugin_errors()
for entry in entry_points(group="verl.plugins"):
    try:
        entry.load()
    except Exception as error:
        logging.getLogger("verl").debug("Failed to load plugin '%s': %s", entry.name, error)
print(json.dumps([plugins(), failed]))
"""


def test_what_a_broken_plug_in_says_is_kept(tmp_path):
    entries = {"verl.plugins": "mine = broken_plugin\nfine = fine_plugin"}
    path = package(tmp_path, "broken_plugin", "def go():\n    raise KeyError('no such loss')\ngo()\n", entry_points=entries)
    (tmp_path / "fine_plugin.py").write_text("DONE = True\n")
    options = {"env": {**os.environ, "PYTHONPATH": path}, "capture_output": True, "text": True, "check": True}
    loaded, broken = json.loads(subprocess.run([sys.executable, "-c", AS_VERL_LOADS], **options).stdout.splitlines()[-1])
    assert {"mine": "broken_plugin", "fine": "fine_plugin"}.items() <= loaded.items()
    assert broken["mine"] == f"KeyError: 'no such loss' ({tmp_path / 'broken_plugin.py'}, line 2)"
    assert "fine" not in broken


VERL = {"switch": "", "plugins": {"spanwise": "m"}, "failed": {}, "faults": {}, "use_v1": True,
        "estimators": ["spanwise", "spanwise_grpo"], "modes": ["spanwise_sync", "sync"]}  # fmt: skip


def test_sentences_on_a_verl():
    for changes, place, says in (
        ({"failed": {"mine": "KeyError: 'x'"}}, 0, "'mine' fails, and verl does not report the error: KeyError: 'x'"),
        ({"plugins": {}}, 0, "spanwise is not registered in this verl: there is no entry point 'spanwise'"),
        ({"switch": "none"}, 0, "VERL_USE_EXTERNAL_PLUGINS is 'none', so verl does not load spanwise"),
        ({"estimators": []}, 0, "verl's registry still lacks the estimator spanwise"),
        ({"faults": {"trainer": "AttributeError: y"}}, 0, "could not attach its part 'trainer' to verl: AttributeError: y"),
        ({}, 1, "V1 (trainer.use_v1: true). Credit by block works in V0, and in V1 with trainer_mode=sync."),
        ({"use_v1": False}, 1, "uses V0"),
        ({"modes": [], "v1": "no queue"}, 1, "cannot be imported: no queue"),
    ):
        broken, works = sentences_on_verl({**VERL, **changes})
        assert says in (broken, works)[place][-1]
        assert bool(broken) == (place == 0)
