"""Check which engines are installed and work. Standard library only: this must run where everything else is broken.

An engine and the adapter to it are imported in a process of their own, `python -m spanwise.commands.doctor ENGINE`.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import traceback
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any

import spanwise
from spanwise.engines.windows import WINDOWS, is_tested

#: The packages whose versions are printed with the engines.
PACKAGES = (
    "torch", "transformers", "accelerate", "datasets", "peft", "vllm", "ray", "TransferQueue", "skyrl-gym", "tensordict",
    "math-verify", "pyarrow", "scipy",
)  # fmt: skip
_TITLES = {"trl": "TRL", "verl": "verl", "skyrl": "SkyRL"}
#: Seconds that an engine may take to be imported.
PATIENCE = 300
#: The beginning of the last line of a process that imported an engine.
MARK = "spanwise-doctor "
#: A line of the table and its sentences: name, version, the versions that the tests run with, state, sentences.
Finding = tuple[str, str, str, str, list[str]]


def main() -> None:
    """Print Python, packages and engines with their problems; exit with status 1 if something installed is broken."""
    version = installed("spanwise") or "not installed as a package"
    versions = {"python": ".".join(map(str, sys.version_info[:3])), "spanwise": version}
    versions |= {name: number for name in PACKAGES if (number := installed(name))}
    findings: list[Finding] = [(name, number, "", "ok", []) for name, number in versions.items()]
    findings += map(_engine, WINDOWS)
    print(f"{'':14}  {'version':18}  {'tested with':18}")
    for name, number, window, state, _ in findings:
        print(f"{name:14}  {number:18}  {window:18}  {state}")
    for name, *_, sentences in findings:
        for sentence in sentences:
            print(f"{name}: {sentence}")
    if any(state == "broken" for *_, state, _ in findings):
        sys.exit(1)


def installed(name: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _engine(name: str) -> Finding:
    title, number, window = _TITLES[name], installed(name), WINDOWS[name]
    if number is None:
        has_others = any(installed(other) for other in WINDOWS if other != name)
        advice_end = ", in an environment of its own" if name != "trl" or has_others else ""
        advice = f"To train with {title}: pip install 'spanwise[{name}]'{advice_end}."
        if name == "skyrl" and sys.version_info < (3, 12):
            advice = (
                "SkyRL needs Python 3.12 or newer: make a separate environment, and pip install 'spanwise[skyrl]' there."
            )
        return title, "", window, "not installed", [advice]
    faults, facts = sentences(name, probed(name))
    untested = f"{title} {number} is not among the versions that the tests run with ({window})."
    notes = [] if is_tested(name, number) else [untested]
    state = "broken" if faults else "untested" if notes else "ok"
    return title, number, window, state, [*faults, *notes, *facts]


def probed(name: str) -> Mapping[str, Any]:
    """Import an engine and its adapter in a separate process, and return the facts that this process prints."""
    root = str(Path(spanwise.__file__).parents[1])
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), root)))
    command = [sys.executable, "-m", "spanwise.commands.doctor", name]
    try:
        process = subprocess.run(
            command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"the import takes more than {PATIENCE} seconds"}
    result_lines = [line for line in process.stdout.splitlines() if line.startswith(MARK)]
    if not result_lines:
        last_lines = "\n".join(process.stderr.strip().splitlines()[-3:])
        return {"error": f"the process ended with status {process.returncode}: {last_lines}"}
    return json.loads(result_lines[-1].removeprefix(MARK))


def sentences(name: str, facts: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Turn the facts about an engine into two lists of sentences: what is broken, and what works."""
    if facts.get("error"):
        return [f"The adapter to {_TITLES[name]} cannot be imported: {facts['error']}"], []
    if name == "trl":
        return [], ["spanwise.engines.trl is imported; spanwise train RECIPE trains with it."]
    registered = "spanwise" in facts["estimators"]
    count = sum(name.startswith("spanwise") for name in facts["estimators"]) - registered
    if name == "skyrl":
        return [], [
            "spanwise.engines.skyrl is imported; trainer.override_entrypoint=spanwise.engines.skyrl.main trains by a recipe. "
            f"SkyRL's registry has {count} names spanwise_<method>."
        ]
    facts_found = [
        f"algorithm.adv_estimator=spanwise is in verl's registry, and {count} names spanwise_<method> for one reward.",
        _trainer_of_verl(facts),
    ]
    return _faults_of_verl(facts), facts_found if registered else []


