"""transformers deprecates a name that TRL uses; any other warning in these tests is one of ours."""

import pytest


def pytest_collection_modifyitems(items):
    for item in items:
        if "engines/trl" in str(item.path):
            item.add_marker(pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"))
