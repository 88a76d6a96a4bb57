"""Fixtures of the tests of credit."""

import pytest

from spanwise.credit import recursion


@pytest.fixture(params=["one block", "many blocks"])
def blocks(request, monkeypatch):
    if request.param == "many blocks":
        monkeypatch.setattr(recursion, "_ROWS", 2)
        monkeypatch.setattr(recursion, "_BLOCK", 1)  # 32 tokens, the least
