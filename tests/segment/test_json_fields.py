"""The segmenter `json`: escapes by hand, an oracle that reads sign by sign, and one that knows JSON and nothing of ours."""

import json
import random

import pytest

from json_oracle import slow_json, walked
from segment_small import claims_in
from spanwise.errors import LayoutError
from spanwise.layout import Layout
from spanwise.segment.json_fields import paths, steps

ITEMS = Layout(["name", "items[*].price"], segmenter="json", most=2)
FRAGMENTS = [
    "{", "}", "[", "]", ",", '"a":', '"b" :', '"items":', '"price":', '"a"', '"x y"', "3", "4.5", "true", " ", "\n", '"', "\\",
    '\\"', "foo", '"\\u0061":', '"q\\n\\u00e9"', '"\\ud83d\\ude42"', '"\\q"', "é", "日", '{"a": 1}', ", ", ": ", "null",
    "[]", "{}", "[ ]", '"c"\n:', "\r", "\t", "\x0b", ":", '"a":"v",', '"b":7}', "\x00", "{ {",
]  # fmt: skip
LAYOUTS = [
    ITEMS,
    Layout({"rest": [], "a": "json:a", "b": "json:b.a"}),
    Layout({"a": "json:a[*]", "p": "json:items[*].price", "i": "json:items[0].a"}),
    Layout({"rest": [], "x[*]": "json:items[*]", "a": "json:a"}, most=1),
    Layout({"x[*]": ["json:items[*].a", "json:items[*].price"], "a": "json:a.b[1]"}, most=2),
]


def soup(draw):
    opening = draw.choice(["", "{", "{", '{"items": [', '{"a": '])
    return (opening + "".join(draw.choices(FRAGMENTS, k=draw.randint(1, 20)))).encode()


def test_agrees_with_the_oracle_on_what_is_broken():
    draw = random.Random(0)
    for _ in range(300):
        data = soup(draw)
        for layout in LAYOUTS:
            claims, fault = claims_in(layout, data)
            contents = [None if content is None else content.encode() for *_, content in claims]
            places = [(claim.part, claim.start, claim.stop) for claim, *_ in claims]
            claimed = [(*place, content) for place, content in zip(places, contents, strict=True)]
            assert (claimed, fault) == slow_json(data, layout), data


@pytest.mark.parametrize(
    ("text", "contents"),
    [
        (b'{"a": "\xff\xe6", "b": "\\n\xff"}', ["\ufffd\ufffd", "\n\ufffd"]),
        (rb'{"\u0061": "\"\\\n\u00e9\ud83d\ude42", "b": "\ud800"}', ['"\\\né🙂', "\ufffd"]),
        (rb'{"a": "\q", "b": "\u12"}', [r"\q", r"\u12"]),  # no escapes of JSON
    ],
)
def test_escapes_are_read_and_what_is_no_text_is_replaced(text, contents):
    claims, fault = claims_in(Layout(["a", "b"], segmenter="json"), text)
    assert ([content for *_, content in claims], fault) == (contents, 0)


def test_a_raw_tab_is_text_beside_escapes_too():
    claims, fault = claims_in(Layout(["a", "b"], segmenter="json"), b'{"a": "x\ty", "b": "x\t\\u0079"}')
    assert ([content for *_, content in claims], fault) == (["x\ty"] * 2, 0)


def value(draw, depth=0):
    kind = draw.randrange(7 if depth < 3 else 5)
    if kind < 5:
        return (draw.randint(-9, 99), draw.choice([True, None, 0.5, 1e300]), "x, y", 'q"\\\n{é🙂', "")[kind]
    keys = draw.sample(["a", "b", "c", "items", "price", "k.l", 'm"n'], draw.randint(0, 4))
    if kind == 5:
        return {key: value(draw, depth + 1) for key in keys}
    return [value(draw, depth + 1) for _ in keys]


def test_agrees_with_the_standard_library_on_what_is_whole():
    draw = random.Random(1)
    seen = 0
    for _ in range(50):
        top = {key: value(draw) for key in draw.sample(["a", "b", "c", "items"], 3)}
        text = json.dumps(top, ensure_ascii=draw.random() < 0.5, indent=draw.choice([None, None, 1]))
        for path, start, end, gold in walked(text):
            if not path:
                continue
            layout = Layout({"it": "json:" + "".join(f"[{json.dumps(step)}]" for step in path), "rest": []})
            ((claim, claimed, content),), fault = claims_in(layout, f"So {text}")
            assert (fault, claim.stop) == (0, 3 + len(text[:end].encode()))
            assert claimed.strip() == text[start:end]
            assert content == gold if isinstance(gold, str) else json.loads(content) == gold
            seen += 1
    assert seen > 300


@pytest.mark.parametrize("path", ["", ".a", "a.", "a..b", "a[", "a[x]", "a[-1]", 'a["b]', "[0].a", "[*]", 'a"b', "a]b"])
def test_what_is_no_path(path):
    with pytest.raises(LayoutError, match="is not a path"):
        steps(path)


def test_paths():
    assert steps('a.b[0]["c\\"."][*].d e') == ["a", "b", 0, 'c".', -1, "d e"]
    assert steps('["\\q"]') == ["\\q"]


def test_paths_of_a_text_are_read_only_so_deep():
    text = '{"a":' * 400 + "1" + "}" * 400
    assert list(paths(text))[-1] == ".".join(["a"] * 20)
    assert list(paths('{"k": ' + "[" * 100_000)) == ["k"]
