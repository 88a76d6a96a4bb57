"""What the reward workers read, as text that verl carries to the trainer, and the advantages that come of it. No verl here."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from spanwise.batch import Batch, Steps
from spanwise.credit import Turns, group_index, split_turns
from spanwise.credit.trajectories.turns import runs
from spanwise.errors import AlignmentError, RecipeError
from spanwise.modes.critic.elsewhere import returns
from spanwise.pipeline import Reading
from spanwise.scheme import Scheme
from spanwise.step import ReadBatch, Step, StepResult, steps_of_turns
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
        tokens: fields of `Batch` with one number per token (`value_nt`, `logp_nt`, `ids_nt`); whatever where the mask is 0.
        places: mode -> the column of what it appended to each row, -1 where that is nothing.
    """

    packed: Sequence[Any]
    session: Sequence[Any] | None = None
    step: Sequence[int] | None = None
    padding: Sequence[bool] = field(default=())
    tokens: Mapping[str, Shaped[Tensor, "n t"]] = field(default_factory=dict)
    places: Mapping[str, Sequence[int]] = field(default_factory=dict)

    @cached_property
    def real(self) -> list[int]:
        """The rows that are no padding."""
        return [n for n in range(len(self.packed)) if not (self.padding and self.padding[n])]


def pack(reading: Reading, length_n: Sequence[int], *, masked: bool, turns: Turns | None = None, anchor: Any = None) -> str:
    """A reading of the outputs of one rollout as text: verl's V0 trainer carries nothing else of uneven size."""
    assert reading.spans is not None, "what was read here has spans"
    block_nt = reading.spans.block_nt
    rollout: dict[str, Any] = {"masked": masked, "runs": []}
    if turns is not None:
        block_nt = turns.put(block_nt + 1, rows=len(length_n)) - 1
        rollout["turns"] = turns.row_s.bincount(minlength=len(length_n)).tolist()
    if anchor is not None:
        rollout["anchor"] = list(anchor)
    for block_t, length in zip(block_nt, length_n, strict=True):
        block_r, count_r = block_t[:length].unique_consecutive(return_counts=True)
        rollout["runs"].append([*zip(block_r.tolist(), count_r.tolist(), strict=True)])
    rollout["table"] = base64.b64encode(reading.pack().numpy().tobytes()).decode()
    return json.dumps(rollout, separators=(",", ":"), default=str)


@dataclass(frozen=True)
class Carried:
    """What the rows of a batch carry.

    Attributes:
        reading: of the rows, or of their turns where any row was read turn by turn.
        sampled_nt: the tokens that the model sampled.
        masked_n: whether the reader of each row knew which these are.
        turns: where the turns lie.
        anchor: the state that each row of the reading starts from; None: nobody said any.
    """

    reading: Reading
    sampled_nt: Bool[Tensor, "n t"]
    masked_n: Bool[Tensor, " n"]
    turns: Turns | None
    anchor: list[Any] | None


def unpack(rows: Rows, scheme: Scheme, width: int) -> Carried:
    """What all rows carry, right-padded to a width."""
    seen: dict[str, dict[str, Any]] = {}
    block_nt = torch.full((len(rows.packed), width), -1, dtype=torch.int8 if len(scheme.layout.names) < 128 else torch.int16)
    tables, masked, anchor, split = [], [], [], []
    for n, text in enumerate(rows.packed):
        if not isinstance(text, str):
            raise RecipeError(
                f"Row {n} carries no reading, so its rewards did not come from spanwise's reward manager: the agent loop scored it "
                f"itself. Let it leave reward_score empty, and give what it knows in extra_fields, which rewards read as columns."
            )
        if text not in seen:
            seen[text] = _loaded(text)
        rollout, step = seen[text], 0 if rows.step is None else rows.step[n]
        here = slice(rollout["first"][step], rollout["first"][step + 1])
        tables.append(rollout["table"][here])
        anchor += rollout["anchor"][here] if "anchor" in rollout else [None] * (here.stop - here.start)
        split.append("turns" in rollout)
        masked.append(bool(rollout["masked"]))
        block_r, count_r = torch.tensor(rollout["runs"][step], dtype=torch.long).reshape(-1, 2).unbind(dim=1)
        length = int(count_r.sum())
        if length > width:
            raise AlignmentError(f"Row {n} was read with {length} tokens and the trainer has room for {width}.")
        block_nt[n, :length] = block_r.repeat_interleave(count_r).to(block_nt.dtype)
    sampled_nt = block_nt >= 0
    turns = None
    # Runs of sampled tokens, or the whole of a row that was read as one; which is no turn if it holds no token.
    if any(split):
        split_n1 = torch.tensor(split)[:, None]
        turns = split_turns(sampled_nt, torch.where(sampled_nt, runs(sampled_nt) * split_n1, -1))
        tables = [part for part, one, some in zip(tables, split, sampled_nt.any(dim=1).tolist(), strict=True) if one or some]
        block_nt = turns.take(block_nt, fill=-1)
    reading = Reading.unpack(torch.cat(tables), scheme)
    spans = Spans.of_blocks(scheme.layout.names, block_nt, reading.fault_n)
    known = any(state is not None for state in anchor)
    return Carried(replace(reading, spans=spans), sampled_nt, torch.tensor(masked), turns, anchor if known else None)


