"""Pack blocks and rewards as text in verl's reward workers, and unpack them in verl's trainer.

This module imports nothing of verl. Every token-level loss of verl depends on the advantage as A f(sign A, ratio). So a positive
factor on A (`loss_factor`) scales the token's loss, and undoes the divisor of `actor.loss_agg_mode` without a copy of the loss.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
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
from spanwise.pipeline import Reading, advantages
from spanwise.scheme import Scheme
from spanwise.step import BatchCredit, ReadBatch, Step, StepResult, steps_of_turns
from spanwise.types import Spans

#: The key in verl's `reward_extra_info` under which a rollout's packed rewards and blocks travel.
KEY = "spanwise"
#: The values of verl's `actor.loss_agg_mode` that spanwise supports.
MODES = ("seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "token-mean", "token-sum")
USE = f"Use actor_rollout_ref.actor.loss_agg_mode={MODES[0]}."


@dataclass(frozen=True)
class Rows:
    """The rows of a batch in verl's trainer."""

    packed: Sequence[Any]  # JSON with the blocks and rewards of each row's rollout; padding rows may hold anything.
    session: Sequence[Any] | None = None  # The rollout id of each row; None: every row is a rollout.
    output_number: Sequence[int] | None = None  # The number of each row within its rollout.
    padding: Sequence[bool] = field(default=())  # True for rows that verl added to fill up the batch.
    tokens: Mapping[str, Shaped[Tensor, "n t"]] = field(default_factory=dict)  # Maps a `Batch` field to the tokens' values.
    # For each mode, such as LaSeR: the column of the token that the mode appended to each row, or -1 for no token.
    places: Mapping[str, Int[Tensor, " n"]] = field(default_factory=dict)

    @cached_property
    def real(self) -> list[int]:
        """The indices of the rows that are not padding."""
        return [n for n in range(len(self.packed)) if not (self.padding and self.padding[n])]

    @cached_property
    def rollouts(self) -> int:
        """The number of rollouts that the rows belong to, without padding."""
        return len(self.real if self.session is None else {self.session[n] for n in self.real})


def pack(reading: Reading, length_n: Sequence[int], *, masked: bool, turns: Turns | None = None, anchor: Any = None) -> str:
    """Pack a rollout's blocks and rewards as text. verl's V0 trainer carries no other data of uneven length."""
    assert reading.spans is not None, "`pack` needs reading.spans, which only the process that sampled the completion has"
    block_nt, note_nm = reading.spans.block_nt, reading.scores.note_nm
    if turns is not None:
        block_nt = turns.put(block_nt + 1, rows=len(length_n)) - 1  # tokens between turns get the block number -1
    packed_outputs: list[dict[str, list[Any]]] = []
    for block_t, token_count in zip(block_nt, length_n, strict=True):
        run_blocks, run_lengths = block_t[:token_count].unique_consecutive(return_counts=True)
        packed_outputs.append({"runs": [run_blocks.tolist(), run_lengths.tolist()], "table": [], "anchor": [], "notes": []})
    output_index_s = range(len(packed_outputs)) if turns is None else turns.row_s.tolist()
    for s, (n, table_row) in enumerate(zip(output_index_s, reading.pack().tolist(), strict=True)):
        packed_outputs[n]["table"].append(table_row)
        packed_outputs[n]["anchor"].append(None if anchor is None else anchor[s])
        if note_nm is not None:
            packed_outputs[n]["notes"].append(note_nm[s].tolist())
    packed_rollout = {"masked": masked, "split": turns is not None, "outputs": packed_outputs}
    return json.dumps(packed_rollout, separators=(",", ":"), default=_as_json)


def _as_json(state: Any) -> Any:
    """Convert an array in a turn's state to a list. Refuse any other object that JSON cannot store."""
    if hasattr(state, "tolist"):
        return state.tolist()
    raise RecipeError(
        f"The state of a turn contains a value of the type {type(state).__name__}, which verl's reward workers cannot send to the "
        f"trainer. Use text, numbers, or lists of texts and numbers."
    )


