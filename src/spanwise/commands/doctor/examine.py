"""What is installed and whether it works, engine by engine. Standard library only: it must run where everything else is broken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import spanwise
from spanwise.commands.doctor.probe import MARK
from spanwise.engines.windows import WINDOWS, is_tested

State = Literal["ok", "not installed", "untested", "broken"]
#: What is worth naming beside the engines.
PACKAGES = (
    "torch", "transformers", "accelerate", "datasets", "peft", "vllm", "ray", "TransferQueue", "skyrl-gym", "tensordict",
    "math-verify", "pyarrow", "scipy",
)  # fmt: skip
_TITLES = {"trl": "TRL", "verl": "verl", "skyrl": "SkyRL"}
#: Seconds that an engine may take to be imported.
PATIENCE = 300


@dataclass(frozen=True)
class Finding:
    """One line of the table.

    Attributes:
        name: of the package or the engine.
        version: what is installed.
        window: the versions that the tests run with; empty for what has none.
        state: whether it works.
        says: what there is to say, sentence by sentence.
    """

    name: str
    version: str
    state: State
    window: str = ""
    says: tuple[str, ...] = ()


def examine() -> list[Finding]:
    """Look at this environment: Python and packages, then each engine in a process of its own."""
    python = ".".join(map(str, sys.version_info[:3]))
    found = [
        Finding("python", python, "ok"),
        Finding("spanwise", installed("spanwise") or "not installed as a package", "ok"),
    ]
    found += [Finding(name, held, "ok") for name in PACKAGES if (held := installed(name))]
    return [*found, *(_engine(name) for name in WINDOWS)]


def installed(name: str) -> str | None:
    """The version of a package; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _engine(name: str) -> Finding:
    held, window = installed(name), WINDOWS[name]
    if held is None:
        return Finding(_TITLES[name], "", "not installed", window, _how(name))
    found = probed(name)
    wrong = _faults(name, found)
    says = list(wrong)
    if not is_tested(name, held):
        says.append(f"{_TITLES[name]} {held} is not among the versions that the tests run with ({window}).")
    if not found.get("error"):
        says += _good(name, found)
    state: State = "broken" if wrong else "ok" if is_tested(name, held) else "untested"
    return Finding(_TITLES[name], held, state, window, tuple(says))


def _how(name: str) -> tuple[str, ...]:
    if name == "skyrl" and sys.version_info < (3, 12):
        return (
            "SkyRL needs Python 3.12 or newer: make an environment of its own, and pip install 'spanwise[skyrl]' there.",
        )
    beside = any(installed(other) for other in WINDOWS if other != name)
    alone = ", in an environment of its own" if name != "trl" or beside else ""
    return (f"To train with {_TITLES[name]}: pip install 'spanwise[{name}]'{alone}.",)


def probed(name: str) -> Mapping[str, Any]:
    """What an engine and the adapter to it say when they are imported in a process of their own."""
    root = str(Path(spanwise.__file__).parents[1])
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), root)))
    command = [sys.executable, "-m", "spanwise.commands.doctor.probe", name]
    try:
        done = subprocess.run(
            command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"it was still being imported after {PATIENCE} seconds"}
    last = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if not last:
        ending = "\n".join(done.stderr.strip().splitlines()[-3:])
        return {"error": f"the process ended with status {done.returncode}: {ending}"}
    return json.loads(last[-1].removeprefix(MARK))


def _faults(name: str, found: Mapping[str, Any]) -> list[str]:
    """What is broken, in sentences."""
    if found.get("error"):
        return [f"The adapter to {_TITLES[name]} cannot be imported: {found['error']}"]
    if name != "verl":
        return []
    wrong = [
        f"The plug-in '{plugin}' is broken, and verl does not say so: {text}" for plugin, text in found["failed"].items()
    ]
    wrong += [f"'{part}' could not be attached to verl: {text}" for part, text in found["faults"].items()]
    if "spanwise" not in found["plugins"]:
        wrong.append(
            "spanwise is not registered in this verl: there is no entry point 'spanwise' in the group verl.plugins. Install it "
            "into this environment (pip install spanwise); to have it on PYTHONPATH is not enough."
        )
    elif found["switch"].strip().lower() not in ("", "auto") and "spanwise" not in found["switch"].lower().split(","):
        wrong.append(f"VERL_USE_EXTERNAL_PLUGINS is '{found['switch']}', so verl does not load spanwise; leave it out.")
    elif "spanwise" not in found["estimators"]:
        wrong.append(
            "spanwise's plug-in is loaded, and algorithm.adv_estimator=spanwise is not in verl's registry all the same."
        )
    return wrong


def _good(name: str, found: Mapping[str, Any]) -> list[str]:
    """What works, and how it is asked for."""
    if name == "trl":
        return ["spanwise.engines.trl is imported; spanwise train RECIPE trains with it."]
    count = len([one for one in found["estimators"] if one != "spanwise"])
    if name == "skyrl":
        return [
            "spanwise.engines.skyrl is imported; trainer.override_entrypoint=spanwise.engines.skyrl.main trains by a recipe. "
            f"SkyRL's registry has {count} names spanwise_<method>."
        ]
    if "spanwise" not in found["estimators"]:
        return []
    said = [f"algorithm.adv_estimator=spanwise is in verl's registry, and {count} names spanwise_<method> for one reward."]
    modes = [mode.removeprefix("spanwise_") for mode in found.get("modes", ()) if mode.startswith("spanwise_")]
    usual = "V1 (trainer.use_v1: true)" if found["use_v1"] else "V0 (trainer.use_v1: false)"
    if found["use_v1"] is None:
        usual = "V0, the only one that it has"
    if modes:
        said.append(f"main_ppo uses {usual}. Modes of V1 with credit by block: {', '.join(modes)}; V0 has it too.")
    elif "v1" in found:
        said.append(f"main_ppo uses {usual}, and V1 cannot be imported: {found['v1']}")
    else:
        said.append(f"main_ppo uses {usual}.")
    return said
