"""Memory and time of `spanwise credit` for the same completions in every format of rollout files.

    python benchmarks/file_formats.py [--megabytes 100] [--formats csv,parquet]

Writes completions of so many megabytes of text in each format, and credits each file in a process of its own by grpo and bae. It
prints the size of the file, the resident memory of that process before reading, its peak while reading, what it keeps after
reading, and its peak at the end. *Anonymous* is the peak of the memory that the system cannot drop: the rest is pages of files,
such as the token ids, which lie in a temporary file (TMPDIR names its folder). The formats `inspect` and `eval`, the `.json` and
`.eval` of Inspect, need the package inspect_ai.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

TAGS = ("reasoning", "answer", "analysis", "confidence")
GROUP, GROUPS_PER_STEP = 16, 32
CHILD = """
import json, sys, threading, time, torch
torch.set_num_threads(1)
from spanwise.commands.credit import credit as command
from spanwise.rollouts.files import REPORT

def memory(name):
    return int(next(line for line in open("/proc/self/status") if line.startswith(name)).split()[1]) / 1024

def read(*args, **options):
    figures["start"], began = memory("VmRSS"), time.process_time()
    table = read_rollouts(*args, **options)
    figures.update(reading=memory("VmHWM"), kept=memory("VmRSS"), seconds=time.process_time() - began, rows=len(table))
    figures["tokens"] = len(table.tokens.values)
    return table

def watch():
    while True:
        figures["anonymous"] = max(figures["anonymous"], memory("RssAnon"))
        time.sleep(0.05)

figures, works, read_rollouts, began = {"anonymous": 0}, {}, command.read_rollouts, time.process_time()
threading.Thread(target=watch, daemon=True).start()
command.read_rollouts = read
REPORT.set(lambda work, done, total: works.setdefault(work, []).append(done / total))
source, output, reading, *tokenizer = sys.argv[1:]
if reading == "True":
    read(source, tokenizer=(tokenizer or [None])[0])
else:
    command.credit(source, output=output, methods=["grpo", "bae"], tokenizer=(tokenizer or [None])[0])
figures.update(peak=memory("VmHWM"), all=time.process_time() - began, reports=len(works.get("reading", ())))
print(json.dumps(figures), file=sys.stderr)
"""


def completions(megabytes: float, pieces: list[str]) -> Iterator[dict[str, Any]]:
    """Yield completions in groups of 16, of about 500 words each."""
    rng, size, n = np.random.default_rng(0), 0, 0
    prompt, first_word = "", 2 * len(TAGS) + 20
    while size < megabytes * 1e6 or n % GROUP:
        if n % GROUP == 0:
            prompt = f"{n // GROUP}: {''.join(pieces[i] for i in rng.integers(first_word, len(pieces), 60))}"
        length, digit, sure = int(rng.integers(200, 600)), int(rng.integers(10)), int(rng.integers(1, 10))
        body = [rng.integers(first_word, len(pieces), size).tolist() for size in (length, length // 4)]
        ids = [0, *body[0], 1, 2, 18 + digit, 3, 4, *body[1], 5, 6, 8 + sure, 7]
        text = "".join(pieces[i] for i in ids)
        answer = f"{n // GROUP % 10}"
        yield {
            "prompt": prompt, "ids": ids, "text": text, "answer": answer, "correct": float(f"{digit}" == answer),
            "step": 1 + n // GROUP // GROUPS_PER_STEP, "group": n // GROUP, "n": n,
        }  # fmt: skip
        size, n = size + len(text), n + 1


def vocabulary(words: int = 20_000) -> list[str]:
    """Return the texts of all tokens: tags, digits and words."""
    rng, letters = np.random.default_rng(1), np.array(list("abcdefghijklmnopqrstuvwxyz"))
    pieces = ["".join(rng.choice(letters, size=size)) + " " for size in rng.integers(2, 9, words)]
    marks = [f"<{slash}{tag}>" for tag in TAGS for slash in ("", "/")]
    numbers = [f"0.{digit}" for digit in range(10)] + [str(digit) for digit in range(10)]
    return [*dict.fromkeys([*marks, *numbers, *pieces])]


def write_tokenizer(folder: Path, pieces: list[str]) -> Path:
    """Write a tokenizer with these tokens."""
    from tokenizers import Tokenizer, decoders, models

    backend = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token=pieces[-1]))
    backend.decoder = decoders.Fuse()
    folder.mkdir(parents=True)
    backend.save(str(folder / "tokenizer.json"))
    return folder


Rows = Iterator[dict[str, Any]]


def by_step(rows: Rows) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of each training step together."""
    together: list[dict[str, Any]] = []
    for row in rows:
        if together and together[-1]["step"] != row["step"]:
            yield together
            together = []
        together.append(row)
    yield together