@dataclass(frozen=True)
class UnpackedBatch:
    """The blocks and rewards of a batch, unpacked from JSON texts."""

    reading: Reading  # The rewards of each row or turn, without the blocks (`spans` is None).
    row_s: Int[Tensor, " s"]  # The index of the batch row to which each row of `reading` (a batch row or a turn) belongs.
    runs: Sequence[list[list[int]]]  # Each row's blocks, run-length encoded: block numbers and run lengths.
    masked_n: Bool[Tensor, " n"]  # True if the row came with a mask of sampled tokens.
    split_n: Bool[Tensor, " n"]  # True if the row was split into turns.
    anchor: list[Any] | None  # The state before each row or turn, if the method compares states.

    @cached_property
    def length_n(self) -> list[int]:
        """The number of tokens of each batch row, tool output included."""
        return [sum(run_lengths) for _, run_lengths in self.runs]

    def blocks_of(
        self, scheme: Scheme, mask_nt: Bool[Tensor, "n t"], rows: Sequence[int]
    ) -> tuple[Spans, Bool[Tensor, "n t"], Turns | None, Int[Tensor, " s"]]:
        """Return the blocks and the mask of sampled tokens for some rows of a batch.

        `rows` ascend; `mask_nt`: the tokens that verl trains. Also return turns (None: not split) and indices in `reading`.
        """
        row_width = mask_nt.shape[1]
        run_blocks, run_lengths = [], []
        for n in rows:
            blocks_of_runs, lengths_of_runs = self.runs[n]
            if self.length_n[n] > row_width:
                raise AlignmentError(
                    f"Row {n}: the reward worker read {self.length_n[n]} tokens, but the trainer's row has only {row_width}."
                )
            run_blocks += [*blocks_of_runs, -1]
            run_lengths += [*lengths_of_runs, row_width - self.length_n[n]]
        block_dtype = np.int8 if len(scheme.layout.names) < 128 else np.int16
        block_by_token = np.repeat(np.array(run_blocks, dtype=block_dtype), run_lengths)
        block_nt = torch.from_numpy(block_by_token.reshape(len(rows), row_width))
        is_sampled_nt = block_nt >= 0
        row_turns = None
        for n in (mask_nt != is_sampled_nt).any(dim=1).nonzero().flatten().tolist():
            if self.masked_n[rows[n]] and not (mask_nt[n] & ~is_sampled_nt[n]).any():
                continue  # verl's rejection sampling may mask some of the sampled tokens
            raise AlignmentError(
                f"Row {rows[n]}: verl trains {int(mask_nt[n].sum())} tokens, but the reward worker counted "
                f"{int(is_sampled_nt[n].sum())} tokens as the model's own. So spanwise would also score tool output. Let agent "
                "loops set AgentLoopOutput.response_mask. Do not override AgentLoopWorker._compute_score."
            )
        row_index_n = torch.tensor(rows, dtype=torch.int64)
        if self.split_n.any():
            turn_number_nt = runs(is_sampled_nt) * self.split_n[row_index_n, None]  # a row not split into turns is turn 0
            row_turns = split_turns(is_sampled_nt, torch.where(is_sampled_nt, turn_number_nt, -1))
            block_nt = row_turns.take(block_nt, fill=-1)
        is_selected_s = torch.isin(self.row_s, row_index_n)
        row_spans = Spans.of_blocks(scheme.layout.names, block_nt, self.reading.fault_n[is_selected_s])
        return row_spans, is_sampled_nt, row_turns, is_selected_s.nonzero().flatten()


def unpack(packed: Sequence[Any], scheme: Scheme, output_number: Sequence[int] | None = None) -> UnpackedBatch:
    """Unpack the blocks and rewards of all rows from JSON texts. `output_number`: each row's number in its rollout."""
    parse_text = cache(json.loads)  # a text is parsed once for all rows of a rollout
    rollout_dicts, output_dicts = [], []
    for n, packed_text in enumerate(packed):
        if not isinstance(packed_text, str):
            raise RecipeError(
                f"The agent loop scored row {n} itself, so spanwise's reward manager did not, and the row has no blocks and "
                "rewards. Let the agent loop leave reward_score empty. Put its results in extra_fields, which rewards read as "
                "columns."
            )
        rollout_dicts.append(parse_text(packed_text))
        output_dicts.append(rollout_dicts[n]["outputs"][0 if output_number is None else output_number[n]])
    is_split_n = [rollout["split"] for rollout in rollout_dicts]
    output_indices = list(range(len(output_dicts)))
    if any(is_split_n):  # a row without sampled tokens has no turn
        output_indices = [n for n, output in enumerate(output_dicts) if any(block >= 0 for block in output["runs"][0])]
    table_rows = [row for n in output_indices for row in output_dicts[n]["table"]]
    reading_table = torch.tensor(table_rows or np.zeros((0, 0)), dtype=torch.float64)
    state_before_turn_s = [_hashable(state) for n in output_indices for state in output_dicts[n]["anchor"]]
    reading = Reading.unpack(reading_table, scheme)
    if any(output_dicts[n]["notes"] for n in output_indices):
        no_notes: list[str | None] = [None] * len(scheme.objectives)
        reward_notes: list[list[str | None]] = []
        for n in output_indices:  # `notes` is empty if no reward of the output has a note
            reward_notes += output_dicts[n]["notes"] or [no_notes] * len(output_dicts[n]["table"])
        reading = replace(reading, scores=replace(reading.scores, note_nm=np.array(reward_notes, dtype=object)))
    return UnpackedBatch(
        reading,
        torch.tensor([n for n in output_indices for _ in output_dicts[n]["table"]], dtype=torch.int64),
        [output["runs"] for output in output_dicts],
        torch.tensor([rollout["masked"] for rollout in rollout_dicts]),
        torch.tensor(is_split_n),
        state_before_turn_s if any(state is not None for state in state_before_turn_s) else None,
    )


