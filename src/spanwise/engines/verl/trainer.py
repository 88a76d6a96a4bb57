"""Wrap verl's V1 trainers. They keep packed blocks and rewards in verl's TransferQueue."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import transfer_queue as tq  # pyright: ignore[reportMissingImports]
from tensordict import TensorDict  # pyright: ignore[reportMissingImports]
from torch import Tensor

from spanwise.engines.verl import settings
from spanwise.engines.verl.carry import KEY, ChunkedCredit, Rows
from spanwise.engines.verl.estimators import carrying
from spanwise.engines.verl.plugin import around, say
from spanwise.engines.verl.run import Sampled, VerlRun

#: The modes of verl's trainer that can train with a recipe.
MODES = ("sync", "colocate_async", "separate_async")
#: The approximate number of tokens in a chunk of rows, padding included.
CHUNK_TOKENS = 2**21


def attach(v1: Any) -> None:
    """Let verl's V1 trainers train with a recipe. `spanwise_<mode>` becomes a second name of each trainer mode."""
    settings.attach(v1.PPOTrainer)
    trainer_registry = v1.trainer_base.TRAINER_REGISTRY
    for mode in MODES:
        if mode in trainer_registry:
            trainer_registry.setdefault(f"spanwise_{mode}", trainer_registry[mode])

    @around(v1.PPOTrainer, "_compute_advantage")
    def compute_advantage(original: Any, self: Any, batch: Any, metrics: dict[str, Any]) -> Any:
        run: VerlRun | None = self.spanwise
        if run is None:
            return original(self, batch, metrics)
        batch_rows = rows_of(batch, run)
        run.note_missing(self, batch_rows)
        if run.allows_chunks:
            return _in_chunks(v1.trainer_base.MetricsAggregator, partial(original, self), batch, metrics, batch_rows, run)
        with carrying(partial(run.credit, batch_rows, getattr(self, "global_steps", 1) - 1)):
            batch = original(self, batch, metrics)
        metrics.update(run.result.metrics if run.result else {})
        if run.parts:
            _write_targets(batch, batch_rows, run.targets)
        run.keep(self, batch_rows, lambda: sampled_of(batch))
        return batch

    @around(v1.trainer_base.MetricsAggregator, "_get_aggregation_type")
    def get_aggregation_type(original: Any, self: Any, metric_name: str) -> str:
        """Average metrics `credit/...`. verl goes by words in a name, and would add up those of a block called `summary`."""
        return "weighted_avg" if metric_name.startswith("credit/") else original(self, metric_name)

    @around(v1.PPOTrainer, "_compute_metrics")
    def compute_metrics(original: Any, self: Any, batch: Any, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        computed_metrics = original(self, batch, metrics, *args, **kwargs)
        if self.spanwise is not None:
            self.spanwise.add_update(metrics)
            self.spanwise.note_replaced(metrics)
        return computed_metrics


def _in_chunks(metrics_class: Any, original: Any, batch: Any, metrics: dict[str, Any], rows: Rows, run: VerlRun) -> Any:
    """Let verl compute advantages in chunks of rows, to save memory. Join the metrics."""
    chunked_credit = ChunkedCredit.of(rows, [uid for uid, _ in rows.session or ()], run.step)
    say(*chunked_credit.batch.warnings)
    credited_chunks = []
    joined_metrics = metrics_class()
    for chunk in chunked_credit.split(CHUNK_TOKENS):
        chunk_metrics: dict[str, Any] = {}
        with carrying(partial(run.credit_chunk, chunked_credit, chunk)):
            credited_chunks.append(original(batch.select_keys([batch.keys[n] for n in chunk]), chunk_metrics))
        joined_metrics.add_step_metrics(chunk_metrics, sample_count=len(chunk))
    metrics.update({**joined_metrics.get_aggregated_metrics(), **chunked_credit.batch.metrics})
    joined_batch = type(batch).concat(credited_chunks).select_keys(batch.keys)
    joined_batch.extra_info = joined_batch.extra_info or {}  # `concat` may leave None, to which verl cannot add entries
    return joined_batch


def rows_of(batch: Any, run: VerlRun) -> Rows:
    """Fetch the packed rewards and the per-token numbers of a batch."""
    response_fields = ["responses", "response_mask"] if run.parts else []
    fetched_fields = _fetch(batch, "extra_fields", *run.tokens.values(), *response_fields)
    extra_fields = list(fetched_fields["extra_fields"])  # The TransferQueue may return an array instead of a list.
    key_parts = [key.rsplit("_", 2) for key in batch.keys]  # A row's key is "<prompt id>_<rollout number>_<output number>".
    token_column_by_mode = {}
    for name, mode_part in run.parts.items():  # a mode's appended token is the last of its row, and masked
        token_columns = [
            len(ids) - 1 if len(ids) > 1 and int(ids[-1]) == mode_part.token and not mask[-1] else -1
            for ids, mask in zip(fetched_fields["responses"].unbind(), fetched_fields["response_mask"].unbind(), strict=True)
        ]
        token_column_by_mode[name] = torch.tensor(token_columns)
    return Rows(
        packed=[(fields.get("reward_extra_info") or {}).get(KEY) for fields in extra_fields],
        session=[(uid, session) for uid, session, _ in key_parts],
        output_number=[int(number_text) for _, _, number_text in key_parts],
        padding=[bool(tag.get("is_padding")) for tag in batch.tags],
        tokens={name: fetched_fields[field].to_padded_tensor(0.0) for name, field in run.tokens.items()},
        places=token_column_by_mode,
    )


def _fetch(batch: Any, *fields: str) -> Any:
    """Fetch some fields of a batch from the TransferQueue."""
    return tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=list(fields))


def _write_targets(batch: Any, rows: Rows, targets: Mapping[str, Tensor]) -> None:
    """Write into `old_log_probs` the log-probability that a mode's loss trains the mode's appended token to have."""
    old_logp_rows = [row.clone() for row in _fetch(batch, "old_log_probs")["old_log_probs"].unbind()]
    for name, target_n in targets.items():
        for n, target_logp in zip(rows.real, target_n, strict=True):
            if (token_column := int(rows.places[name][n])) >= 0:
                old_logp_rows[n][token_column] = target_logp
    nested_logps = torch.nested.as_nested_tensor(old_logp_rows, layout=torch.jagged)
    updated_fields = TensorDict({"old_log_probs": nested_logps}, batch_size=len(old_logp_rows))
    tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=updated_fields)


def sampled_of(batch: Any) -> Sampled:
    """Fetch a batch's prompts, responses and gold answers from the TransferQueue."""
    fetched_fields = _fetch(batch, "prompts", "responses", "reward_model")
    has_reward_models = "reward_model" in set(fetched_fields.keys())  # `in` does not work on a TensorDict
    reward_models = list(fetched_fields["reward_model"]) if has_reward_models else [None] * len(batch.keys)
    return Sampled(
        uids=[key.rsplit("_", 2)[0] for key in batch.keys],
        prompts=[ids_t.tolist() for ids_t in fetched_fields["prompts"].unbind()],
        ids_nt=fetched_fields["responses"].to_padded_tensor(0),
        answers=[(reward_model or {}).get("ground_truth") for reward_model in reward_models],
    )
