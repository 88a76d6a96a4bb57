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
    """A package or an engine: its version, whether it works, the versions that the tests run with, and what there is to say."""

    name: str
    version: str
    state: State
    window: str = ""
    says: tuple[str, ...] = ()


def main() -> None:
    """Print a line for each finding, then what there is to say; exit status 1 if something that is installed is broken."""
    findings = examine()
    print(f"{'':14}  {'version':18}  {'tested with':18}")
    for one in findings:
        print(f"{one.name:14}  {one.version:18}  {one.window:18}  {one.state}")
    for one in findings:
        for sentence in one.says:
            print(f"{one.name}: {sentence}")
    if any(one.state == "broken" for one in findings):
        sys.exit(1)


def examine() -> list[Finding]:
    """Look at this environment: Python and packages, then each engine in a process of its own."""
    own = installed("spanwise") or "not installed as a package"
    versions = {"python": ".".join(map(str, sys.version_info[:3])), "spanwise": own}
    versions |= {name: number for name in PACKAGES if (number := installed(name))}
    return [*(Finding(name, number, "ok") for name, number in versions.items()), *map(_engine, WINDOWS)]


def installed(name: str) -> str | None:
    """The version of a package; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _engine(name: str) -> Finding:
    title, number, window = _TITLES[name], installed(name), WINDOWS[name]
    if number is None:
        return Finding(title, "", "not installed", window, (_how(name),))
    wrong, good = sentences(name, probed(name))
    tested = is_tested(name, number)
    untested = () if tested else (f"{title} {number} is not among the versions that the tests run with ({window}).",)
    state: State = "broken" if wrong else "ok" if tested else "untested"
    return Finding(title, number, state, window, (*wrong, *untested, *good))


def _how(name: str) -> str:
    if name == "skyrl" and sys.version_info < (3, 12):
        return "SkyRL needs Python 3.12 or newer: make an environment of its own, and pip install 'spanwise[skyrl]' there."
    beside = any(installed(other) for other in WINDOWS if other != name)
    alone = ", in an environment of its own" if name != "trl" or beside else ""
    return f"To train with {_TITLES[name]}: pip install 'spanwise[{name}]'{alone}."


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


def sentences(name: str, facts: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """What is broken, and what works and how it is asked for, of what `probe` says of an engine."""
    if facts.get("error"):
        return [f"The adapter to {_TITLES[name]} cannot be imported: {facts['error']}"], []
    if name == "trl":
        return [], ["spanwise.engines.trl is imported; spanwise train RECIPE trains with it."]
    registered = "spanwise" in facts["estimators"]
    count = len(facts["estimators"]) - registered
    if name == "skyrl":
        return [], [
            "spanwise.engines.skyrl is imported; trainer.override_entrypoint=spanwise.engines.skyrl.main trains by a recipe. "
            f"SkyRL's registry has {count} names spanwise_<method>."
        ]
    good = [
        f"algorithm.adv_estimator=spanwise is in verl's registry, and {count} names spanwise_<method> for one reward.",
        _trainer_of_verl(facts),
    ]
    return _faults_of_verl(facts), good if registered else []


def _faults_of_verl(facts: Mapping[str, Any]) -> list[str]:
    wrong = [
        f"The plug-in '{plugin}' is broken, and verl does not say so: {text}" for plugin, text in facts["failed"].items()
    ]
    wrong += [f"'{part}' could not be attached to verl: {text}" for part, text in facts["faults"].items()]
    if "spanwise" not in facts["plugins"]:
        wrong.append(
            "spanwise is not registered in this verl: there is no entry point 'spanwise' in the group verl.plugins. Install it "
            "into this environment (pip install spanwise); to have it on PYTHONPATH is not enough."
        )
    elif facts["switch"].strip().lower() not in ("", "auto") and "spanwise" not in facts["switch"].lower().split(","):
        wrong.append(f"VERL_USE_EXTERNAL_PLUGINS is '{facts['switch']}', so verl does not load spanwise; leave it out.")
    elif "spanwise" not in facts["estimators"]:
        wrong.append(
            "spanwise's plug-in is loaded, and algorithm.adv_estimator=spanwise is not in verl's registry all the same."
        )
    return wrong


def _trainer_of_verl(facts: Mapping[str, Any]) -> str:
    """Which trainer `main_ppo` uses, and where there is credit by block."""
    usual = {True: "V1 (trainer.use_v1: true)", False: "V0 (trainer.use_v1: false)", None: "V0, the only one that it has"}
    trainer = f"main_ppo uses {usual[facts['use_v1']]}"
    modes = [mode.removeprefix("spanwise_") for mode in facts.get("modes", ()) if mode.startswith("spanwise_")]
    if modes:
        return f"{trainer}. Modes of V1 with credit by block: {', '.join(modes)}; V0 has it too."
    return f"{trainer}, and V1 cannot be imported: {facts['v1']}" if "v1" in facts else f"{trainer}."
