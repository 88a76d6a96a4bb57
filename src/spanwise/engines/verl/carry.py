"""Pack the readings of reward workers as text that verl carries to the trainer, and compute advantages; imports no verl.

Every token-level loss of verl depends on the advantage as A f(sign A, ratio), so a positive factor on A is a factor on the token's
loss, and the divisor of `actor.loss_agg_mode` can be undone in the advantage, without a copy of verl's loss (`loss_factor`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from spanwise.batch import Batch, Steps
from spanwise.credit import Turns, group_index, split_turns
from spanwise.credit.trajectories.turns import runs
from spanwise.errors import AlignmentError, RecipeError
from spanwise.modes.critic.config import returns
from spanwise.pipeline import Reading
from spanwise.scheme import Scheme
from spanwise.step import ReadBatch, Step, StepResult, steps_of_turns
from spanwise.types import Spans

#: The key of `reward_extra_info` that holds the packed text.
KEY = "spanwise"
#: The values of `actor.loss_agg_mode` that can be undone.
MODES = ("seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "token-mean", "token-sum")
#: The advice for a mode that cannot be undone.
USE = f"Use actor_rollout_ref.actor.loss_agg_mode={MODES[0]}."


@dataclass(frozen=True)
class Rows:
    """The columns that verl keeps beside the rows of a batch."""

    packed: Sequence[Any]  # the text of `pack` for the row's rollout; any value for padding
    session: Sequence[Any] | None = None  # the rollout of each row; None: every row is a rollout
    step: Sequence[int] | None = None  # the place of each row among the outputs of its rollout
    padding: Sequence[bool] = field(default=())  # which rows V1 trainers added as padding
    tokens: Mapping[str, Shaped[Tensor, "n t"]] = field(default_factory=dict)  # `Batch` fields per token (`value_nt`, ...)
    places: Mapping[str, Int[Tensor, " n"]] = field(default_factory=dict)  # mode -> the column of its appended token, or -1

    @cached_property
    def real(self) -> list[int]:
        """The indices of the rows that are not padding."""
        return [n for n in range(len(self.packed)) if not (self.padding and self.padding[n])]


def pack(reading: Reading, length_n: Sequence[int], *, masked: bool, turns: Turns | None = None, anchor: Any = None) -> str:
    """Pack a reading of the outputs of one rollout as text, because verl's V0 trainer carries no other uneven data."""
    assert reading.spans is not None, "what was read here has spans"
    block_nt = reading.spans.block_nt
    if turns is not None:
        block_nt = turns.put(block_nt + 1, rows=len(length_n)) - 1
    outputs: list[dict[str, list[Any]]] = []
    for block_t, length in zip(block_nt, length_n, strict=True):
        runs_2r = block_t[:length].unique_consecutive(return_counts=True)
        outputs.append({"runs": [value_r.tolist() for value_r in runs_2r], "table": [], "anchor": []})
    output_s = range(len(outputs)) if turns is None else turns.row_s.tolist()
    for s, (n, table_row) in enumerate(zip(output_s, reading.pack().tolist(), strict=True)):
        outputs[n]["table"].append(table_row)
        outputs[n]["anchor"].append(None if anchor is None else anchor[s])
    rollout = {"masked": masked, "split": turns is not None, "outputs": outputs}
    return json.dumps(rollout, separators=(",", ":"), default=_as_json)


def _as_json(state: Any) -> Any:
    """Return the numbers of an array; refuse other objects, because equal objects may have different texts."""
    if hasattr(state, "tolist"):
        return state.tolist()
    raise RecipeError(
        f"The state of a turn is or holds a {type(state).__name__}, which verl's reward workers cannot hand to its trainer; "
        f"give text, numbers, or lists of them."
    )


class Carried(NamedTuple):
    """The readings that the rows of a batch carry."""

    reading: Reading  # one row per row, or per turn if some row was read turn by turn
    sampled_nt: Bool[Tensor, "n t"]  # the tokens that the model sampled
    masked_n: Bool[Tensor, " n"]  # whether the row's reader knew the sampled tokens
    turns: Turns | None  # the places of the turns
    anchor: list[Any] | None  # the state before each row of the reading; None: unknown


