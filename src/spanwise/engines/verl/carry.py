"""What the reward workers read, as text that verl carries to the trainer, and the advantages that come of it. No verl here."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from spanwise.batch import Batch, Steps
from spanwise.errors import AlignmentError, RecipeError
from spanwise.pipeline import Reading, advantages, credit, metrics
from spanwise.scheme import Scheme
from spanwise.types import Spans

#: The key of `reward_extra_info` that holds it.
KEY = "spanwise"


@dataclass(frozen=True)
class Rows:
    """What stands beside the rows of a batch of verl.

    Attributes:
        packed: of each row, what `pack` made of the session it belongs to; anything for padding.
        session: the rollout that each row belongs to; None: every row is one of its own.
        step: where each row stands among the outputs of its rollout.
        padding: rows that V1 trainers fill up with.
        anchor: what each row starts from, for methods that compare steps; None where it is not known.
    """

    packed: Sequence[Any]
    session: Sequence[Any] | None = None
    step: Sequence[int] | None = None
    padding: Sequence[bool] = field(default=())
    anchor: Sequence[Any] | None = None


def pack(reading: Reading, length_n: Sequence[int], *, masked: bool) -> str:
    """A reading of the outputs of one rollout as text: verl's V0 trainer carries nothing else of uneven size.

    Args:
        reading: with spans.
        length_n: tokens of each output, tool output included.
        masked: whether the reader knew which tokens the model sampled.
    """
    assert reading.spans is not None, "what was read here has spans"
    runs = []
    for block_t, length in zip(reading.spans.block_nt, length_n, strict=True):
        block_r, count_r = block_t[:length].unique_consecutive(return_counts=True)
        runs.append([*zip(block_r.tolist(), count_r.tolist(), strict=True)])
    table = base64.b64encode(reading.pack().numpy().tobytes()).decode()
    return json.dumps({"table": table, "runs": runs, "masked": masked}, separators=(",", ":"))


def unpack(rows: Rows, scheme: Scheme, width: int) -> tuple[Reading, Bool[Tensor, " n"]]:
    """The readings of all rows, right-padded to a width, and whether their readers knew which tokens the model sampled.

    Raises:
        RecipeError: a row carries nothing.
        AlignmentError: a row is longer than the width, or was packed under another scheme.
    """
    seen: dict[str, dict[str, Any]] = {}
    tables, block_nt, masked = [], torch.full((len(rows.packed), width), -1, dtype=torch.int16), []
    for n, text in enumerate(rows.packed):
        if not isinstance(text, str):
            raise RecipeError(
                f"Row {n} carries no reading, so its rewards did not come from spanwise's reward manager: the agent loop scored it "
                f"itself. Let it leave reward_score empty, and give what it knows in extra_fields, which rewards read as columns."
            )
        if text not in seen:
            seen[text] = json.loads(text)
            table = np.frombuffer(base64.b64decode(seen[text]["table"])).reshape(len(seen[text]["runs"]), -1)
            seen[text]["table"] = torch.from_numpy(table.copy())
        held, step = seen[text], 0 if rows.step is None else rows.step[n]
        tables.append(held["table"][step])
        blocks, counts = zip(*held["runs"][step], strict=True) if held["runs"][step] else ((), ())
        if sum(counts) > width:
            raise AlignmentError(f"Row {n} was read with {sum(counts)} tokens and the trainer has room for {width}.")
        block_nt[n, : sum(counts)] = torch.tensor(blocks, dtype=torch.int16).repeat_interleave(torch.tensor(counts))
        masked.append(bool(held["masked"]))
    reading = Reading.unpack(torch.stack(tables), scheme)
    spans = Spans.of_blocks(scheme.layout.names, block_nt, reading.fault_n)
    return replace(reading, spans=spans), torch.tensor(masked)


def credited(
    rows: Rows, uids: Sequence[Any], mask_nt: Shaped[Tensor, "n t"], scheme: Scheme
) -> tuple[Float[Tensor, "n t"], Reading, dict[str, float]]:
    """Advantages of the rows of a batch, 0 at masked tokens and at padding; what they come of; block metrics.

    Args:
        rows: what was carried.
        uids: the prompt of each row.
        mask_nt: verl's response mask: trained tokens, perhaps fewer than were sampled (rejection).
        scheme: the rule.

    Raises:
        RecipeError, AlignmentError: see `unpack`; a token is trained that was not read as the model's own.
    """
    mask_nt = mask_nt.bool()
    real = [n for n in range(len(mask_nt)) if not (rows.padding and rows.padding[n])]

    def taken(values: Sequence[Any] | None) -> list[Any] | None:
        return None if values is None else [values[n] for n in real]

    own = Rows(taken(rows.packed) or [], taken(rows.session), taken(rows.step), (), taken(rows.anchor))
    reading, masked_n = unpack(own, scheme, mask_nt.shape[1])
    assert reading.spans is not None, "unpack gives spans"
    sampled_nt = reading.spans.block_nt >= 0
    _check_tokens(mask_nt[real], sampled_nt, masked_n)
    batch = Batch(taken(uids), mask_nt=sampled_nt, steps=_steps(own, scheme))
    found = credit(reading, batch, scheme)
    adv_nt = torch.zeros(mask_nt.shape)
    adv_nt[real] = advantages(found, reading.spans, scheme)
    return torch.where(mask_nt, adv_nt, 0.0), reading, metrics(found, reading, scheme)


def _steps(rows: Rows, scheme: Scheme) -> Steps | None:
    """Where rows stand in their rollouts, if any rollout has several or the method compares steps."""
    if rows.session is None or rows.step is None:
        return None
    dense = {name: i for i, name in enumerate(dict.fromkeys(rows.session))}
    if len(dense) == len(rows.session) and "steps" not in scheme.needs:
        return None
    return Steps(torch.tensor([dense[name] for name in rows.session]), torch.tensor(list(rows.step)), rows.anchor)


def _check_tokens(mask_nt: Tensor, sampled_nt: Tensor, masked_n: Tensor) -> None:
    extra_nt = mask_nt & ~sampled_nt
    unknown_nt = (mask_nt != sampled_nt) & ~masked_n[:, None]
    for n in (extra_nt | unknown_nt).any(dim=1).nonzero().flatten().tolist():
        raise AlignmentError(
            f"Row {n}: verl trains {int(mask_nt[n].sum())} tokens and the reward worker took {int(sampled_nt[n].sum())} for the "
            f"model's own. Tool output must not be scored as the model's: let agent loops set AgentLoopOutput.response_mask, and "
            f"leave AgentLoopWorker._compute_score to verl."
        )
