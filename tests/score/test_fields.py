"""Rewards of single fields, of steps, of JSON under a schema and of code that runs, with values worked out by hand."""

import itertools
import json
import socket
import subprocess
from datetime import date, datetime, time
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pandas as pd
import pytest
import torch

from helpers import NAN
from score_small import ABSENT, BROKE, BYTES, ERROR, OK, byte_group, rewarded
from spanwise import Layout, Objective, Scheme, read
from spanwise.errors import DataError, RecipeError
from spanwise.score.score import check_objectives
from spanwise.score.worker import run
from spanwise.testing import check_reward


def field(text, name):
    """A completion of one field; None: the field is incomplete, False: it is missing."""
    return {name: None if text is False else {name: text, "": f'"{name}": {text}, '}}


def scored(reward, pays, text, *, columns=None, **options):
    result = rewarded(reward, text, columns=columns, pays=pays, options=options)
    return result.value_n.tolist(), result.status_n.tolist()


def of_field(reward, texts, cells, *, name="price", **options):
    return scored(reward, name, [field(text, name) for text in texts], columns={"answer": cells}, tag=name, **options)


GSM8K = "She has <<9-5=4>>4 eggs.\n#### 4"  # a solution ends with the value


def same(rewards, values, status=None):
    """Compare the numbers and, if they are not OK for a number and ERROR for none, the statuses of some rewards."""
    usual_status = [ERROR if value != value else OK for value in values]
    assert rewards == (pytest.approx(values, abs=1e-12, nan_ok=True), status or usual_status)


@pytest.mark.parametrize(
    ("text", "gold", "right"),
    [
        ("tea", "tea", 1), (" tea\n", "tea", 1), ("Tea", "tea", 0), ("3", 3, 1), ("3.0", 3, 1), ("3", 3.5, 0), ("three", 3, 0),
        ("true", True, 1), ("1", True, 0), ("true", 1, 0), ("null", None, 1), ('["a", 1]', ["a", 1], 1), ('["a"]', ["a", 1], 0),
        ("[1, 0]", [True, False], 0), ('{"a": [true, 2.0]}', {"a": [True, 2]}, 1), ('{"a": true}', {"a": 1}, 0),
        ('{"b": 1, "a": 2}', {"a": 2, "b": 1}, 1), (None, "tea", 0), ("", "", 1), ("[" * 100_000, [1], 0),
        ("4", GSM8K, 1), ("5", GSM8K, 0), (GSM8K, GSM8K, 1),
    ],
)  # fmt: skip
def test_a_field_equals_its_gold_value(text, gold, right):
    same(of_field("equals", [text], [{"price": gold}]), [right])
    same(of_field("equals", [text], [json.dumps({"price": gold})]), [right])


def test_absent_missing_and_beyond_are_three_things():
    cells = [{"price": 3}, {"cost": 3}, None, '{"price": 3']
    same(of_field("equals", ["3", "3", "3", "3"], cells), [1, NAN, NAN, NAN])
    same(of_field("equals", [False, False], [{"price": 3}, {"cost": 3}]), [NAN, NAN], [ABSENT, ABSENT])
    path, golds = "items[1].price", [{"items": [{"price": 1}, {"price": 2}]}, {"items": [{"price": 1}]}, {"items": []}, {}]
    same(of_field("equals", ["2"] * 4, golds, name=path), [1, 0, 0, NAN])
    anywhere = [{"items": [{"price": 1}, {"price": 2}]}, {"items": []}]
    same(of_field("equals", ["2", "2"], anywhere, name="items[*].price"), [1, 0])  # the last element counts


