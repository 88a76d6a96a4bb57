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
from spanwise.pipeline import Reading, advantages
from spanwise.scheme import Scheme
from spanwise.step import BatchCredit, ReadBatch, Step, StepResult, steps_of_turns
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

    @cached_property
    def rollouts(self) -> int:
        """The number of rollouts that the rows come from, without padding."""
        return len(self.real if self.session is None else {self.session[n] for n in self.real})


def pack(reading: Reading, length_n: Sequence[int], *, masked: bool, turns: Turns | None = None, anchor: Any = None) -> str:
    """Pack a reading of the outputs of one rollout as text, because verl's V0 trainer carries no other uneven data."""
    assert reading.spans is not None, "what was read here has spans"
    block_nt = reading.spans.block_nt
    if turns is not None:
        block_nt = turns.put(block_nt + 1, rows=len(length_n)) - 1
    outputs: list[dict[str, list[Any]]] = []
    note_nm = reading.scores.note_nm
    for block_t, length in zip(block_nt, length_n, strict=True):
        runs_2r = block_t[:length].unique_consecutive(return_counts=True)
        outputs.append({"runs": [value_r.tolist() for value_r in runs_2r], "table": [], "anchor": [], "notes": []})
    output_s = range(len(outputs)) if turns is None else turns.row_s.tolist()
    for s, (n, table_row) in enumerate(zip(output_s, reading.pack().tolist(), strict=True)):
        outputs[n]["table"].append(table_row)
        outputs[n]["anchor"].append(None if anchor is None else anchor[s])
        if note_nm is not None:
            outputs[n]["notes"].append(note_nm[s].tolist())
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


class Tokens(NamedTuple):
    """The tokens of some rows."""

    spans: Spans  # one row per row, or per turn if some row of the batch was read turn by turn
    sampled_nt: Bool[Tensor, "n t"]  # the tokens that the model sampled
    turns: Turns | None  # the places of the turns
    place_s: Int[Tensor, " s"]  # which rows of the whole reading they are


@dataclass(frozen=True)
class Carried:
    """The readings that the rows of a batch carry."""

    reading: Reading  # one row per row, or per turn if some row was read turn by turn; without spans
    row_s: Int[Tensor, " s"]  # the row of each row of the reading
    runs: Sequence[list[list[int]]]  # of each row: the block of each run of its tokens, and its length
    masked_n: Bool[Tensor, " n"]  # whether the row's reader knew the sampled tokens
    split_n: Bool[Tensor, " n"]  # whether the row was read turn by turn
    anchor: list[Any] | None  # the state before each row of the reading; None: unknown

    @cached_property
    def length_n(self) -> list[int]:
        """The number of tokens of each row, tool output included."""
        return [sum(counts) for _, counts in self.runs]

    @cached_property
    def step_s(self) -> Int[Tensor, " s"]:
        """The number of each row of the reading among those of its row."""
        first_s = torch.searchsorted(self.row_s, self.row_s)
        return torch.arange(len(self.row_s)) - first_s

    def tokens(self, scheme: Scheme, width: int, rows: Sequence[int]) -> Tokens:
        """Return the tokens of some rows, in ascending order, right-padded to `width`."""
        block_r, count_r = [], []
        for n in rows:
            blocks, counts = self.runs[n]
            if self.length_n[n] > width:
                raise AlignmentError(
                    f"Row {n} was read with {self.length_n[n]} tokens, but the trainer has room for {width}."
                )
            block_r += [*blocks, -1]
            count_r += [*counts, width - self.length_n[n]]
        dtype = np.int8 if len(scheme.layout.names) < 128 else np.int16
        block_nt = torch.from_numpy(np.repeat(np.array(block_r, dtype=dtype), count_r).reshape(len(rows), width))
        sampled_nt, turns, row_n = block_nt >= 0, None, torch.tensor(rows, dtype=torch.int64)
        if self.split_n.any():
            # A turn is a run of sampled tokens, or a whole row that was read as one turn; a row without tokens has no turn.
            turns = split_turns(sampled_nt, torch.where(sampled_nt, runs(sampled_nt) * self.split_n[row_n, None], -1))
            block_nt = turns.take(block_nt, fill=-1)
        place_s = torch.isin(self.row_s, row_n).nonzero().flatten()
        return Tokens(
            Spans.of_blocks(scheme.layout.names, block_nt, self.reading.fault_n[place_s]), sampled_nt, turns, place_s
        )

    def check(self, mask_nt: Tensor, sampled_nt: Tensor, rows: Sequence[int]) -> None:
        """Refuse a row if verl trains tokens that the reward worker did not see as sampled."""
        for n in (mask_nt != sampled_nt).any(dim=1).nonzero().flatten().tolist():
            if self.masked_n[rows[n]] and not (mask_nt[n] & ~sampled_nt[n]).any():
                continue  # rejection may have removed tokens
            raise AlignmentError(
                f"Row {rows[n]}: verl trains {int(mask_nt[n].sum())} tokens and the reward worker took {int(sampled_nt[n].sum())} "
                f"for the model's own. Tool output must not be scored as the model's: let agent loops set "
                f"AgentLoopOutput.response_mask, and leave AgentLoopWorker._compute_score to verl."
            )


