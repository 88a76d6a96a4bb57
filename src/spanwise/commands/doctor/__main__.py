"""The same as `spanwise doctor`, where the packages of the command line are not installed: python -m spanwise.commands.doctor."""

from __future__ import annotations

import sys

from spanwise.commands.doctor.examine import examine


def main() -> None:
    """Print a line for each finding; exit status 1 if something that is installed is broken."""
    found = examine()
    for one in found:
        window = f"  tested with {one.window}" if one.window else ""
        print(f"{one.name:14}  {one.version or '-':12}  {one.state}{window}")
        for sentence in one.says:
            print(f"    {sentence}")
    sys.exit(any(one.state == "broken" for one in found))


if __name__ == "__main__":
    main()
