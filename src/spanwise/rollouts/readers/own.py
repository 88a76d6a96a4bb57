"""spanwise's own files, of a training run or of `spanwise credit`: the columns of `rollouts.schema`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from spanwise.credit import group_index
from spanwise.errors import DataError
from spanwise.rollouts import schema
from spanwise.rollouts.parquet import flat, joined, offsets, steps_of
from spanwise.rollouts.recorded import numbers
from spanwise.rollouts.table import AsRecorded, Cut, Ragged, RolloutTable, finite
from spanwise.rollouts.text import cut_text, load_tokenizer
from spanwise.score import Reward
from spanwise.segment import Vocabulary
from spanwise.types import Status

AS_TEXT = "The file holds its tokens as text, without ids."


def read_own(path: Path, files: Sequence[Path], tokenizer: str | Path | None) -> RolloutTable:
    """Read spanwise's own parquet; the tokenizer is the one of the run's model, or the one that the file names.

    Credit is left where it is: it is what a method made of the rest. So are advantages, but for those of the only method, or of
    `recorded`: they are what the completions were trained with.
    """
    folder = run_folder(files[0])
    found = pq.read_schema(files[0])
    source = schema.IDS if schema.IDS in found.names else schema.TOKENS
    place = tokenizer or (_tokenizer(folder, found) if source == schema.IDS else None)
    if source == schema.TOKENS and tokenizer is not None:
        raise DataError(f"'{path}' holds its tokens as text, so there is nothing to read with --tokenizer; leave it out.")
    held = schema.token_columns(found.names)
    trained = _trained(found.names)
    wanted = [*(name for name in _given(found.names) if name != schema.TEXT or place is None), *trained]
    tables = [pq.read_table(file, columns=wanted) for file in files]
    for file, table in zip(files, tables, strict=True):
        _check(file, table, source, [schema.TRAINABLE, *held.values(), *trained])
    table = joined(path, tables, promote="default")
    trainable = flat(table[schema.TRAINABLE], np.bool_)
    same = True  # the tokens are the file's own, so what it says of each is of use
    if source == schema.TOKENS:
        cut = _texts(table[source], trainable)
    elif place is not None:
        cut = Cut(_ragged(table[source]), trainable, load_tokenizer(place)[1], "")
        _check_spelling(files[0], cut.vocabulary, place)
    elif schema.TEXT in table.column_names:
        note = "There is no tokenizer beside the file; credit is shown per word. Give its folder with --tokenizer."
        cut = cut_text([[(text or "", True)] for text in table[schema.TEXT].to_pylist()])._replace(note=note)
        same = False
    else:
        raise DataError(f"'{path}' holds token ids and no text; give the folder of the tokenizer with --tokenizer.")
    return RolloutTable.of(
        "spanwise",
        path,
        cut,
        prompts=table[schema.PROMPT].to_pylist(),
        steps=steps_of(path, table),
        keys=_whole(path, table, schema.GROUP),
        rewards=_rewards(path, table),
        tokenizer=None if place is None else Path(place),
        columns={
            name: table[name].to_pylist()
            for name in table.column_names
            if schema.type_of(name) is None and not pa.types.is_list(table[name].type)
        },
        token_values={key: flat(table[name], np.float32) for key, name in held.items()} if same else {},
        keyed=schema.GROUP in table.column_names,
        learned_n=_learned(table, cut) if same else None,
        folder=folder,
        as_recorded=AsRecorded(f"the file's '{name}'", flat(table[name], np.float64), shares=True)
        if same and (name := next(iter(trained), None))
        else None,
        rollout_n=None if (rollouts := _whole(path, table, schema.ROLLOUT)) is None else group_index(rollouts),
        self_reward_n=numbers(table, schema.SELF_REWARD) if schema.SELF_REWARD in table.column_names else None,
    )


def _trained(names: Sequence[str]) -> list[str]:
    """The column of what the completions were trained with, if there is one and no doubt."""
    methods = schema.methods_in(names)
    chosen = [schema.RECORDED] if schema.RECORDED in methods else methods if len(methods) == 1 else []
    return [name for name in map(schema.advantages, chosen) if name in names]


def _given(names: Sequence[str]) -> list[str]:
    """The columns that no method made and that segmentation does not find again."""
    made = {schema.start(block) for block in schema.blocks(names)}
    made.update(name for method in schema.methods_in(names) for name in schema.made_by(method, names))
    return [name for name in names if name not in made]


def _tokenizer(folder: Path | None, found: pa.Schema) -> Path | None:
    return (None if folder is None else tokenizer_in(folder)) or schema.tokenizer_of(found)


def tokenizer_in(run: Path) -> Path | None:
    """The folder of a run that holds its tokenizer: that of its model, or the one that a script's run lays beside its rollouts."""
    return next((run / name for name in ("model", "tokenizer") if (run / name / "tokenizer.json").is_file()), None)


