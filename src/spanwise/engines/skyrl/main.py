"""The entrypoint for SkyRL. Set `trainer.override_entrypoint=spanwise.engines.skyrl.main`."""

import sys
from pathlib import Path
from typing import Any

import ray  # pyright: ignore[reportMissingImports]
from skyrl.train.entrypoints.main_base import BasePPOExp  # pyright: ignore[reportMissingImports]
from skyrl.train.fully_async_trainer import FullyAsyncRayPPOTrainer  # pyright: ignore[reportMissingImports]
from skyrl.train.utils import validate_cfg  # pyright: ignore[reportMissingImports]
from skyrl.train.utils.utils import initialize_ray  # pyright: ignore[reportMissingImports]

from spanwise.engines.skyrl.config import SpanwiseTrainConfig, check
from spanwise.engines.skyrl.estimators import register
from spanwise.engines.skyrl.trainer import SpanRayPPOTrainer


class SpanFullyAsyncRayPPOTrainer(SpanRayPPOTrainer, FullyAsyncRayPPOTrainer):
    """SkyRL's asynchronous trainer with the credit of a recipe."""

    def _should_keep_group(self, group: Any) -> bool:
        """Return whether some completion of a prompt group gets credit. SkyRL fills batches with such groups."""
        group_output = group.generator_output
        return bool(self._useful_uids(group_output, [group.uid] * len(group_output["response_ids"])))


def trainer_class(cfg: Any) -> type[SpanRayPPOTrainer]:
    """Return the class of the trainer, asynchronous or synchronous."""
    return SpanFullyAsyncRayPPOTrainer if cfg.trainer.fully_async.enabled else SpanRayPPOTrainer


class SpanPPOExp(BasePPOExp):
    """SkyRL's `BasePPOExp` with a trainer that uses the recipe's credit."""

    def get_trainer(self, *args: Any, **kwargs: Any) -> SpanRayPPOTrainer:
        """Build the trainer that uses the recipe's credit."""
        return trainer_class(self.cfg)(*args, **kwargs)


@ray.remote(num_cpus=1)
def _run(cfg: Any) -> None:
    SpanPPOExp(cfg).run()


def configured(arguments: list[str]) -> Any:
    """Read SkyRL's configuration from the command line, and check it."""
    # SkyRL's configuration has no field for `trainer.override_entrypoint`, so leave it out.
    overrides = [argument for argument in arguments if not argument.startswith("trainer.override_entrypoint=")]
    cfg: Any = SpanwiseTrainConfig.from_cli_overrides(overrides)
    register()
    check(cfg)
    # The training task may run in another folder, so paths must be absolute.
    options = cfg.trainer.algorithm.spanwise
    options.recipe = str(Path(options.recipe).resolve())
    options.folder = None if options.folder is None else str(Path(options.folder).resolve())
    validate_cfg(cfg)
    return cfg


def main() -> None:
    """Train with the SkyRL options in `sys.argv`."""
    cfg = configured(sys.argv[1:])
    initialize_ray(cfg)
    remote_task: Any = _run
    ray.get(remote_task.remote(cfg))


if __name__ == "__main__":
    main()
