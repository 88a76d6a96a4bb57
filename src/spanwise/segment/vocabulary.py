"""The class `Vocabulary`, which maps token ids to their bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any

import numpy as np
from jaxtyping import Int

from spanwise.errors import AlignmentError, DataError

#: A test text with tags, characters of 2 to 4 bytes, and a character that takes several tokens.
PROBE = "Hi <answer>42</answer>\n naïve Σ→∞ 日本語 🙂🏽!"

_REMEDY = (
    "spanwise reads the decoders ByteLevel (Qwen, Llama 3, GPT-2), Fuse, and those of SentencePiece (Replace or Metaspace, "
    "with or without ByteFallback). For other decoders, build Vocabulary(pieces) from the bytes of each id."
)


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The bytes of every token id. They align text with tokens without re-encoding the text.

    A completion's text is the concatenation of its tokens' pieces. That is exact for byte-level BPE and for SentencePiece
    with byte fallback, also where a token holds only a part of a character.

    Args:
        pieces: the bytes of id 0, 1, 2, ...; b"" for an id that writes nothing or is not used.
        added: the ids of tokens that the tokenizer has beside what it learned, such as `<think>` or `<|im_end|>`; a delimiter
            among them is that token, not the same characters spelled in others.

    Raises:
        DataError: no pieces at all.

    Example:
        >>> vocabulary = Vocabulary((b"<answer>", b"4", b"2</", b"answer>"))
        >>> len(vocabulary)
        4
        >>> import numpy as np
        >>> vocabulary.join(np.array([0, 1, 2, 3]))
        (b'<answer>42</answer>', array([ 8,  9, 12, 19]))
    """

    pieces: tuple[bytes, ...]
    added: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if not self.pieces:
            raise DataError("A vocabulary needs at least one token; this one is empty.")

    def __len__(self) -> int:
        return len(self.pieces)

    @cached_property
    def _table(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the bytes of all token ids in one array. Also return the number of bytes of each id."""
        return np.array(self.pieces, dtype=object), np.array([len(piece) for piece in self.pieces], dtype=np.int64)

    def join(self, ids_t: Int[np.ndarray, " t"]) -> tuple[bytes, Int[np.ndarray, " t"]]:
        """Concatenate the bytes of the tokens `ids_t`. Return them, and the byte at which each token ends.

        Raises:
            AlignmentError: an id below 0 or not below `len(self)`.
        """
        if ids_t.size and not (ids_t.min() >= 0 and ids_t.max() < len(self)):
            bad_id = int(ids_t[(ids_t < 0) | (ids_t >= len(self))][0])
            raise AlignmentError(
                f"Token id {bad_id} is not in the vocabulary, which has {len(self)} ids (0 to {len(self) - 1}). Mask the token, "
                f"or use Vocabulary.of(tokenizer, model) if the model has more embedding rows than its tokenizer has tokens."
            )
        bytes_of_id, length_of_id = self._table
        return b"".join(bytes_of_id[ids_t].tolist()), np.cumsum(length_of_id[ids_t])

    @classmethod
    def of(cls, tokenizer: Any, model: Any) -> Vocabulary:
        """Read the bytes of every token id that a model can sample. Its tokenizer often has fewer.

        Args:
            tokenizer: see `from_tokenizer`, also for errors and an example.
            model: a model of transformers; its configuration says how many rows it has.
        """
        return cls.from_tokenizer(tokenizer, size=getattr(model.config.get_text_config(), "vocab_size", None))

    @classmethod
    def from_tokenizer(cls, tokenizer: Any, *, size: int | None = None) -> Vocabulary:
        r"""Read the bytes of every token id from a fast tokenizer.

        Pieces follow the tokenizer's own decoder. Added and special tokens hold their literal text in UTF-8, except that a
        SentencePiece vocabulary's ordinary added tokens read "▁" as a space, as the decoder does. The one difference to
        `decode`: a leading space is kept, because a completion continues a prompt.

        Args:
            tokenizer: a fast tokenizer of transformers, or a `tokenizers.Tokenizer`.
            size: how many ids the model can sample, if that is more than the tokenizer names; the rest hold b"" (`of` asks a
                model for it).

        Raises:
            DataError: a slow tokenizer, a decoder whose pieces depend on their neighbours, or a probe text whose tokens do
                not join to what the tokenizer itself decodes.

        Example:
            >>> from tokenizers import Tokenizer, decoders, models
            >>> tokenizer = Tokenizer(models.WordLevel({"<answer>": 0, "7": 1, "</answer>": 2}))
            >>> tokenizer.decoder = decoders.Fuse()
            >>> Vocabulary.from_tokenizer(tokenizer).pieces
            (b'<answer>', b'7', b'</answer>')
        """
        fast_tokenizer = getattr(tokenizer, "backend_tokenizer", tokenizer)
        if not hasattr(fast_tokenizer, "to_str"):
            raise DataError(f"{type(tokenizer).__name__} is not a fast tokenizer; load it with use_fast=True.")
        tokenizer_json = json.loads(fast_tokenizer.to_str())
        piece_to_bytes, replace_characters = _compile_decoder(tokenizer_json.get("decoder"))
        added_tokens = {token["id"]: token for token in tokenizer_json.get("added_tokens", [])}
        id_of_token: Mapping[str, int] = fast_tokenizer.get_vocab(with_added_tokens=True)
        largest_id = max(id_of_token.values(), default=-1)
        bytes_of_id = [b""] * max(largest_id + 1, size or 0)
        for piece, token_id in id_of_token.items():
            if token_id in added_tokens:
                bytes_of_id[token_id] = (piece if added_tokens[token_id]["special"] else replace_characters(piece)).encode()
            else:
                bytes_of_id[token_id] = piece_to_bytes(piece)
        vocabulary = cls(tuple(bytes_of_id), frozenset(added_tokens))
        _check_probe(vocabulary, fast_tokenizer)
        return vocabulary


def _check_probe(vocabulary: Vocabulary, backend: Any) -> None:
    """Encode a test text, and check that the tokens' bytes in the vocabulary match what the tokenizer decodes."""
    try:
        probe_ids = backend.encode(PROBE, add_special_tokens=False).ids
    except Exception:  # the vocabulary may lack tokens for `PROBE`
        return
    joined_text = vocabulary.join(np.array(probe_ids, dtype=np.int64))[0].decode(errors="replace")
    decoded_text = backend.decode(probe_ids, skip_special_tokens=False)
    if joined_text.lstrip(" ") != decoded_text.lstrip(" "):
        raise DataError(
            f"The tokens of {PROBE!r} spell {joined_text!r}, but the tokenizer decodes these tokens to {decoded_text!r}. {_REMEDY}"
        )


def _compile_decoder(decoder: Mapping[str, Any] | None) -> tuple[Callable[[str], bytes], Callable[[str], str]]:
    """Turn a tokenizer's decoder into two functions: learned tokens to bytes, added tokens to text."""
    if decoder is None:
        raise DataError(
            f"The tokenizer has no decoder, so decoding adds spaces that belong to no token. Set a decoder, for example "
            f"tokenizer.decoder = tokenizers.decoders.Fuse(). {_REMEDY}"
        )
    replacements: list[tuple[str, str]] = []
    encode_piece: Callable[[str], bytes] = str.encode
    is_after_fuse_step = False
    for step in decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]:
        step_type = step["type"]
        is_before_encoding = not is_after_fuse_step and encode_piece is str.encode
        if step_type == "Fuse":
            is_after_fuse_step = True
        elif step_type == "Strip" and is_after_fuse_step:
            pass  # a completion continues a prompt, so it keeps its leading space
        elif step_type == "Replace" and is_before_encoding and "String" in step["pattern"]:
            replacements.append((step["pattern"]["String"], step["content"]))
        elif step_type == "Metaspace" and is_before_encoding:
            replacements.append((step["replacement"], " "))
        elif step_type in _ENCODERS and is_before_encoding:
            encode_piece = _ENCODERS[step_type]
        else:
            raise DataError(
                f"The tokenizer's decoder has a step that spanwise cannot read: {json.dumps(step, ensure_ascii=False)}. {_REMEDY}"
            )

    def replace_characters(text: str) -> str:
        return reduce(lambda changed, replacement: changed.replace(*replacement), replacements, text)

    return lambda text: encode_piece(replace_characters(text)), replace_characters


def _byte_of_character() -> dict[str, int]:
    """Map the characters of GPT-2's byte-level alphabet to bytes."""
    printable_bytes = {*range(33, 127), *range(161, 173), *range(174, 256)}
    unprintable_bytes = [byte for byte in range(256) if byte not in printable_bytes]
    return {chr(byte): byte for byte in printable_bytes} | {chr(256 + n): byte for n, byte in enumerate(unprintable_bytes)}


_ALPHABET = _byte_of_character()
_BYTE_PIECE = re.compile("<0x([0-9a-fA-F]{2})>")


def _byte_level(text: str) -> bytes:
    try:
        return bytes([_ALPHABET[character] for character in text])
    except KeyError:  # a byte-level tokenizer does not change a text with characters outside its alphabet
        return text.encode()


def _byte_fallback(text: str) -> bytes:
    byte_match = _BYTE_PIECE.fullmatch(text)
    return text.encode() if byte_match is None else bytes.fromhex(byte_match[1])


#: Maps the type of a tokenizer's decoder step, such as ByteLevel, to a function that returns a token's bytes.
_ENCODERS: dict[str, Callable[[str], bytes]] = {"ByteLevel": _byte_level, "ByteFallback": _byte_fallback}
