"""verl's V0 trainer (`trainer.use_v1=False`): it carries text per row, and three functions are wrapped."""

from __future__ import annotations

from functools import wraps
from typing import Any

from spanwise.engines.verl.carry import KEY, Rows
from spanwise.engines.verl.settings import Settings, prepare


def attach(ray_trainer: Any) -> None:
    """Wrap the trainer's set-up, its advantages and its metrics; nothing changes where the estimator is not `spanwise`."""
    trainer, advantage = ray_trainer.RayPPOTrainer, ray_trainer.compute_advantage
    data_metrics = ray_trainer.compute_data_metrics
    if getattr(advantage, "by_spanwise", False):
        return
    start, state, shown = trainer.__init__, {}, {}

    @wraps(start)
    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        if config.algorithm.adv_estimator == "spanwise":
            state["settings"] = prepare(config)
        start(self, config, *args, **kwargs)

    @wraps(advantage)
    def compute_advantage(data: Any, adv_estimator: Any, *args: Any, **kwargs: Any) -> Any:
        settings: Settings | None = state.get("settings")
        if adv_estimator != "spanwise" or settings is None or KEY not in data.non_tensor_batch:
            return advantage(data, adv_estimator, *args, **kwargs)
        tokens = {name: data.batch[field] for name, field in settings.tokens.items()}
        with settings.carrying(Rows(data.non_tensor_batch[KEY].tolist(), tokens=tokens)) as found:
            data = advantage(data, adv_estimator, *args, **kwargs)
        shown.update(found)
        return data

    @wraps(data_metrics)
    def compute_data_metrics(*args: Any, **kwargs: Any) -> Any:
        found = {**data_metrics(*args, **kwargs), **shown}
        shown.clear()
        return found

    compute_advantage.by_spanwise = True  # type: ignore[attr-defined]
    trainer.__init__, ray_trainer.compute_advantage = init, compute_advantage
    ray_trainer.compute_data_metrics = compute_data_metrics
