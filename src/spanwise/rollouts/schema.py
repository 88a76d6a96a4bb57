"""Define the columns of a rollout file. Their names are written in this module only.

A run's `rollouts/step_*.parquet` and the `credit.parquet` of `spanwise credit` are one format: a row per completion, and credit
under the name of the method that made it. A run has one method, an export has those that were asked for, and under the name
`recorded` what the trainer that wrote the rollouts says of them.

| column | type | what it holds |
|---|---|---|
| `step` | int64 | the training step that the completion was generated in |
| `group` | int64 | completions of one step with the same number are compared with each other |
| `rollout` | int64 | those of one group (without `group`: step) with the same number are parts of one rollout, which has one vote |
| `prompt` | string | its text; a conversation as JSON |
| `completion_ids` | list<int32> | the ids that were sampled, and those of tools in between |
| `tokens` | list<string> | instead of ids, where none are known: the texts; list<binary> where they cut characters |
| `trainable` | list<bool> | for each token, whether the model sampled it |
| `text` | string | what the completion says; left out of an export |
| `fault` | int64 | what is wrong with the tags, as bits of `Fault` |
| `start/<block>` | int64 | the block's first token |
| `end/<block>` | int64 | the token after its last; no block has any token where the completion was left out of the loss |
| `block` | list<int16> | the block of each token, by its place among the blocks, -1 for none; where blocks lie in several pieces |
| `reward/<objective>` | double | null where there is none |
| `status/<objective>` | string | why the reward has its value or has none: `Status` in lower case |
| `note/<objective>` | string | why a judge gave the reward, or why a check failed; null where nothing is said |
| `stated/<objective>` | double | the number that its text states and the reward read, as a confidence; null where there is none |
| `values` | list<float> | what a critic expected before each token; null where it is not known |
| `values/<stream>` | list<float> | the same of a critic with several values, by their names (`Scheme.value_names`) |
| `value_after` | double | the value after the last token, as the method took it: 0 where it ended; null where not known |
| `value_after/<stream>` | double | the same of a critic with several values |
| `logprobs` | list<float> | log-probability of each token under the policy that sampled it; null where it is not known |
| `self_reward` | double | the score r_s of the completion's reserved token (`Laser`); null where it did not end |
| `credit/<method>/<block>` | double | null where the completion does not have the block |
| `credit/<method>/stop` | double | credit of the decision to stop, which the last trainable token carries |
| `parts/<method>` | list<struct> | what the credit is made of, an entry per objective, or one for the sum of all, see `PART` |
| `advantages/<method>` | list<float> | what each token trains with; null where the completion was left out of the loss |

Required are `prompt`, `trainable` and one of `completion_ids` and `tokens`. Any other column is handed to rewards; a gold answer
is called `answer`, and is JSON where it is no text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from spanwise.batch import Batch
from spanwise.disk import whole_file
from spanwise.errors import AlignmentError, DataError, SpanwiseError
from spanwise.pipeline import Reading
from spanwise.rollouts.cells import clean, object_text
from spanwise.types import Credit, Scores, Spans, Status, Zero, whole_text

STEP, GROUP, ROLLOUT, PROMPT, ANSWER, TEXT = "step", "group", "rollout", "prompt", "answer", "text"
IDS, TOKENS, TRAINABLE, FAULT, BLOCK, STOP = "completion_ids", "tokens", "trainable", "fault", "block", "stop"
VALUES, AFTER, LOGP, SCORE = "values", "value_after", "logprobs", "self_reward"

#: The method name for advantages that a trainer recorded.
RECORDED = "recorded"

VERSION = "1"  # the version of the rollout format
_VERSION_KEY, _TOKENIZER_KEY = b"spanwise.rollouts", b"spanwise.tokenizer"


@dataclass(frozen=True)
class CreditPart:
    """The credit that one objective gives a completion. It is `weight * (worth - baseline) / divisor`."""

    objective: str  # The objective; names of summed objectives are joined by " + ".
    worth: float | None  # The reward, or the number that replaces a missing reward.
    baseline: float | None  # The number that is subtracted from `worth`; None if there is none.
    divisor: float | None  # The divisor of `worth - baseline`; None without a baseline.
    weight: float
    part: float  # The credit that the objective gives the completion.
    stratum: int = -1  # The number of the set of rewards that this one was compared in; -1: none.
    members: int = 0  # The number of rewards in the stratum, the set of compared rewards.
    averaged: int = 0  # How many rewards the baseline averages; 0 if unknown.
    reason: str = ""  # Why the credit is exactly 0; "" if unknown or not 0.


_ARROW_TYPES = {"str": pa.string(), "int": pa.int64(), "float": pa.float64(), "float | None": pa.float64()}
#: The Arrow type of a `CreditPart` in the column `parts/<method>`.
PART = pa.struct([(part_field.name, _ARROW_TYPES[str(part_field.type)]) for part_field in fields(CreditPart)])
_NUMBERS = pa.list_(pa.float32())
#: The Arrow type of every column of a rollout file. Names that end in "/" are prefixes.
COLUMNS = {
    STEP: pa.int64(), GROUP: pa.int64(), ROLLOUT: pa.int64(), PROMPT: pa.string(), IDS: pa.list_(pa.int32()),
    TOKENS: pa.list_(pa.string()), TRAINABLE: pa.list_(pa.bool_()), TEXT: pa.string(), FAULT: pa.int64(),
    "start/": pa.int64(), "end/": pa.int64(), BLOCK: pa.list_(pa.int16()),
    "reward/": pa.float64(), "status/": pa.string(), "note/": pa.string(), "stated/": pa.float64(),
    VALUES: _NUMBERS, f"{VALUES}/": _NUMBERS, AFTER: pa.float64(), f"{AFTER}/": pa.float64(), LOGP: _NUMBERS,
    SCORE: pa.float64(),
    "credit/": pa.float64(), "parts/": pa.list_(PART), "advantages/": _NUMBERS,
}  # fmt: skip


def column(family: str, *names: str) -> str:
    """Build a column name such as `reward/correct`."""
    assert f"{family}/" in COLUMNS, f"no column is called {family}/..."
    if family in ("credit", "advantages", "parts") and "/" in names[0]:
        raise SpanwiseError(
            f"Method '{names[0]}' has a '/' in its name, but rollout files split column names at '/'. Rename the method."
        )
    return "/".join((family, *names))


def family_names(names: Iterable[str], *family: str) -> list[str]:
    """Select the names that begin with a prefix such as `reward/`. Return them without the prefix."""
    family_prefix = f"{column(*family)}/"
    return [name.removeprefix(family_prefix) for name in names if name.startswith(family_prefix)]


def value_columns(streams: Sequence[str], family: str = VALUES) -> list[str]:
    """Return the names of the columns with a critic's values."""
    return [family] if len(streams) < 2 else [column(family, stream) for stream in streams]


