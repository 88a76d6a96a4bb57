"""examples/verl_run.sh as it stands: what it tells verl is a configuration that verl composes and spanwise takes."""

import os
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="needs verl: make test-verl")

from hydra import compose, initialize_config_module

from spanwise.engines.verl.settings import prepare

FILE = Path(__file__).parents[3] / "examples" / "verl_run.sh"


def told(file, folder, *more, **variables):
    """The arguments that the script gives to Python."""
    (folder / "python").write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    (folder / "python").chmod(0o755)
    given = {**os.environ, "PYTHON": str(folder / "python"), **variables}
    return subprocess.run(
        ["bash", str(file), *more], env=given, capture_output=True, text=True, check=True
    ).stdout.splitlines()


def test_verl_takes_every_argument_and_added_ones_win(tmp_path):
    said = told(FILE, tmp_path, "trainer.total_epochs=7")
    assert said[:2] == ["-m", "verl.trainer.main_ppo"]
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=said[2:])
    assert config.trainer.total_epochs == 7
    settings = prepare(config)
    assert settings.scheme.layout.names == ("solution", "confidence")
    assert (settings.mode, settings.mini_batch) == ("seq-mean-token-mean", 128 * 8)
    assert (str(settings.keeper.record.folder.path), settings.keeper.record.keep) == ("runs/verl", 10)
