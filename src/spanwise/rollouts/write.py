"""The one writer of rollout files: completions with what is said of them, as a table, streamed by parts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from spanwise.credit import Parts
from spanwise.disk import whole_file
from spanwise.errors import AlignmentError
from spanwise.rollouts import schema
from spanwise.rollouts.messages import clean
from spanwise.rollouts.table import Ragged
from spanwise.types import Scores, Status


@dataclass(frozen=True)
class Credited:
    """What one method credits completions with; NaN is written as null.

    Attributes:
        by_block: block -> credit of each completion, NaN where it does not have the block.
        stop_n: credit of the decision to stop.
        advantages: of each token, flat; NaN at the tokens of completions that were left out of the loss.
        parts: what the credit is made of, objective by objective; None where nobody knows.

    Example:
        >>> import torch
        >>> found = Credited({"all": torch.tensor([0.5])}, torch.zeros(1), np.array([0.25, 0.25], np.float32))
        >>> sorted(found.by_block), found.advantages.sum().item()
        (['all'], 0.5)
    """

    by_block: Mapping[str, Float[Tensor, " n"]]
    stop_n: Float[Tensor, " n"]
    advantages: Float[np.ndarray, " v"]
    parts: Parts | None = None


@dataclass(frozen=True)
class Completions:
    """Completions as a rollout file holds them; what they are in words stands in `rollouts.schema`.

    Attributes:
        step_n, group_n: when they were generated, and which are compared.
        prompts: N texts.
        tokens: N rows of ids.
        trainable: of each token, flat.
        names: the K blocks.
        start_nk, end_nk: their spans; empty where the block is absent or the completion was left out of the loss.
        fault_n: `Fault` bits.
        scores: rewards and statuses; rewards by outcome are not written.
        credit: method -> what it credits.
        text: N texts; None where the tokens say it.
        token_values: "value" (one of several: "value/<stream>"), "logp" of each token, flat; NaN where it is not known.
        rollout_n: see `RolloutTable`.
        block: the block of each token, flat, -1 for none; None where each block is one piece, so that its span says it.
        self_reward_n: the self-rewarding score of each completion, NaN where it did not end; None: there is none.
        answers: the gold answer of each, None where there is none; None: nobody knows any.

    Raises:
        AlignmentError: something flat that does not have one entry per token.

    Example:
        One completion of two tokens, the second from a tool.

        >>> import torch
        >>> nothing_11 = torch.zeros(1, 1)
        >>> one = Completions(
        ...     step_n=torch.tensor([1]), group_n=torch.tensor([0]), prompts=["2 + 2?"], tokens=Ragged.of([[5, 9]]),
        ...     trainable=np.array([True, False]), names=("all",), start_nk=nothing_11.long(), end_nk=nothing_11.long() + 1,
        ...     scores=Scores(("correct",), nothing_11 + 1, nothing_11.long(), torch.zeros(1, 1, 2)),
        ...     fault_n=torch.tensor([0]), credit={},
        ... )
        >>> rollout_table(one, None).column("trainable").to_pylist()
        [[True, False]]
    """

    step_n: Int[Tensor, " n"]
    group_n: Int[Tensor, " n"]
    prompts: Sequence[str]
    tokens: Ragged
    trainable: Bool[np.ndarray, " v"]
    names: tuple[str, ...]
    start_nk: Int[Tensor, "n k"]
    end_nk: Int[Tensor, "n k"]
    fault_n: Int[Tensor, " n"]
    scores: Scores
    credit: Mapping[str, Credited]
    text: Sequence[str] | None = None
    token_values: Mapping[str, Shaped[np.ndarray, " v"]] = field(default_factory=dict)
    rollout_n: Int[Tensor, " n"] | None = None
    block: Int[np.ndarray, " v"] | None = None
    self_reward_n: Float[Tensor, " n"] | None = None
    answers: Sequence[Any] | None = None

    def __post_init__(self) -> None:
        flat = {"trainable flags": self.trainable, **self.token_values}
        flat |= {f"advantages of '{method}'": one.advantages for method, one in self.credit.items()}
        flat |= {} if self.block is None else {"block numbers": self.block}
        for name, values in flat.items():
            if len(values) != len(self.tokens.values):
                raise AlignmentError(
                    f"There are {len(self.tokens.values)} tokens and {len(values)} {name}; give one for each."
                )


def write_rollouts(
    file: Path, parts: Iterable[Completions], *, pieces: Sequence[bytes] | None = None, tokenizer: Path | None = None
) -> None:
    """Write a rollout file, part by part; nobody ever sees half of it.

    Args:
        file: its folder is made if it does not exist.
        parts: completions, in order; all of the same blocks, objectives and methods.
        pieces: the bytes of every id, where the ids are no tokenizer's own; they are written instead of ids.
        tokenizer: the folder that the ids are of, where a reader could not know it.

    Raises:
        DataError: the file cannot be written.

    Example:
        Two answers to one prompt, and what GRPO without a scale credits them with; then they are read again.

        >>> import tempfile, torch
        >>> from spanwise.rollouts import read_rollouts
        >>> nothing_21, credit_n = torch.zeros(2, 1), torch.tensor([0.5, -0.5])
        >>> part = Completions(
        ...     step_n=torch.tensor([1, 1]), group_n=torch.tensor([0, 0]), prompts=["2 + 2?"] * 2, tokens=Ragged.of([[0], [1]]),
        ...     trainable=np.array([True, True]), names=("all",), start_nk=nothing_21.long(), end_nk=nothing_21.long() + 1,
        ...     fault_n=torch.tensor([0, 0]), credit={"grpo": Credited({"all": credit_n}, torch.zeros(2), credit_n.numpy())},
        ...     scores=Scores(("correct",), torch.tensor([[1.0], [0.0]]), nothing_21.long(), torch.zeros(2, 1, 2)),
        ... )
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_rollouts(Path(folder) / "step_1.parquet", [part], pieces=[b"4", b"5"])
        ...     table = read_rollouts(Path(folder) / "step_1.parquet")
        >>> table.prompts[0], table.rewards["correct"].value_n.tolist()
        ('2 + 2?', [1.0, 0.0])
    """
    texts = None if pieces is None else piece_texts(pieces)
    writer: pq.ParquetWriter | None = None
    with whole_file(file) as beside:
        try:
            for part in parts:
                table = rollout_table(part, texts).replace_schema_metadata(schema.metadata(tokenizer))
                # Nobody looks for a completion by the bounds of a column; working them out takes a tenth of the time.
                writer = writer or pq.ParquetWriter(beside, table.schema, compression="zstd", write_statistics=False)
                writer.write_table(table)
        finally:
            if writer is not None:
                _close(writer)


def _close(writer: pq.ParquetWriter) -> None:
    """Close a writer, once: on a full disk that fails, and would again when the writer goes."""
    try:
        writer.close()
    finally:
        writer.is_open = False


def piece_texts(pieces: Sequence[bytes]) -> pa.Array:
    """What each id says as text; as bytes where a tokenizer cuts characters."""
    try:
        return pa.array([piece.decode() for piece in pieces], pa.string())
    except UnicodeDecodeError:
        return pa.array(pieces, pa.binary())


def rollout_table(part: Completions, pieces: pa.Array | None = None) -> pa.Table:
    """The columns of `rollouts.schema` for some completions.

    Args:
        part: the completions.
        pieces: what each id says, to be written instead of ids.
    """
    ids = pa.array(part.tokens.values, pa.int32())
    columns = {
        schema.STEP: _array(schema.STEP, part.step_n.numpy()),
        schema.GROUP: _array(schema.GROUP, part.group_n.numpy()),
        **({} if part.rollout_n is None else {schema.ROLLOUT: _array(schema.ROLLOUT, part.rollout_n.numpy())}),
        schema.PROMPT: _array(schema.PROMPT, [clean(prompt) for prompt in part.prompts]),
        **_answers(part.answers),
        **({} if part.text is None else {schema.TEXT: _array(schema.TEXT, part.text)}),
        schema.FAULT: _array(schema.FAULT, part.fault_n.numpy()),
        **_blocks(part),
        **(
            {}
            if part.self_reward_n is None
            else {schema.SELF_REWARD: _array(schema.SELF_REWARD, part.self_reward_n.numpy())}
        ),
        **_rewards(part.scores),
        **_lists(
            part.tokens, {schema.IDS: ids} if pieces is None else {schema.TOKENS: _spelled(pieces, part.tokens.values)}
        ),
        **_lists(part.tokens, {schema.TRAINABLE: pa.array(part.trainable)}),
        **({} if part.block is None else _lists(part.tokens, {schema.BLOCK: pa.array(part.block.astype(np.int16))})),
        **_lists(part.tokens, {schema.token_column(name): _floats(values) for name, values in part.token_values.items()}),
    }
    for method, one in part.credit.items():
        for block, credit_n in {**one.by_block, schema.STOP: one.stop_n}.items():
            name = schema.credit(method, block)
            columns[name] = _array(name, credit_n.numpy())
        columns |= {} if one.parts is None else {schema.parts(method): _parts(one.parts)}
        columns |= _lists(part.tokens, {schema.advantages(method): _floats(one.advantages)})
    return pa.table(columns)


def _answers(answers: Sequence[Any] | None) -> dict[str, pa.Array]:
    """Gold answers as text, JSON where they are none; nothing where nobody knows any."""
    if answers is None:
        return {}
    said = [one if one is None or isinstance(one, str) else json.dumps(one, default=str) for one in answers]
    return {schema.ANSWER: pa.array([None if one is None else clean(one) for one in said], pa.string())}


def _parts(apart: Parts) -> pa.Array:
    """A list per completion with a struct per objective."""
    n, m = apart.part_nm.shape
    columns = {
        "objective": pa.array(list(apart.names) * n, pa.string()),
        "weight": pa.array(np.tile(apart.weight_m.double().numpy(), n)),
        "stratum": pa.array(apart.stratum_nm.long().flatten().numpy()),
        **{
            name: pa.array(table_nm.double().flatten().numpy(), from_pandas=True)
            for name, table_nm in (
                ("worth", apart.worth_nm), ("baseline", apart.baseline_nm), ("divisor", apart.divisor_nm), ("part", apart.part_nm),
            )
        },
    }  # fmt: skip
    flat = pa.StructArray.from_arrays([columns[field.name] for field in schema.PART], fields=list(schema.PART))
    return pa.ListArray.from_arrays(pa.array(np.arange(n + 1, dtype=np.int32) * m), flat)


def _spelled(pieces: pa.Array, ids: np.ndarray) -> pa.Array:
    """The piece of each id; nothing for what is none, as may stand at a masked token."""
    known = np.where((ids >= 0) & (ids < len(pieces)), ids, len(pieces))
    return pa.concat_arrays([pieces, pa.array([""], pieces.type)]).take(pa.array(known))


def _blocks(part: Completions) -> dict[str, pa.Array]:
    columns = {}
    for k, block in enumerate(part.names):
        for name, edge_nk in ((schema.start(block), part.start_nk), (schema.end(block), part.end_nk)):
            columns[name] = _array(name, edge_nk[:, k].numpy())
    return columns


def _rewards(scores: Scores) -> dict[str, pa.Array]:
    columns = {}
    for m, objective in enumerate(scores.names):
        reward, status = schema.reward(objective), schema.status(objective)
        columns[reward] = _array(reward, scores.reward_nm[:, m].numpy())
        columns[status] = _array(status, [Status(value).name.lower() for value in scores.status_nm[:, m].tolist()])
        if scores.stated_nm is not None:
            columns[schema.stated(objective)] = _array(schema.stated(objective), scores.stated_nm[:, m].double().numpy())
    return columns


def _array(name: str, values: Sequence[str] | np.ndarray) -> pa.Array:
    return pa.array(values, schema.type_of(name), from_pandas=True)  # NaN becomes null


def _floats(values: np.ndarray) -> pa.Array:
    return pa.array(values.astype(np.float32, copy=False), from_pandas=True)


def _lists(tokens: Ragged, flat: Mapping[str, pa.Array]) -> dict[str, pa.Array]:
    """Flat columns as a list per completion."""
    offsets = pa.array(tokens.offsets.astype(np.int32))
    return {name: pa.ListArray.from_arrays(offsets, values) for name, values in flat.items()}
