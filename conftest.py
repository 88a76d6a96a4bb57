"""What needs an engine that is not installed here is not collected, and what was collected is not looked at for garbage again."""

import gc
from importlib.metadata import distributions

import hypothesis  # noqa: F401  (it counts who refers to what, which it cannot once that is frozen)

_INSTALLED = {found.name.lower() for found in distributions()}
_VERL = [f"src/spanwise/engines/verl/{name}.py" for name in ("legacy", "masks", "reward", "settings", "trainer")]
collect_ignore_glob = [
    "tests/typed/*.py",  # read by a type checker, not run
    *([] if "verl" in _INSTALLED else _VERL),
    *([] if "skyrl" in _INSTALLED else ["src/spanwise/engines/skyrl/[!_]*.py", "src/spanwise/modes/*/skyrl.py"]),
    *([] if {"ms_swift", "ms-swift"} & _INSTALLED else ["src/spanwise/engines/swift/trainer.py"]),
]


def pytest_collection_finish() -> None:
    """Thousands of modules stay until the end; TRL collects garbage after every training, which took as long as the training."""
    gc.collect()
    gc.freeze()