def unpack(packed: Sequence[Any], scheme: Scheme, width: int, step: Sequence[int] | None = None) -> Carried:
    """Read the packed text of all rows back, right-padded to `width`; `step` is each row's place in its rollout."""
    rollout_by_text: dict[str, dict[str, Any]] = {}
    rollouts, outputs, block_r, count_r = [], [], [], []
    for n, text in enumerate(packed):
        if not isinstance(text, str):
            raise RecipeError(
                f"Row {n} carries no reading, because the agent loop scored the row instead of spanwise's reward manager. Let the "
                f"agent loop leave reward_score empty and put its results in extra_fields, which rewards read as columns."
            )
        if text not in rollout_by_text:
            rollout_by_text[text] = json.loads(text)
        rollouts.append(rollout_by_text[text])
        outputs.append(rollout_by_text[text]["outputs"][0 if step is None else step[n]])
        blocks, counts = outputs[n]["runs"]
        if (length := sum(counts)) > width:
            raise AlignmentError(f"Row {n} was read with {length} tokens, but the trainer has room for {width}.")
        block_r += [*blocks, -1]
        count_r += [*counts, width - length]
    dtype = np.int8 if len(scheme.layout.names) < 128 else np.int16
    block_nt = torch.from_numpy(np.repeat(np.array(block_r, dtype=dtype), count_r).reshape(len(packed), width))
    sampled_nt, turns = block_nt >= 0, None
    if any(rollout["split"] for rollout in rollouts):
        # A turn is a run of sampled tokens, or a whole row that was read as one turn; a row without tokens has no turn.
        split_n1 = torch.tensor([rollout["split"] for rollout in rollouts])[:, None]
        turns = split_turns(sampled_nt, torch.where(sampled_nt, runs(sampled_nt) * split_n1, -1))
        outputs = [output for output, has_tokens in zip(outputs, sampled_nt.any(dim=1).tolist(), strict=True) if has_tokens]
        block_nt = turns.take(block_nt, fill=-1)
    table = [row for output in outputs for row in output["table"]]
    table_nc = torch.tensor(table, dtype=torch.float64).reshape(len(table), len(table[0]) if table else 0)
    reading = Reading.unpack(table_nc, scheme)
    states = [_hashable(anchor) for output in outputs for anchor in output["anchor"]]
    return Carried(
        replace(reading, spans=Spans.of_blocks(scheme.layout.names, block_nt, reading.fault_n)),
        sampled_nt,
        torch.tensor([rollout["masked"] for rollout in rollouts]),
        turns,
        states if any(state is not None for state in states) else None,
    )


def _hashable(state: Any) -> Any:
    """Return a JSON state with tuples instead of lists, at any depth."""
    return tuple(map(_hashable, state)) if isinstance(state, list) else state


class Credited(NamedTuple):
    """The advantages of a batch's rows, the targets of their critic (None: no critic), and the step's result with both."""

    adv_nt: Float[Tensor, "n t"]
    return_nt: Float[Tensor, "n t"] | None
    result: StepResult