@pytest.mark.parametrize("kind", [torch.tensor, np.array, pd.Series, list])
def test_gold_values_in_a_tensor_or_an_array_are_those_of_a_list(kind):
    same(of_field("equals", ["4", "4"], kind([4, 5])), [1, 0])
    same(of_field("equals", ["true", "true"], kind([True, False])), [1, 0])
    same(of_field("near", ["4", "4"], kind([4, 5])), [1, 0])
    same(of_field("near", ["4"], [np.int64(4)]), [1])
    same(scored("correct", "a", [{"a": {"": "", "answer": "4"}}] * 2, columns={"answer": kind([4, 5])}), [1, 0])
    same(of_field("one_of", ["b", "c"], [np.array(["a", "b"])] * 2), [1, 0])  # as pandas reads lists from parquet
    nested = [{"price": np.array([1, 2])}, {"price": [np.float64(1), {"b": np.array([2])}]}]  # inside objects, too
    same(of_field("equals", ["[1, 2]", '[1, {"b": [2]}]'], nested), [1, 1])
    same(of_field("equals", ["[1, 3]", '[1, {"b": 2}]'], nested), [0, 0])
    number = {"listed": [np.array([0.25, 0.5])]}
    same(scored("listed", "s[1]", [{"s[1]": {"": "x"}}], columns=number), [0.5])


@pytest.mark.parametrize(
    ("text", "gold", "right"),
    [
        ("3.1", Decimal("3.10"), 1), ("3.2", Decimal("3.10"), 0), ("3.1", np.float32(3.1), 1), ("[3.1]", [Decimal("3.1")], 1),
        ("2024-01-05", date(2024, 1, 5), 1), ("2024-01-05", datetime(2024, 1, 5), 1), ("2024-05-01", date(2024, 1, 5), 0),
        ("Rome", b"Rome", 1), ("[1, 2]", np.array([1, 2]), 1), ("[1, 2]", (1, 2), 1), ("true", np.bool_(True), 1),
        ("[3.1]", np.array([3.1], np.float32), 1), ("3.1", torch.tensor(3.1), 1), ("0.5", Fraction(1, 2), 1),
        ("12:30:00", time(12, 30), 1),
        ("12345678901234567890", Decimal("12345678901234567890"), 1), ("2024-01-05", np.datetime64("2024-01-05", "ns"), 1),
        ("3", float("nan"), NAN), ("nan", float("nan"), NAN), ("3", object(), NAN), ("3", {3}, NAN), ("NaT", pd.NaT, NAN),
    ],
)  # fmt: skip
def test_a_gold_value_of_a_type_that_json_lacks_is_read_or_there_is_no_reward(text, gold, right):
    for cell in (gold, {"price": gold}):
        same(of_field("equals", [text], [cell]), [right])
    same(of_field("equals", ["3"], [{"price": 3, "id": gold, (1, 2): 4}]), [1])  # it takes no other field along


def test_dicts_and_lists_as_pandas_writes_them_into_a_csv_file_and_objects_that_cannot_be_read():
    """`DataFrame.to_csv` writes a column of dicts as Python prints them, in single quotes."""
    cells = [str({"price": 3, "name": "O'Hara", "sold": None})] * 2
    same(of_field("equals", ["3", "4"], cells), [1, 0])
    same(of_field("equals", ["O'Hara", "tea"], cells, name="name"), [1, 0])
    same(of_field("equals", ["{'price'", "{3}"], ["{'price'", "{3}"]), [1, 1])  # no dict: the cell is the gold value
    same(of_field("one_of", ["Roma"] * 3, ["['Rome', 'Roma']", "['Rome' 'Roma']", "[None, 'Roma']"]), [1, NAN, 1])
    same(of_field("equals", ['["a", null]', "[1]", "[0, 1)"], ["['a', None]", "[1]", "[0, 1)"]), [1, 1, 1])
    cells = ["{'price': 'tea', 'cost': nan}", "{'price': 'tea', 'cost': Decimal('3.1')}", "{'price': 'tea', 'cost': None}"]
    same(of_field("equals", ["tea"] * 3, cells), [NAN, NAN, 1])
    cells = ['{"price": "tea", "cost": None}', '{"price": "tea"', "{'price': 'tea'"]  # the last two are cut off
    same(of_field("equals", ["tea"] * 3, cells), [1, NAN, NAN])


