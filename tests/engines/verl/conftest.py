"""Tests against verl itself: not collected where it is not installed."""

import warnings
from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("verl") else ["test_*.py"]

if not collect_ignore_glob:
    with warnings.catch_warnings():  # verl and what it imports warn of engines that are not here
        warnings.simplefilter("ignore")
        import verl.trainer.main_ppo  # noqa: F401
        import verl.trainer.main_ppo_v0  # noqa: F401
        import verl.trainer.ppo.v1  # noqa: F401
