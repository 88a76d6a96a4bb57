"""What a launch file of examples/ tells Python, without starting it."""

import os
import subprocess


def python_arguments(file, folder, *more, **variables):
    """The arguments that the script gives to Python."""
    (folder / "python").write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    (folder / "python").chmod(0o755)
    environment = {**os.environ, "PYTHON": str(folder / "python"), **variables}
    return subprocess.run(
        ["bash", str(file), *more], env=environment, capture_output=True, text=True, check=True
    ).stdout.splitlines()
