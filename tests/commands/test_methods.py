"""`spanwise methods`: where a formula was taken from."""

from __future__ import annotations

from spanwise.commands.methods.methods import show_methods
from spanwise.credit import METHODS
from spanwise.registry import register


def test_a_plug_in_without_a_source_is_not_taken_from_the_paper(capsys):
    @register("halved", kind="completion", paper="none")
    def halved(reward_n, group_n):
        """Halve every reward."""
        return reward_n / 2

    try:
        show_methods("halved")
    finally:
        METHODS.pop("halved")
    assert f"Taken from {__name__}, which is no part of spanwise." in " ".join(capsys.readouterr().out.split())
    show_methods("grpo")
    assert "Taken from the paper, which leaves ddof open" in " ".join(capsys.readouterr().out.split())
