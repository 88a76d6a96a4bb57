"""The command `spanwise doctor`, which has no options."""

from spanwise.commands.doctor.examine import main as command

__all__ = ["command"]
