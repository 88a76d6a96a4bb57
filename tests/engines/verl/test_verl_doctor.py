"""`spanwise doctor` beside a real verl: what is registered in it, and what a plug-in said that verl swallowed."""

import os
import subprocess
import sys
from importlib.metadata import entry_points

import pytest

from packages_small import package

pytest.importorskip("verl")


def doctor(path=None, **settings):
    environment = {**os.environ, **({"PYTHONPATH": path} if path else {}), **settings}
    command = [sys.executable, "-m", "spanwise.commands.doctor"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=280)


@pytest.fixture(autouse=True)
def installed():
    if "spanwise" not in entry_points(group="verl.plugins").names:
        pytest.skip("spanwise is on PYTHONPATH and not installed, so verl does not load it")


def test_this_verl_has_the_estimator_and_the_modes():
    done = doctor()
    assert done.returncode == 0, done.stdout
    assert "algorithm.adv_estimator=spanwise is in verl's registry" in done.stdout
    assert "main_ppo uses V1 (trainer.use_v1: true). Modes of V1 with credit by block: " in done.stdout


def test_a_plug_in_that_verl_swallows_is_heard(tmp_path):
    """Only while verl is half imported does this one fail: to load it again afterwards would say nothing."""
    code = "import sys\nif sys.modules['verl'].__spec__._initializing:\n    raise RuntimeError('verl is not whole yet')\n"
    path = package(tmp_path, "early_plugin", code, entry_points={"verl.plugins": "early = early_plugin"})
    done = doctor(path)
    assert done.returncode == 1
    assert "The plug-in 'early' is broken, and verl does not say so: RuntimeError: verl is not whole yet" in done.stdout


def test_a_plug_in_that_is_broken_is_heard_where_verl_loads_it(tmp_path):
    entries = {"verl.plugins": "mine = broken_plugin\nfine = fine_plugin"}
    path = package(tmp_path, "broken_plugin", "def go():\n    raise KeyError('no such loss')\ngo()\n", entry_points=entries)
    (tmp_path / "fine_plugin.py").write_text("DONE = True\n")
    place = f"KeyError: 'no such loss' ({tmp_path / 'broken_plugin.py'}, line 2)"
    said = doctor(path).stdout
    assert f"The plug-in 'mine' is broken, and verl does not say so: {place}" in said
    assert "'fine'" not in said
    assert "no such loss" not in doctor(path, VERL_USE_EXTERNAL_PLUGINS="fine,spanwise").stdout


def test_plug_ins_that_are_switched_off():
    done = doctor(VERL_USE_EXTERNAL_PLUGINS="none")
    assert done.returncode == 1
    assert "VERL_USE_EXTERNAL_PLUGINS is 'none', so verl does not load spanwise; unset it." in done.stdout
