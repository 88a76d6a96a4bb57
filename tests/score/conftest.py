"""One verifier for the tests of this folder."""

import pytest

from spanwise.score import MathVerifier


@pytest.fixture(scope="session")
def verifier():
    with MathVerifier(deadline=20.0) as shared:
        yield shared
