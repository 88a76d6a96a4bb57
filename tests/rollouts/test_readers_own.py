"""What the writer writes, the reader gives back; credit on an export is credit on what it was made of."""

import math
import os

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from tokenizers import Tokenizer, decoders, models

from rollout_files import ABSENT, OK, UNSCORED, own_run, write_own
from rollouts_cases import TEXTS, Case, cases, completion
from spanwise.commands.credit.credit import credit, credit_rollouts
from spanwise.errors import DataError
from spanwise.rollouts import read_rollouts, schema, write_rollouts
from spanwise.rollouts.rows import read_credit, read_numbers, read_rows, token_rows
from spanwise.rollouts.table import load_tokenizer
from spanwise.types import Fault, Status

SPELLED = ["<answer>", "</answer>", "4", "5", "<confidence>", "</confidence>", "0.9", "so ", "0.2"]
EXAMPLES = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """The folder of a tokenizer of nine words."""
    folder = tmp_path_factory.mktemp("tokenizer")
    backend = Tokenizer(models.WordLevel({word: n for n, word in enumerate(SPELLED)}, unk_token="so "))
    backend.decoder = decoders.Fuse()
    backend.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("files") / "a.parquet"


def same(first, other):
    """Return whether two lists are equal; NaN equals NaN and None."""
    return all(a == b or (a != a and (b is None or b != b)) for a, b in zip(first, other, strict=True))


@EXAMPLES
@given(case=cases())
def test_what_is_written_is_read(case, tokenizer, place):
    write_rollouts(place, case.parts(), pieces=case.pieces, tokenizer=None if case.pieces else tokenizer)
    table = read_rollouts(place)
    rows = case.rows
    assert list(table.prompts) == [row["prompt"] for row in rows]
    assert table.step_n.tolist() == [row["step"] for row in rows]
    keys = [(row["step"], row["group"]) for row in rows]
    numbers = list(dict.fromkeys(keys))
    assert table.group_n.tolist() == [numbers.index(key) for key in keys]
    assert table.keyed
    spelled = [word.encode() for word in SPELLED] if case.pieces is None else case.pieces
    for n, row in enumerate(rows):
        stored = [table.vocabulary.pieces[index] for index in table.tokens.slice(n, n + 1)]
        assert stored == [spelled[index] for index in row["ids"]]
        if case.pieces is None:
            assert table.tokens.slice(n, n + 1).tolist() == row["ids"]
        assert table.tokens.with_values(table.trainable).slice(n, n + 1).tolist() == row["trainable"]
        assert bool(table.learned_n[n]) != row["left_out"]
        for name in case.per_token:
            assert same(row[name], table.tokens.with_values(table.token_values[name]).slice(n, n + 1).tolist())
    assert table.has_ids == (case.pieces is None)
    assert set(table.token_values) == set(case.per_token)
    assert set(table.rewards) == set(case.objectives)
    for name, reward in table.rewards.items():
        assert same([row["reward"][name] for row in rows], reward.value_n.tolist())
        assert reward.status_n.tolist() == [row["status"][name] for row in rows]
    assert table.columns == {}


@EXAMPLES
@given(case=cases())
def test_what_is_written_is_shown(case, tokenizer, place):
    """Numbers of every row, and all of the rows that are asked for, whatever parts they lie in."""
    write_rollouts(place, case.parts(), pieces=case.pieces)
    table, rows = read_numbers(place), case.rows
    credit = read_credit(table)
    assert list(credit) == list(case.methods)
    for method in case.methods:
        for block in case.blocks:
            assert same([row[f"credit/{method}"][block] for row in rows], credit[method][block].tolist())
        stops = [row[f"stop/{method}"] or math.nan for row in rows]  # 0 is no stop credit
        stored = credit[method].get("stop")
        assert ("stop" in credit[method]) == any(stop == stop for stop in stops)
        assert stored is None or same(stops, stored.tolist())
    for name in case.objectives:
        assert same([row["reward"][name] for row in rows], schema.float_column(table, f"reward/{name}").tolist())
    chosen = list(range(0, len(rows), 2))
    for n, token_row in zip(chosen, token_rows(read_rows(place, chosen), None), strict=True):
        row = rows[n]
        texts = [f"⟨{i}⟩" if case.pieces is None else case.pieces[i].decode(errors="surrogateescape") for i in row["ids"]]
        assert token_row.tokens == texts
        assert token_row.step == row["step"]
        assert token_row.spans == {name: [(row["start"][name], row["end"][name])] for name in case.blocks}
        assert token_row.fault == ", ".join(fault.name.lower() for fault in Fault(row["fault"]))
        assert token_row.statuses == {name: Status(row["status"][name]).name.lower() for name in case.objectives}
        assert list(token_row.rewards) == list(case.objectives)
        assert same([row["reward"][name] for name in case.objectives], token_row.rewards.values())
        assert token_row.stop == {m: row[f"stop/{m}"] for m in case.methods if row[f"stop/{m}"] != 0}
        for method in case.methods:
            trained = zip(row[f"advantages/{method}"], row["trainable"], strict=True)
            assert same([value if flag else math.nan for value, flag in trained], token_row.advantages[method])
        streams = [name for name in case.per_token if name != "logprobs"]
        assert list(token_row.values) == [name.partition("/")[2] for name in streams]
        assert (token_row.probabilities is None) == ("logprobs" not in case.per_token)
        for name in streams:
            assert same(row[name], token_row.values[name.partition("/")[2]])
        if "logprobs" in case.per_token:
            assert same(np.exp(np.array(row["logprobs"])).tolist(), token_row.probabilities)


