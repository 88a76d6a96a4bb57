"""Rollout files that are damaged, empty or of another kind."""

import json
import zipfile

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from border.case import case, check, command
from full_disk import full_disk
from rollout_files import small_episode, write_lines

PLAIN = [{"prompt": "2+2=", "completion": text, "passed": 1} for text in ("4", "It is 5, I think.")]
LM_EVAL = {"doc_id": 0, "doc": {}, "arguments": {"gen_args_0": {"arg_0": "2+2="}}, "resps": [["4"]], "filter": "none"}


@case
def credited(folder, write, *arguments, **options):
    return command("credit", write(folder, *arguments, **options), "--output", "out")


def text(folder, name, content):
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder / name


def lines(folder, name, *rows):
    return write_lines(folder / name, rows)


def cut(folder, write, *arguments, part=0.5):
    file = write(folder, *arguments)
    return text(folder, file.name, file.read_bytes()[: int(file.stat().st_size * part)])


def parquet(folder, **columns):
    pq.write_table(pa.table({"prompt": ["2+2="] * 2, "completion": ["4", "5"], **columns}), folder / "a.parquet")
    return folder / "a.parquet"


def dump(folder, **saved):
    torch.save(saved, folder / "0.pt")
    return folder / "0.pt"


def sample(**changes):
    """A sample of slime's, without the fields that are None."""
    usual = {"prompt": "p", "tokens": [1, 2, 3], "response": "ab", "response_length": 2}
    return [{name: value for name, value in {**usual, **changes}.items() if value is not None}]


def archive(folder):
    with zipfile.ZipFile(folder / "log", "w") as file:
        file.writestr("a.txt", "x")
    return folder / "log"


def without_room(folder):
    file = lines(folder, "1.jsonl", *PLAIN * 8)
    with full_disk(100):
        return credited(lambda folder: file)(folder)


FLAGS = {"completion_ids": [[1], [3]], "trainable": [[True], [True]], "text": ["4", "5"]}
CASES = {
    "a file without a byte, of any format": credited(text, "1.jsonl", ""),
    "JSON lines, cut off": credited(cut, lines, "1.jsonl", *PLAIN, part=0.8),
    "a JSON array, cut off": credited(cut, text, "a.json", json.dumps(PLAIN), part=0.8),
    "a `.json` of plain text": credited(text, "a.json", "hello"),
    "a CSV file, cut off": credited(text, "a.csv", "prompt,completion,acc\n2+2=,4,1\n2+2="),
    "an image called `.csv`": credited(text, "a.csv", b"\x89PNG\r\n\x1a\n" + bytes(90)),
    "JSON called `.csv`": credited(text, "a.csv", json.dumps(PLAIN)),
    "a CSV file with a heading alone": credited(text, "a.csv", "prompt,completion\n"),
    "parquet, cut off": credited(cut, parquet),
    "text called `.parquet`": credited(text, "a.parquet", "hello\n"),
    "a file of numpy": credited(text, "a.npy", b"\x93NUMPY\x01\x00" + bytes(90)),
    "a pickle, such as SkyRL's `dump_data_batch`": credited(text, "a.pkl", b"\x80\x04}."),
    "a zip archive": credited(archive),
    "a conversation that is a text": credited(lines, "1.jsonl", {"messages": "hi"}),
    "verl's dump with a row that lacks its output": credited(
        lines, "1.jsonl", {"input": "q", "output": "a"}, {"input": "q"}
    ),
    "samples of lm-eval with a row that lacks its responses": credited(
        lines, "samples_sums.jsonl", LM_EVAL, {name: LM_EVAL[name] for name in LM_EVAL if name != "resps"}
    ),
    "samples of lm-eval whose responses are a number": credited(lines, "samples_sums.jsonl", {**LM_EVAL, "resps": 5}),
    "samples of lm-eval of a task with given choices": credited(lines, "samples_sums.jsonl", {**LM_EVAL, "arguments": {}}),
    "traces with a line that is none": credited(lines, "traces.jsonl", small_episode("4", {}), {"a": 1}),
    "a dump of slime, cut off": credited(cut, lambda folder: dump(folder, rollout_id=0, samples=sample())),
    "a torch file that is no dump": credited(dump, w=torch.zeros(1)),
    "a dump of slime whose sample lacks its response": credited(dump, samples=sample(response=None)),
    "a dump of slime whose tokens are words": credited(dump, samples=sample(tokens=["a", "b"])),
    "a dump of slime with a response longer than its tokens": credited(dump, samples=sample(response_length=9)),
    "our own rollouts, with a flag too few": credited(parquet, **{**FLAGS, "completion_ids": [[1, 2], [3]]}),
    "a word among the numbers of a reward": credited(text, "a.csv", "prompt,completion,reward\n2+2=,4,1\n2+2=,5,high\n"),
    "decimal commas in the column `reward`": credited(text, "a.csv", "prompt;completion;reward\n2+2=;4;0,5\n2+2=;5;0,2\n"),
    "our own rollouts, with words in place of rewards": credited(parquet, **FLAGS, **{"reward/tone": ["good", "bad"]}),
    "no room for the tokens of a file": without_room,
}

test = check(__doc__, CASES)
