"""`spanwise doctor` on the command line."""

from __future__ import annotations

from spanwise.commands.doctor.examine import main


def command() -> None:
    """Say which engines are installed and work: versions, the plug-in in this verl, which trainer it uses, what broke.

    Exit status 1 if something that is installed is broken.
    """
    main()
