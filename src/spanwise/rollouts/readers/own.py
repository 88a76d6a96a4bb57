"""spanwise's own files, of a training run or of `spanwise credit`: the columns of `rollouts.schema`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from spanwise.credit import group_index
from spanwise.errors import DataError
from spanwise.rollouts import schema
from spanwise.rollouts.cells import steps_of
from spanwise.rollouts.files import flat, joined, offsets
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
    place = tokenizer
    if source == schema.TOKENS and tokenizer is not None:
        raise DataError(f"'{path}' holds its tokens as text, so there is nothing to read with --tokenizer; leave it out.")
    if source == schema.IDS and tokenizer is None:
        place = (folder and tokenizer_in(folder)) or schema.tokenizer_of(found)
    known, trained = schema.token_columns(found.names), _trained(found.names)
    wanted = [*(name for name in _given(found.names) if name != schema.TEXT or place is None), *trained]
    tables = [pq.read_table(file, columns=wanted) for file in files]
    for file, table in zip(files, tables, strict=True):
        _check(file, table, [source, schema.TRAINABLE, *known, *trained])
    table = joined(path, tables)
    trainable = flat(table[schema.TRAINABLE], np.bool_)
    same = True  # the tokens are the file's own, so what it says of each is of use
    if source == schema.TOKENS:
        cut = _texts(table[source], trainable)
    elif place is not None:
        ids = Ragged(flat(table[source], np.int32), offsets(table[source]))
        cut = Cut(ids, trainable, load_tokenizer(place)[1], "")
        _check_spelling(files[0], cut.vocabulary, place)
    elif schema.TEXT in table.column_names:
        note = "There is no tokenizer beside the file; credit is shown per word. Give its folder with --tokenizer."
        cut = cut_text([[(text or "", True)] for text in table[schema.TEXT].to_pylist()])._replace(note=note)
        same = False
    else:
        raise DataError(f"'{path}' holds token ids and no text; give the folder of the tokenizer with --tokenizer.")
    rollouts = _whole(path, table, schema.ROLLOUT)
    plain = [one.name for one in table.schema if not pa.types.is_list(one.type)]
    steps = table[schema.STEP].to_pylist() if schema.STEP in plain else [None] * len(table)
    return replace(
        RolloutTable.of(
            "spanwise",
            path,
            cut,
            prompts=table[schema.PROMPT].to_pylist(),
            steps=steps_of(path, steps),
            keys=_whole(path, table, schema.GROUP),
            columns={name: table[name].to_pylist() for name in plain if schema.type_of(name) is None},
            rewards={},
        ),
        rewards=_rewards(path, table),
        tokenizer=None if place is None else Path(place),
        token_values={name: flat(table[name], np.float32) for name in known if same},
        learned_n=_learned(table, cut) if same else None,
        folder=folder,
        as_recorded=next(
            (AsRecorded(f"the file's '{name}'", flat(table[name], np.float64), shares=True) for name in trained if same),
            None,
        ),
        rollout_n=None if rollouts is None else group_index(rollouts),
        score_n=numbers(table, schema.SCORE) if schema.SCORE in plain else None,
    )


def _trained(names: Sequence[str]) -> list[str]:
    """The column of what the completions were trained with, if there is one and no doubt."""
    methods = schema.methods_in(names)
    chosen = [schema.RECORDED] if schema.RECORDED in methods else methods if len(methods) == 1 else []
    return [name for method in chosen if (name := schema.column("advantages", method)) in names]


def _given(names: Sequence[str]) -> list[str]:
    """The columns that no method made and that segmentation does not find again."""
    made = {schema.column("start", block) for block in schema.behind(names, "end")}
    made.update(name for method in schema.methods_in(names) for name in schema.made_by(method, names))
    return [name for name in names if name not in made]


def tokenizer_in(run: Path) -> Path | None:
    """The folder of a run that holds its tokenizer: that of its model, or the one that a script's run lays beside its rollouts."""
    return next((run / name for name in ("model", "tokenizer") if (run / name / "tokenizer.json").is_file()), None)


def run_folder(file: Path) -> Path | None:
    """The run folder that a rollout file lies in, known by its `recipe.yaml`."""
    found = [place for place in (file.parent.parent, file.parent) if (place / "recipe.yaml").is_file()]
    return found[0] if found else None


def _check(file: Path, table: pa.Table, names: Sequence[str]) -> None:
    """Every column of tokens must have a list for each completion, as long as that of the first of them."""
    lengths = None
    for name in names:
        if name not in table.column_names:
            raise DataError(f"'{file}' has no column '{name}', unlike the files beside it; give one of them.")
        column = table[name]
        if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
            raise DataError(f"The column '{name}' of '{file}' must hold a list per completion, not {column.type}.")
        if column.null_count:
            raise DataError(f"{column.null_count} of {len(column)} completions of '{file}' have no '{name}'.")
        here = np.diff(offsets(column))
        lengths = here if lengths is None else lengths
        if (lengths != here).any():
            row = int((lengths != here).argmax())
            raise DataError(
                f"Completion {row} of '{file}' has {int(lengths[row])} tokens and {int(here[row])} values of '{name}'; "
                f"there must be one for each token. Was the file changed after it was written?"
            )


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
    for name in schema.behind(table.column_names, "reward"):
        status, column = schema.column("status", name), table[schema.column("reward", name)]
        given = table[status].to_pylist() if status in table.column_names else ["unscored"] * len(table)
        unknown = next((row for row, value in enumerate(given) if value not in known), None)
        if unknown is not None:
            said = f"Completion {unknown} of '{path}' has '{given[unknown]}' as '{status}'"
            raise DataError(f"{said}, which is none of {', '.join(known)}.")
        reasons = [Status.UNSCORED if value == "ok" else known[value] for value in given]
        rewards[name] = Reward.of([finite(value) for value in column.to_pylist()], status=reasons)
    return rewards


def _learned(table: pa.Table, cut: Cut) -> torch.Tensor | None:
    """A completion that has tokens and no block was left out of the loss (`mask_truncated_completions`)."""
    ends = [name for name in table.column_names if name.startswith(schema.column("end", ""))]
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
