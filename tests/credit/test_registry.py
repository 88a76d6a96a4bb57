"""The registry of methods."""

from spanwise.credit.registry import METHODS


def test_registered_as_step_methods():
    for name in ("gigpo", "gagpo"):
        assert METHODS[name].kind == "step"
        assert METHODS[name].needs == ("trajectory_s", "step_s", "anchor_s")
