"""verl's V0 trainer (`trainer.use_v1=False`): it carries text per row, and four functions are wrapped."""

from __future__ import annotations

from functools import wraps
from typing import Any

from spanwise.engines.verl.carry import KEY, Rows
from spanwise.engines.verl.keeping import UPDATE, Keeper, Sampled
from spanwise.engines.verl.memory import load_memory, save_memory
from spanwise.engines.verl.settings import Settings, prepare


def attach(ray_trainer: Any) -> None:
    """Wrap the trainer's set-up, loop, advantages, update and metrics; nothing changes where the estimator is not `spanwise`."""
    trainer, advantage = ray_trainer.RayPPOTrainer, ray_trainer.compute_advantage
    data_metrics, update = ray_trainer.compute_data_metrics, trainer._update_actor
    if getattr(advantage, "by_spanwise", False):
        return
    start, loop, state, shown = trainer.__init__, trainer.fit, {}, {}
    save, load = trainer._save_checkpoint, trainer._load_checkpoint

    def keeper_of(one: Any) -> Keeper | None:
        settings: Settings | None = state.get("settings") if state.get("trainer") is one else None
        return None if settings is None else settings.keeper

    @wraps(start)
    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        if config.algorithm.adv_estimator == "spanwise":
            state["settings"], state["trainer"] = prepare(config), self
        start(self, config, *args, **kwargs)

    @wraps(loop)
    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        keeper = keeper_of(self)
        if keeper is None:
            return loop(self, *args, **kwargs)
        with keeper.running(self, done=None):
            return loop(self, *args, **kwargs)

    @wraps(save)
    def save_checkpoint(self: Any, *args: Any, **kwargs: Any) -> Any:
        if state.get("trainer") is self:
            save_memory(state["settings"].scheme, self.config, self.global_steps)
        return save(self, *args, **kwargs)

    @wraps(load)
    def load_checkpoint(self: Any, *args: Any, **kwargs: Any) -> Any:
        loaded = load(self, *args, **kwargs)
        if state.get("trainer") is self:
            load_memory(state["settings"].scheme, self.config, self.global_steps)
        return loaded

    @wraps(advantage)
    def compute_advantage(data: Any, adv_estimator: Any, *args: Any, **kwargs: Any) -> Any:
        settings: Settings | None = state.get("settings")
        if adv_estimator != "spanwise" or settings is None or KEY not in data.non_tensor_batch:
            return advantage(data, adv_estimator, *args, **kwargs)
        tokens = {name: data.batch[field] for name, field in settings.tokens.items()}
        rows = Rows(data.non_tensor_batch[KEY].tolist(), tokens=tokens)
        with settings.carrying(rows) as found:
            data = advantage(data, adv_estimator, *args, **kwargs)
        shown.update(found)
        if settings.keeper is not None and settings.found is not None:
            settings.keeper.keep(state["trainer"], rows, settings.found, found, lambda: sampled_of(data))
        return data

    @wraps(update)
    def update_actor(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = update(self, *args, **kwargs)
        if (keeper := keeper_of(self)) is not None:
            keeper.record.add_update(ray_trainer.reduce_metrics(dict(output.meta_info["metrics"])), UPDATE)
        return output

    @wraps(data_metrics)
    def compute_data_metrics(*args: Any, **kwargs: Any) -> Any:
        found = {**data_metrics(*args, **kwargs), **shown}
        shown.clear()
        if (keeper := keeper_of(state.get("trainer"))) is not None:
            keeper.record.add_update(found, UPDATE)
        return found

    compute_advantage.by_spanwise = True  # type: ignore[attr-defined]
    trainer.__init__, trainer.fit, trainer._update_actor = init, fit, update_actor
    trainer._save_checkpoint, trainer._load_checkpoint = save_checkpoint, load_checkpoint
    ray_trainer.compute_advantage = compute_advantage
    ray_trainer.compute_data_metrics = compute_data_metrics


def sampled_of(data: Any) -> Sampled:
    """What the rows of a batch of V0 are; prompts are padded on the left."""
    ids_nt, prompts_nt = data.batch["responses"], data.batch["prompts"]
    there_nt = data.batch["attention_mask"][:, : prompts_nt.shape[1]].bool()
    told = data.non_tensor_batch.get("reward_model", [None] * len(ids_nt))
    return Sampled(
        uids=data.non_tensor_batch["uid"].tolist(),
        prompts=[ids_t[there_t].tolist() for ids_t, there_t in zip(prompts_nt, there_nt, strict=True)],
        ids_nt=ids_nt,
        answers=[(row or {}).get("ground_truth") for row in told],
    )
