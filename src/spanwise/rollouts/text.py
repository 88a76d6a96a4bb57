"""Tokens for completions that a file holds as text: words that keep every byte, or the pieces of a tokenizer."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from spanwise.errors import DataError
from spanwise.rollouts.messages import Parts
from spanwise.rollouts.table import Cut, Ragged
from spanwise.segment import Vocabulary

#: A tag, a word with the space before it, other space, a sign "<" that opens no tag. A tag never shares its piece.
_PIECE = re.compile(r"</?[\w.-]+>|\s?[^\s<]+|\s+|<[^\s<]*")

#: Completions that are encoded at a time.
AT_ONCE = 256

WORDS = "The file holds no token ids; credit is shown per word."


def pieces(text: str) -> list[str]:
    r"""Cut a text into tags, words and space; together they are the text.

    >>> pieces("So 2 <3\n<answer>4</answer>")
    ['So', ' 2', ' ', '<3', '\n', '<answer>', '4', '</answer>']
    """
    return _PIECE.findall(text)


def cut_text(completions: Sequence[Parts], tokenizer: str | Path | None = None) -> Cut:
    """Cut completions into tokens: with the tokenizer of a folder if one is given, else into words."""
    if tokenizer is not None:
        return _encode(completions, tokenizer)
    known: dict[str, int] = {}
    ids: list[int] = []
    lengths: list[int] = []
    flags: list[np.ndarray] = []
    for parts in completions:
        before = len(ids)
        for text, sampled in parts:
            start = len(ids)
            ids += [known.setdefault(piece, len(known)) for piece in pieces(text)]
            flags.append(np.full(len(ids) - start, sampled))
        lengths.append(len(ids) - before)
    vocabulary = Vocabulary(tuple(piece.encode() for piece in known) or (b"",))
    trainable = np.concatenate([np.zeros(0, dtype=np.bool_), *flags])
    return Cut(Ragged(np.array(ids, dtype=np.int32), np.cumsum([0, *lengths])), trainable, vocabulary, WORDS if ids else "")


def load_tokenizer(folder: str | Path) -> tuple[Any, Vocabulary]:
    """The tokenizer of a local folder, and the bytes of its ids (as many as the model beside it can sample).

    The last one that was loaded is kept until its file changes: a page is made of files that name the tokenizer they were made
    with, and a large one takes a second.
    """
    place = Path(folder)
    file = place if place.is_file() else place / "tokenizer.json"
    stamp = (file.stat().st_mtime_ns, file.stat().st_size) if file.is_file() else (0, 0)
    return _loaded(file, stamp, _embedding_rows(file.with_name("config.json")))


@lru_cache(maxsize=1)
def _loaded(file: Path, stamp: tuple[int, int], size: int | None) -> tuple[Any, Vocabulary]:
    from tokenizers import Tokenizer

    try:
        backend = Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DataError(
            f"'{file.parent}' holds no tokenizer.json; give the folder of a model or of a fast tokenizer."
        ) from error
    except Exception as error:  # the Rust parser raises bare exceptions
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DataError(f"'{file}' is not a readable tokenizer: {reason}.") from error
    backend.no_truncation()
    backend.no_padding()
    return backend, Vocabulary.from_tokenizer(backend, size=size)


def _embedding_rows(config: Path) -> int | None:
    try:
        size = json.loads(config.read_text(encoding="utf-8")).get("vocab_size")
    except (OSError, ValueError, AttributeError):
        return None
    return size if isinstance(size, int) else None


def _encode(completions: Sequence[Parts], folder: str | Path) -> Cut:
    backend, vocabulary = load_tokenizer(folder)
    flat, flags = [np.zeros(0, dtype=np.int32)], [np.zeros(0, dtype=np.bool_)]
    lengths: list[int] = []
    count = changed = 0
    for first in range(0, len(completions), AT_ONCE):  # what the tokenizer returns takes a hundred bytes a token
        some = completions[first : first + AT_ONCE]
        parts = [part for completion in some for part in completion]
        encoded = [found.ids for found in backend.encode_batch([text for text, _ in parts], add_special_tokens=False)]
        for (text, sampled), ids in zip(parts, encoded, strict=True):
            flat.append(np.array(ids, dtype=np.int32))
            flags.append(np.full(len(ids), sampled))
            changed += vocabulary.join(flat[-1])[0] != text.encode()
        sizes = iter(map(len, encoded))
        lengths += [sum(next(sizes) for _ in completion) for completion in some]
        count += len(parts)
    note = f"The file holds no token ids; the text is encoded with the tokenizer of '{folder}'"
    note += f", which changes {changed} of {count} texts." if changed else "."
    return Cut(Ragged(np.concatenate(flat), np.cumsum([0, *lengths])), np.concatenate(flags), vocabulary, note)
