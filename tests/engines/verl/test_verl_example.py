"""examples/verl_run.sh as it stands: what it tells verl is a configuration that verl composes and spanwise takes."""

from pathlib import Path

from hydra import compose, initialize_config_module

from launch_file import python_arguments
from spanwise.engines.verl.settings import prepare

FILE = Path(__file__).parents[3] / "examples" / "verl_run.sh"


def test_verl_takes_every_argument_and_added_ones_win(tmp_path):
    arguments = python_arguments(FILE, tmp_path, "trainer.total_epochs=7")
    assert arguments[:2] == ["-m", "verl.trainer.main_ppo"]
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=arguments[2:])
    assert config.trainer.total_epochs == 7
    settings = prepare(config)
    assert settings.scheme.layout.names == ("solution", "confidence")
    assert (settings.reduction["mode"], settings.reduction["mini_batch"]) == ("seq-mean-token-mean", 128 * 8)
    assert (str(settings.record.folder.path), settings.record.keep) == ("runs/verl", 10)
