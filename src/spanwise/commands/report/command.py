"""Define the options of `spanwise report`."""

from pathlib import Path

#: The pip extra that installs the packages of this command.
EXTRA = "report"


def command(folder: Path, /) -> None:
    """Write FOLDER/report.html for a run, a comparison, a fidelity measurement or a credit export. The file works offline.

    Args:
        folder: a folder that `spanwise train`, `compare`, `fidelity` or `credit` wrote.
    """
    from spanwise.commands.report.report import report_folder

    print(report_folder(folder))
