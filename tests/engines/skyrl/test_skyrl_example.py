"""examples/skyrl_run.sh as it stands: what it tells SkyRL is a configuration that SkyRL and spanwise take."""

from pathlib import Path

from launch_file import python_arguments
from spanwise.engines.skyrl.config import check
from spanwise.engines.skyrl.main import configured

FILE = Path(__file__).parents[3] / "examples" / "skyrl_run.sh"


def test_skyrl_takes_every_argument_and_added_ones_win(tmp_path):
    arguments = python_arguments(FILE, tmp_path, "trainer.epochs=7")
    assert arguments[:2] == ["-m", "skyrl.train.entrypoints.main_base"]
    cfg = configured(arguments[2:])
    assert cfg.trainer.epochs == 7
    assert (cfg.trainer.algorithm.spanwise.keep_rollouts, cfg.generator.n_samples_per_prompt) == (10, 8)
    assert check(cfg).scheme.layout.names == ("solution", "confidence")
