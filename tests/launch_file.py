"""What a launch file of examples/ tells Python, without starting it."""

import os
import subprocess


def python_arguments(file, folder, *more, **variables):
    (folder / "python").write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    (folder / "python").chmod(0o755)
    environment = {**os.environ, "PYTHON": str(folder / "python"), **variables}
    return subprocess.check_output(["bash", str(file), *more], env=environment, text=True).splitlines()
