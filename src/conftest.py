"""Docstrings are run where the engine they are about is installed."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("skyrl") else ["spanwise/engines/skyrl/*"]
