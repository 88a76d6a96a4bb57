"""One schema: what its table says is what both writers write, no other file spells a column, other versions are refused."""

import ast
import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import spanwise
from rollout_files import write_own
from rollouts_cases import TEXTS, Case, completion
from spanwise.errors import DataError, SpanwiseError
from spanwise.rollouts import read_rollouts, schema, write_rollouts
from spanwise.rollouts.rows import read_numbers, read_rows

TABLE = dict(re.findall(r"^\| `([^|`]+)`(?:[^|]*)\| ([^|]+) \|", schema.__doc__, re.M))


def plain(kind):
    """A type in the words of the table: the name of a list's entry says nothing."""
    return re.sub(r"struct<.*?>", "struct", re.sub(r"list<\w+: ", "list<", str(kind)))


def written(path, **changes):
    per_token = ("values", "values/correct", "logprobs")
    case = Case([completion(**dict.fromkeys(per_token, [0.0] * 3))], per_token=per_token, **{"text": True, **changes})
    write_rollouts(path, case.parts(), pieces=case.pieces)
    return pq.read_schema(path)


@pytest.mark.parametrize("pieces", [None, TEXTS])
def test_a_file_has_the_columns_and_types_that_the_table_says(pieces, tmp_path):
    stored = written(tmp_path / "a.parquet", pieces=pieces)
    assert {field.name: field.type for field in stored} == {field.name: schema.type_of(field.name) for field in stored}
    assert {name: plain(schema.type_of(re.sub(r"<\w+>", "x", name))) for name in TABLE} == TABLE
    families = {name.partition("/")[0] for name in stored.names}
    other = "tokens" if pieces is None else "completion_ids"
    # Whose a row is stands there where a rollout is several rows: test_credit_branches; blocks of tokens where they have pieces;
    # scores of their own where a recipe has laser: test_credit_score; parts and what is stated: test_report_parts;
    # notes: test_judge_runs; values after the last token where a run has a critic: test_credit_trained.
    elsewhere = {other, "rollout", "block", "self_reward", "parts", "stated", "note", "value_after"}
    assert families == {name.partition("/")[0] for name in TABLE} - elsewhere


def test_tokens_that_cut_characters_are_bytes(tmp_path):
    stored = written(tmp_path / "a.parquet", pieces=[b"\xc3", b"\xa9", b"a"])
    assert plain(stored.field("tokens").type) == "list<binary>"
    assert "list<binary>" in schema.__doc__


#: What starts a column and nothing else; metrics of training are called credit/..., too.
FAMILIES = ("start/", "end/", "reward/", "status/", "advantages/", "values/", "value_after/", "parts/", "stated/")
COLUMNS = ("completion_ids", "logprobs", "trainable")


def test_no_other_module_spells_a_column():
    """In the rooms that read and write own files; TRL's and verifiers' fields are those of their own formats."""
    root = Path(spanwise.__file__).parent
    rooms = [*(root / "rollouts").rglob("*.py"), *(root / "commands").rglob("*.py"), *(root / "report").rglob("*.py")]
    spelled = set()
    for file in rooms:
        texts = [node.value for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant)]
        texts = [text for text in texts if isinstance(text, str)]
        spelled |= {(file.stem, word) for word in FAMILIES for text in texts if text.startswith(word)}
        spelled |= {(file.stem, word) for word in COLUMNS if word in texts}
    allowed = {("schema", word) for word in COLUMNS}
    assert spelled >= allowed  # the search finds them where they are
    # A reward function's argument of that name, two fields of verifiers' own.
    fields = {"completion_ids": ("apply", "evaluate"), "logprobs": ("trainers", "traces"), "trainable": ("traces",)}
    others = {(stem, name) for name, stems in fields.items() for stem in stems}
    assert {place for place in spelled if place[0] != "schema"} <= others


@pytest.mark.parametrize("method", ["bae:group", "reinforce++", "日本 x"])
@pytest.mark.parametrize("block", ["a", "c/d", "stop it"])
def test_names_come_back_out_of_columns(method, block):
    column = schema.column
    names = [column("advantages", method), column("credit", method, block), column("credit", f"{method}x", block)]
    names += [column(family, block) for family in ("start", "end", "reward", "status")]
    assert schema.methods_in(names) == [method, f"{method}x"]
    assert schema.family_names(names, "credit", method) == [block]
    assert schema.family_names(names, "end") == schema.family_names(names, "reward") == [block]
    assert schema.method_columns(method, names) == names[:2]
    per_token = ["values/correct", "logprobs", "values/brier"]
    assert schema.token_columns([*per_token, *names]) == ["values/correct", "values/brier", "logprobs"]
    for family, *wrong in (("advantages", "a/b"), ("credit", "a/b", "c"), ("parts", "a/b")):
        with pytest.raises(SpanwiseError, match="'a/b'"):
            schema.column(family, *wrong)


def test_a_file_says_its_version_and_one_made_by_hand_needs_none(tmp_path):
    assert written(tmp_path / "a.parquet").metadata[b"spanwise.rollouts"] == b"1"
    file = write_own(tmp_path / "b.parquet", [[1]], text=["t"], answer=["4"], **{"advantages/mine": [[0.5]]})
    assert read_rollouts(file).columns == {"answer": ["4"]}
    pq.write_table(pq.read_table(file).replace_schema_metadata({"spanwise.rollouts": "2"}), file)
    with pytest.raises(DataError, match=r"b\.parquet' has version 2 .* reads version 1"):
        read_rollouts(file)


def test_advantages_of_no_method_are_refused(tmp_path):
    file = write_own(tmp_path / "a.parquet", [[1]], text=["t"], advantages=[[0.5]])
    for read in (read_rollouts, read_numbers, read_rows):
        with pytest.raises(DataError, match="a column 'advantages' without the name of a method"):
            read(file)
