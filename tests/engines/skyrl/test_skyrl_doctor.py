"""`spanwise doctor` beside a real SkyRL."""

import subprocess
import sys


def test_this_skyrl_has_the_entrypoint_and_the_names():
    command = [sys.executable, "-m", "spanwise.commands.doctor"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert result.returncode == 0, result.stdout
    assert "set trainer.override_entrypoint=spanwise.engines.skyrl.main." in result.stdout