def _loaded(text: str) -> dict[str, Any]:
    """What one rollout carries, with the first row of its table that each output has."""
    rollout = json.loads(text)
    rollout["first"] = [0, *accumulate(rollout.get("turns") or [1] * len(rollout["runs"]))]
    table = np.frombuffer(base64.b64decode(rollout["table"])).reshape(max(rollout["first"][-1], 1), -1)
    rollout["table"] = torch.from_numpy(table.copy())
    if "anchor" in rollout:
        rollout["anchor"] = [tuple(state) if isinstance(state, list) else state for state in rollout["anchor"]]
    return rollout


class Credited(NamedTuple):
    """What the rows of a batch are trained with, what a critic is fitted to (None: there is none), and their story.

    What was read and compared (`result`) are the rows without padding, or their turns; `metrics` are those and the critic's.
    """

    adv_nt: Float[Tensor, "n t"]
    return_nt: Float[Tensor, "n t"] | None
    metrics: dict[str, float]
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
    """Advantages of the rows of a batch and the targets of its critic, 0 at masked tokens and at padding.

    verl's mask may hold fewer tokens than were sampled (rejection); `more` are fields of `Batch` that modes add, by row.
    """
    mask_nt, scheme, real = mask_nt.bool(), step.scheme, rows.real
    own_mask_nt = mask_nt[real]
    session, output = ([values[n] for n in real] if values else None for values in (rows.session, rows.step))
    carried = unpack(Rows([rows.packed[n] for n in real], step=output), scheme, mask_nt.shape[1])
    _check_tokens(own_mask_nt, carried.sampled_nt, carried.masked_n)
    steps = _steps(session, output, carried, scheme)
    for mode in scheme.modes if steps is not None else ():
        mode.check_turns()
    group_n = group_index([uids[n] for n in real])
    bare = ReadBatch(Batch(group_n), carried.reading, len(real), carried.turns)
    tokens: dict[str, Any] = {name: bare.take(value_nt[real]) for name, value_nt in rows.tokens.items()}
    tokens |= {name: value_n[real] for name, value_n in (more or {}).items()}
    group_s = group_n if carried.turns is None else group_n[carried.turns.row_s]
    own = replace(bare, batch=Batch(group_s, mask_nt=bare.spans.block_nt >= 0, steps=steps, **tokens))
    result = step.finish(own, dtype=dtype)
    result = replace(result, advantages_nt=result.advantages_nt.masked_fill(~own.take(own_mask_nt), 0.0))

    def placed(value_su: Tensor) -> Tensor:
        """Of the tokens that were read, among all rows of the batch; 0 where verl trains nothing."""
        value_nt = own.put(value_su)
        return value_nt.new_zeros(mask_nt.shape).index_copy(0, torch.tensor(real), value_nt).masked_fill_(~mask_nt, 0.0)

    adv_nt = placed(result.advantages_nt)
    if not scheme.value_names:
        return Credited(adv_nt, None, result.metrics, result)
    return_su, error = returns(own.reading, own.batch, scheme, lam=value_lam)
    return Credited(adv_nt, placed(return_su), {**result.metrics, **error}, result)


def _steps(session: Sequence[Any] | None, output: Sequence[int] | None, carried: Carried, scheme: Scheme) -> Steps | None:
    """Where what was read stands in its rollouts, if any rollout has several turns or the scheme asks."""
    session_n = torch.arange(len(carried.masked_n)) if session is None else group_index(session)
    output_n = torch.zeros_like(session_n) if output is None else group_index(torch.tensor(output))
    if carried.turns is not None:
        return steps_of_turns(Steps(session_n, output_n), carried.turns, carried.anchor)
    several = len(session_n.unique()) < len(session_n)
    return Steps(session_n, output_n, carried.anchor) if several or "steps" in scheme.needs else None


def _check_tokens(mask_nt: Tensor, sampled_nt: Tensor, masked_n: Tensor) -> None:
    extra_nt = mask_nt & ~sampled_nt
    unknown_nt = (mask_nt != sampled_nt) & ~masked_n[:, None]
    for n in (extra_nt | unknown_nt).any(dim=1).nonzero().flatten().tolist():
        raise AlignmentError(
            f"Row {n}: verl trains {int(mask_nt[n].sum())} tokens and the reward worker took {int(sampled_nt[n].sum())} for the "
            f"model's own. Tool output must not be scored as the model's: let agent loops set AgentLoopOutput.response_mask, and "
            f"leave AgentLoopWorker._compute_score to verl."
        )
