import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models
from transformers import ByT5Tokenizer

from spanwise.errors import AlignmentError, DataError
from spanwise.segment import Vocabulary
from tokenizers_small import byte_level, sentencepiece, word_level

STOP = "<\uff5cend▁of▁sentence\uff5c>"  # with the signs that DeepSeek's special tokens have
BYTE_LEVEL = byte_level(special=("<answer>", STOP), tokens=("<thé>",))
SENTENCEPIECE = sentencepiece(tokens=("▁▁▁", "<answer>"))
BYTE_VOCABULARY = Vocabulary.from_tokenizer(BYTE_LEVEL)
PIECE_VOCABULARY = Vocabulary.from_tokenizer(SENTENCEPIECE)
fast = settings(deadline=None, max_examples=150)
chunks = st.sampled_from(["<answer>4</answer>", "日本", " So ", "<0x41>", "\n\n"])
texts = st.lists(st.one_of(st.text(max_size=6), chunks)).map("".join)


def encode(tokenizer, text):
    return np.array(tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int64)


@fast
@given(texts)
def test_byte_level_pieces_join_to_the_text_that_was_encoded(text):
    assert BYTE_VOCABULARY.join(encode(BYTE_LEVEL, text))[0] == text.encode()


@fast
@given(texts.filter(lambda text: "▁" not in text))
def test_byte_fallback_pieces_join_to_the_text_that_was_encoded(text):
    # The normaliser puts one space in front of each stretch between added tokens; without added tokens, of the whole text.
    text = text.replace("<answer>", "<answers>")
    joined = PIECE_VOCABULARY.join(encode(SENTENCEPIECE, text))[0]
    assert joined == (b" " + text.encode() if text else b"")


def test_all_256_bytes_are_there_once_as_single_tokens():
    singles = sorted(piece for piece in BYTE_VOCABULARY.pieces if len(piece) == 1)
    assert singles == [bytes([n]) for n in range(256)]
    at = SENTENCEPIECE.convert_tokens_to_ids
    assert [PIECE_VOCABULARY.pieces[at(f"<0x{n:02X}>")] for n in range(256)] == [bytes([n]) for n in range(256)]


@pytest.mark.parametrize("token", ["<answer>", STOP, "<thé>", "<|end|>"])
def test_added_and_special_tokens_hold_their_literal_text(token):
    assert BYTE_VOCABULARY.pieces[BYTE_LEVEL.convert_tokens_to_ids(token)] == token.encode()


def test_ordinary_added_tokens_of_sentencepiece_read_as_its_decoder_reads_them():
    index = SENTENCEPIECE.convert_tokens_to_ids("▁▁▁")
    assert SENTENCEPIECE.backend_tokenizer.decode([index, index]) == "     "  # six, less the leading one
    assert PIECE_VOCABULARY.pieces[index] == b"   "
    assert PIECE_VOCABULARY.pieces[SENTENCEPIECE.convert_tokens_to_ids("</s>")] == b"</s>"


@pytest.mark.parametrize(
    ("decoder", "pieces", "read"),
    [
        (decoders.ByteLevel(), ["a b", "Ġc", "日本"], ["a b", " c", "日本"]),  # what is not in its alphabet is literal
        (decoders.Metaspace(), ["▁So", "▁4"], [" So", " 4"]),  # with the leading space, which `decode` drops
    ],
)
def test_pieces_read_as_the_decoder_reads_them(decoder, pieces, read):
    tokenizer = Tokenizer(models.WordLevel({piece: n for n, piece in enumerate(pieces)}, unk_token=pieces[0]))
    tokenizer.decoder = decoder
    assert [tokenizer.decode([n]).lstrip() for n in range(len(pieces))] == [text.lstrip() for text in read]
    assert Vocabulary.from_tokenizer(tokenizer).pieces == tuple(text.encode() for text in read)


def test_word_level_pieces_are_literal_and_holes_are_empty():
    assert Vocabulary.from_tokenizer(word_level(["<a>", "é", "▁"])).pieces == (b"<a>", "é".encode(), "▁".encode())
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 3}))
    tokenizer.decoder = decoders.Fuse()
    assert Vocabulary.from_tokenizer(tokenizer, size=6).pieces == (b"a", b"", b"", b"b", b"", b"")
    assert len(Vocabulary.from_tokenizer(tokenizer, size=2)) == 4


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.WordPiece(),
        decoders.BPEDecoder(),
        decoders.CTC(),
        decoders.Sequence([decoders.Replace(Regex("_+"), " "), decoders.Fuse()]),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("a", "b")]),
        decoders.Sequence([decoders.Strip(" ", 1, 0), decoders.Fuse()]),
        None,
    ],
)
def test_decoders_that_look_at_neighbours_are_refused(decoder):
    tokenizer = Tokenizer(models.WordLevel({"a": 0}))
    if decoder is not None:
        tokenizer.decoder = decoder
    with pytest.raises(DataError, match="decoder"):
        Vocabulary.from_tokenizer(tokenizer)


def test_pieces_that_disagree_with_the_tokenizer_are_refused():
    # "ï" is a letter of the byte-level alphabet; as an added token its own decoder writes a broken byte for it.
    with pytest.raises(DataError, match="naïve"):
        Vocabulary.from_tokenizer(byte_level(tokens=("ï",)))
    with pytest.raises(DataError, match="ByT5Tokenizer"):  # a slow one
        Vocabulary.from_tokenizer(ByT5Tokenizer())


def test_ids_outside_the_vocabulary_name_the_id_and_the_size():
    vocabulary = Vocabulary((b"a", b"b"))
    for wrong in (2, -1):
        with pytest.raises(AlignmentError, match=f"{wrong} .* 2 ids"):
            vocabulary.join(np.array([0, wrong]))
    with pytest.raises(DataError):
        Vocabulary(())
