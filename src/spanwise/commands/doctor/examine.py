"""Check which engines (TRL, verl, SkyRL) are installed and work.

Standard library only, because this must run where everything else is broken.
An engine and the adapter to it are imported in a process of their own, `python -m spanwise.commands.doctor ENGINE`.
"""

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
#: The seconds that the import of an engine may take.
PATIENCE = 300
#: The start of the output line that holds the facts about an engine.
MARK = "spanwise-doctor "
#: The findings on a package: name, version, tested versions, state, and sentences for the user.
Finding = tuple[str, str, str, str, list[str]]
#: Two lists of sentences on an engine: what is broken and what works.
Sentences = tuple[list[str], list[str]]


def main() -> None:
    """Check which engines are installed and work. Show versions, errors, and verl's plug-in and trainer.

    Exit status 1 if something that is installed is broken.
    """
    spanwise_version = installed("spanwise") or "not installed as a package"
    version_by_package = {"python": ".".join(map(str, sys.version_info[:3])), "spanwise": spanwise_version}
    version_by_package |= {name: version_number for name in PACKAGES if (version_number := installed(name))}
    findings: list[Finding] = [(name, version_number, "", "ok", []) for name, version_number in version_by_package.items()]
    findings += map(_check_engine, WINDOWS)
    print(f"{'':14}  {'version':18}  {'tested with':18}")
    for name, version_number, tested_versions, status, _ in findings:
        print(f"{name:14}  {version_number:18}  {tested_versions:18}  {status}")
    for name, *_, sentences in findings:
        for sentence in sentences:
            print(f"{name}: {sentence}")
    if any(status == "broken" for *_, status, _ in findings):
        sys.exit(1)


def installed(name: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _check_engine(name: str) -> Finding:
    engine_title = _TITLES[name]
    engine_version = installed(name)
    tested_versions = WINDOWS[name]
    if engine_version is None:
        has_other_engine = any(installed(other_name) for other_name in WINDOWS if other_name != name)
        environment_text = " in a separate environment" if name != "trl" or has_other_engine else ""
        install_advice = f"To train with {engine_title}, install it{environment_text}: pip install 'spanwise[{name}]'."
        if name == "skyrl" and sys.version_info < (3, 12):
            install_advice = (
                "SkyRL needs Python 3.12 or newer. Make a separate environment, and run pip install 'spanwise[skyrl]' in it."
            )
        return engine_title, "", tested_versions, "not installed", [install_advice]
    problem_sentences, success_sentences = probe_in_process(name)
    untested_note = f"{engine_title} {engine_version} is untested: the tests run with {tested_versions}."
    version_notes = [] if is_tested(name, engine_version) else [untested_note]
    status = "broken" if problem_sentences else "untested" if version_notes else "ok"
    return engine_title, engine_version, tested_versions, status, [*problem_sentences, *version_notes, *success_sentences]


def probe_in_process(name: str) -> Sentences:
    """Import an engine and its adapter in a separate process. Return the sentences that the process prints."""
    package_root = str(Path(spanwise.__file__).parents[1])
    python_path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), package_root)))
    environment = {**os.environ, "PYTHONPATH": python_path}
    command = [sys.executable, "-m", "spanwise.commands.doctor", name]
    try:
        process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False)
    except subprocess.TimeoutExpired:
        return _broken(name, f"the import takes more than {PATIENCE} seconds")
    result_lines = [line for line in process.stdout.splitlines() if line.startswith(MARK)]
    if not result_lines:
        last_error_text = "\n".join(process.stderr.strip().splitlines()[-3:])
        return _broken(name, f"the process ended with status {process.returncode}: {last_error_text}")
    return json.loads(result_lines[-1].removeprefix(MARK))


def _broken(name: str, reason: str) -> Sentences:
    return [f"The adapter to {_TITLES[name]} cannot be imported: {reason}"], []


def sentences_on_verl(facts: Mapping[str, Any]) -> Sentences:
    """Turn the facts about verl into sentences on what is broken and what works."""
    failures = [
        f"verl's plug-in '{plugin}' fails, and verl does not report the error: {error}"
        for plugin, error in facts["failed"].items()
    ]
    failures += [f"spanwise could not attach its part '{part}' to verl: {error}" for part, error in facts["faults"].items()]
    if "spanwise" not in facts["plugins"]:
        failures.append(
            "spanwise is not registered in this verl: there is no entry point 'spanwise' in the group verl.plugins. Install "
            "spanwise into this environment (pip install spanwise). A PYTHONPATH with spanwise is not enough."
        )
    elif facts["switch"].strip().lower() not in ("", "auto") and "spanwise" not in facts["switch"].lower().split(","):
        failures.append(f"VERL_USE_EXTERNAL_PLUGINS is '{facts['switch']}', so verl does not load spanwise; unset it.")
    elif "spanwise" not in facts["estimators"]:
        failures.append("spanwise's plug-in is loaded, but verl's registry still lacks the estimator spanwise.")
    if "spanwise" not in facts["estimators"]:
        return failures, []
    estimator_count = sum(name.startswith("spanwise_") for name in facts["estimators"])
    method_note = f"verl's registry also has {estimator_count} estimators spanwise_<method>, each for one reward."
    return failures, [f"verl's registry has the estimator spanwise. {method_note}", _trainer_of_verl(facts)]