def columns(rows: list[dict[str, Any]], **names: Callable[[dict[str, Any]], Any]) -> dict[str, list[Any]]:
    """Return the columns of an Arrow table."""
    return {name: [entry(row) for row in rows] for name, entry in names.items()}


def plain(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of a table of one's own."""
    return {"prompt": row["prompt"], "completion": row["text"], "answer": row["answer"], "correct": row["correct"]}


def write_lines(file: Path, rows: Iterator[dict[str, Any]]) -> Path:
    """Write JSON lines."""
    with file.open("w") as stream:
        stream.writelines(json.dumps(row) + "\n" for row in rows)
    return file


def as_csv(folder: Path, rows: Rows) -> Path:
    """Write a CSV table."""
    with (folder / "table.csv").open("w", newline="") as stream:
        writer = csv.DictWriter(stream, ["prompt", "completion", "answer", "correct"])
        writer.writeheader()
        writer.writerows(map(plain, rows))
    return folder / "table.csv"


def as_json(folder: Path, rows: Rows) -> Path:
    """Write a JSON array."""
    with (folder / "table.json").open("w") as stream:
        for n, row in enumerate(rows):
            stream.write(("," if n else "[") + json.dumps(plain(row)))
        stream.write("]")
    return folder / "table.json"


def as_jsonl(folder: Path, rows: Rows) -> Path:
    """Write JSON lines with a prompt and a completion."""
    return write_lines(folder / "table.jsonl", map(plain, rows))


def as_chats(folder: Path, rows: Rows) -> Path:
    """Write JSON lines with prompts and completions as lists of messages."""

    def chat(row: dict[str, Any]) -> dict[str, Any]:
        system = {"role": "system", "content": "Think in tags."}
        return plain(row) | {
            "prompt": [system, {"role": "user", "content": row["prompt"]}],
            "completion": [{"role": "assistant", "content": row["text"]}],
        }

    return write_lines(folder / "chats.jsonl", map(chat, rows))


def as_messages(folder: Path, rows: Rows) -> Path:
    """Write an agent's log: OpenAI's messages with a tool call."""

    def log(row: dict[str, Any]) -> dict[str, Any]:
        call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
        messages = [
            {"role": "user", "content": row["prompt"]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": row["answer"]},
            {"role": "assistant", "content": row["text"]},
        ]
        return {"messages": messages, "answer": row["answer"], "correct": row["correct"]}

    return write_lines(folder / "agent.jsonl", map(log, rows))


def as_parquet(folder: Path, rows: Rows) -> Path:
    """Write a parquet table in one file."""
    writer = None
    for together in by_step(rows):
        table = pa.Table.from_pylist([plain(row) for row in together])
        writer = writer or pq.ParquetWriter(folder / "table.parquet", table.schema)
        writer.write_table(table)
    assert writer is not None, "there are rows"
    writer.close()
    return folder / "table.parquet"


def as_trl(folder: Path, rows: Rows) -> Path:
    """Write TRL's completions: a parquet file per step."""
    (folder / "completions").mkdir()
    for together in by_step(rows):
        table = columns(
            together, step=lambda r: r["step"], prompt=lambda r: r["prompt"], completion=lambda r: r["text"],
            correct=lambda r: r["correct"], answer=lambda r: r["answer"], advantage=lambda r: r["correct"],
        )  # fmt: skip
        pq.write_table(pa.table(table), folder / "completions" / f"completions_{together[0]['step']:05d}.parquet")
    return folder


def as_verl(folder: Path, rows: Rows) -> Path:
    """Write verl's dump: a file of JSON lines per step."""
    for together in by_step(rows):
        named = ({"input": r["prompt"], "output": r["text"], "gts": r["answer"], "score": r["correct"]} for r in together)
        write_lines(folder / f"{together[0]['step']}.jsonl", (row | {"step": together[0]["step"]} for row in named))
    return folder


def as_lm_eval(folder: Path, rows: Rows) -> Path:
    """Write samples of lm-evaluation-harness: a document per group, each completion as a document of its own file."""

    def sample(row: dict[str, Any]) -> dict[str, Any]:
        return {
            "doc_id": row["n"], "doc": {"question": row["prompt"], "answer": row["answer"]}, "target": row["answer"],
            "arguments": {"gen_args_0": {"arg_0": row["prompt"], "arg_1": {"until": []}}}, "resps": [[row["text"]]],
            "filtered_resps": [row["text"]], "filter": "none", "metrics": ["correct"], "doc_hash": "h", "prompt_hash": "h",
            "target_hash": "h", "correct": row["correct"],
        }  # fmt: skip

    return write_lines(folder / "samples_sums_2026.jsonl", map(sample, rows))


def as_slime(folder: Path, rows: Rows) -> Path:
    """Write slime's dumps: a torch file per step, with token ids and log-probabilities."""
    (folder / "rollout_data").mkdir()
    for together in by_step(rows):
        samples = [
            {
                "group_index": row["group"], "index": row["n"], "rollout_id": None, "prompt": row["prompt"], "tokens": row["ids"],
                "response": row["text"], "response_length": len(row["ids"]), "label": row["answer"], "reward": row["correct"],
                "loss_mask": None, "rollout_log_probs": [-0.5 - i / 7 for i in range(len(row["ids"]))], "remove_sample": False,
                "status": "completed", "metadata": {},
            }
            for row in together
        ]  # fmt: skip
        step = together[0]["step"]
        torch.save({"rollout_id": step, "samples": samples}, folder / "rollout_data" / f"{step}.pt")
    return folder


def as_traces(folder: Path, rows: Rows) -> Path:
    """Write traces of verifiers or prime-rl with token ids and log-probabilities."""

    def episode(row: dict[str, Any]) -> dict[str, Any]:
        question = {"parent": None, "message": {"role": "user", "content": row["prompt"]}, "sampled": False}
        reply = {
            "parent": 0, "message": {"role": "assistant", "content": row["text"]}, "sampled": True, "token_ids": row["ids"],
            "mask": [True] * len(row["ids"]), "logprobs": [-0.5 - i / 7 for i in range(len(row["ids"]))],
        }  # fmt: skip
        task = {"type": "Sums", "data": {"answer": row["answer"]}, "hash": "h"}
        trace = {
            "id": f"{row['n']}", "task": task, "agent": {"name": "solver"}, "nodes": [question, reply],
            "rewards": {"correct": {"score": row["correct"], "weight": 1.0}},
        }  # fmt: skip
        run = {"type": "train", "id": "r", "work": {"type": "train", "step": row["step"]}}
        return {"task": task, "group": {"id": f"{row['group']}"}, "run": run, "traces": [trace]}

    return write_lines(folder / "traces.jsonl", map(episode, rows))


def as_own(folder: Path, rows: Rows) -> Path:
    """Write rollouts as a training run of spanwise keeps them: a parquet file per step."""
    (folder / "rollouts").mkdir()
    for together in by_step(rows):
        table = columns(
            together, step=lambda r: r["step"], group_id=lambda r: r["group"], prompt=lambda r: r["prompt"],
            answer=lambda r: r["answer"], text=lambda r: r["text"], completion_ids=lambda r: r["ids"],
            trainable=lambda r: [True] * len(r["ids"]),
        )  # fmt: skip
        table |= {"reward/correct": [row["correct"] for row in together], "status/correct": ["ok"] * len(together)}
        table["advantages/bae"] = [[0.5] * len(row["ids"]) for row in together]
        file = folder / "rollouts" / f"step_{together[0]['step']:06d}.parquet"
        pq.write_table(pa.table(table), file, compression="zstd")
    return folder


def _as_inspect(folder: Path, rows: Rows, suffix: str) -> Path:
    """Write a log of Inspect, whose epochs are the completions of a group."""
    from inspect_ai import log, model, scorer  # pyright: ignore[reportMissingImports]

    samples, ids = [], dict[int, None]()
    for row in rows:
        ids.setdefault(row["group"])
        messages = [
            model.ChatMessageUser(content=row["prompt"], id=f"u{row['n']}"),
            model.ChatMessageAssistant(content=row["text"], id=f"a{row['n']}"),
        ]
        samples.append(
            log.EvalSample(
                id=row["group"], epoch=row["n"] % GROUP + 1, input=row["prompt"], target=row["answer"], messages=messages,
                scores={"correct": scorer.Score(value=row["correct"])},
            )
        )  # fmt: skip
    spec = log.EvalSpec(
        created="2026-11-28T08:00:00+00:00", task="sums", model="mockllm/model", dataset=log.EvalDataset(sample_ids=[*ids]),
        config=log.EvalConfig(epochs=GROUP),
    )  # fmt: skip
    file = folder / f"log{suffix}"
    log.write_eval_log(log.EvalLog(eval=spec, status="success", samples=samples), str(file))
    return file


def as_inspect(folder: Path, rows: Rows) -> Path:
    """Write Inspect's `.json`."""
    return _as_inspect(folder, rows, ".json")


def as_eval(folder: Path, rows: Rows) -> Path:
    """Write Inspect's `.eval`."""
    return _as_inspect(folder, rows, ".eval")


FORMATS = {
    function.__name__.removeprefix("as_"): function
    for function in (
        as_csv, as_json, as_jsonl, as_chats, as_messages, as_parquet, as_trl, as_verl, as_lm_eval, as_slime, as_traces, as_own,
        as_inspect, as_eval,
    )
}  # fmt: skip
#: The width of a column of the table.
WIDTH = 12
#: Formats with token ids, which are read with the tokenizer.
WITH_IDS = ("slime", "traces", "own")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=float, nargs="+", default=[100.0], help="of completions as text; several sizes")
    parser.add_argument("--formats", default=",".join(name for name in FORMATS if name not in ("inspect", "eval")))
    parser.add_argument("--reading", action="store_true", help="only read the file")
    options = parser.parse_args()
    headings = (
        "text MB",
        "file MB",
        "completions",
        "start",
        "reading",
        "kept",
        "peak",
        "anonymous MB",
        "reading s",
        "all s",
        "reports",
    )
    print(f"{'format':10s} {' '.join(f'{heading:>{WIDTH}s}' for heading in headings)}")
    for name in options.formats.split(","):
        for megabytes in options.megabytes:
            with tempfile.TemporaryDirectory() as place:
                pieces = vocabulary()
                (Path(place) / "data").mkdir()
                source = FORMATS[name](Path(place) / "data", completions(megabytes, pieces))
                files = [source] if source.is_file() else [file for file in source.rglob("*") if file.is_file()]
                words = [sys.executable, "-c", CHILD, str(source), str(Path(place) / "out"), str(options.reading)]
                words += [str(write_tokenizer(Path(place) / "tokenizer", pieces))] if name in WITH_IDS else []
                environment = {**os.environ, "OMP_NUM_THREADS": "1"}
                process = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
                if process.returncode:
                    reason = (process.stderr.strip().splitlines() or ["killed"])[-1]
                    print(f"{name:10s} {megabytes:7.0f}  failed: {reason}", flush=True)
                    continue
                figures = json.loads(process.stderr.strip().splitlines()[-1])
                size = sum(file.stat().st_size for file in files) / 1e6
            keys = ("rows", "start", "reading", "kept", "peak", "anonymous", "seconds", "all", "reports")
            numbers = [megabytes, size, *(figures[key] for key in keys)]
            print(f"{name:10s} {' '.join(f'{number:{WIDTH}.0f}' for number in numbers)}", flush=True)


if __name__ == "__main__":
    main()
