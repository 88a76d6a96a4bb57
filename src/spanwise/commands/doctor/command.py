"""Define the options of `spanwise doctor`."""

from __future__ import annotations

from spanwise.commands.doctor.examine import main


def command() -> None:
    """Check which engines are installed and work: show versions, the plug-in and trainer of verl, and errors.

    Exit status 1 if something that is installed is broken.
    """
    main()
