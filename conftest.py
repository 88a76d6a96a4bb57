"""What needs an engine that is not installed here is not collected."""

from importlib.util import find_spec

_VERL = [f"src/spanwise/engines/verl/{name}.py" for name in ("legacy", "reward", "settings", "trainer")]
collect_ignore_glob = [
    *([] if find_spec("verl") else _VERL),
    *([] if find_spec("skyrl") else ["src/spanwise/engines/skyrl/[!_]*.py"]),
]
