"""Train with NeMo-RL by a recipe of spanwise, through an advantage estimator. Written for NVIDIA-NeMo/RL 7ea279ab, not run."""

from typing import Any

from spanwise.engines.nemo_rl.estimator import SpanEstimator
from spanwise.engines.nemo_rl.settings import get_setting


def attach() -> None:
    """Let `grpo.adv_estimator.name=spanwise` choose `SpanEstimator` in NeMo-RL; other estimator names work as before."""
    from nemo_rl.algorithms import grpo  # pyright: ignore[reportMissingImports]

    original_factory = grpo._create_advantage_estimator

    def create(master_config: Any) -> Any:
        if get_setting(master_config, "grpo.adv_estimator.name") == "spanwise":
            return SpanEstimator(master_config)
        return original_factory(master_config)

    grpo._create_advantage_estimator = create
