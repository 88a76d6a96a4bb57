"""Imports one engine and its adapter in a process of its own, and prints what came of it.

`python -m spanwise.commands.doctor.probe ENGINE`. Nothing but the standard library is needed here: whatever is broken must be able
to say so.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from importlib import import_module
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
    import_module("spanwise.engines.trl")
    return {}


def probe_skyrl() -> dict[str, Any]:
    """Import SkyRL's entrypoint for spanwise, and look into SkyRL's registry."""
    import_module("spanwise.engines.skyrl.main")
    import_module("spanwise.engines.skyrl.estimators").register()
    registry = import_module("skyrl.backends.skyrl_train.utils.ppo_utils").AdvantageEstimatorRegistry
    return {"estimators": _ours(registry.list_available())}


def probe_verl() -> dict[str, Any]:
    """Import verl as its trainer does, and say which plug-ins it loads, what became of them, and which trainer it uses."""
    switch, swallowed = os.environ.get(_SWITCH, ""), _listen()
    place = Path(import_module("verl").__file__ or "").parent / "trainer" / "config" / "ppo_trainer.yaml"
    facts = {
        "switch": switch,
        "plugins": plugins(),
        "failed": {**broken_plugins(switch), **swallowed},
        "estimators": _ours(import_module("verl.trainer.ppo.core_algos").ADV_ESTIMATOR_REGISTRY),
        "use_v1": _setting(place, "use_v1"),
    }
    try:
        facts["modes"] = sorted(import_module("verl.trainer.ppo.v1").trainer_base.TRAINER_REGISTRY)
    except Exception as error:
        facts["v1"] = said(error)
    return {**facts, "faults": dict(import_module("spanwise.engines.verl.plugin").FAULTS)}


def plugins() -> dict[str, str]:
    """Name -> module of every plug-in of verl that is installed."""
    return {entry.name: entry.value for entry in entry_points(group=GROUP)}


def broken_plugins(switch: str = "") -> dict[str, str]:
    """Load the plug-ins that verl loads, and keep what each says that cannot be loaded."""
    named = {name.strip().lower() for name in switch.split(",")} - {"", "auto"}
    broken = {}
    for entry in entry_points(group=GROUP):
        if not named or entry.name.lower() in named:
            try:
                entry.load()
            except BaseException as error:
                broken[entry.name] = said(error)
    return broken


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


def _setting(file: Path, name: str) -> Any:
    """One setting of the trainer as it is configured; None if there is none."""
    import yaml

    return yaml.safe_load(file.read_text(encoding="utf-8"))["trainer"].get(name) if file.is_file() else None


def _ours(names: Any) -> list[str]:
    return sorted(str(name) for name in names if str(name).startswith("spanwise"))


def main(engine: str) -> None:
    """Print what came of it as JSON, after whatever the engine itself prints."""
    try:
        facts = {"trl": probe_trl, "verl": probe_verl, "skyrl": probe_skyrl}[engine]()
    except BaseException as error:
        facts = {"error": said(error)}
    print(f"\n{MARK}{json.dumps(facts)}", flush=True)
    os._exit(0)  # an engine's threads must not keep this process


if __name__ == "__main__":
    main(sys.argv[1])
