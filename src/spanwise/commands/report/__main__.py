"""The same as `spanwise report FOLDER`, for trainers that make their report in a process of its own."""

from __future__ import annotations

import sys

from spanwise.commands.report.report import report_folder
from spanwise.errors import SpanwiseError


def main() -> None:
    """Write the report of one folder and print where it lies; an error is one sentence and exit status 1."""
    try:
        print(report_folder(sys.argv[1]))
    except SpanwiseError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
