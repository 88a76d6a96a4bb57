"""What needs an engine that is not installed here is not collected."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("skyrl") else ["src/spanwise/engines/skyrl/[!_]*.py"]