def token_columns(names: Iterable[str]) -> list[str]:
    """Select the columns with one number per token. Log-probabilities come last."""
    column_names = [name for name in names if name in (VALUES, LOGP) or name.startswith(f"{VALUES}/")]
    return sorted(column_names, key=lambda name: (name == LOGP, name != VALUES))


def methods_in(names: Iterable[str]) -> list[str]:
    """Return the methods whose credit or advantages a file holds."""
    name_parts = (name.split("/") for name in names)
    return list(dict.fromkeys(parts[1] for parts in name_parts if parts[0] in ("credit", "advantages") and len(parts) > 1))


def method_columns(method: str, names: Iterable[str]) -> list[str]:
    """Select the columns with the credit and the advantages of a method."""
    token_and_part_columns = (column("advantages", method), column("parts", method))
    return [name for name in names if name in token_and_part_columns or name.startswith(column("credit", method, ""))]


def type_of(name: str) -> pa.DataType | None:
    """Return the Arrow type of a column; None if the rollout format has no such column."""
    family, separator, _ = name.partition("/")
    return COLUMNS.get(family + separator)


def metadata(tokenizer: Path | None = None) -> dict[bytes, bytes]:
    """Return a rollout file's metadata: the version of the format, and the folder of the tokenizer."""
    file_metadata = {_VERSION_KEY: VERSION.encode()}
    return file_metadata if tokenizer is None else {**file_metadata, _TOKENIZER_KEY: str(tokenizer.resolve()).encode()}


