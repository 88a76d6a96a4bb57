"""What `spanwise why` says of a file for SAE: decisions, stretches and the critic's delay, on made values that are known."""

import io
import json
import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

import trl_small
from spanwise.commands.why.why import why

STRETCH, DECISIONS, ROWS = 8, 6, 40


def run(path, delay, *, blind=False, seed=0):
    """A run of SAE: a decision of +1 or -1 every eight tokens, seen by the critic `delay` tokens late; the reward is their sum."""
    draw = np.random.default_rng(seed)
    trl_small.tokenizer().save_pretrained(path / "model")
    size = STRETCH * (DECISIONS + 1)
    effect_nk = draw.choice([-1.0, 1.0], (ROWS, DECISIONS))
    values = np.zeros((ROWS, size))
    for k in range(DECISIONS):
        values[:, STRETCH * (k + 1) + 1 + delay :] += 0.0 if blind else effect_nk[:, [k]]
    values += 0.1 * draw.standard_normal(values.shape)
    probability = np.full((ROWS, size), 0.9)
    probability[:, STRETCH : STRETCH * (DECISIONS + 1) : STRETCH] = 0.1
    ids = trl_small.tokenizer().convert_tokens_to_ids(["<answer>", "4", "</answer>", *["a"] * (size - 3)])
    columns = {
        "step": [1] * ROWS, "group": [0] * ROWS, "prompt": ["2+2="] * ROWS, "completion_ids": [ids] * ROWS,
        "trainable": [[True] * size] * ROWS, "text": ["<answer>4</answer>" + "a" * (size - 3)] * ROWS, "fault": [0] * ROWS,
        "start/solution": [0] * ROWS, "end/solution": [size] * ROWS, "reward/correct": effect_nk.sum(axis=1).tolist(),
        "status/correct": ["ok"] * ROWS, "values": values.tolist(), "logprobs": [[math.log(p) for p in row] for row in probability],
        "credit/sae/solution": [0.5] * ROWS, "credit/sae/stop": [0.0] * ROWS, "advantages/sae": [[0.1] * size] * ROWS,
    }  # fmt: skip
    (path / "rollouts").mkdir(parents=True)
    pq.write_table(pa.table(columns), path / "rollouts" / "step_000001.parquet")
    objective = "{reward: correct, pays: solution, if_missing: 0.0}"
    (path / "recipe.yaml").write_text(
        f"method: sae\nlayout: {{solution: [answer]}}\nobjectives: [{objective}]\nprompts: 1\ngroup_size: {ROWS}\n"
    )
    (path / "metrics.jsonl").write_text(json.dumps({"step": 1}) + "\n")
    return path


def said(path):
    console = Console(file=io.StringIO(), width=200)
    why(path, console=console)
    return console.file.getvalue()


@pytest.mark.parametrize(("delay", "lag"), [(0, "1 token."), (1, "2 tokens"), (5, "8 tokens")])
def test_decisions_are_counted_and_the_delay_is_found(delay, lag, tmp_path):
    """.95^(1/8) is .9936; the last stretch ends with the completion, a token short."""
    seen = said(run(tmp_path, delay))
    assert "sae: 6 decisions (tokens below 0.2) in a completion, 7.83 tokens from one to the next" in seen
    assert "lambda 0.9935 at each token has the same horizon" in seen
    assert f"half of what it learns of a decision after {lag}" in seen


def test_a_critic_that_sees_nothing_is_said(tmp_path):
    assert "the critic's value does not move with the reward" in said(run(tmp_path, 0, blind=True))
