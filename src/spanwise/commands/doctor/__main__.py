"""Run `spanwise doctor` without the command line's packages: python -m spanwise.commands.doctor."""

import sys

from spanwise.commands.doctor.examine import main, probe

if __name__ == "__main__":
    probe(sys.argv[1]) if sys.argv[1:] else main()
