"""Run the command line with `python -m spanwise`."""

from spanwise.cli import main

if __name__ == "__main__":
    main()
