"""Shared settings: one torch thread, no hub, and a switch for the run-time shape checks."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import jaxtyping
import pytest
import torch

from browser import browser  # noqa: F401  (the fixture)

torch.set_num_threads(1)


@pytest.fixture
def unchecked_shapes():
    """Users run without the shape checks; the sentences they get must come from our own code."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
