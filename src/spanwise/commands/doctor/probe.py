"""Imports one engine and its adapter in a process of its own, and prints what came of it.

`python -m spanwise.commands.doctor.probe ENGINE`. Nothing but the standard library is needed here: whatever is broken must be able
to say so.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import traceback
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

#: What the last line of the output begins with.
MARK = "spanwise-doctor "
#: The group of entry points that verl loads.
GROUP = "verl.plugins"
_SWITCH = "VERL_USE_EXTERNAL_PLUGINS"


def said(error: BaseException) -> str:
    """An exception in a line: where it was raised and what it says."""
    last = traceback.extract_tb(error.__traceback__)[-1:]
    where = f" ({last[0].filename}, line {last[0].lineno})" if last else ""
    return f"{type(error).__name__}: {error}{where}"


def probe_trl() -> dict[str, Any]:
    """Import TRL and the adapter to it."""
    importlib.import_module("spanwise.engines.trl")
    return {}


def probe_skyrl() -> dict[str, Any]:
    """Import SkyRL's entrypoint for spanwise, and look into SkyRL's registry."""
    importlib.import_module("spanwise.engines.skyrl.main")
    estimators = importlib.import_module("spanwise.engines.skyrl.estimators")
    estimators.register()
    utils = importlib.import_module("skyrl.backends.skyrl_train.utils.ppo_utils")
    return {"estimators": _ours(utils.AdvantageEstimatorRegistry.list_available())}


def probe_verl() -> dict[str, Any]:
    """Import verl as its trainer does, and say which plug-ins it loads, what became of them, and which trainer it uses."""
    found: dict[str, Any] = {"switch": os.environ.get(_SWITCH, ""), "plugins": plugins()}
    swallowed = _listen()
    importlib.import_module("verl")
    found["failed"] = {**broken_plugins(found["switch"]), **swallowed}
    algos = importlib.import_module("verl.trainer.ppo.core_algos")
    found["estimators"] = _ours(algos.ADV_ESTIMATOR_REGISTRY)
    found |= _trainer()
    adapter = importlib.import_module("spanwise.engines.verl.plugin")
    found["faults"] = dict(adapter.FAULTS)
    return found


def plugins() -> dict[str, str]:
    """Name -> module of every plug-in of verl that is installed."""
    return {entry.name: entry.value for entry in entry_points(group=GROUP)}


def broken_plugins(switch: str = "") -> dict[str, str]:
    """Load the plug-ins that verl loads, and keep what each says that cannot be loaded."""
    found = {}
    names = {name.strip() for name in switch.split(",")} if switch.strip().lower() not in ("", "auto") else None
    for entry in entry_points(group=GROUP):
        if names is not None and entry.name.lower() not in {name.lower() for name in names}:
            continue
        try:
            entry.load()
        except BaseException as error:
            found[entry.name] = said(error)
    return found


def _listen() -> dict[str, str]:
    """What verl keeps to itself: it logs the exception of a plug-in for debugging and goes on."""
    swallowed: dict[str, str] = {}

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if isinstance(record.args, tuple) and len(record.args) == 2 and isinstance(record.args[1], BaseException):
                swallowed[str(record.args[0])] = said(record.args[1])

    heard = logging.getLogger("verl")
    heard.setLevel(logging.DEBUG)
    heard.addHandler(Ear(level=logging.DEBUG))
    return swallowed


def _trainer() -> dict[str, Any]:
    """Which trainer `main_ppo` uses as configured, and the modes of V1 that it knows."""
    import yaml

    place = Path(importlib.import_module("verl").__file__ or "").parent / "trainer" / "config" / "ppo_trainer.yaml"
    settings = yaml.safe_load(place.read_text(encoding="utf-8"))["trainer"] if place.is_file() else {}
    found: dict[str, Any] = {"use_v1": settings.get("use_v1")}
    try:
        v1 = importlib.import_module("verl.trainer.ppo.v1")
    except Exception as error:
        return {**found, "v1": said(error)}
    return {**found, "modes": sorted(v1.trainer_base.TRAINER_REGISTRY)}


def _ours(names: Any) -> list[str]:
    return sorted(str(name) for name in names if str(name).startswith("spanwise"))


def main(engine: str) -> None:
    """Print what came of it as JSON, after whatever the engine itself prints."""
    try:
        found = {"trl": probe_trl, "verl": probe_verl, "skyrl": probe_skyrl}[engine]()
    except BaseException as error:
        found = {"error": said(error)}
    print(f"\n{MARK}{json.dumps(found)}", flush=True)
    os._exit(0)  # an engine's threads must not keep this process


if __name__ == "__main__":
    main(sys.argv[1])