def run_folder(file: Path) -> Path | None:
    """The run folder that a rollout file lies in, known by its `recipe.yaml`."""
    found = [place for place in (file.parent.parent, file.parent) if (place / "recipe.yaml").is_file()]
    return found[0] if found else None


def _check(file: Path, table: pa.Table, source: str, names: Sequence[str]) -> None:
    lengths = _lengths(file, table, source)
    for name in names:
        other = _lengths(file, table, name)
        wrong = np.flatnonzero(lengths != other)
        if wrong.size:
            row = int(wrong[0])
            raise DataError(
                f"Completion {row} of '{file}' has {int(lengths[row])} tokens and {int(other[row])} values of '{name}'; "
                f"there must be one for each token. Was the file changed after it was written?"
            )


def _lengths(file: Path, table: pa.Table, name: str) -> np.ndarray:
    if name not in table.column_names:
        raise DataError(f"'{file}' has no column '{name}', unlike the files beside it; give one of them.")
    column = table[name]
    if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
        raise DataError(f"The column '{name}' of '{file}' must hold a list per completion, not {column.type}.")
    if column.null_count:
        raise DataError(f"{column.null_count} of {len(column)} completions of '{file}' have no '{name}'.")
    return np.diff(offsets(column))


def _ragged(column: pa.ChunkedArray) -> Ragged:
    return Ragged(flat(column, np.int32), offsets(column))


def _texts(column: pa.ChunkedArray, trainable: np.ndarray) -> Cut:
    """Tokens that are kept as texts, or as bytes: each text gets an id."""
    coded = column.combine_chunks().flatten().dictionary_encode()
    pieces = [text.encode() if isinstance(text, str) else text for text in coded.dictionary.to_pylist()]
    ids = coded.indices.to_numpy(zero_copy_only=False).astype(np.int32)
    return Cut(Ragged(ids, offsets(column)), trainable, Vocabulary(tuple(pieces) or (b"",)), AS_TEXT)


def _whole(path: Path, table: pa.Table, name: str) -> list[int] | None:
    """What the file says of groups, or of rollouts."""
    if name not in table.column_names:
        return None
    column = table[name]
    if column.null_count:
        lack = f"{column.null_count} of {len(column)} completions of '{path}' have no '{name}'"
        raise DataError(f"{lack}; say it of all of them, or leave the column out.")
    return column.to_pylist()


def _rewards(path: Path, table: pa.Table) -> dict[str, Reward]:
    """The rewards with the statuses they were written with; a gap without a reason was never scored."""
    rewards = {}
    known = {status.name.lower(): status for status in Status}
    for name in schema.objectives(table.column_names):
        status = schema.status(name)
        given = table[status].to_pylist() if status in table.column_names else ["unscored"] * len(table)
        for row, value in enumerate(given):
            if value not in known:
                raise DataError(
                    f"Completion {row} of '{path}' has '{value}' as '{status}', which is none of {', '.join(known)}."
                )
        reasons = [Status.UNSCORED if value == "ok" else known[value] for value in given]
        rewards[name] = Reward.of([finite(value) for value in table[schema.reward(name)].to_pylist()], status=reasons)
    return rewards


def _learned(table: pa.Table, cut: Cut) -> torch.Tensor | None:
    """A completion that has tokens and no block was left out of the loss (`mask_truncated_completions`)."""
    ends = [schema.end(block) for block in schema.blocks(table.column_names)]
    if not ends:
        return None
    inside = np.max([table[name].to_numpy() for name in ends], axis=0) > 0
    counts = np.concatenate(([0], np.cumsum(cut.trainable)))[cut.tokens.offsets]
    return torch.from_numpy(inside | (np.diff(counts) == 0))


def _check_spelling(file: Path, vocabulary: Vocabulary, tokenizer: str | Path) -> None:
    """The first completions as the tokenizer spells them, against the text beside them."""
    names = [schema.IDS, schema.TRAINABLE, schema.TEXT]
    if schema.TEXT not in pq.read_schema(file).names:
        return
    batch = next(pq.ParquetFile(file).iter_batches(batch_size=32, columns=names), None)
    rows = [] if batch is None else batch.to_pylist()
    wrong = 0
    for row in rows:
        ids = np.array([i for i, keep in zip(row[schema.IDS], row[schema.TRAINABLE], strict=True) if keep], dtype=np.int64)
        known = ids[(ids >= 0) & (ids < len(vocabulary))]
        wrong += len(known) < len(ids) or vocabulary.join(known)[0].decode(errors="replace") != row[schema.TEXT]
    if wrong > len(rows) // 2:
        raise DataError(
            f"The tokenizer of '{tokenizer}' spells {wrong} of the first {len(rows)} completions of '{file}' otherwise than "
            f"the file does; give the tokenizer that they were sampled with."
        )
