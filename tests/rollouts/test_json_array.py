"""A JSON array read entry by entry is what `json.loads` makes of the whole."""

import json
from io import BufferedReader, BytesIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spanwise.rollouts import json_array

NUMBERS = st.one_of(st.integers(), st.floats(allow_nan=False), st.just(float("inf")))
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.text()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(), inner, max_size=3)),
    max_leaves=8,
)


def entries(text, *, piece=2**20, name=None):
    """The entries, read in pieces of so many bytes, and the bytes that were counted."""
    counted, stream = [], BufferedReader(BytesIO(text))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_array, "_PIECE", piece)
        read = json_array.array_entries if name is None else json_array.member_entries
        arguments = (stream, counted.append) if name is None else (stream, name, counted.append)
        return list(read(*arguments)), sum(counted)


@settings(max_examples=200, deadline=None)
@given(
    values=st.lists(VALUES, max_size=4),
    indent=st.sampled_from([None, 0, 2]),
    ascii=st.booleans(),
    encoding=st.sampled_from(["utf-8", "utf-8-sig", "utf-16-le"]),
    piece=st.sampled_from([1, 2, 7, 1000]),
)
def test_the_entries_are_those_of_the_whole_in_pieces_of_any_size(values, indent, ascii, encoding, piece):
    text = json.dumps(values, indent=indent, ensure_ascii=ascii).encode(encoding, "surrogatepass")
    assert entries(text, piece=piece) == (json.loads(text), len(text))
    member = json.dumps({"a": [1], "rows": values, "b": {"rows": [2]}}, indent=indent, ensure_ascii=ascii)
    assert entries(member.encode(encoding, "surrogatepass"), piece=piece, name="rows")[0] == values


@pytest.mark.parametrize("piece", [1, 5, 1000])
def test_what_is_cut_off_or_wrong_anywhere_is_refused(piece):
    array = json.dumps([{"a": 'x\\"é', "b": [1.5, None]}, {"c": -12}], ensure_ascii=False).encode()
    for end in range(1, len(array)):
        with pytest.raises(ValueError, match=r"\w"):
            entries(array[:end], piece=piece)
    for wrong in (b"[1 2]", b"[1,]", b"[,1]", b"[1] 2", b"[nope]", b'[{"a" 1}]', b"[\xff]", b'["\\u12x4"]'):
        with pytest.raises(ValueError, match=r"\w"):
            entries(wrong, piece=piece)


def test_an_error_in_the_middle_ends_the_reading_there():
    """A missing comma is not taken for a text that goes on."""
    text = b'[{"a" 1}' + b" " * 1000 + b"]" * 100_000
    counted = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_array, "_PIECE", 100)
        with pytest.raises(ValueError, match="delimiter"):
            list(json_array.array_entries(BufferedReader(BytesIO(text)), counted.append))
    assert sum(counted) == 100
