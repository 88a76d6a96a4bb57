"""Rollout files that are damaged, empty or of another kind."""

import json
import zipfile

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from border.case import check, command
from full_disk import full_disk
from rollout_files import small_episode, trl_file, write_lines

PLAIN = [{"prompt": "2+2=", "completion": text, "passed": 1} for text in ("4", "It is 5, I think.")]
SAMPLE = {"prompt": "p", "tokens": [1, 2, 3], "response": "ab", "response_length": 2}
LM_EVAL = {"doc_id": 0, "doc": {}, "arguments": {"gen_args_0": {"arg_0": "2+2="}}, "resps": [["4"]], "filter": "none"}


def credited(file):
    return command("credit", file, "--output", "out")


def text(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def cut(path, part=0.5):
    """Cut off the end of a file."""
    return text(path, path.read_bytes()[: int(path.stat().st_size * part)])


def parquet(path, **columns):
    pq.write_table(pa.table({"prompt": ["2+2="] * 2, "completion": ["4", "5"], **columns}), path)
    return path


def dump(path, **fields):
    torch.save({"rollout_id": 0, "samples": [{**SAMPLE, **fields}]}, path)
    return path


def archive(path):
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a.txt", "x")
    return path


def without_room(file):
    with full_disk(100):
        return credited(file)


def without(record, name):
    return {key: value for key, value in record.items() if key != name}


CASES = {
    "a file without a byte, of any format": lambda f: credited(text(f / "1.jsonl", "")),
    "JSON lines, cut off": lambda f: credited(cut(write_lines(f / "1.jsonl", PLAIN), 0.8)),
    "a JSON array, cut off": lambda f: credited(cut(text(f / "a.json", json.dumps(PLAIN)), 0.8)),
    "a `.json` of plain text": lambda f: credited(text(f / "a.json", "hello")),
    "a CSV file, cut off": lambda f: credited(text(f / "a.csv", "prompt,completion,acc\n2+2=,4,1\n2+2=")),
    "an image called `.csv`": lambda f: credited(text(f / "a.csv", b"\x89PNG\r\n\x1a\n" + bytes(90))),
    "JSON called `.csv`": lambda f: credited(text(f / "a.csv", json.dumps(PLAIN))),
    "a CSV file with a heading alone": lambda f: credited(text(f / "a.csv", "prompt,completion\n")),
    "parquet, cut off": lambda f: credited(cut(trl_file(f / "a.parquet", ["4", "5"]))),
    "text called `.parquet`": lambda f: credited(text(f / "a.parquet", "hello\n")),
    "a file of numpy": lambda f: credited(text(f / "a.npy", b"\x93NUMPY\x01\x00" + bytes(90))),
    "a pickle, such as SkyRL's `dump_data_batch`": lambda f: credited(text(f / "a.pkl", b"\x80\x04}.")),
    "a zip archive": lambda f: credited(archive(f / "log")),
    "a conversation that is a text": lambda f: credited(write_lines(f / "1.jsonl", [{"messages": "hi"}])),
    "verl's dump with a row that lacks its output": lambda f: credited(
        write_lines(f / "1.jsonl", [{"input": "q", "output": "a"}, {"input": "q"}])
    ),
    "samples of lm-eval with a row that lacks its responses": lambda f: credited(
        write_lines(f / "samples_sums.jsonl", [LM_EVAL, without(LM_EVAL, "resps")])
    ),
    "samples of lm-eval whose responses are a number": lambda f: credited(
        write_lines(f / "samples_sums.jsonl", [{**LM_EVAL, "resps": 5}])
    ),
    "samples of lm-eval of a task with given choices": lambda f: credited(
        write_lines(f / "samples_sums.jsonl", [{**LM_EVAL, "arguments": {}}])
    ),
    "traces with a line that is none": lambda f: credited(
        write_lines(f / "traces.jsonl", [small_episode("4", {}), {"a": 1}])
    ),
    "a dump of slime, cut off": lambda f: credited(cut(dump(f / "0.pt"))),
    "a torch file that is no dump": lambda f: credited((torch.save({"w": torch.zeros(1)}, f / "0.pt"), f / "0.pt")[1]),
    "a dump of slime whose sample lacks its response": lambda f: credited(
        (torch.save({"samples": [without(SAMPLE, "response")]}, f / "0.pt"), f / "0.pt")[1]
    ),
    "a dump of slime whose tokens are words": lambda f: credited(dump(f / "0.pt", tokens=["a", "b"])),
    "a dump of slime with a response longer than its tokens": lambda f: credited(dump(f / "0.pt", response_length=9)),
    "our own rollouts, with a flag too few": lambda f: credited(
        parquet(f / "a.parquet", completion_ids=[[1, 2], [3]], trainable=[[True], [True]], text=["4", "5"])
    ),
    "a word among the numbers of a reward": lambda f: credited(
        text(f / "a.csv", "prompt,completion,reward\n2+2=,4,1\n2+2=,5,high\n")
    ),
    "words in a column `reward/NAME`": lambda f: credited(
        write_lines(f / "1.jsonl", [{"prompt": "2+2=", "completion": "4", "reward/tone": "good"}])
    ),
    "our own rollouts, with words in place of rewards": lambda f: credited(
        parquet(
            f / "a.parquet",
            completion_ids=[[1], [3]],
            trainable=[[True], [True]],
            text=["4", "5"],
            **{"reward/tone": ["good", "bad"]},
        )
    ),
    "no room for the tokens of a file": lambda f: without_room(write_lines(f / "1.jsonl", PLAIN * 8)),
}

test = check(__doc__, CASES)
