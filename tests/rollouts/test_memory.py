"""Memory: reading keeps the ids of tokens and no text, and credit keeps nothing more of a token."""

import gc
import tracemalloc

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from plain_files import save
from rollout_files import node, write_lines, write_own
from spanwise.commands.credit.credit import credit_rollouts
from spanwise.rollouts import columns, files, json_array, read_rollouts
from tokenizers_small import byte_level

#: Ten times as many bytes as its tokens take.
WORDS = " ".join(f"w{n % 50}{'x' * 40}" for n in range(500))
ROWS = [{"prompt": f"{n // 8}", "completion": f"{n} {WORDS}", "score": float(n % 2), "step": n // 16} for n in range(50)]


#: Each completion's tokens, one a word, where a format has ids.
IDS, LOGPROBS = list(range(300, 801)), [-0.1 - n for n in range(501)]


def chat(row):
    return [{"role": "assistant", "content": row["completion"]}]


def lm_eval(row):
    texts = {"arguments": {"gen_args_0": {"arg_0": row["prompt"]}}, "resps": [[row["completion"]]]}
    usual = {"doc": {}, "target": "4", "filter": "none", "metrics": ["score"], "score": row["score"]}
    return {"doc_id": ROWS.index(row), **usual, **texts}


def traces(row):
    reply = node("assistant", "", parent=0, sampled=True, ids=IDS, mask=[True] * len(IDS), logprobs=LOGPROBS)
    nodes = [node("user", row["prompt"], parent=None), reply]
    return {"group": {"id": row["prompt"]}, "traces": [{"nodes": nodes, "rewards": {"score": row["score"]}}]}


def slime(folder):
    tokens = {"response": "", "response_length": len(IDS), "tokens": IDS, "rollout_log_probs": LOGPROBS}
    for step in range(10):
        samples = [{"prompt": row["prompt"], "reward": row["score"], **tokens} for row in ROWS[step * 5 : step * 5 + 5]]
        torch.save({"rollout_id": step, "samples": samples}, folder / f"{step}.pt")
    return folder


def own_file(folder):
    columns = {"prompt": [row["prompt"] for row in ROWS], "logprobs": [LOGPROBS] * len(ROWS)}
    return write_own(folder / "a.parquet", [IDS] * len(ROWS), **columns)


def scored(row, **fields):
    return {**fields, "score": row["score"], "step": row["step"]}


def lines(name, line):
    return lambda folder: write_lines(folder / name, map(line, ROWS))


FILES = {
    "verl": lines("1.jsonl", lambda row: scored(row, input=row["prompt"], output=row["completion"])),
    "lines": lines("1.jsonl", dict),
    "lists": lines("1.jsonl", lambda row: scored(row, question=row["prompt"], responses=[chat(row)])),
    "messages": lines("1.jsonl", lambda row: scored(row, messages=[{"role": "user", "content": row["prompt"]}, *chat(row)])),
    "lm-eval": lines("samples_a.jsonl", lm_eval),
    "traces": lines("traces.jsonl", traces),
    **{kind: lambda folder, kind=kind: save(folder, ROWS, kind) for kind in ("json", "csv", "parquet")},
    "slime": slime,
    "own": own_file,
}
#: The formats whose tokens have an id and a log-probability each, which takes four bytes.
WITH_LOGPROBS = ("traces", "slime", "own")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_level().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", FILES)
def test_reading_takes_little_beside_what_is_kept_and_says_how_far_it_is(name, tmp_path, monkeypatch, tokenizer):
    """Reading never holds all text of a file, nor its tokens as Python's numbers."""
    path = FILES[name](tmp_path)
    size = sum(file.stat().st_size for file in ([path] if path.is_file() else path.glob("*.pt")))
    monkeypatch.setattr(json_array, "_PIECE", 2**14)
    monkeypatch.setattr(files, "_BLOCK", 2**16)
    monkeypatch.setattr(columns, "_ROWS_AT_ONCE", 4)
    options = {"tokenizer": tokenizer} if name in WITH_LOGPROBS else {}
    read_rollouts(path, **options)  # imports, and the tokenizer
    done = []
    token = files.REPORT.set(lambda work, part, total: done.append((work, part, total)))
    gc.collect()  # else what earlier tests left may be collected, and warned about, while memory is measured
    tracemalloc.start()
    try:
        table = read_rollouts(path, **options)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        files.REPORT.reset(token)
    kept = len(table.tokens.values) * (9 if name in WITH_LOGPROBS else 5)  # four bytes of an id, one of the mask
    assert len(table) == len(ROWS)
    assert peak < 1.5 * kept + 300_000
    assert {(work, total) for work, _, total in done} == {("reading", size)}
    parts = [part for _, part, _ in done]
    assert parts[-1] == size
    assert len(parts) >= 5


def test_arrow_keeps_nothing_of_the_rows_before(tmp_path, monkeypatch):
    """Arrow's own memory, which tracemalloc does not see: at most a few of thirty row groups."""
    file = tmp_path / "a.parquet"
    monkeypatch.setattr(columns, "_ROWS_AT_ONCE", 5)
    pq.write_table(pa.Table.from_pylist(ROWS * 3), file, row_group_size=5, compression="none", use_dictionary=False)
    before, at_each = pa.total_allocated_bytes(), []
    for batch in columns.read_row_batches(file, ["completion"], files.ReadingProgress([file])):
        at_each.append(pa.total_allocated_bytes() - before)
        del batch
    assert max(at_each) < 0.2 * file.stat().st_size


def test_credit_keeps_nothing_of_a_token_beside_what_was_read(tmp_path):
    words = " ".join(f"word{n % 50}" for n in range(2000))
    text = f"<reasoning>{words}</reasoning><answer>4</answer><analysis>{words}</analysis><confidence>0.5</confidence>"
    rows = [{"prompt": f"{n // 8}", "completion": text, "answer": str(n % 2 + 3), "step": 1} for n in range(50)]
    file = write_lines(tmp_path / "1.jsonl", rows)
    tracemalloc.start()
    try:
        result = credit_rollouts(file, methods=["grpo", "rlcr", "bae"])
        kept = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len({applied.file_spans.names for applied in result.applied}) == 2
    assert kept < 1.2 * (result.table.tokens.values.nbytes + result.table.trainable.nbytes)