def test_a_column_of_the_field_alone_and_keys_that_are_no_paths():
    same(of_field("equals", ['["a"]', "b"], [["a"], "b"], name="words"), [1, 1])
    same(of_field("equals", ["4"] * 2, [{"a[b": 4}, {"c": 4}], name="a[b"), [1, NAN])
    same(of_field("equals", ["2"], [{"buyer": {"name": {"last": 2}}}], name="buyer.name.last"), [1])
    with pytest.raises(DataError):
        of_field("equals", ["4"], [4], column="gold")


def test_near_is_within_a_share_of_the_gold_value_or_a_number():
    numbers = ["101", "99", "101.1", "98.9", "-100", "1e2", "+100.", "1_00", "nan", "inf", "9" * 400]
    texts = [*numbers, '" 100 "', "100 EUR", None]
    right = [1, 1, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0]  # a share of 100 is 1; quotes are not part of what a field says
    same(of_field("near", texts, [{"price": 100}] * len(texts)), right)
    same(of_field("near", ["102", "103"], [100, "100"], rel=0.0, abs=2), [1, 0])
    same(of_field("near", ["-99", "-98"], [-100, -100], rel=0.01), [1, 0])  # the share is of the absolute value
    same(of_field("near", ["101", "103"], [100, 100], abs=2.5), [1, 0])  # whichever is wider
    golds = ["cheap", True, None, {"cost": 1}, "1e999", 10**400, [100]]
    same(of_field("near", ["100"] * len(golds), golds), [NAN] * len(golds))
    same(of_field("near", ["4.01", "5"], [GSM8K] * 2), [1, 0])
    same(of_field("near", [False], ["cheap"]), [NAN], [ABSENT])


def test_one_of_the_values_that_are_allowed():
    cells = [["Rome", "Roma"], '["Rome", 3]', {"price": ["Rome"]}, {"price": []}, {"price": "Rome"}, None, ["Rome"]]
    same(of_field("one_of", ["Roma", "3.0", "Paris", "Rome", "Rome", "Rome", None], cells), [1, 1, 0, NAN, NAN, NAN, 0])
    same(of_field("one_of", [False], [["Rome"]]), [NAN], [ABSENT])


def test_number_i_is_that_of_step_i_and_an_absent_step_has_none():
    steps = {"step[0]": {"": "a"}, "step[1]": {"": "b"}, "step[2]": None}
    cells = [[0.5, -1], "[0.5, 0]", [0.5, None, 0.9], [0.5], None, [0.1, float("nan")], [0.1, "0.2"], [0.1, True]]
    cells += [{"step[1]": 0.3}, {"step[0]": 0.3}]
    values = [-1, 0, NAN, NAN, NAN, NAN, NAN, NAN, 0.3, NAN]
    status = [OK, OK, ABSENT, ERROR, ERROR, ABSENT, ERROR, ERROR, OK, ERROR]
    same(scored("listed", "step[1]", [steps] * len(cells), columns={"listed": cells}), values, status)
    part, cells = {"items[0].parts[1]": {"": "a"}}, [[0.1, 0.2], {"items[0].parts[1]": 0.3}]  # number 0 or number 1?
    same(scored("listed", "items[0].parts[1]", [part] * 2, columns={"listed": cells}), [NAN, 0.3], [ERROR, OK])
    text = [steps, {**steps, "step[2]": {"": "c"}}]  # the block that is judged is not the one that is paid
    same(scored("listed", "step[1]", text, columns={"listed": [[1, 2, 3]] * 2}, block="step[2]"), [NAN, 3], [ABSENT, OK])