def _faults_of_verl(facts: Mapping[str, Any]) -> list[str]:
    faults = [
        f"The plug-in '{plugin}' is broken, and verl does not say so: {text}" for plugin, text in facts["failed"].items()
    ]
    faults += [f"'{part}' could not be attached to verl: {text}" for part, text in facts["faults"].items()]
    if "spanwise" not in facts["plugins"]:
        faults.append(
            "spanwise is not registered in this verl: there is no entry point 'spanwise' in the group verl.plugins. Install it "
            "into this environment (pip install spanwise); to have it on PYTHONPATH is not enough."
        )
    elif facts["switch"].strip().lower() not in ("", "auto") and "spanwise" not in facts["switch"].lower().split(","):
        faults.append(f"VERL_USE_EXTERNAL_PLUGINS is '{facts['switch']}', so verl does not load spanwise; unset it.")
    elif "spanwise" not in facts["estimators"]:
        faults.append("spanwise's plug-in is loaded, but algorithm.adv_estimator=spanwise is still not in verl's registry.")
    return faults


def _trainer_of_verl(facts: Mapping[str, Any]) -> str:
    """Say which trainer `main_ppo` uses, and which modes have credit by block."""
    names = {True: "V1 (trainer.use_v1: true)", False: "V0 (trainer.use_v1: false)", None: "V0, the only one in this verl"}
    trainer = f"main_ppo uses {names[facts['use_v1']]}"
    modes = [mode.removeprefix("spanwise_") for mode in facts.get("modes", ()) if mode.startswith("spanwise_")]
    if modes:
        return f"{trainer}. Modes of V1 with credit by block: {', '.join(modes)}; V0 has it too."
    return f"{trainer}, and V1 cannot be imported: {facts['v1']}" if "v1" in facts else f"{trainer}."


def probe(engine: str) -> None:
    """Print the result of importing an engine as JSON, below all that the engine prints itself."""
    try:
        facts = {"trl": _trl, "verl": _verl, "skyrl": _skyrl}[engine]()
    except BaseException as error:
        facts = {"error": _in_a_line(error)}
    print(f"\n{MARK}{json.dumps(facts)}", flush=True)
    os._exit(0)  # threads of an engine must not keep this process alive


def _in_a_line(error: BaseException) -> str:
    """Format an exception as one line: its text and where it was raised."""
    last_frames = traceback.extract_tb(error.__traceback__)[-1:]
    place = f" ({last_frames[0].filename}, line {last_frames[0].lineno})" if last_frames else ""
    return f"{type(error).__name__}: {error}{place}"


def _trl() -> dict[str, Any]:
    """Import TRL and the adapter to it."""
    import_module("spanwise.engines.trl")
    return {}


def _skyrl() -> dict[str, Any]:
    """Import SkyRL's entrypoint for spanwise, and look into SkyRL's registry."""
    import_module("spanwise.engines.skyrl.main")
    import_module("spanwise.engines.skyrl.estimators").register()
    registry = import_module("skyrl.backends.skyrl_train.utils.ppo_utils").AdvantageEstimatorRegistry
    return {"estimators": sorted(map(str, registry.list_available()))}


def _verl() -> dict[str, Any]:
    """Import verl as its trainer does; return its plug-ins, the errors of their imports, and the trainer that it uses."""
    plugin_errors = _listen()
    file = Path(import_module("verl").__file__ or "").parent / "trainer" / "config" / "ppo_trainer.yaml"
    trainer_config = import_module("yaml").safe_load(file.read_text(encoding="utf-8"))["trainer"] if file.is_file() else {}
    facts = {
        "switch": os.environ.get("VERL_USE_EXTERNAL_PLUGINS", ""),
        "plugins": plugins(),
        "failed": plugin_errors,
        "estimators": sorted(map(str, import_module("verl.trainer.ppo.core_algos").ADV_ESTIMATOR_REGISTRY)),
        "use_v1": trainer_config.get("use_v1"),
    }
    try:
        facts["modes"] = sorted(import_module("verl.trainer.ppo.v1").trainer_base.TRAINER_REGISTRY)
    except Exception as error:
        facts["v1"] = _in_a_line(error)
    return {**facts, "faults": dict(import_module("spanwise.engines.verl.plugin").FAULTS)}


def plugins() -> dict[str, str]:
    """Return the installed plug-ins of verl: name -> module."""
    return {entry.name: entry.value for entry in entry_points(group="verl.plugins")}


def _listen() -> dict[str, str]:
    """Catch the exceptions of plug-ins, which verl only logs for debugging."""
    plugin_errors: dict[str, str] = {}

    def heard(record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple) and len(record.args) == 2 and isinstance(record.args[1], BaseException):
            plugin_errors[str(record.args[0])] = _in_a_line(record.args[1])
        return True

    logger = logging.getLogger("verl")
    logger.setLevel(logging.DEBUG)
    logger.addFilter(heard)
    return plugin_errors
