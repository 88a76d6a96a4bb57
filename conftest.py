"""What needs an engine that is not installed here is not collected."""

from importlib.util import find_spec

collect_ignore = (
    [] if find_spec("verl") else [f"src/spanwise/engines/verl/{n}.py" for n in ("legacy", "reward", "settings", "trainer")]
)
