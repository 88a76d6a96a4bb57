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
    known: dict[str, int] = {}
    backend, vocabulary = (None, None) if tokenizer is None else load_tokenizer(tokenizer)

    def encode(texts: list[str]) -> list[list[int]]:
        if backend is None:
            return [[known.setdefault(piece, len(known)) for piece in pieces(text)] for text in texts]
        return [found.ids for found in backend.encode_batch(texts, add_special_tokens=False)]

    flat, flags, lengths = [np.zeros(0, dtype=np.int32)], [np.zeros(0, dtype=np.bool_)], [0]
    count = changed = 0
    for first in range(0, len(completions), AT_ONCE):  # what a tokenizer returns takes a hundred bytes a token
        some = completions[first : first + AT_ONCE]
        encoded = iter(encode([text for parts in some for text, _ in parts]))
        for parts in some:
            lengths.append(0)
            for (text, sampled), ids in zip(parts, encoded, strict=False):
                flat.append(np.array(ids, dtype=np.int32))
                flags.append(np.full(len(ids), sampled))
                lengths[-1] += len(ids)
                count += 1
                changed += vocabulary is not None and vocabulary.join(flat[-1])[0] != text.encode()
    note = WORDS if known else ""
    if tokenizer is not None:
        note = f"The file holds no token ids; the text is encoded with the tokenizer of '{tokenizer}'"
        note += f", which changes {changed} of {count} texts." if changed else "."
    if vocabulary is None:
        vocabulary = Vocabulary(tuple(piece.encode() for piece in known) or (b"",))
    return Cut(Ragged(np.concatenate(flat), np.cumsum(lengths)), np.concatenate(flags), vocabulary, note)


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
