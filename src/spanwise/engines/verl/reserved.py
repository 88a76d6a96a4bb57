"""A reserved token in the rows of verl (`engines.appended`): appended to responses, and found and taught in a batch."""

from __future__ import annotations

from typing import Any

import torch
import transfer_queue as tq  # pyright: ignore[reportMissingImports]
from jaxtyping import Float
from tensordict import TensorDict  # pyright: ignore[reportMissingImports]
from torch import Tensor

from spanwise.engines.appended import Appended, verdicts_of
from spanwise.engines.verl.carry import Rows
from spanwise.laser import Laser
from spanwise.pipeline import Reading
from spanwise.scheme import Scheme


def reserved_of(laser: Laser, config: Any, model: Any) -> Appended:
    """The reserved token of a run.

    Args:
        laser: of the recipe.
        config: verl's whole configuration.
        model: verl's `HFModelConfig`.
    """
    return Appended.of(
        laser,
        model.tokenizer,
        size=model.hf_config.get_text_config().vocab_size,
        generation=model.generation_config,
        temperature=config.actor_rollout_ref.rollout.temperature,
    )


def append(output: Any, reserved: Appended) -> None:
    """Put the token behind the response of an `AgentLoopOutput` that ended, as one that the model did not sample."""
    if not reserved.ended(output.response_ids, output.response_mask):
        return
    output.response_ids = [*output.response_ids, reserved.token]
    output.response_mask = [*output.response_mask, 0]
    if output.response_logprobs is not None:
        output.response_logprobs = [*output.response_logprobs, 0.0]


def columns_of(responses: Tensor, masks: Tensor, token: int) -> list[int]:
    """Where the token stands in each row of nested responses: at the end, or nowhere (-1)."""
    found = []
    for ids_t, mask_t in zip(responses.unbind(), masks.unbind(), strict=True):
        there = len(ids_t) > 1 and int(ids_t[-1]) == token and not bool(mask_t[-1])
        found.append(len(ids_t) - 1 if there else -1)
    return found


def scores(rows: Rows, reserved: Appended) -> Float[Tensor, " n"]:
    """The self-rewarding score of each row, NaN where it did not end."""
    column_n = torch.tensor(rows.reserved)
    logp_nt = rows.tokens["logp_nt"]
    logp_n = logp_nt.gather(1, column_n.clamp(min=0)[:, None])[:, 0]
    return reserved.scores(torch.where(column_n >= 0, logp_n, torch.nan))


def verdicts(rows: Rows, reading: Reading, scheme: Scheme) -> Float[Tensor, " n"]:
    """The verdict of each row, NaN where it is absent, and of padding."""
    assert scheme.laser is not None, "there is a reserved token"
    verdict_n = torch.full((len(rows.packed),), torch.nan, dtype=torch.float64)
    verdict_n[rows.real] = verdicts_of(reading, scheme, scheme.laser)
    return verdict_n


def placed(adv_nt: Float[Tensor, "n t"], rows: Rows, weight_n: Float[Tensor, " n"]) -> Float[Tensor, "n t"]:
    """Advantages with a weight at each reserved token."""
    column_n = torch.tensor(rows.reserved)
    at = (column_n >= 0).nonzero()[:, 0]
    adv_nt = adv_nt.clone()
    adv_nt[at, column_n[at]] = weight_n[at].to(adv_nt.dtype)
    return adv_nt


def write_targets(batch: Any, rows: Rows, target_n: Float[Tensor, " n"]) -> None:
    """Put the target of each reserved token in the place of its old log-probability, in the TransferQueue."""
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["old_log_probs"])
    own = [row.clone() for row in data["old_log_probs"].unbind()]
    for row, column, target in zip(own, rows.reserved, target_n, strict=True):
        if column >= 0:
            row[column] = target
    written = TensorDict({"old_log_probs": torch.nested.as_nested_tensor(own, layout=torch.jagged)}, batch_size=len(own))
    tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=written)
