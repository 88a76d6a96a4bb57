"""The entry point as verl loads it, in processes of their own."""

import importlib
import os
import subprocess
import sys

import pytest


def python(code, **environment):
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=200,
    )
    assert run.returncode == 0, run.stderr
    return run


NAMES = "from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY as r; print([n for n in r if 'spanwise' in str(n)])"


def test_verl_registers_it_by_itself():
    assert "'spanwise_grpo'" in python("import verl\n" + NAMES).stdout


def test_without_entry_points_too():
    """Where plug-ins are switched off, the module may be named, or imported late."""
    off = {"VERL_USE_EXTERNAL_PLUGINS": "none"}
    assert (
        "'spanwise_grpo'"
        in python("import verl\n" + NAMES, **off, VERL_USE_EXTERNAL_MODULES="spanwise.engines.verl.plugin").stdout
    )
    late = python(f"import verl\n{NAMES}\nimport spanwise.engines.verl.plugin\n{NAMES}", **off).stdout.splitlines()
    assert late[0] == "[]"
    assert "'spanwise_grpo'" in late[1]


def test_it_is_light():
    """Nothing of verl's trainers is imported in processes that do not need them."""
    told = "import verl, sys\nprint([m for m in sys.modules if m.startswith(('verl.trainer', 'verl.exp', 'transformers'))])"
    assert python(told).stdout == python(told, VERL_USE_EXTERNAL_PLUGINS="none").stdout


def test_registering_again_is_free():
    from verl.trainer.ppo import core_algos
    from verl.trainer.ppo.v1 import get_trainer_cls

    from spanwise.engines.verl import plugin

    before = dict(core_algos.ADV_ESTIMATOR_REGISTRY), get_trainer_cls("sync"), len(sys.meta_path)
    plugin.register()
    assert (dict(core_algos.ADV_ESTIMATOR_REGISTRY), get_trainer_cls("sync"), len(sys.meta_path)) == before
    assert plugin.FAULTS == {}


def test_another_version_is_named(monkeypatch, capsys):
    import verl

    from spanwise.engines.verl import plugin

    monkeypatch.setattr(verl, "__version__", "0.10.0.dev0")
    with pytest.warns(UserWarning, match=r"tested with verl >=0.9,<0.10, but yours is verl 0.10.0.dev0"):
        plugin.register()
    assert "[spanwise]" in capsys.readouterr().err


def test_a_part_that_fails_says_so_and_verl_goes_on(monkeypatch, capsys):
    from verl.trainer.ppo import core_algos

    from spanwise.engines.verl import estimators, plugin

    def broken(module):
        raise AttributeError("no such thing in this verl")

    monkeypatch.setattr(estimators, "attach", broken)
    monkeypatch.setattr(plugin, "FAULTS", {})
    with pytest.warns(UserWarning, match=r"could not attach 'estimators' to verl.trainer.ppo.core_algos.*no such thing"):
        plugin.register()
    assert plugin.FAULTS == {"estimators": "AttributeError: no such thing in this verl"}
    assert "no such thing" in capsys.readouterr().err
    assert importlib.import_module("verl.trainer.ppo.core_algos") is core_algos