def tokenizer_of(schema: pa.Schema) -> Path | None:
    """Return the tokenizer folder that a file names, if the folder still exists."""
    folder_bytes = (schema.metadata or {}).get(_TOKENIZER_KEY)
    return Path(folder_bytes.decode()) if folder_bytes and Path(folder_bytes.decode()).exists() else None


def check_version(file: Path, schema: pa.Schema) -> None:
    """Refuse a rollout file of another version, or with a column `advantages` instead of `advantages/<method>`."""
    file_version = (schema.metadata or {}).get(_VERSION_KEY)
    if file_version not in (None, VERSION.encode()):
        raise DataError(
            f"'{file}' has version {file_version.decode(errors='replace')} of the rollout format, but this spanwise reads version "
            f"{VERSION}. Write the file again, or read it with the spanwise that wrote it."
        )
    if "advantages" in schema.names:
        raise DataError(
            f"'{file}' has a column 'advantages' without the name of a method. Rename the column to 'advantages/<method>'."
        )


def rollout_table(columns: Mapping[str, Any], offsets: Int[np.ndarray, " o"] | Sequence[int]) -> pa.Table:
    """Build a table of completions with the columns and types of `rollouts.schema`.

    Args:
        columns: name -> a value for each completion, or one for each token, end to end, if the column holds lists of them; NaN
            becomes null, and a prompt or an answer that is no text JSON. A column that is None is left out.
        offsets: where the tokens of each completion start, and where those of the last one end.

    Raises:
        AlignmentError: a column of tokens that does not have one entry for each of them.

    Example:
        One completion of two tokens, the second from a tool.

        >>> rollout_table({"prompt": ["2 + 2?"], "completion_ids": [5, 9], "trainable": [True, False]}, [0, 2]).to_pylist()
        [{'prompt': '2 + 2?', 'completion_ids': [5, 9], 'trainable': [True, False]}]
    """
    list_offsets = pa.array(offsets, pa.int32())
    arrays_by_column: dict[str, pa.Array] = {}
    for name, values in columns.items():
        column_type = type_of(name)
        if values is None or isinstance(values, pa.Array):
            column_array = values
        elif name in (PROMPT, ANSWER):
            cell_texts = (cell if isinstance(cell, str | None) else json.dumps(cell, default=object_text) for cell in values)
            column_array = pa.array([text if text is None else clean(text) for text in cell_texts], pa.string())
        else:
            list_type = column_type if column_type is not None and pa.types.is_list(column_type) else None
            values = values.numpy() if isinstance(values, Tensor) else values
            value_type = column_type if list_type is None else list_type.value_type
            column_array = pa.array(values, value_type, from_pandas=True)  # NaN becomes null
            if list_type is not None and len(values) != list_offsets[-1].as_py():
                raise AlignmentError(
                    f"There are {list_offsets[-1]} tokens and {len(values)} entries of '{name}'; give one entry for each token."
                )
            column_array = column_array if list_type is None else pa.ListArray.from_arrays(list_offsets, column_array)
        if column_array is not None:
            arrays_by_column[name] = column_array
    return pa.table(arrays_by_column)


def span_columns(
    names: Sequence[str], start_nk: Int[Tensor, "n k"], end_nk: Int[Tensor, "n k"]
) -> dict[str, Int[Tensor, " n"]]:
    """Return the columns `start/<block>` and `end/<block>` for every block."""
    sides_and_edges = (("start", start_nk), ("end", end_nk))
    return {column(side_name, name): edge_nk[:, k] for k, name in enumerate(names) for side_name, edge_nk in sides_and_edges}


def score_columns(scores: Scores) -> dict[str, Any]:
    """Return the columns `reward`, `status`, `note` and `stated` of every objective."""
    columns: dict[str, Any] = {}
    for m, objective_name in enumerate(scores.names):
        columns[column("reward", objective_name)] = scores.reward_nm[:, m]
        columns[column("status", objective_name)] = [Status(code).name.lower() for code in scores.status_nm[:, m].tolist()]
        note_n = None if scores.note_nm is None else scores.note_nm[:, m]
        columns[column("note", objective_name)] = None if note_n is None or not any(note_n) else note_n.tolist()
        columns[column("stated", objective_name)] = None if scores.stated_nm is None else scores.stated_nm[:, m]
    return columns


