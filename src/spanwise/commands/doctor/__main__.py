"""The same as `spanwise doctor`, where the packages of the command line are not installed: python -m spanwise.commands.doctor."""

from spanwise.commands.doctor.examine import main

if __name__ == "__main__":
    main()
