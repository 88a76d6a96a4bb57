"""Rollout files as their writers leave them, small."""

import json
import re
from io import StringIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console

from spanwise.types import Status

LAYOUT = {"solution": ["answer"], "confidence": ["confidence"]}


def quiet():
    return Console(file=StringIO(), width=160)


def texts(table):
    """What each completion of a table says, token by token joined."""
    return [table.vocabulary.join(table.tokens.slice(n, n + 1).astype(np.int64))[0].decode() for n in range(len(table))]


def tagged(answer, confidence, thought="so "):
    report = "" if confidence is None else f"<confidence>{confidence}</confidence>"
    return f"{thought}<answer>{answer}</answer>{report}"


def write_lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def records(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def timeless_metrics(folder):
    """The lines of a run's metrics, without what a clock or the machine says."""
    timed = re.compile("seconds|time|share|memory|per_second")
    lines = records(folder / "metrics.jsonl")
    return [{name: value for name, value in line.items() if not timed.search(name)} for line in lines]


def verl_rows():
    """As `_write_generations` of verl 0.9 writes them: four fields, the step, then what the reward function returned."""
    spoken = [tagged("4", "0.9"), tagged("4", "0.7"), tagged("3", "0.8"), tagged("5", "0.1")]
    return [
        {"input": "2+2=", "output": text, "gts": "4", "score": score, "step": step, "acc": score > 0}
        for step, scores in ((9, (1.0, 1.0, 0.0, 0.0)), (10, (1.0, 1.0, 0.0, 0.0)))
        for text, score in zip(spoken, scores, strict=True)
    ]


def node(role, content, *, parent, sampled=False, ids=(), mask=(), logprobs=()):
    message = {"role": role, "content": content}
    extra = {"token_ids": list(ids), "mask": list(mask), "logprobs": list(logprobs)} if ids else {}
    return {"parent": parent, "message": message, "sampled": sampled, "timestamp": 1.0, **extra}


def trace(text, answer, reward, *, prompt="2+2=", extra=(), **fields):
    nodes = [node("user", prompt, parent=None), node("assistant", text, parent=0, sampled=True), *extra]
    return {
        "version": 1, "id": "t", "task": {"type": "Sums", "data": {"idx": 0, "prompt": prompt, "answer": answer}, "hash": "h"},
        "agent": {"config": {}, "name": "agent"}, "nodes": nodes, "rewards": reward, "metrics": {"turns": 1.0}, **fields,
    }  # fmt: skip


def episode(agent_trace, *, step=3, group="g"):
    return {
        "id": "e", "env": {"id": "sums"}, "task": agent_trace["task"], "group": {"id": group}, "ok": True, "errors": [],
        "run": {"type": "train", "id": "r", "work": {"type": "train", "step": step}}, "traces": [agent_trace],
    }  # fmt: skip


OK, ABSENT, UNPARSABLE, _, ERROR, UNSCORED, _ = (int(status) for status in Status)


def verl_file(path, outputs, *, prompts=None, step=1, **columns):
    rows = [{"input": prompts[n] if prompts else "2+2=", "output": text, "step": step} for n, text in enumerate(outputs)]
    for name, values in columns.items():
        for row, value in zip(rows, values, strict=True):
            row[name] = value
    return write_lines(path, rows)


def trl_file(path, outputs, **columns):
    pq.write_table(pa.table({"prompt": ["2+2="] * len(outputs), "completion": outputs, **columns}), path)
    return path


def small_episode(text, rewards, *, answer="4", group="g", **fields):
    nodes = [node("user", "2+2=", parent=None), node("assistant", text, parent=0, sampled=True)]
    trace = {"task": {"data": {"answer": answer}}, "agent": {"name": "a"}, "nodes": nodes, "rewards": rewards, **fields}
    return {"group": {"id": group}, "run": {"work": {"step": 1}}, "traces": [trace]}


def verifiers_file(path, outputs, **columns):
    rows = [{name: {"score": values[n], "weight": 1.0} for name, values in columns.items()} for n in range(len(outputs))]
    return write_lines(path, [small_episode(text, row) for text, row in zip(outputs, rows, strict=True)])


WELL_FORMED = [tagged("4", "0.9"), tagged("4", "0.8"), tagged("4", "0.7"), tagged("5", "0.1")]


def write_own(path, ids, *, key="completion_ids", **columns):
    """Completions in our own columns, all right unless `columns` say otherwise; those stand last, and None leaves one out."""
    size = len(ids)
    usual = {
        "step": [1] * size, "prompt": ["2+2="] * size, key: ids, "trainable": [[True] * len(row) for row in ids],
        "reward/correct": [1.0] * size, "status/correct": ["ok"] * size,
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    others = {name: column for name, column in usual.items() if name not in columns}
    pq.write_table(pa.table({name: column for name, column in {**others, **columns}.items() if column is not None}), path)
    return path


def own_run(folder, *, rewards, status=None, outputs=WELL_FORMED, recipe="group_size: 2\nprompts: 2\n"):
    """A run folder of ours as `keep_rollouts` leaves it, without the model."""
    columns = {"reward/correct": rewards, "status/correct": status, "text": outputs}
    write_own(folder / "rollouts" / "step_000001.parquet", [[1]] * 4, **columns)
    (folder / "recipe.yaml").write_text(f"layout: {json.dumps(LAYOUT)}\n{recipe}")
    return folder


def sae_run(folder, options=None, *, metrics=(), **columns):
    """A run of SAE that pays the answer: `columns` as `write_own` takes them, all of one group."""
    ids = columns.pop("completion_ids")
    size, width = len(ids), len(ids[0])
    usual = {
        "group": [0] * size, "fault": [0] * size, "start/solution": [0] * size, "end/solution": [width] * size,
        "credit/sae/solution": [0.5] * size, "credit/sae/stop": [0.0] * size, "advantages/sae": [[0.1] * width] * size,
    }  # fmt: skip
    write_own(folder / "rollouts" / "step_000001.parquet", ids, **{**usual, **columns})
    objective = "{reward: correct, pays: solution, if_missing: 0.0}"
    recipe = f"method: sae\nlayout: {{solution: [answer]}}\nobjectives: [{objective}]\nprompts: 1\ngroup_size: {size}\n"
    (folder / "recipe.yaml").write_text(f"{recipe}options: {json.dumps(options or {})}\n")
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, **dict(metrics)}) + "\n")
    return folder
