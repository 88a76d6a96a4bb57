"""What needs an engine that is not installed here is not collected."""

from importlib.metadata import distributions

_INSTALLED = {found.name.lower() for found in distributions()}
_VERL = [f"src/spanwise/engines/verl/{name}.py" for name in ("legacy", "masks", "reserved", "reward", "settings", "trainer")]
collect_ignore_glob = [
    "tests/typed/*.py",  # read by a type checker, not run
    *([] if "verl" in _INSTALLED else _VERL),
    *([] if "skyrl" in _INSTALLED else ["src/spanwise/engines/skyrl/[!_]*.py"]),
]