OBJECT = {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer", "minimum": 2}}}


def valid(texts, schema, **more):
    """Score texts, or blocks with their fields, under a schema; None: the completion has no block."""
    blocks = ({"": text} if isinstance(text, str) else text for text in texts)
    return scored("json_schema", "all", [{"all": block} for block in blocks], schema=schema, **more)


def test_a_whole_completion_under_a_schema(tmp_path):
    fenced = 'Sure:\n```json\n{"a": 3}\n``` Done {'
    texts = ['{"a": 2}', fenced, '{"a": 1}', '{"b": 2}', '{"a": 2', "", "[]", "{" * 100_000, None]
    values = [1, 1, 0, 0, 0, 0, 0, 0, NAN]
    same(valid(texts, OBJECT), values, [OK] * 8 + [ABSENT])
    file = tmp_path / "object.json"
    file.write_text(json.dumps(OBJECT))
    same(valid(texts, str(file)), values, [OK] * 8 + [ABSENT])
    deep = '{"a": ' + "[" * 900 + "]" * 900 + "}"
    inner = {"$ref": "#/$defs/x"}
    recursive = {**inner, "$defs": {"x": {"additionalProperties": inner, "items": inner}}}
    same(valid(['{"a": {"a": []}}', deep], recursive), [1, 0])


@pytest.mark.parametrize(
    ("step", "number", "right"),
    [
        ("0.01", "0.07", 1), ("0.01", "19.99", 1), ("0.01", "0.075", 0), ("0.1", "0.3", 1), ("0.1", "1.1e0", 1),
        ("0.01", "3", 1), ("0.01", "3.0", 1), ("0.01", "1e300", 1), ("0.01", "1" + "0" * 400, 1), ("3", "1" + "0" * 400, 0),
        ("0.03", "1" + "0" * 400, 0), ("2", "1e400", 0), ("0.01", "1e400", 0), ("0.01", "-1e400", 0), ("2", "4.0", 1),
        ("0.01", "NaN", 0), ("0.01", "Infinity", 0), ("2", "-Infinity", 0), ("5e-324", "0.1", 1), ("3e-300", "0.1", 0),
        ("0.01", "5e-324", 0), ("0.01", "1" + "0" * 5000, 0),
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "kind", ["", "https://json-schema.org/draft/2020-12/schema", "http://json-schema.org/draft-07/schema#"]
)
def test_a_multiple_is_one_of_the_decimals_that_are_written(kind, step, number, right):
    schema = f'{{"properties": {{"price": {{"multipleOf": {step}}}, "of": {{"$ref": "#"}}}}}}'
    schema = schema.replace("{", f'{{"$schema": "{kind}", ', 1) if kind else schema
    texts = [f'{{"price": {number}}}', f'{{"of": {{"price": {number}}}}}']
    same(valid(texts, "shape", columns={"shape": [schema] * 2}), [right] * 2)


def test_numbers_are_read_for_what_they_are():
    texts = ["3.0", "3", "3.5", "1e400", "NaN", "Infinity", '"NaN"']
    same(valid(texts, {"type": "integer"}), [1, 1, 0, 0, 0, 0, 0])
    same(valid(texts, {"type": "number", "minimum": 3}), [1, 1, 1, 1, 0, 0, 0])
    same(valid(texts, {"enum": [3, 3.5, "NaN"]}), [1, 1, 1, 0, 0, 0, 1])
    fields = [{"n": text, "": f'"n": {text}'} for text in texts[:4]]
    same(valid(fields, {"type": "number", "multipleOf": 0.5}, tag="n"), [1, 1, 1, 0])
    schemas = ['{"multipleOf": NaN}', '{"multipleOf": 1e400}', '{"maximum": Infinity}']
    same(valid(["3"] * 3, "shape", columns={"shape": schemas}), [NAN] * 3)


def test_all_blocks_make_the_whole_in_the_order_in_which_they_were_written():
    layout = Layout({"a": "a", "b": "b", "prose": []}, segmenter="json")
    scheme = Scheme("bae", layout, [Objective("json_schema", "*", options={"schema": OBJECT})])
    assert read(byte_group(*['{"b": 1, "a": 2}'] * 2), scheme, BYTES).scores.reward_nm.flatten().tolist() == [1.0, 1.0]


def test_a_schema_of_the_dataset_and_rows_without_one():
    cells = [OBJECT, json.dumps(OBJECT), {"type": "intger"}, "no schema", None, 3, OBJECT]
    rewards = valid(['{"a": 2}', '{"a": 1}', *['{"a": 2}'] * 4, None], "shape", columns={"shape": cells})
    same(rewards, [1, 0, NAN, NAN, NAN, NAN, NAN], [OK, OK, ERROR, ERROR, ERROR, ERROR, ABSENT])


def test_a_field_in_quotes_is_a_string_as_is_read_behind_its_own_key():
    cases = [
        ("3", '"n": 3, '), ("3", '"n": "3", '), ("3", ' "3"'), ("3", " 3"), ("tea", '"n": "tea"'), ("[1", '"n": "[1"'),
        (None, '"n": [1'), ("3", '{"a": 3, "n": "3"}'), ("3", '{"a": "3", "n" : 3}'), ("3", '{"a": [3, "3"], "n":"3"}'),
    ]  # fmt: skip
    fields = [{"n": text, "": block} for text, block in cases]
    same(valid(fields, {"type": "integer"}, tag="n"), [1, 0, 0, 1, 0, 0, 0, 0, 1, 0])
    same(valid(fields, {"type": "string"}, tag="n"), [0, 1, 1, 0, 1, 1, 0, 1, 0, 1])


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"$ref": "#/$defs/b"}}},
        {"$defs": {"b": {"$id": "b.json", "items": {"$ref": "c.json"}}}},
        {"allOf": [{"not": {"$ref": "#/$defs/b"}}], "$defs": {"b": {"if": {"$ref": "#"}}}},
        {"const": {1, 2}},
        {"items": {"$ref": "#/elsewhere"}, "elsewhere": {"type": "intger"}},
        [],
    ],
)
def test_a_schema_that_is_none_is_refused_before_anything_runs_and_nothing_is_fetched(schema, monkeypatch):
    monkeypatch.setattr(socket, "socket", None)
    monkeypatch.setattr(socket, "getaddrinfo", None)
    with pytest.raises(RecipeError):
        check_objectives([Objective("json_schema", "a", options={"schema": schema})], Layout({"a": "a"}))
    harmless = {"const": {"$ref": "https://example.com/a.json"}, "$id": "https://example.com/b.json"}
    harmless["$defs"] = {"c": {"$id": "c.json"}}
    harmless["properties"] = {"d": {"$ref": "c.json"}, "e": {"$ref": "https://json-schema.org/draft/2020-12/schema"}}
    check_objectives([Objective("json_schema", "a", options={"schema": harmless})], Layout({"a": "a"}))


