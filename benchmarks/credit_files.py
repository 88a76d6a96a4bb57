"""Cost of `spanwise credit` on a large rollout file, each measured in a process of its own.

    python benchmarks/credit_files.py [--completions 10000] [--tokens 1000] [--files 10] [--methods grpo,bae]

Writes spanwise's own parquet with synthetic completions (eight tags each, words of four bytes on average), then prints wall time,
tokens per second and peak memory of the whole command (reading, segmentation, rewards, three methods, export, report), beside
two floors: starting Python with torch and pyarrow, and reading and rewriting the same columns with pyarrow alone.

With `--text` the file is TRL's completions, text without ids, and a byte-level BPE tokenizer of 8,000 pieces encodes it again.
With `--lines` it is verl's dump, JSON lines with text, of which every word is a token; the floor copies it line by line. With
`--table` they are JSON lines of one's own, with `prompt` and `completion`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TAGS = ("reasoning", "answer", "analysis", "confidence")
FLOOR = """
import sys, pyarrow as pa, pyarrow.parquet as pq
from pathlib import Path
files = sorted(Path(sys.argv[1]).glob("*/*.parquet"))
writer = None
for file in files:
    table = pq.read_table(file)
    writer = writer or pq.ParquetWriter(sys.argv[2], table.schema, compression="zstd")
    writer.write_table(table)
writer.close()
"""
LINES_FLOOR = """
import json, sys
from pathlib import Path
with open(sys.argv[2], "w") as out:
    for line in open(next(Path(sys.argv[1]).glob("*.jsonl"))):
        out.write(json.dumps(json.loads(line)) + "\\n")
"""
START = "import sys, torch, pyarrow.parquet"
COMMAND = """
import sys, torch
torch.set_num_threads(1)
from spanwise.commands.credit.credit import credit
credit(sys.argv[1], output=sys.argv[2], methods=sys.argv[3].split(","), tokenizer=(sys.argv[4:] or [None])[0])
"""


def synthetic_run(folder: Path, *, completions: int, tokens: int, files: int, group: int = 16, words: int = 50_000) -> int:
    """Write a run folder: recipe, tokenizer and rollouts; returns the number of tokens."""
    rng = np.random.default_rng(0)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz      "))
    pieces = list(dict.fromkeys("".join(rng.choice(letters, size=size)) for size in rng.integers(2, 8, words)))
    marks = [f"<{slash}{tag}>" for tag in TAGS for slash in ("", "/")]
    numbers = [f"0.{digit}" for digit in range(10)] + [str(digit) for digit in range(10)]
    pieces = [*dict.fromkeys([*marks, *numbers, *pieces])]
    first_word = len(marks) + len(numbers)
    backend = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token=pieces[-1]))
    backend.decoder = decoders.Fuse()
    (folder / "model").mkdir(parents=True)
    backend.save(str(folder / "model" / "tokenizer.json"))
    (folder / "recipe.yaml").write_text("task: digits\nmethod: bae\n")
    (folder / "rollouts").mkdir()
    total = 0
    for step, count in enumerate(np.diff(np.linspace(0, completions, files + 1).astype(int)), start=1):
        rows: dict[str, list] = {name: [] for name in ("ids", "text", "correct", "brier", "advantages")}
        for _ in range(count):
            length = int(rng.integers(tokens * 3 // 4, tokens * 5 // 4 + 1))
            body = [rng.integers(first_word, len(pieces), size).tolist() for size in (length * 3 // 4, length // 4 - 10)]
            digit, sure = rng.integers(len(marks) + 10, first_word), rng.integers(len(marks), len(marks) + 10)
            ids = [0, *body[0], 1, 2, int(digit), 3, 4, *body[1], 5, 6, int(sure), 7]
            right = float(rng.integers(2))
            rows["ids"].append(ids)
            rows["text"].append("".join(pieces[i] for i in ids))
            rows["correct"].append(right)
            rows["brier"].append(-((float(pieces[sure]) - right) ** 2))
            rows["advantages"].append([0.0] * len(ids))
            total += len(ids)
        table = {
            "step": [step] * count,
            "prompt": [f"step {step}, prompt {n // group}" for n in range(count)],
            "completion_ids": rows["ids"],
            "trainable": [[True] * len(ids) for ids in rows["ids"]],
            "text": rows["text"],
            "reward/correct": rows["correct"],
            "status/correct": ["ok"] * count,
            "reward/brier": rows["brier"],
            "status/brier": ["ok"] * count,
            "advantages/bae": rows["advantages"],
        }
        pq.write_table(pa.table(table), folder / "rollouts" / f"step_{step:06d}.parquet")
    return total


def text_run(folder: Path, run: Path, *, pieces: int = 8000) -> Path:
    """Write the completions of `run` as TRL does, and a tokenizer for them; returns the tokenizer's folder."""
    texts: list[str] = []
    (folder / "completions").mkdir(parents=True)
    for file in sorted(run.glob("rollouts/*.parquet")):
        table = pq.read_table(file, columns=["step", "prompt", "text", "reward/correct", "reward/brier"])
        texts += table["text"].to_pylist()[:20]
        names = ["step", "prompt", "completion", "correct", "brier"]
        place = folder / "completions" / file.name.replace("step", "completions")
        pq.write_table(table.rename_columns(names), place)
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=pieces, initial_alphabet=alphabet, show_progress=False)
    )
    backend.save(str(folder / "tokenizer.json"))
    return folder