def _hashable(state: Any) -> Any:
    """Replace all lists in a turn's state by tuples, so that the state can be hashed."""
    return tuple(map(_hashable, state)) if isinstance(state, list) else state


class Credited(NamedTuple):
    """The advantages of a batch, the targets of any critic, and the result of the step."""

    adv_nt: Float[Tensor, "n t"]
    return_nt: Float[Tensor, "n t"] | None
    result: StepResult


def read_rows(rows: Rows, uids: Sequence[Any], step: Step) -> tuple[UnpackedBatch, ReadBatch]:
    """Unpack the blocks and rewards of a batch. Return them also as a `ReadBatch` without `spans`."""
    group_n = group_index([uids[n] for n in rows.real])
    all_output_numbers = rows.output_number or [0] * len(rows.packed)
    output_numbers = [all_output_numbers[n] for n in rows.real]
    unpacked_batch = unpack([rows.packed[n] for n in rows.real], step.scheme, output_numbers)
    rollout_ids = rows.session or range(len(rows.packed))
    rollout_n = group_index([rollout_ids[n] for n in rows.real])
    steps = Steps(rollout_n, torch.tensor(output_numbers, dtype=torch.int64), unpacked_batch.anchor)
    if unpacked_batch.split_n.any():
        row_s = unpacked_batch.row_s
        step_s = torch.arange(len(row_s)) - torch.searchsorted(row_s, row_s)  # each turn's number in its row, from 0
        steps = steps_of_turns(steps, row_s, step_s, unpacked_batch.anchor)
    elif len(rollout_n.unique()) == len(rollout_n) and "steps" not in step.scheme.needs:
        steps = None
    for mode in step.scheme.modes if steps is not None else ():
        mode.check_turns()
    return unpacked_batch, ReadBatch(Batch(group_n[unpacked_batch.row_s], steps=steps), unpacked_batch.reading, len(group_n))


def credited(
    rows: Rows,
    uids: Sequence[Any],
    mask_nt: Shaped[Tensor, "n t"],
    step: Step,
    *,
    value_lam: float = 1.0,
    fields: Mapping[str, Tensor] = {},  # `Batch` fields that modes such as laser fill in
    dtype: torch.dtype = torch.float32,
) -> Credited:
    """Compute the advantages of a batch and its critic's targets. Masked tokens and padding rows get 0."""
    scheme = step.scheme
    real_indices = rows.real
    unpacked_batch, scored_rows = read_rows(rows, uids, step)
    real_mask_nt = mask_nt[real_indices].bool()
    spans, is_sampled_nt, turns, _ = unpacked_batch.blocks_of(scheme, real_mask_nt, range(len(real_indices)))
    scored_rows = replace(scored_rows, reading=replace(scored_rows.reading, spans=spans), turns=turns)
    token_fields: dict[str, Any] = {name: scored_rows.take(table_nt[real_indices]) for name, table_nt in rows.tokens.items()}
    batch = replace(scored_rows.batch, mask_nt=scored_rows.take(is_sampled_nt), **token_fields, **fields)
    step_result = step.finish(replace(scored_rows, batch=batch), dtype=dtype)
    step_result.advantages_nt.masked_fill_(~scored_rows.take(real_mask_nt), 0.0)
    adv_nt = to_all_rows(scored_rows.put(step_result.advantages_nt), real_indices, mask_nt)
    if not scheme.value_names:
        return Credited(adv_nt, None, step_result)
    return_su, critic_metrics = returns(scored_rows.reading, batch, scheme, lam=value_lam)
    return_nt = to_all_rows(scored_rows.put(return_su), real_indices, mask_nt)
    return Credited(adv_nt, return_nt, replace(step_result, metrics={**step_result.metrics, **critic_metrics}))