def test_text_around_the_json_is_wrong_where_it_must_stand_alone():
    texts = [
        '{"a": 3}', ' {"a": 3}\n<eos>', '{"a": 3}<|im_end|>', 'So {"a": 3}', '{"a": 3} {"a": 3}', '{"a": 3}</s> more', '{"a": "x"}',
    ]  # fmt: skip
    integer = {"properties": {"a": {"type": "integer"}}}
    same(valid(texts, integer, alone=True), [1, 1, 1, 0, 0, 0, 0])
    same(valid(texts, integer), [1, 1, 1, 1, 1, 1, 0])


def doubled(times):
    """A schema that looks at the same value 2**times times."""
    names = [f"d{n}" for n in range(times + 1)]
    inner = {name: {"allOf": [{"$ref": f"#/$defs/{after}"}] * 2} for name, after in itertools.pairwise(names)}
    return {"$ref": "#/$defs/d0", "$defs": {**inner, names[-1]: {"type": "object"}}}


BACKTRACKS = {"properties": {"a": {"pattern": r"^(\w+\s?)*$"}}}
COMPARES = {"properties": {"a": {"uniqueItems": True}}}


@pytest.mark.parametrize(
    ("schema", "right_and_wrong", "long"),
    [
        (BACKTRACKS, ['{"a": "so it is"}', '{"a": "!"}'], json.dumps({"a": "x" * 40 + "!"})),
        pytest.param(
            COMPARES,
            ['{"a": [{}, {"k": 2}]}', '{"a": [{}, {}]}'],
            json.dumps({"a": [{"k": n} for n in range(8000)]}),
            marks=pytest.mark.long,
        ),
        pytest.param(doubled(30), [], "{}", marks=pytest.mark.long),
    ],
)
def test_a_value_that_takes_a_schema_too_long_is_stopped_and_costs_itself_alone(schema, right_and_wrong, long):
    limited = {"workers": 2, "deadline": 0.5}
    check_objectives([Objective("json_schema", "all", options={"schema": schema, **limited})], Layout({"all": "all"}))
    size = len(right_and_wrong)
    same(valid([*right_and_wrong, long, None], schema, **limited), [*[1, 0][:size], 0, NAN], [*[OK] * size, BROKE, ABSENT])


