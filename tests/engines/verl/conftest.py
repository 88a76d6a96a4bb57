"""Tests against verl itself: not collected where it is not installed."""

import warnings
from pathlib import Path

from installed import installed

PURE = ("test_carry.py", "test_weights.py")
collect_ignore = [] if installed("verl") else [p.name for p in Path(__file__).parent.glob("*.py") if p.name not in PURE]

if installed("verl"):
    with warnings.catch_warnings():  # verl and what it imports warn of engines that are not here
        warnings.simplefilter("ignore")
        import verl.trainer.main_ppo
        import verl.trainer.main_ppo_v0
        import verl.trainer.ppo.v1  # noqa: F401
