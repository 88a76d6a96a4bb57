"""The same as `spanwise report FOLDER`, for trainers that make their report in a process of its own."""

import sys

from spanwise.commands.report.report import report_folder
from spanwise.errors import SpanwiseError

if __name__ == "__main__":
    try:
        print(report_folder(sys.argv[1]))
    except SpanwiseError as error:
        sys.exit(str(error))