def test_a_schema_of_linear_keywords_starts_no_process(monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    same(valid(['{"a": 2}', '{"a": 1}'], {"title": "pattern", **OBJECT}), [1, 0])
    named = {"properties": {"pattern": {"enum": ["$ref"]}}, "additionalProperties": False}
    same(valid(['{"pattern": "$ref"}', '{"uniqueItems": true}'], named), [1, 0])


CODE = {
    '```python title="a.py"\ntwo = lambda: 2\n```\n': 1.0,
    "```python {.a}\n1 / 0\n```\nso\n```py3.11\r\ntwo = lambda: 2\r\n```": 1.0,
    "def two():\n    return 2": 1.0,
    "```python\ndef two():\n    return 3\n```\nBetter:\n```\ndef two():\n    return 2\n```": 1.0,
    "def two():": 0.0,
    "two = lambda: 2\nx = '''": 0.0,  # would swallow the tests
    "while True: pass": 0.0,
    "import mmap\nx = mmap.mmap(-1, 2**30)\ntwo = lambda: 2": 0.0,
    "two = lambda: open('x', 'wb').write(b'0' * 2**27) and 2": 0.0,
    "import os\nassert 'SPANWISE_SECRET' not in os.environ and os.listdir() == []\ntwo = lambda: 2": 1.0,
    "import sys\nassert sys.stdin.read() == ''\nprint('x' * 2**20)\ntwo = lambda: 2": 1.0,
    "\ud800": 0.0,
    " ": 0.0,
    "1. So:\n   ```python\n   def two():\n       return 2\n   ```\n2. Done": 1.0,
    "   ```python\ndef two():\n    return 2\n   ```": 1.0,  # only the fence is indented
    "Call ```two()``` to see\n```python title=a\ntwo = lambda: 2\n```\nor ```two()```\n or so": 1.0,
}
RUN_LIMITS = {"allow": True, "workers": 2, "deadline": 0.3, "memory": 2**29}


def test_code_runs_to_the_end_of_its_tests_within_its_limits(monkeypatch):
    monkeypatch.setenv("SPANWISE_SECRET", "1")
    text = [{"fix": {"code": code, "": ""}} for code in CODE] + [{"fix": {"code": None, "": ""}}, {"fix": None}]
    rewards = scored("runs", "fix", text, columns={"tests": ["assert two() == 2"] * len(text)}, tests="tests", **RUN_LIMITS)
    same(rewards, [*CODE.values(), 0, NAN], [OK] * (len(CODE) + 1) + [ABSENT])
    ends = [{"fix": {"code": code, "": ""}} for code in ("exit(0)", "x = 1", "exit(3)", "1 / 0")]
    same(scored("runs", "fix", ends, **RUN_LIMITS), [1, 1, 0, 0])


#: Cells of a column of tests: those that right code passes, those that it fails, and tests that any code would pass, or none.
PASSED = ['["x = two()", "assert x == 2"]', " ['x = two()', 'assert x == 2']", "['x = two()' 'assert x == 2']"]
PASSED += [["x = two()", "assert x == 2"], np.array(["x = two()", "assert x == 2"]), np.str_("assert two() == 2")]
FAILED = ['["assert two() == 2", "assert two() == 3"]', "['assert two() == 3']"]
NO_TESTS = ["", None, 3, "[]", "[1, 2", "# assert two() == 2", [{"input": "", "output": "2"}]]
NO_TESTS += ['{"inputs": ["1\\n"], "outputs": ["2\\n"]}', '{"cases": [{"output": "2", "shown": true}], "fn_name": null}']
NO_TESTS += ["import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        self.assertEqual(two(), 2)"]
NO_TESTS += ['METADATA = {"author": "a"}\n\ndef check(candidate):\n    assert candidate() == 2\n']


def test_tests_are_code_or_a_list_of_it_and_what_calls_nothing_is_none():
    cells = [*PASSED, *FAILED, *NO_TESTS]
    text = [{"fix": {"code": "two = lambda: 2", "": ""}}] * len(cells)
    rights = [1] * len(PASSED) + [0] * len(FAILED) + [NAN] * len(NO_TESTS)
    same(scored("runs", "fix", text, columns={"tests": cells}, tests="tests", **RUN_LIMITS), rights)


@pytest.mark.long
def test_values_are_compared_as_python_compares_them_outside_of_the_process_that_ran_the_code():
    limits = {"deadline": 5.0, "clock": 30.0, "memory": 0}
    code = (
        "import collections, decimal, enum, fractions\n"
        "class Kind(str, enum.Enum):\n    A = 'a'\n"
        "pair = collections.namedtuple('pair', 'x y')\n"
        "def check(f):\n    assert f(3) == 3\n"
    )
    right = [
        "2 == 2.0", "True == 1", "0.1 + 0.2 == 0.30000000000000004", "fractions.Fraction(1, 2) == 0.5", "Kind.A == 'a'",
        "decimal.Decimal('0.5') == 0.5", "[1, (2, {'a': {3}})] == [1.0, (2, {'a': {3}})]",
        "{'b': 1, 'a': None} == {'a': None, 'b': 1}", "collections.Counter('aab') == {'a': 2, 'b': 1}",
        "pair(1, 'x\\n') == (1, 'x\\n')", "{1: 2}.keys() == {1}", "10 ** 5000 == 0x" + f"{10**5000:x}",
        "numpy.int64(2) == 2", "[numpy.float32(0.5), numpy.bool_(True)] == [0.5, 1]",
        "float('inf') == 1e999", "b'a' == b'a'", "2j == 2j", "'\\ud800' == '\\ud800'",
    ]  # fmt: skip
    asserts = "\n".join(f"assert {comparison}" for comparison in right)
    assert run(f"import numpy\n{code}", f"{asserts}\ncheck(int)", **limits) is True
    wrong = ["check(lambda n: 4) is None", "'2' == 2", "[1] == (1,)", "float('nan') == 1", "b'a' == 'a'", "None == 0"]
    wrong.append("{1} == [1]")
    for comparison in wrong:
        assert run(code, f"assert {comparison}", **limits) is False, comparison


def test_a_program_that_sleeps_is_stopped_by_the_clock_with_what_it_started(tmp_path):
    sign = tmp_path / "alive"
    child = f"import time; time.sleep(0.3); open({str(sign)!r}, 'w')"
    code = f"import subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', {child!r}])\n"
    assert run(code, None, deadline=5.0, clock=30.0, memory=0)  # it ends by itself, and its child with it
    assert not run(f"{code}time.sleep(60)", None, deadline=5.0, clock=0.2, memory=0)
    assert run("import time\ntime.sleep(0.4)", None, deadline=5.0, clock=30.0, memory=0)
    assert not sign.exists()


@pytest.mark.parametrize("options", [{}, {"allow": False}, {"allow": "yes"}, {"allow": 1}])
def test_code_does_not_run_unless_somebody_allows_it(options, tmp_path):
    sign = tmp_path / "ran"
    with pytest.raises(RecipeError):
        check_objectives([Objective("runs", "fix", options={"tag": "", **options})], Layout({"fix": []}))
    with pytest.raises(RecipeError):
        scored("runs", "fix", [{"fix": {"": f"open({str(sign)!r}, 'w')"}}], tag="", **options)
    assert not sign.exists()


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("reward", "options", "columns"),
    [
        ("equals", {"tag": "price"}, {"answer": ["4", {"price": 4}, '{"price": null}', None, [1]]}),
        ("near", {"tag": "price"}, {"answer": ["4", {"price": 0.7}, "x", None]}),
        ("one_of", {"tag": "price"}, {"answer": [["4", 0.7], {"price": ["", "x"]}, [], None]}),
        ("listed", {}, {"listed": [[0.5], '{"price": 2}', {"price": None}, None, []]}),
        ("json_schema", {"tag": "price", "schema": "shape"}, {"shape": [OBJECT, '{"type": "number"}', None, "x"]}),
        ("json_schema", {"schema": OBJECT}, {}),
        ("runs", {"tag": "price", "tests": "tests", **RUN_LIMITS}, {"tests": ["assert True", None]}),
    ],
)
def test_every_one_has_the_properties_of_a_reward(reward, options, columns):
    fewer = {"properties": ["absent", "split"], "examples": 3} if reward == "runs" else {"examples": 6}
    layout = Layout({"price": "price", "step[0]": "step"})
    check_reward(reward, pays=["price"], layout=layout, options=options, columns=columns, processes=False, **fewer)


