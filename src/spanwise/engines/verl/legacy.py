"""Wrap verl's V0 trainer, which `trainer.use_v1=False` chooses."""

from __future__ import annotations

from functools import partial
from typing import Any

from spanwise.engines.verl import settings
from spanwise.engines.verl.carry import KEY, Rows
from spanwise.engines.verl.estimators import CREDIT_FUNCTION, carrying
from spanwise.engines.verl.plugin import around
from spanwise.engines.verl.run import Sampled, VerlRun


def attach(ray_trainer: Any) -> None:
    """Let verl's V0 trainer train with a recipe."""
    trainer_class = ray_trainer.RayPPOTrainer
    settings.attach(trainer_class)
    credit_metrics: dict[str, float] = {}

    @around(trainer_class, "_update_actor")
    def update_actor(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        actor_output = original(self, *args, **kwargs)
        if self.spanwise is not None:
            self.spanwise.add_update(ray_trainer.reduce_metrics(dict(actor_output.meta_info["metrics"])))
        return actor_output

    @around(ray_trainer, "compute_advantage")
    def compute_advantage(original: Any, data: Any, adv_estimator: Any, *args: Any, **kwargs: Any) -> Any:
        is_v1_trainer = CREDIT_FUNCTION.get() is not None  # the V1 trainer calls this function, too
        if adv_estimator != "spanwise" or trainer_class.latest is None or is_v1_trainer:
            return original(data, adv_estimator, *args, **kwargs)
        run: VerlRun = trainer_class.latest.spanwise
        token_fields = {name: data.batch[field] for name, field in run.tokens.items()}
        packed_texts = data.non_tensor_batch.get(KEY, [None] * len(data))
        batch_rows = Rows(list(packed_texts), tokens=token_fields)
        with carrying(partial(run.credit, batch_rows, 0)):
            data = original(data, adv_estimator, *args, **kwargs)
        credit_metrics.update(run.result.metrics if run.result else {})
        run.keep(trainer_class.latest, batch_rows, lambda: sampled_of(data))
        return data

    @around(ray_trainer, "compute_data_metrics")
    def compute_data_metrics(original: Any, *args: Any, **kwargs: Any) -> Any:
        all_metrics = {**original(*args, **kwargs), **credit_metrics}
        credit_metrics.clear()
        if trainer_class.latest is not None:
            trainer_class.latest.spanwise.add_update(all_metrics)
        return all_metrics


def sampled_of(data: Any) -> Sampled:
    """Return the prompts, responses and gold answers of a batch of the V0 trainer."""
    response_nt = data.batch["responses"]
    prompt_nt = data.batch["prompts"]
    prompt_mask_nt = data.batch["attention_mask"][:, : prompt_nt.shape[1]].bool()
    reward_models = data.non_tensor_batch.get("reward_model", [None] * len(response_nt))
    return Sampled(
        uids=data.non_tensor_batch["uid"].tolist(),
        prompts=[ids_t[mask_t].tolist() for ids_t, mask_t in zip(prompt_nt, prompt_mask_nt, strict=True)],
        ids_nt=response_nt,
        answers=[(reward_model or {}).get("ground_truth") for reward_model in reward_models],
    )
