"""verl's dump of rollouts, written by verl's own function: any texts, rewards and columns are read back."""

import json
import math
import random

import numpy as np
import pytest
from verl.trainer.ppo.ray_trainer import RayPPOTrainer

from rollout_files import texts
from spanwise.rollouts import read_rollouts


def spoken(draw):
    words = ["so", "4", "é", "日本", "\u2028", "🙂", "<answer>4</answer>", '"q"', "{}", "a,b", "\n"]
    return " ".join(draw.choices(words, k=draw.randint(0, 6)))


@pytest.mark.parametrize("seed", range(10))
def test_what_verl_dumps_is_what_is_read(seed, tmp_path):
    draw = random.Random(seed)
    expected = []
    for step in (9, 10):
        prompts = [prompt for prompt in (f"{n} {spoken(draw)}" for n in range(draw.randint(1, 3))) for _ in range(2)]
        outputs = [f"{n}{spoken(draw)}" for n in range(len(prompts))]
        scores = [draw.choice([0.0, 0.5, -1.0]) for _ in prompts]
        # as reward functions return them: missing for some, numbers of numpy, texts
        acc = [draw.choice([True, False, None]) for _ in prompts]
        loss = [np.float64(draw.random()) for _ in prompts]
        extra = {"acc": acc, "loss": loss, "pred": [spoken(draw) for _ in prompts]}
        RayPPOTrainer._write_generations(prompts, outputs, ["é"] * len(prompts), scores, extra, str(tmp_path), step)
        expected += [(step, *row) for row in zip(prompts, outputs, scores, acc, loss, extra["pred"], strict=True)]
    table = read_rollouts(tmp_path)
    steps, prompts, outputs, scores, acc, loss, pred = zip(*expected, strict=True)
    assert (table.source, table.step_n.tolist(), tuple(table.prompts)) == ("verl", list(steps), prompts)
    assert tuple(texts(table)) == outputs
    assert table.rewards["score"].value_n.tolist() == list(scores)
    if any(value is not None for value in acc):
        numbers = [math.nan if value is None else float(value) for value in acc]
        assert table.rewards["acc"].value_n.tolist() == pytest.approx(numbers, nan_ok=True)
    lines = [json.loads(line) for step in (9, 10) for line in (tmp_path / f"{step}.jsonl").read_text().split("\n") if line]
    assert table.columns["loss"] == [line["loss"] for line in lines]  # verl writes a number of numpy as text or as a number
    assert tuple(table.columns["pred"]) == pred
    assert table.columns["answer"] == ["é"] * len(lines)
    same = [(step, prompt) for step, prompt in zip(steps, prompts, strict=True)]
    assert [[a == b for b in same] for a in same] == (table.group_n[:, None] == table.group_n).tolist()