def unpack(packed: Sequence[Any], scheme: Scheme, step: Sequence[int] | None = None) -> Carried:
    """Read the packed text of all rows back; `step` is each row's place in its rollout."""
    rollout_by_text: dict[str, dict[str, Any]] = {}
    rollouts, outputs = [], []
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
    splits = [rollout["split"] for rollout in rollouts]
    # Beside rows that are split into turns, a row without tokens has no turn.
    read_rows = [n for n, output in enumerate(outputs) if not any(splits) or max(output["runs"][0], default=-1) >= 0]
    table = [row for n in read_rows for row in outputs[n]["table"]]
    table_sc = torch.tensor(table, dtype=torch.float64).reshape(len(table), len(table[0]) if table else 0)
    states = [_hashable(anchor) for n in read_rows for anchor in outputs[n]["anchor"]]
    reading = Reading.unpack(table_sc, scheme)
    if any(outputs[n]["notes"] for n in read_rows):
        # A rollout none of whose rewards says anything carries no notes.
        nothing: list[str | None] = [None] * len(scheme.objectives)
        rows = [outputs[n]["notes"] or [nothing] * len(outputs[n]["table"]) for n in read_rows]
        note_nm = np.array([row for rows_of_output in rows for row in rows_of_output], dtype=object)
        reading = replace(reading, scores=replace(reading.scores, note_nm=note_nm))
    return Carried(
        reading,
        torch.tensor([n for n in read_rows for _ in outputs[n]["table"]], dtype=torch.int64),
        [output["runs"] for output in outputs],
        torch.tensor([rollout["masked"] for rollout in rollouts]),
        torch.tensor(splits),
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


def read_rows(rows: Rows, uids: Sequence[Any], step: Step) -> tuple[Carried, ReadBatch]:
    """Read what the rows of a batch carry, as a batch without tokens."""
    group_n = group_index([uids[n] for n in rows.real])
    output_n = None if rows.step is None else [rows.step[n] for n in rows.real]
    carried = unpack([rows.packed[n] for n in rows.real], step.scheme, output_n)
    session_n = torch.arange(len(group_n)) if rows.session is None else group_index([rows.session[n] for n in rows.real])
    steps = Steps(session_n, torch.zeros_like(session_n) if output_n is None else torch.tensor(output_n), carried.anchor)
    if carried.split_n.any():
        steps = steps_of_turns(steps, carried.row_s, carried.step_s, carried.anchor)
    elif len(session_n.unique()) == len(session_n) and "steps" not in step.scheme.needs:
        steps = None
    for mode in step.scheme.modes if steps is not None else ():
        mode.check_turns()
    return carried, ReadBatch(Batch(group_n[carried.row_s], steps=steps), carried.reading, len(group_n))


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
    scheme, real = step.scheme, rows.real
    carried, bare = read_rows(rows, uids, step)
    tokens = carried.tokens(scheme, mask_nt.shape[1], range(len(real)))
    read_mask_nt = real_rows(mask_nt.bool(), real)
    carried.check(read_mask_nt, tokens.sampled_nt, range(len(real)))
    bare = replace(bare, reading=replace(bare.reading, spans=tokens.spans), turns=tokens.turns)
    fields: dict[str, Any] = {name: bare.take(value_nt[real]) for name, value_nt in rows.tokens.items()}
    batch = replace(bare.batch, mask_nt=bare.take(tokens.sampled_nt), **fields, **(more or {}))
    result = step.finish(replace(bare, batch=batch), dtype=dtype)
    result.advantages_nt.masked_fill_(~bare.take(read_mask_nt), 0.0)
    adv_nt = to_all_rows(bare.put(result.advantages_nt), real, mask_nt)
    if not scheme.value_names:
        return Credited(adv_nt, None, result)
    return_su, error_metrics = returns(bare.reading, batch, scheme, lam=value_lam)
    return_nt = to_all_rows(bare.put(return_su), real, mask_nt)
    return Credited(adv_nt, return_nt, replace(result, metrics={**result.metrics, **error_metrics}))


@dataclass(frozen=True)
class Shares:
    """The credit of a batch whose method needs no tokens, from which the advantages of any of its rows follow."""

    rows: Rows
    carried: Carried
    batch: BatchCredit

    @staticmethod
    def of(rows: Rows, uids: Sequence[Any], step: Step) -> Shares:
        """Compute the credit of the rows of a batch."""
        carried, read_batch = read_rows(rows, uids, step)
        return Shares(rows, carried, step.credit(read_batch))

    @cached_property
    def _number_by_row(self) -> dict[int, int]:
        """The number of each row among those that are not padding."""
        return {n: number for number, n in enumerate(self.rows.real)}

    def split(self, tokens: int) -> list[range]:
        """Deal the rows into shares of about so many tokens; neighbouring rows, and so padding, go to different shares."""
        count = len(self.rows.packed)
        shares = min(count, -(-count * max(self.carried.length_n, default=0) // tokens)) or 1
        return [range(first, count, shares) for first in range(shares)]

    def advantages(self, share: range, mask_nt: Shaped[Tensor, "n t"], scheme: Scheme) -> Float[Tensor, "n t"]:
        """Return the advantages of a share of the rows, 0 at masked tokens and at padding."""
        real = [i for i, n in enumerate(share) if n in self._number_by_row]
        numbers = [self._number_by_row[share[i]] for i in real]
        tokens = self.carried.tokens(scheme, mask_nt.shape[1], numbers)
        self.carried.check(real_rows(mask_nt.bool(), real), tokens.sampled_nt, numbers)
        adv_nt = advantages(self.batch.credits.take(tokens.place_s), tokens.spans, scheme)
        return to_all_rows(adv_nt if tokens.turns is None else tokens.turns.put(adv_nt, rows=len(real)), real, mask_nt)


def real_rows(value_nt: Shaped[Tensor, "m t"], real: Sequence[int]) -> Shaped[Tensor, "n t"]:
    """Take the rows that are not padding; the table itself if all are."""
    return value_nt if len(real) == len(value_nt) else value_nt[list(real)]


def to_all_rows(value_nt: Float[Tensor, "n t"], real: Sequence[int], mask_nt: Shaped[Tensor, "m t"]) -> Float[Tensor, "m t"]:
    """Put numbers of the rows that are not padding into a table of all rows; 0 at tokens that verl does not train."""
    if len(real) < len(mask_nt):
        value_nt = value_nt.new_zeros(mask_nt.shape).index_copy_(0, torch.tensor(real, dtype=torch.int64), value_nt)
    return value_nt.masked_fill_(~mask_nt.bool(), 0.0)


def loss_factor(
    mask_nt: Shaped[Tensor, "n t"],
    *,
    mode: str,
    rollouts: int,
    mini_batch: int,
    tokens: int,
    rows: int | None = None,
    horizon: int | float | None = None,
) -> Float[Tensor, "n 1"]:
    """Compute the factor on advantages that turns verl's loss into the mean over rollouts of the sum over tokens."""
    length_n1, row_count = mask_nt.sum(dim=1, keepdim=True).float(), rows or len(mask_nt)
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
