"""Wrap verl's V0 trainer (`trainer.use_v1=False`), which carries text per row."""

from __future__ import annotations

from typing import Any

from spanwise.engines.verl import settings
from spanwise.engines.verl.carry import KEY, Rows
from spanwise.engines.verl.plugin import around
from spanwise.engines.verl.run import Sampled, VerlRun


def attach(ray_trainer: Any) -> None:
    """Let verl's V0 trainer train by a recipe."""
    kind = ray_trainer.RayPPOTrainer
    settings.attach(kind)
    credit_metrics: dict[str, float] = {}

    @around(kind, "_update_actor")
    def _(stock: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        output = stock(self, *args, **kwargs)
        if self.spanwise is not None:
            self.spanwise.add_update(ray_trainer.reduce_metrics(dict(output.meta_info["metrics"])))
        return output

    @around(ray_trainer, "compute_advantage")
    def _(stock: Any, data: Any, adv_estimator: Any, *args: Any, **kwargs: Any) -> Any:
        if adv_estimator != "spanwise" or kind.latest is None or KEY not in data.non_tensor_batch:
            return stock(data, adv_estimator, *args, **kwargs)
        run: VerlRun = kind.latest.spanwise
        tokens = {name: data.batch[field] for name, field in run.tokens.items()}
        rows = Rows(data.non_tensor_batch[KEY].tolist(), tokens=tokens)
        with run.carrying(rows):
            data = stock(data, adv_estimator, *args, **kwargs)
        credit_metrics.update(run.result.metrics if run.result else {})
        run.keep(kind.latest, rows, lambda: sampled_of(data))
        return data

    @around(ray_trainer, "compute_data_metrics")
    def _(stock: Any, *args: Any, **kwargs: Any) -> Any:
        logged = {**stock(*args, **kwargs), **credit_metrics}
        credit_metrics.clear()
        if kind.latest is not None:
            kind.latest.spanwise.add_update(logged)
        return logged


def sampled_of(data: Any) -> Sampled:
    """Return prompts, responses and gold answers of a V0 batch, whose prompts are padded on the left."""
    ids_nt, prompts_nt = data.batch["responses"], data.batch["prompts"]
    there_nt = data.batch["attention_mask"][:, : prompts_nt.shape[1]].bool()
    reward_models = data.non_tensor_batch.get("reward_model", [None] * len(ids_nt))
    return Sampled(
        uids=data.non_tensor_batch["uid"].tolist(),
        prompts=[ids_t[there_t].tolist() for ids_t, there_t in zip(prompts_nt, there_nt, strict=True)],
        ids_nt=ids_nt,
        answers=[(row or {}).get("ground_truth") for row in reward_models],
    )
