"""The entry point as verl loads it, in fresh processes, and what `spanwise doctor` reports of it and of other plug-ins."""

import importlib
import os
import subprocess
import sys
from importlib.metadata import entry_points

import pytest
import verl
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.v1 import get_trainer_cls

from packages_small import package
from spanwise.commands.doctor import examine
from spanwise.engines.verl import estimators, plugin


def process(*words, **environment):
    command = [sys.executable, "-W", "ignore", *words]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, timeout=280)


def python(code, **environment):
    run = process("-c", code, **environment)
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


def doctor(path, **settings):
    return process("-m", "spanwise.commands.doctor", PYTHONPATH=path, **settings)


NAMES = "from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY as r; print([n for n in r if 'spanwise' in str(n)])"
OFF = {"VERL_USE_EXTERNAL_PLUGINS": "none"}


def test_verl_registers_it_by_itself_and_it_is_light_and_without_entry_points_it_is_imported_late():
    """The plug-in imports none of verl's trainers in a process that does not need them."""
    heavy = "'verl.trainer', 'verl.exp', 'transformers'"
    code = f"import verl, sys\nprint([m for m in sys.modules if m.startswith(({heavy}))])\n{NAMES}"
    modules, names = python(code)
    assert "'spanwise_grpo'" in names
    assert python(f"{code}\nimport spanwise.engines.verl.plugin\n{NAMES}", **OFF) == [modules, "[]", names]


def test_registering_again_is_free():
    before = dict(core_algos.ADV_ESTIMATOR_REGISTRY), get_trainer_cls("sync"), len(sys.meta_path)
    plugin.register()
    assert (dict(core_algos.ADV_ESTIMATOR_REGISTRY), get_trainer_cls("sync"), len(sys.meta_path)) == before
    assert plugin.FAULTS == {}


def test_another_version_is_named(monkeypatch, capsys):
    monkeypatch.setattr(verl, "__version__", "0.10.0.dev0")
    with pytest.warns(UserWarning, match=r"tested with verl >=0.9,<0.10, but you use verl 0.10.0.dev0"):
        plugin.register()
    assert "[spanwise]" in capsys.readouterr().err


def test_a_part_that_fails_says_so_and_verl_goes_on(monkeypatch, capsys):
    def broken(module):
        raise AttributeError("no such thing in this verl")

    monkeypatch.setattr(estimators, "attach", broken)
    monkeypatch.setattr(plugin, "FAULTS", {})
    with pytest.warns(UserWarning, match=r"'estimators' to verl.trainer.ppo.core_algos, and runs without .*no such thing"):
        plugin.register()
    assert plugin.FAULTS == {"estimators": "AttributeError: no such thing in this verl"}
    assert "no such thing" in capsys.readouterr().err
    assert importlib.import_module("verl.trainer.ppo.core_algos") is core_algos


#: If spanwise is on PYTHONPATH and not installed, verl does not load it.
INSTALLED = pytest.mark.skipif("spanwise" not in entry_points(group="verl.plugins").names, reason="not installed")


@INSTALLED
def test_a_plug_in_that_verl_swallows_is_heard_and_without_it_nothing_is_wrong(tmp_path):
    """This plug-in fails only while verl is half imported, so loading it again afterwards would show no fault."""
    code = "import sys\nif sys.modules['verl'].__spec__._initializing:\n    raise RuntimeError('verl is not whole yet')\n"
    path = package(tmp_path, "early_plugin", code, entry_points={"verl.plugins": "early = early_plugin"})
    broken = doctor(path)
    assert broken.returncode == 1
    assert "'early' fails, and verl does not report the error: RuntimeError: verl is not whole yet" in broken.stdout
    whole = doctor(path, VERL_USE_EXTERNAL_PLUGINS="spanwise")
    assert whole.returncode == 0, whole.stdout
    assert "not whole" not in whole.stdout
    assert "verl's registry has the estimator spanwise" in whole.stdout
    modes = "main_ppo uses V1 (trainer.use_v1: true). Credit by block works in V0, and in V1 with trainer_mode="
    assert modes in whole.stdout


@INSTALLED
def test_plug_ins_that_are_switched_off(monkeypatch):
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "none")
    broken, _ = examine._probe_verl()
    assert "VERL_USE_EXTERNAL_PLUGINS is 'none', so verl does not load spanwise; unset it." in broken