def test_a_file_names_the_tokenizer_of_its_ids(tokenizer, tmp_path):
    moved = tmp_path / "tokenizer"
    moved.mkdir()
    (moved / "tokenizer.json").write_bytes((tokenizer / "tokenizer.json").read_bytes())
    case = Case([completion(ids=(0, 2, 1))])
    write_rollouts(tmp_path / "a.parquet", case.parts(), tokenizer=moved)
    table = read_rollouts(tmp_path / "a.parquet")
    assert (table.has_ids, table.tokenizer) == (True, moved)
    moved.rename(tmp_path / "gone")
    with pytest.raises(DataError, match="--tokenizer"):
        read_rollouts(tmp_path / "a.parquet")
    assert read_rollouts(tmp_path / "a.parquet", tokenizer=tokenizer).tokens.values.tolist() == [0, 2, 1]


def test_a_tokenizer_is_loaded_once_until_it_changes(tokenizer, tmp_path):
    file = tmp_path / "tokenizer.json"
    file.write_bytes((tokenizer / "tokenizer.json").read_bytes())
    backend, vocabulary = load_tokenizer(tmp_path)
    assert load_tokenizer(file)[1] is load_tokenizer(str(tmp_path))[1] is vocabulary
    file.write_text(file.read_text().replace('"so "', '"as "'))
    os.utime(file, ns=(0, 0))
    assert load_tokenizer(tmp_path)[1].pieces[7] == b"as "
    (tmp_path / "config.json").write_text('{"vocab_size": 12}')  # the model beside it can sample more ids
    assert len(load_tokenizer(tmp_path)[1]) == 12
    file.unlink()
    with pytest.raises(DataError, match=r"holds no tokenizer\.json"):
        load_tokenizer(tmp_path)
    assert backend.id_to_token(7) == "so "


def test_texts_take_no_tokenizer_and_groups_that_some_rows_lack_are_refused(tokenizer, tmp_path):
    write_rollouts(tmp_path / "a.parquet", Case([completion()], pieces=TEXTS).parts(), pieces=TEXTS)
    with pytest.raises(DataError, match="holds its tokens as text"):
        read_rollouts(tmp_path / "a.parquet", tokenizer=tokenizer)
    file = write_own(tmp_path / "a.parquet", [["a"], ["b"]], key="tokens", group=[0, None])
    with pytest.raises(DataError, match=r"1 of 2 completions of .* have no 'group'"):
        read_rollouts(file)


def test_a_row_without_a_rollout_beside_rows_with_one_is_a_rollout(tmp_path):
    """As where a run went on with turns, or only some of its batches have them."""
    file = write_own(tmp_path / "a.parquet", [["a"]] * 4, key="tokens", group=[0] * 4, rollout=[0, 0, None, None])
    assert read_rollouts(file).rollout_n.tolist() == [0, 0, 1, 2]


def test_statuses_of_our_own_files(tmp_path):
    rewards = [1.0, None, None, 0.0]
    kept = read_rollouts(own_run(tmp_path / "a", rewards=rewards, status=["ok", "timeout", "absent", "ok"]))
    assert kept.rewards["correct"].status_n.tolist() == [OK, int(Status.TIMEOUT), ABSENT, OK]
    bare = read_rollouts(own_run(tmp_path / "b", rewards=rewards))
    assert bare.rewards["correct"].status_n.tolist() == [OK, UNSCORED, UNSCORED, OK]
    with pytest.raises(DataError, match=r"Completion 1 of .* has 'late' in column 'status/correct'; a status is one of ok"):
        read_rollouts(own_run(tmp_path / "c", rewards=rewards, status=["ok", "late", "ok", "ok"]))


LAYOUT = {"solution": ["answer"], "confidence": ["confidence"]}
#: Right, wrong, right without a confidence, and one that was left out of the loss; each stands in two groups.
SAID = ["0271465", "031485", "021", "021485"]


