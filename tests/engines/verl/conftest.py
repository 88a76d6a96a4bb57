"""Tests against verl itself; not collected if it is not installed."""

import asyncio
import gc
import sys
import warnings
from functools import cache
from pathlib import Path

import pytest

from installed import installed

collect_ignore = (
    [] if installed("verl") else [p.name for p in Path(__file__).parent.glob("*.py") if p.name != "test_carry.py"]
)

if installed("verl"):
    sys.path.append(str(Path(__file__).parent / "cpu"))
    with warnings.catch_warnings(action="ignore"):  # verl and its imports warn of engines that are not here
        import verl.trainer.main_ppo
        import verl.trainer.main_ppo_v0
        import verl.trainer.ppo.v1  # noqa: F401


@pytest.fixture(scope="session")
def queue():
    """A real TransferQueue."""
    import ray
    import transfer_queue as tq

    with warnings.catch_warnings(action="ignore"):
        ray.init(num_cpus=4, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
        tq.init()
        yield
        tq.close()
        ray.shutdown()
        with warnings.catch_warnings(action="ignore"):  # of what TransferQueue leaves open
            gc.collect()


@pytest.fixture(scope="session")
def whole_run(tmp_path_factory):
    """Name -> the whole run of that name, made when it is first asked for."""
    from verl_runs import whole

    return cache(lambda name: whole(name, tmp_path_factory.mktemp(name)))


@pytest.fixture(scope="session")
def loop():
    """V0's trainer looks for a loop when it is made."""
    with warnings.catch_warnings(action="ignore"):
        try:
            asyncio.get_event_loop()
        except RuntimeError:
            asyncio.set_event_loop(asyncio.new_event_loop())


def pytest_collection_modifyitems(items):
    """Small batches of scripted completions often teach nothing and are not full, as spanwise says."""
    said = "ignore:Every advantage of the batch:UserWarning", "ignore:The batch of step .* lacks:UserWarning"
    for item in items:
        if "engines/verl" in str(item.path):
            item.add_marker(pytest.mark.filterwarnings(*said))