def credit_columns(
    method: str, names: Sequence[str], present_nk: Bool[Tensor, "n k"], credit: Credit, advantages: Shaped[Any, " v"]
) -> dict[str, Any]:
    """Return the columns of one method's credit, with NaN for absent blocks."""
    credit_nk = credit.block_nk.masked_fill(~present_nk, torch.nan)
    return {
        **{column("credit", method, name): credit_nk[:, k] for k, name in enumerate(names)},
        column("credit", method, STOP): credit.stop_n,
        column("parts", method): _part_lists(credit) if credit.names else None,
        column("advantages", method): advantages,
    }


def _part_lists(credit: Credit) -> pa.Array:
    """Build the column `parts/<method>`: a list of `CreditPart`s per completion."""
    advantage_nm, reward_comparison = credit.explained
    assert credit.weight_m is not None, "it compares objectives"
    completion_count, objective_count = advantage_nm.shape
    values_of_field = {name.removesuffix("_nm"): x_nm.flatten().numpy() for name, x_nm in vars(reward_comparison).items()}
    reason_names = np.array([reason.name.lower() if reason else "" for reason in Zero])
    values_of_field |= {
        "objective": list(credit.names) * completion_count,
        "weight": np.tile(credit.weight_m.double().numpy(), completion_count),
        "part": (credit.weight_m * advantage_nm).flatten().numpy(),
        "reason": reason_names[values_of_field["reason"]],
    }
    field_arrays = [pa.array(values_of_field[entry.name], entry.type, from_pandas=True) for entry in PART]
    part_structs = pa.StructArray.from_arrays(field_arrays, fields=list(PART))
    list_offsets = pa.array(np.arange(completion_count + 1, dtype=np.int32) * objective_count)
    return pa.ListArray.from_arrays(list_offsets, part_structs)


def float_column(table: pa.Table, name: str) -> Float[Tensor, " n"]:
    """Return a column as float64, with NaN for null."""
    return torch.tensor(column_of(table, name).cast(pa.float64()).to_numpy(), dtype=torch.float64)


def column_of(table: pa.Table, name: str, file: str = "the rollouts") -> pa.ChunkedArray:
    """Return a column by its name. Raise a DataError if there is none."""
    if name not in table.column_names:
        raise DataError(f"There is no column '{name}' in {file}, only {', '.join(table.column_names) or 'none'}.")
    return table[name]


def flat_values(column: pa.ChunkedArray, dtype: Any) -> Shaped[np.ndarray, " v"]:
    """Concatenate the lists of an Arrow column into one array, with NaN for missing values."""
    flat_array = column.combine_chunks().flatten()
    if flat_array.null_count:
        flat_array = flat_array.cast(pa.float64())
    return flat_array.to_numpy(zero_copy_only=False).astype(dtype, copy=False)


def offsets(column: pa.ChunkedArray) -> Int[np.ndarray, " o"]:
    """Return where each list of a column starts in `flat_values`, and where the last one ends."""
    list_lengths = column.combine_chunks().value_lengths().fill_null(0)
    return np.concatenate(([0], np.cumsum(list_lengths.to_numpy(zero_copy_only=False), dtype=np.int64)))


def token_edges(table: pa.Table, names: Iterable[str], file: str) -> Int[np.ndarray, " o"]:
    """Return where each completion's tokens start in the flat columns. Refuse columns whose lists differ in length."""
    expected_edges = None
    for name in names:
        column_lists = column_of(table, name, file)
        if not (pa.types.is_list(column_lists.type) or pa.types.is_large_list(column_lists.type)):
            raise DataError(f"The column '{name}' of {file} must hold a list per completion, not {column_lists.type}.")
        if column_lists.null_count:
            raise DataError(f"{column_lists.null_count} of {len(column_lists)} completions of {file} have no '{name}'.")
        column_edges = offsets(column_lists)
        expected_edges = column_edges if expected_edges is None else expected_edges
        if (expected_edges != column_edges).any():
            token_counts, value_counts = np.diff(expected_edges), np.diff(column_edges)
            row_index = int((token_counts != value_counts).argmax())
            raise DataError(
                f"Completion {row_index} of {file} has {token_counts[row_index]} tokens and {value_counts[row_index]} values "
                f"of '{name}', but each token needs one value. Was the file changed after it was written?"
            )
    assert expected_edges is not None, "there is a column of tokens"
    return expected_edges