def lines_run(
    folder: Path, *, completions: int, tokens: int, own: bool = False, group: int = 16, words: int = 20_000
) -> int:
    """Write verl's dump of texts, or a table of one's `own`, line by line; returns the number of words in them."""
    rng = np.random.default_rng(0)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    vocabulary = np.array(["".join(rng.choice(letters, size=size)) for size in rng.integers(2, 9, words)])
    folder.mkdir()
    total, prompt = 0, ""
    with (folder / "1.jsonl").open("w") as file:
        for n in range(completions):
            prompt = prompt if n % group else f"{n // group}: {' '.join(rng.choice(vocabulary, 60))}"
            length, answer, sure = int(rng.integers(tokens // 2, tokens)), int(rng.integers(10)), int(rng.integers(1, 10))
            reasoning, analysis = (" ".join(rng.choice(vocabulary, size)) for size in (length, length // 4))
            body = f"<reasoning>{reasoning}</reasoning><answer>{answer}</answer>"
            body += f"<analysis>{analysis}</analysis><confidence>0.{sure}</confidence>"
            right = float(answer == n // group % 10)
            names = ("prompt", "completion", "answer", "correct") if own else ("input", "output", "gts", "score")
            row = dict(zip(names, (prompt, body, str(n // group % 10), right), strict=True))
            row |= {} if own else {"acc": right}
            file.write(json.dumps({**row, "step": 1 + n // group // 64}) + "\n")
            total += length + length // 4
    return total


def measured(code: str, *arguments: object) -> tuple[float, float, float]:
    """Wall seconds, CPU seconds and peak memory in GiB of a Python process."""
    probe = (
        "import json, resource, subprocess, sys, time; s = time.perf_counter();"
        "done = subprocess.run([sys.executable, '-c', *sys.argv[1:]], stdout=sys.stderr, check=True);"
        "u = resource.getrusage(resource.RUSAGE_CHILDREN);"
        "print(json.dumps([time.perf_counter() - s, u.ru_utime + u.ru_stime, u.ru_maxrss / 2**20]))"
    )
    run = [sys.executable, "-c", probe, code, *map(str, arguments)]
    process = subprocess.run(run, stdout=subprocess.PIPE, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    seconds, cpu, memory = json.loads(process.stdout)
    return seconds, cpu, memory


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--completions", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--files", type=int, default=10)
    parser.add_argument("--methods", default="grpo,rlcr,bae")
    parser.add_argument("--text", action="store_true", help="TRL's completions, encoded again with a tokenizer")
    parser.add_argument("--lines", action="store_true", help="verl's JSON lines, a token per word")
    parser.add_argument("--table", action="store_true", help="JSON lines of one's own, a token per word")
    options = parser.parse_args()
    if options.tokens < 54 and not (options.lines or options.table):
        parser.error(f"--tokens is {options.tokens}; eight tags and something between them need at least 54.")
    with tempfile.TemporaryDirectory() as place:
        run, out = Path(place) / "run", Path(place) / "out"
        size = {"completions": options.completions, "tokens": options.tokens, "files": options.files}
        more = []
        lines = options.lines or options.table
        if lines:
            tokens = lines_run(run, completions=options.completions, tokens=options.tokens, own=options.table)
        else:
            tokens = synthetic_run(run, **size)
        if options.text:
            run = text_run(Path(place) / "text", run)
            more = [run / "tokenizer.json"]
        on_disk = sum(file.stat().st_size for file in (*run.glob("*/*.parquet"), *run.glob("*.jsonl")))
        rows = {
            "start": measured(START),
            "floor: read and rewrite": measured(LINES_FLOOR if lines else FLOOR, run, Path(place) / "floor"),
            "spanwise credit": measured(COMMAND, run, out, options.methods, *more),
        }
        print(
            f"{options.completions} completions, {tokens / 1e6:.1f} M tokens, {on_disk / 1e6:.0f} MB in {options.files} files"
        )
        for name, (seconds, cpu, memory) in rows.items():
            speed = tokens / seconds / 1e6
            print(f"{name:26s} {seconds:6.1f} s wall  {cpu:6.1f} s CPU  {speed:6.2f} M tokens/s  {memory:5.2f} GiB peak")
        wall, cpu = (rows["spanwise credit"][i] / rows["floor: read and rewrite"][i] for i in (0, 1))
        written = ", ".join(f"{file.name} {file.stat().st_size / 1e6:.1f} MB" for file in sorted(out.iterdir()))
        print(f"credit takes {wall:.1f} x the floor (CPU {cpu:.1f} x); written: {written}")
        print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