def credited(
    rows: Rows,
    uids: Sequence[Any],
    mask_nt: Shaped[Tensor, "n t"],
    step: Step,
    *,
    value_lam: float = 1.0,
    more: Mapping[str, Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Credited:
    """Compute the advantages of the rows of a batch and the targets of its critic, 0 at masked tokens and at padding."""
    # Rejection may have removed sampled tokens from the mask.
    mask_nt, scheme, rows_read = mask_nt.bool(), step.scheme, rows.real
    has_padding = len(rows_read) < len(mask_nt)
    read_mask_nt, group_n = mask_nt[rows_read] if has_padding else mask_nt, group_index([uids[n] for n in rows_read])
    output_n = None if rows.step is None else [rows.step[n] for n in rows_read]
    readings = unpack([rows.packed[n] for n in rows_read], scheme, mask_nt.shape[1], output_n)
    turns = readings.turns
    _check_tokens(read_mask_nt, readings.sampled_nt, readings.masked_n)
    session_n = torch.arange(len(rows_read)) if rows.session is None else group_index([rows.session[n] for n in rows_read])
    steps = Steps(session_n, torch.zeros_like(session_n) if output_n is None else torch.tensor(output_n), readings.anchor)
    if turns is not None:
        steps = steps_of_turns(steps, turns, readings.anchor)
    elif len(session_n.unique()) == len(session_n) and "steps" not in scheme.needs:
        steps = None
    for mode in scheme.modes if steps is not None else ():
        mode.check_turns()
    bare = ReadBatch(Batch(group_n), readings.reading, len(rows_read), turns)
    fields: dict[str, Any] = {name: bare.take(value_nt[rows_read]) for name, value_nt in rows.tokens.items()}
    fields |= more or {}
    group_s = group_n if turns is None else group_n[turns.row_s]
    read_batch = replace(bare, batch=Batch(group_s, mask_nt=bare.take(readings.sampled_nt), steps=steps, **fields))
    result = step.finish(read_batch, dtype=dtype)
    result.advantages_nt.masked_fill_(~read_batch.take(read_mask_nt), 0.0)

    def to_all_rows(value_su: Tensor) -> Tensor:
        """Put numbers of the tokens that were read into a table of all rows; 0 at tokens that verl does not train."""
        value_nt = read_batch.put(value_su)
        if has_padding:
            value_nt = value_nt.new_zeros(mask_nt.shape).index_copy_(0, torch.tensor(rows_read), value_nt)
        return value_nt.masked_fill_(~mask_nt, 0.0)

    adv_nt = to_all_rows(result.advantages_nt)
    if not scheme.value_names:
        return Credited(adv_nt, None, result)
    return_su, error_metrics = returns(read_batch.reading, read_batch.batch, scheme, lam=value_lam)
    return Credited(adv_nt, to_all_rows(return_su), replace(result, metrics={**result.metrics, **error_metrics}))


def loss_factor(
    mask_nt: Shaped[Tensor, "n t"],
    *,
    mode: str,
    rollouts: int,
    mini_batch: int,
    tokens: int,
    horizon: int | float | None = None,
) -> Float[Tensor, "n 1"]:
    """Compute the factor on advantages that turns verl's loss into the mean over rollouts of the sum over tokens."""
    length_n1, row_count = mask_nt.sum(dim=1, keepdim=True).float(), len(mask_nt)
    if mode == "token-mean" and row_count > mini_batch:
        raise RecipeError(
            f"loss_agg_mode 'token-mean' divides each mini-batch by its own tokens, and this batch of {row_count} rows makes "
            f"mini-batches of {mini_batch}, so the same credit would weigh differently in each. {USE}"
        )
    # verl divides by a fixed number of rows (`ppo_mini_batch_size` times `rollout.n`); rows / rollouts corrects, on average over
    # the mini-batches, for padding and for several rows of one rollout.
    base_n1 = length_n1.new_full(length_n1.shape, row_count / max(rollouts, 1))
    if mode == "token-sum":
        return base_n1 / mini_batch
    if mode == "token-mean":
        return base_n1 / row_count * tokens
    return base_n1 * {"seq-mean-token-mean": length_n1, "seq-mean-token-sum-norm": float(horizon or 1)}.get(mode, 1.0)


def _check_tokens(mask_nt: Tensor, sampled_nt: Tensor, masked_n: Tensor) -> None:
    """Refuse a row if verl trains tokens that the reward worker did not see as sampled."""
    for n in (mask_nt != sampled_nt).any(dim=1).nonzero().flatten().tolist():
        if masked_n[n] and not (mask_nt[n] & ~sampled_nt[n]).any():
            continue  # rejection may have removed tokens
        raise AlignmentError(
            f"Row {n}: verl trains {int(mask_nt[n].sum())} tokens and the reward worker took {int(sampled_nt[n].sum())} for the "
            f"model's own. Tool output must not be scored as the model's: let agent loops set AgentLoopOutput.response_mask, and "
            f"leave AgentLoopWorker._compute_score to verl."
        )
