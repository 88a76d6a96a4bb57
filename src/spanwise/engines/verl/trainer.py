"""verl's V1 trainers with credit per block: one mode of ours for each of verl's, chosen by the name of the estimator alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import transfer_queue as tq  # pyright: ignore[reportMissingImports]
from omegaconf import open_dict  # pyright: ignore[reportMissingImports]
from tensordict import TensorDict  # pyright: ignore[reportMissingImports]

from spanwise.engines.verl.carry import KEY, Rows
from spanwise.engines.verl.run import Sampled
from spanwise.engines.verl.settings import prepare
from spanwise.errors import RecipeError

#: The modes of verl, in each of which a recipe can be trained.
MODES = ("sync", "colocate_async", "separate_async")


def attach(v1: Any) -> None:
    """Register `spanwise_<mode>` for each mode, and let verl's own modes choose it where the estimator is `spanwise`."""
    registry = v1.trainer_base.TRAINER_REGISTRY
    for mode in MODES:
        if mode in registry and f"spanwise_{mode}" not in registry:
            own = credited_trainer(registry[mode], mode)
            v1.register_trainer(f"spanwise_{mode}")(own)
            registry[mode] = _chosen(registry[mode], own)


def credited_trainer(stock: Any, mode: str) -> Any:
    """A trainer of verl whose advantages come from a recipe; everything else it does stays as it is."""

    class SpanTrainer(stock):
        def __init__(self, config: Any) -> None:
            if config.algorithm.adv_estimator != "spanwise":
                raise RecipeError(
                    f"trainer.v1.trainer_mode=spanwise_{mode} trains algorithm.adv_estimator=spanwise, and it is "
                    f"'{config.algorithm.adv_estimator}'; use trainer.v1.trainer_mode={mode}."
                )
            with open_dict(config):
                config.trainer.v1.trainer_mode = mode  # verl looks at the name
            self.spanwise = prepare(config)
            super().__init__(config)

        def fit(self, *args: Any, **kwargs: Any) -> Any:
            with self.spanwise.training(self, done=getattr(self, "global_steps", 0)):
                return super().fit(*args, **kwargs)

        def _save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
            self.spanwise.save_memory(self.global_steps)
            return super()._save_checkpoint(*args, **kwargs)

        def _load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
            loaded = super()._load_checkpoint(*args, **kwargs)
            self.spanwise.load_memory(self.global_steps)
            return loaded

        def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
            rows = rows_of(batch, self.spanwise.tokens, self.spanwise.parts)
            with self.spanwise.carrying(rows, number=getattr(self, "global_steps", 1) - 1) as shown:
                batch = super()._compute_advantage(batch, metrics)
            metrics.update(shown)
            if self.spanwise.parts:
                rewrite(batch, rows, self.spanwise.parts)
            self.spanwise.keep(self, rows, shown, lambda: sampled_of(batch))
            return batch

        def _compute_metrics(self, batch: Any, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            returned = super()._compute_metrics(batch, metrics, *args, **kwargs)
            self.spanwise.add_update(metrics)
            return returned

    SpanTrainer.__name__ = SpanTrainer.__qualname__ = f"Span{stock.__name__}"
    return SpanTrainer


def rows_of(batch: Any, tokens: Mapping[str, str], parts: Mapping[str, Any] | None = None) -> Rows:
    """What stands in the TransferQueue for the rows of a batch: what the reward workers packed, and fields of `Batch` by token."""
    data = _queued(batch, "extra_fields", *tokens.values(), *(["responses", "response_mask"] if parts else []))
    extra = list(data["extra_fields"])  # a list, an array or a stack, as the queue's storage likes
    names = [key.rsplit("_", 2) for key in batch.keys]
    return Rows(
        packed=[(told.get("reward_extra_info") or {}).get(KEY) for told in extra],
        session=[(uid, session) for uid, session, _ in names],
        step=[int(output) for _, _, output in names],
        padding=[bool(tag.get("is_padding")) for tag in batch.tags],
        tokens={name: data[field].to_padded_tensor(0.0) for name, field in tokens.items()},
        places={name: part.places(data["responses"], data["response_mask"]) for name, part in (parts or {}).items()},
    )


def _queued(batch: Any, *fields: str) -> Any:
    return tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=list(fields))


def rewrite(batch: Any, rows: Rows, parts: Mapping[str, Any]) -> None:
    """Put what the losses of modes read into the old log-probabilities, in the TransferQueue."""
    own = list(_queued(batch, "old_log_probs")["old_log_probs"].unbind())
    for name, part in parts.items():
        own = part.rewrite(own, rows.places[name])
    written = TensorDict({"old_log_probs": torch.nested.as_nested_tensor(own, layout=torch.jagged)}, batch_size=len(own))
    tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=written)


def sampled_of(batch: Any) -> Sampled:
    """What stands in the TransferQueue for the rows of a batch: prompts, responses, and the dataset's answers if it has any."""
    data = _queued(batch, "prompts", "responses", "reward_model")
    there = set(data.keys())  # a TensorDict does not answer `in`
    told = list(data["reward_model"]) if "reward_model" in there else [None] * len(batch.keys)
    return Sampled(
        uids=[key.rsplit("_", 2)[0] for key in batch.keys],
        prompts=[ids_t.tolist() for ids_t in data["prompts"].unbind()],
        ids_nt=data["responses"].to_padded_tensor(0),
        answers=[(row or {}).get("ground_truth") for row in told],
    )


def _chosen(stock: Any, own: Callable[[Any], Any]) -> Any:
    """A class in the place of `stock`: made with a configuration that names spanwise it gives ours, else `stock` itself."""

    class Chosen(stock):
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            if cls is not Chosen:
                return super().__new__(cls)
            config = kwargs["config"] if "config" in kwargs else args[0]
            return (own if config.algorithm.adv_estimator == "spanwise" else stock)(*args, **kwargs)

    Chosen.__name__, Chosen.__qualname__, Chosen.__doc__ = stock.__name__, stock.__qualname__, stock.__doc__
    return Chosen