@pytest.mark.parametrize(
    ("text", "gold", "right"),
    [
        ('Sure: {"items": [1, 2]}', '{"items": [3, 4]}', 1), ('{"items": [1, 2, 3]}', {"items": [3, 4]}, 0),
        ('{"items": [1, 2', '{"items": [3, 4]}', 0), ('{"item": [1, 2]}', '{"items": [3, 4]}', 0),
        ("[1, 2]", '{"items": [3, 4]}', 0), ('{"items": [1, 2]}', "[3, 4]", 1),
        ('{"items": []}', '{"items": []}', 1), ('{"items": [1]}', '{"item": [1]}', NAN),
    ],
)  # fmt: skip
def test_count_compares_how_many_elements_there_are(text, gold, right):
    rewards = scored("count", "all", [{"all": {"": text}}, {"all": None}], columns={"answer": [gold, gold]})
    same(rewards, [right, NAN], [ERROR if right != right else OK, ABSENT])


def test_a_whole_completion_is_read_without_the_token_that_ends_it():
    blocks = [{"all": {"": said}} for said in ("[1, 2]<|im_end|>", "[1]<|im_end|>")]
    same(scored("count", "all", blocks, columns={"answer": ["[3, 4]"] * 2}), [1, 0])
    blocks = [{"all": {"": said}} for said in ("Rome<|im_end|>", "Rome<eos>", "Oslo<|im_end|>")]
    same(scored("correct", "all", blocks, columns={"answer": ["Rome"] * 3}, tag=""), [1, 1, 0])
    blocks = [{"all": {"": said}} for said in ("x = 1<|im_end|>", "x = <|im_end|>")]
    same(scored("runs", "all", blocks, allow=True, workers=1, tag=""), [1, 0])
