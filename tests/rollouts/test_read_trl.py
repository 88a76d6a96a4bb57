"""TRL's completions, written by the code of `GRPOTrainer.log`: chats, tool calls, images left out, rewards that are missing."""

import json
import math
import random
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from transformers import Trainer
from trl import GRPOTrainer

from rollout_files import texts, trl_file
from spanwise.rollouts import read_rollouts

TALK = ["so", "4", "é", "日本", "\u2028", "🙂", "<answer>4</answer>", '"q"', "{}", "a,b"]


def spoken(draw):
    return " ".join(draw.choices(TALK, k=draw.randint(1, 6)))


def log(folder, step, rows, monkeypatch):
    """Let TRL write the rows of a step."""
    monkeypatch.setattr(Trainer, "log", lambda *_: None)
    monkeypatch.setattr("trl.trainer.grpo_trainer.is_rich_available", lambda: False)
    (folder / "completions").mkdir(exist_ok=True)
    trainer = object.__new__(GRPOTrainer)
    trainer.model = SimpleNamespace(training=True)
    trainer.accelerator = SimpleNamespace(is_main_process=True)
    trainer.args = SimpleNamespace(report_to=[], output_dir=str(folder))
    trainer.state = SimpleNamespace(global_step=step)
    trainer.log_completions, trainer._metrics = True, {"train": defaultdict(list)}
    columns = {name: [row[name] for row in rows] for name in ("prompt", "completion", "advantages")}
    rewards = {name: [row[name] for row in rows] for name in ("right", "style")}
    trainer._logs = {**columns, "rewards": rewards, "extra": {"level": [step] * len(rows)}, "images": []}
    trainer.log({})


def chat(draw, *, calls, images):
    """A prompt and a completion; with images every content is a list of parts, as TRL makes it."""

    def content(*, image=False):
        more = [{"type": "image", "image": "never written"}] * image
        return [*more, {"type": "text", "text": spoken(draw)}] if images else spoken(draw)

    prompt = [{"role": "system", "content": content()}, {"role": "user", "content": content(image=True)}]
    call = {"type": "function", "function": {"name": "find", "arguments": {"word": spoken(draw)}}}
    reply = {"role": "tool", "name": "find", "content": content()}
    tools = [{"role": "assistant", "content": None, "tool_calls": [call]}, reply]
    return prompt, [*(tools if calls else []), {"role": "assistant", "content": content()}]


def prompt_of(messages):
    return json.dumps([{"role": message["role"], "content": text_of(message)} for message in messages])


def text_of(message):
    """What a message says, by the fields that pandas reads."""
    content = message["content"]

    def absent_or(field):
        return [] if field is None else field

    parts = [content] if isinstance(content, str) else [part.get("text") or "" for part in absent_or(content)]
    calls = [call["function"] for call in absent_or(message.get("tool_calls"))]
    written = [f"{call['name']}({json.dumps(call['arguments'], ensure_ascii=False)})" for call in calls]
    return "\n".join(part for part in ("".join(parts), *written) if part)


@pytest.mark.parametrize("seed", range(10))
def test_what_trl_logs_is_what_is_read(seed, tmp_path, monkeypatch):
    draw, is_chat = random.Random(seed), seed % 2 == 1
    for step in (1, 2):
        prompts = [prompt for prompt in (f"{n} {spoken(draw)}" for n in range(draw.randint(1, 3))) for _ in range(2)]
        rows = [{"prompt": prompt, "completion": spoken(draw)} for prompt in prompts]
        if is_chat:
            pairs = [chat(draw, calls=draw.random() < 0.5, images=seed % 4 == 3) for _ in range(2)]
            rows = [dict(zip(("prompt", "completion"), draw.choice(pairs), strict=True)) for _ in range(6)]
        for row in rows:
            row |= {"right": draw.choice([0.0, 1.0, math.nan]), "style": draw.random(), "advantages": draw.random()}
        log(tmp_path, step, rows, monkeypatch)
    files = sorted((tmp_path / "completions").glob("*.parquet"))
    logged = pd.concat([pd.read_parquet(file) for file in files], ignore_index=True)
    table = read_rollouts(tmp_path)
    assert (table.source, table.step_n.tolist()) == ("TRL", logged["step"].tolist())
    completions, prompts = logged["completion"].tolist(), logged["prompt"].tolist()
    if is_chat:
        for n, messages in enumerate(completions):
            trainable = np.array(table.tokens.with_values(table.trainable).slice(n, n + 1))
            assert all(message["role"] == "assistant" for message in messages) == trainable.all()
        completions, prompts = ["".join(map(text_of, messages)) for messages in completions], [*map(prompt_of, prompts)]
    assert (list(table.prompts), texts(table)) == (prompts, completions)
    for name in ("right", "style"):
        if logged[name].notna().any():
            assert table.rewards[name].value_n.tolist() == pytest.approx(logged[name].tolist(), nan_ok=True)
    assert table.as_recorded.value.tolist() == pytest.approx(logged["advantage"].tolist())
    assert table.columns["level"] == logged["level"].tolist()


def test_a_table_without_advantages_is_not_trls(tmp_path):
    for columns, source in (({"advantage": [0.0]}, "TRL"), ({}, "parquet")):
        assert read_rollouts(trl_file(tmp_path / "a.parquet", ["4"], step=[1], **columns)).source == source