def write_rollouts(
    file: Path, parts: Iterable[pa.Table], *, pieces: Sequence[bytes] | None = None, tokenizer: Path | None = None
) -> None:
    """Write a rollout file from tables of completions, one after the other. The file appears only when it is complete.

    Args:
        file: its folder is made if it does not exist.
        parts: completions, in order, as `rollout_table` makes them; all with the same columns.
        pieces: the bytes of every id, where the ids are no tokenizer's own; they are written instead of ids.
        tokenizer: the folder that the ids are of, where a reader could not know it.

    Raises:
        DataError: the file cannot be written.

    Example:
        Two answers to one prompt, and what GRPO without a scale credits them with; then they are read again.

        >>> import tempfile
        >>> from spanwise.rollouts import read_rollouts, rollout_table
        >>> part = rollout_table({
        ...     "prompt": ["2 + 2?"] * 2, "completion_ids": [0, 1], "trainable": [True, True], "advantages/grpo": [0.5, -0.5],
        ...     "reward/correct": [1.0, 0.0], "status/correct": ["ok", "ok"],
        ... }, [0, 1, 2])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_rollouts(Path(folder) / "step_1.parquet", [part], pieces=[b"4", b"5"])
        ...     table = read_rollouts(Path(folder) / "step_1.parquet")
        >>> table.prompts[0], table.rewards["correct"].value_n.tolist()
        ('2 + 2?', [1.0, 0.0])
    """
    bytes_of_id = [*(pieces or ()), b""]
    empty_id = len(bytes_of_id) - 1  # masked tokens get the id of an empty text
    try:
        token_text_array = pa.array([piece.decode() for piece in bytes_of_id], pa.string())
    except UnicodeDecodeError:  # a token may hold only a part of a UTF-8 character
        token_text_array = pa.array(bytes_of_id, pa.binary())
    writer: pq.ParquetWriter | None = None
    with whole_file(file) as part_file:
        try:
            for part in parts:
                file_table = part.replace_schema_metadata(metadata(tokenizer))
                if pieces is not None:
                    id_lists = part[IDS].combine_chunks()
                    token_ids = id_lists.values.to_numpy()
                    is_valid_id = (token_ids >= 0) & (token_ids < empty_id)
                    token_texts = token_text_array.take(pa.array(np.where(is_valid_id, token_ids, empty_id)))
                    token_lists = pa.ListArray.from_arrays(id_lists.offsets, token_texts)
                    file_table = file_table.set_column(part.schema.get_field_index(IDS), TOKENS, token_lists)
                # Column statistics would take a tenth of the writing time, and no reader uses them.
                writer = writer or pq.ParquetWriter(part_file, file_table.schema, compression="zstd", write_statistics=False)
                writer.write_table(file_table)
        finally:
            if writer is not None:
                try:
                    writer.close()
                finally:  # on a full disk, closing again would fail, too
                    writer.is_open = False
    pa.default_memory_pool().release_unused()  # without `release_unused`, Arrow keeps freed memory