def _trainer_of_verl(facts: Mapping[str, Any]) -> str:
    """Say which trainer verl's `main_ppo` uses."""
    titles = {True: "V1 (trainer.use_v1: true)", False: "V0 (trainer.use_v1: false)", None: "V0 (this verl has no V1)"}
    trainer_note = f"main_ppo uses {titles[facts['use_v1']]}"
    mode_names = [mode.removeprefix("spanwise_") for mode in facts.get("modes", ()) if mode.startswith("spanwise_")]
    if mode_names:
        return f"{trainer_note}. Credit by block works in V0, and in V1 with trainer_mode={' or '.join(mode_names)}."
    return f"{trainer_note}, and V1 cannot be imported: {facts['v1']}" if "v1" in facts else f"{trainer_note}."


def probe(engine: str) -> None:
    """Import an engine, and print the findings as a line of JSON."""
    try:
        engine_sentences = {"trl": _probe_trl, "verl": _probe_verl, "skyrl": _probe_skyrl}[engine]()
    except BaseException as error:
        engine_sentences = _broken(engine, _in_one_line(error))
    print(f"\n{MARK}{json.dumps(engine_sentences)}", flush=True)
    os._exit(0)  # threads that the engine started must not keep this process alive


def _in_one_line(error: BaseException) -> str:
    """Format an exception as one line: its text and where it was raised."""
    last_frames = traceback.extract_tb(error.__traceback__)[-1:]
    location_text = f" ({last_frames[0].filename}, line {last_frames[0].lineno})" if last_frames else ""
    return f"{type(error).__name__}: {error}{location_text}"


def _probe_trl() -> Sentences:
    import_module("spanwise.engines.trl")
    return [], ["spanwise.engines.trl is imported, so `spanwise train RECIPE` can train with TRL."]


def _probe_skyrl() -> Sentences:
    """Import spanwise's entry point for SkyRL, and count spanwise's estimators in SkyRL's registry."""
    import_module("spanwise.engines.skyrl.main")
    import_module("spanwise.engines.skyrl.estimators").register()
    estimator_registry = import_module("skyrl.backends.skyrl_train.utils.ppo_utils").AdvantageEstimatorRegistry
    method_count = sum(str(name).startswith("spanwise_") for name in estimator_registry.list_available())
    return [], [
        "To train with SkyRL and a recipe, set trainer.override_entrypoint=spanwise.engines.skyrl.main. spanwise added "
        f"{method_count} estimators to SkyRL, called spanwise_<method>."
    ]


def _probe_verl() -> Sentences:
    """Import verl, and describe its trainer, its plug-ins, and the errors of importing the plug-ins."""
    plugin_errors = collect_plugin_errors()
    config_file = Path(import_module("verl").__file__ or "").parent / "trainer/config/ppo_trainer.yaml"
    trainer_config: dict[str, Any] = {}
    if config_file.is_file():
        trainer_config = import_module("yaml").safe_load(config_file.read_text(encoding="utf-8"))["trainer"]
    verl_facts = {
        "switch": os.environ.get("VERL_USE_EXTERNAL_PLUGINS", ""),
        "plugins": plugins(),
        "failed": plugin_errors,
        "estimators": [*map(str, import_module("verl.trainer.ppo.core_algos").ADV_ESTIMATOR_REGISTRY)],
        "use_v1": trainer_config.get("use_v1"),
    }
    try:
        verl_facts["modes"] = sorted(import_module("verl.trainer.ppo.v1").trainer_base.TRAINER_REGISTRY)
    except Exception as error:
        verl_facts["v1"] = _in_one_line(error)
    return sentences_on_verl({**verl_facts, "faults": dict(import_module("spanwise.engines.verl.plugin").FAULTS)})


def plugins() -> dict[str, str]:
    """Map the names of verl's installed plug-ins to their modules."""
    return {entry_point.name: entry_point.value for entry_point in entry_points(group="verl.plugins")}


def collect_plugin_errors() -> dict[str, str]:
    """Return a dictionary that collects the exceptions of verl's plug-ins. verl only logs them for debugging."""
    plugin_errors: dict[str, str] = {}

    def collect(record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple) and len(record.args) == 2 and isinstance(record.args[1], BaseException):
            plugin_errors[str(record.args[0])] = _in_one_line(record.args[1])
        return True

    verl_logger = logging.getLogger("verl")
    verl_logger.setLevel(logging.DEBUG)
    verl_logger.addFilter(collect)
    return plugin_errors