@dataclass(frozen=True)
class ChunkedCredit:
    """The credit of a batch, for computing advantages in chunks of rows."""

    rows: Rows
    unpacked: UnpackedBatch
    batch: BatchCredit

    @staticmethod
    def of(rows: Rows, uids: Sequence[Any], step: Step) -> ChunkedCredit:
        """Compute the credit of all rows of a batch, before their tokens are fetched."""
        unpacked_batch, scored_rows = read_rows(rows, uids, step)
        return ChunkedCredit(rows, unpacked_batch, step.credit(scored_rows))

    @cached_property
    def _unpacked_row_by_row(self) -> dict[int, int]:
        """Maps row indices to indices in `unpacked`, which lacks padding rows."""
        return {row_index: unpacked_index for unpacked_index, row_index in enumerate(self.rows.real)}

    def split(self, tokens: int) -> list[range]:
        """Split the rows into chunks of about `tokens` tokens. A chunk takes every k-th row, to spread the padding at the end."""
        row_count = len(self.rows.packed)
        padded_token_count = row_count * max(self.unpacked.length_n, default=0)
        chunk_count = min(row_count, math.ceil(padded_token_count / tokens)) or 1
        return [range(first_row, row_count, chunk_count) for first_row in range(chunk_count)]

    def advantages(self, chunk: range, mask_nt: Shaped[Tensor, "n t"], scheme: Scheme) -> Float[Tensor, "n t"]:
        """Compute the advantages of a chunk of rows. Masked tokens and padding rows get 0."""
        real_positions = [chunk_position for chunk_position, row in enumerate(chunk) if row in self._unpacked_row_by_row]
        unpacked_rows = [self._unpacked_row_by_row[chunk[chunk_position]] for chunk_position in real_positions]
        real_mask_nt = mask_nt[real_positions].bool()
        spans, _, turns, credit_indices = self.unpacked.blocks_of(scheme, real_mask_nt, unpacked_rows)
        adv_nt = advantages(self.batch.credits.take(credit_indices), spans, scheme)
        if turns is not None:
            adv_nt = turns.put(adv_nt, rows=len(real_positions))
        return to_all_rows(adv_nt, real_positions, mask_nt)


def to_all_rows(value_nt: Float[Tensor, "n t"], real: Sequence[int], mask_nt: Shaped[Tensor, "m t"]) -> Float[Tensor, "m t"]:
    """Add padding rows of 0 to a table. Masked tokens become 0, too."""
    if len(real) < len(mask_nt):
        real_rows = torch.tensor(real, dtype=torch.int64)
        value_nt = value_nt.new_zeros(mask_nt.shape).index_copy_(0, real_rows, value_nt)
    return value_nt.masked_fill_(~mask_nt.bool(), 0.0)


def loss_factor(
    mask_nt: Shaped[Tensor, "n t"],
    *,
    mode: str,
    rollouts: int,
    mini_batch: int,
    tokens: int,
    rows: int,
    horizon: int | float | None = None,
) -> Float[Tensor, "n 1"]:
    """Return the factors on advantages that undo the normaliser of verl's loss."""
    token_count_n1 = mask_nt.sum(dim=1, keepdim=True).float()
    if mode == "token-mean" and rows > mini_batch:
        raise RecipeError(
            f"loss_agg_mode 'token-mean' divides each mini-batch by its own number of tokens. This batch of {rows} rows has "
            f"mini-batches of {mini_batch} rows, so equal advantages would not weigh the same in all mini-batches. {USE}"
        )
    factor_n1 = torch.full_like(token_count_n1, rows / max(rollouts, 1))  # verl divides the loss by rows, not by rollouts
    if mode == "token-sum":
        return factor_n1 / mini_batch
    if mode == "token-mean":
        return factor_n1 / rows * tokens
    return factor_n1 * {"seq-mean-token-mean": token_count_n1, "seq-mean-token-sum-norm": float(horizon or 1)}.get(mode, 1.0)