@pytest.mark.parametrize("ids", [True, False])
def test_credit_on_an_export_is_credit_on_its_rollouts(ids, tokenizer, tmp_path):
    cases = []
    for n, digits in enumerate(SAID * 2):
        tokens = [int(sign) for sign in digits]
        spans = {"start": {"solution": 0, "confidence": 0}, "end": {"solution": len(tokens) * (n != 3), "confidence": 0}}
        right, status = (math.nan, Status.TIMEOUT) if n == 5 else (float(2 in tokens), Status.OK)
        fields = {"reward": {"correct": right}, "status": {"correct": int(status)}, **spans}
        critic = {"values": [0.25] * len(tokens), "logprobs": [-0.5] * len(tokens)}
        cases.append(completion(tokens, group=n // 4, prompt="same", **fields, **critic))
    pieces = None if ids else [word.encode() for word in SPELLED]
    case = Case(cases, per_token=("values", "logprobs"), pieces=pieces)
    write_rollouts(tmp_path / "in.parquet", case.parts(), pieces=pieces, tokenizer=tokenizer if ids else None)
    options = {"methods": ["grpo", "bae", "gae"], "overrides": {"layout": LAYOUT}}
    first, file = credit(tmp_path / "in.parquet", output=tmp_path / "out", **options), tmp_path / "out" / "credit.parquet"
    second = credit_rollouts(file, **options)
    assert [applied.name for applied in second.applied] == ["grpo", "bae", "gae"]
    assert second.table.learned_n.tolist() == first.table.learned_n.tolist() == [True] * 3 + [False] + [True] * 4
    for before, other in zip(first.applied, second.applied, strict=True):
        assert before.credit.block_nk.tolist() == other.credit.block_nk.tolist()
        assert before.credit.stop_n.tolist() == other.credit.stop_n.tolist()
        expected = before.advantages(first.table, 0, 8)
        np.testing.assert_array_equal(expected, other.advantages(second.table, 0, 8))
        assert np.abs(expected).max() > 0
    assert second.scores.status_nm.tolist() == first.scores.status_nm.tolist()
    # A timeout stays one, also of what it judges; the tags are read from the text.
    assert second.scores.status_nm[5].tolist() == [int(Status.TIMEOUT)] * 2 + [int(Status.OK)] * 2
    # The export says what was left out and what is not there.
    table = pq.read_table(file)
    rows = table.to_pylist()
    for method in ("grpo", "bae", "gae"):
        assert [row[f"advantages/{method}"] == [None] * 6 for row in rows] == [False] * 3 + [True] + [False] * 4
    assert [row["credit/bae/confidence"] is None for row in rows] == [False, False, True, False] * 2
    assert rows[3]["credit/bae/confidence"] == float(first.applied[1].credit.block_nk[3, 1])  # it was still compared
    assert [(row["start/confidence"], row["end/confidence"]) for row in rows[:4]] == [(4, 7), (3, 6), (0, 0), (0, 0)]
    assert [row["group"] for row in rows] == [0] * 4 + [1] * 4
    for output in (tmp_path / "twice", file.parent):  # the second time over its own input
        credit(file, output=output, **options)
        assert pq.read_table(output / "credit.parquet").equals(table)


def test_only_what_is_asked_for_is_read(tmp_path):
    """A damaged column of tokens stops only those who need it."""
    file = tmp_path / "a.parquet"
    rows = [completion(range(6), prompt=str(n)) for n in range(6)]
    write_rollouts(file, Case(rows, cuts=[2, 4]).parts())
    part = pq.ParquetFile(file).metadata.row_group(1)
    chunks = {part.column(n).path_in_schema: part.column(n) for n in range(part.num_columns)}
    chunk, data = chunks["completion_ids.list.element"], bytearray(file.read_bytes())
    start, size = chunk.dictionary_page_offset or chunk.data_page_offset, chunk.total_compressed_size
    data[start : start + size] = bytes(size)
    file.write_bytes(data)
    assert read_credit(read_numbers(file))["bae"]["solution"].tolist() == [0.5] * 6
    assert [row.prompt for row in token_rows(read_rows(file, [0, 1, 5]), None)] == ["0", "1", "5"]
    with pytest.raises(DataError, match=r"a.parquet' is not readable as parquet; it is damaged or cut off \("):
        read_rows(file, [2])


@pytest.mark.parametrize("read", [read_numbers, read_rows])
def test_files_that_cannot_be_shown_are_one_sentence(read, tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 but no more")
    with pytest.raises(DataError, match="is not readable as parquet"):
        read(tmp_path / "a.parquet")
    with pytest.raises(DataError, match="cannot be read: No such file or directory"):
        read(tmp_path / "none.parquet")