@dataclass(frozen=True)
class Rollouts:
    """The last generation batch of this process, with its rewards and credit.

    Attributes:
        mode: "train" or "eval".
        step: the optimiser step they were generated at.
        method: the name of what credited them.
        batch: the N completions as the trainer filled them in: groups and rollouts of turns, numbered over all processes, token
            ids, the mask of what the model sampled, the dataset's columns but the prompts, and what a critic, the policy or a mode
            said of them.
        reading: what each completion says, block by block, and its rewards and statuses.
        spans: where each block lies among the tokens that enter the loss.
        credit: credit per block of the N completions; its two counters cover all processes.
        advantages_nt: what every token is trained with, before the fold.
        prompts: N prompts, strings or message lists, as the dataset has them.
        completions: N completions as the trainer decoded them.
        value_names: of the values of the batch, if they are several (`Scheme.value_names`).
        more: what modes keep of each completion, by column (`Mode.columns`).
    """

    mode: str
    step: int
    method: str
    batch: Batch
    reading: Reading
    spans: Spans
    credit: Credit
    advantages_nt: Float[Tensor, "n t"]
    prompts: list[Any]
    completions: list[Any]
    value_names: tuple[str, ...] = ()
    more: Mapping[str, Tensor] = field(default_factory=dict)

    def recorded(self, *, step: int, rollout_n: Int[Tensor, " n"] | None = None) -> pa.Table:
        """Return the batch as a table for the rollout file. `answer` is the only column taken from the dataset.

        The table holds no padding.

        Args:
            step: of training, which a batch may serve several optimiser steps of.
            rollout_n: the rollout of each completion, where some are parts of one that has one vote; None: as in `batch.steps`.

        Raises:
            AlignmentError: values that do not fit their names.
        """
        batch, spans = self.batch, self.spans
        if rollout_n is None and batch.steps is not None:
            rollout_n = batch.steps.trajectory_s
        block_texts = self.reading.text or []
        assert batch.ids_nt is not None, "a trainer's batch must hold token ids, but this batch has none"
        assert batch.mask_nt is not None, "a trainer's batch always has a mask"
        mask_nt = batch.mask_nt.bool()
        is_kept_nt = mask_nt.flip(1).cumsum(1).flip(1) > 0  # the tokens up to the last sampled one
        is_in_loss_n1 = (spans.block_nt >= 0).any(dim=1, keepdim=True)
        present_flags = [[blocks[name] is not None for name in spans.names] for blocks in block_texts]
        is_present_nk = torch.tensor(present_flags, dtype=torch.bool).reshape(-1, len(spans.names))
        numbers_by_column = {} if batch.logp_nt is None else {LOGP: batch.logp_nt}
        if (value_nt := batch.value_nt) is not None:
            critic_values = value_nt.unbind(dim=2) if value_nt.ndim == 3 else (value_nt,)
            if len(critic_values) != max(1, len(self.value_names)):
                raise AlignmentError(
                    f"The critic has {len(critic_values)} values for each token, but {len(self.value_names)} names for the "
                    f"values ({', '.join(self.value_names) or 'none'}); give one name to each value."
                )
            numbers_by_column = dict(zip(value_columns(self.value_names), critic_values, strict=True)) | numbers_by_column
        token_tables = {
            name: x.detach().cpu().masked_fill(~mask_nt, torch.nan).float() for name, x in numbers_by_column.items()
        }
        token_tables |= {BLOCK: spans.block_nt} if spans.interleaved else {}
        advantages_nt = self.advantages_nt.masked_fill(~is_in_loss_n1, torch.nan)
        rollout_columns = {
            STEP: [step] * len(block_texts),
            GROUP: batch.group_n,
            ROLLOUT: rollout_n,
            PROMPT: self.prompts,
            ANSWER: batch.columns.get(ANSWER),
            TEXT: [whole_text(blocks) for blocks in block_texts],
            FAULT: spans.fault_n,
            **span_columns(spans.names, spans.start_nk, spans.end_nk),
            SCORE: batch.score_n,
            **self._after_columns(),
            **self.more,
            **score_columns(self.reading.scores),
            IDS: batch.ids_nt[is_kept_nt],
            TRAINABLE: mask_nt[is_kept_nt],
            **{name: token_nt[is_kept_nt] for name, token_nt in token_tables.items()},
            **credit_columns(self.method, spans.names, is_present_nk, self.credit, advantages_nt[is_kept_nt]),
        }
        return rollout_table(rollout_columns, np.cumsum([0, *is_kept_nt.sum(dim=1).tolist()]))

    def _after_columns(self) -> dict[str, Tensor]:
        """Return the columns with the critic's values after the last token."""
        if self.batch.bootstrap_n is None:
            return {}
        column_names = value_columns(self.value_names, AFTER)
        bootstrap_ns = self.batch.bootstrap_n.detach().cpu()
        bootstrap_ns = bootstrap_ns if bootstrap_ns.dim() > 1 else bootstrap_ns[:, None].expand(-1, len(column_names))
        return dict(zip(column_names, bootstrap_ns.unbind(dim=1), strict=True))
