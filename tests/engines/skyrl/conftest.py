"""Tests against SkyRL itself; not collected if it is not installed."""

import warnings

import pytest

from installed import installed

collect_ignore_glob = [] if installed("skyrl") else ["*.py"]

if not collect_ignore_glob:
    with warnings.catch_warnings(action="ignore"):  # SkyRL and its imports warn of engines that are not here
        import skyrl.train.entrypoints.main_base
        import skyrl.train.fully_async_trainer  # noqa: F401
    import skyrl_small as small
    from loguru import logger

    @pytest.fixture(scope="session")
    def data(tmp_path_factory):
        return small.write_dataset(tmp_path_factory.mktemp("signs") / "signs.jsonl")

    @pytest.fixture(autouse=True)
    def quiet():
        logger.disable("skyrl")


def pytest_collection_modifyitems(items):
    for item in items:
        if "engines/skyrl" in str(item.path):
            # small batches of scripted completions often teach nothing, as every engine says
            for rule in ("ignore:Every advantage of the batch:UserWarning",
                         "ignore:'set_vital' is deprecated:UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning",
                         "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"):  # fmt: skip
                item.add_marker(pytest.mark.filterwarnings(rule))
