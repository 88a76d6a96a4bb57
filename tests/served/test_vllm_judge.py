"""A judge behind a real vLLM with constrained choices: on a file and in a run of verl."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parents[1] / "engines" / "verl" / "cpu"))

from run_verl import Run, options, run, write_task

from spanwise import Objective, score_all
from spanwise.rollouts import read_rollouts
from spanwise.tasks import digits_task
from trl_small import THIRD_PARTY

pytestmark = [pytest.mark.timeout(900), *THIRD_PARTY]
#: What vLLM can be held to: the words themselves, or JSON by a schema; with the word's number or the mean over all.
WAYS = [{"constrain": kind, "expected": expected} for kind in ("choice", "schema") for expected in (False, True)]
#: One word, and the mean of the choices' numbers.
WORD = {"model": "judge", "constrain": "choice", "reasons": False, "expected": True}


@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(f"{name}={value}" for name, value in way.items()))
def test_every_question_gets_one_of_the_choices(judge_url, way):
    text = [{"part": {"": f"step {n} of a proof"}} for n in range(12)]
    judge = Objective("judge", pays="part", options={"model": "judge", "base_url": judge_url, "reasons": False, **way})
    scores = score_all([judge], text, columns={"prompt": ["2+2"] * len(text)})
    values = scores.reward_nm[:, 0].tolist()
    assert all(0 < value < 1 if way["expected"] else value in (0, 1) for value in values)


def test_a_file_is_credited_by_its_verdicts(judge_url, tmp_path):
    rows = [{"prompt": f"{n % 3}+2=", "completion": f"<plan>add {n}</plan><answer>{n}</answer>"} for n in range(12)]
    (tmp_path / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    judge = {"reward": "judge", "options": {**WORD, "base_url": judge_url}}
    objectives = [{**judge, "name": f"good_{part}", "pays": [part]} for part in ("plan", "answer")]
    recipe = {"method": "bae_paper", "layout": {"plan": ["plan"], "answer": ["answer"]}, "objectives": objectives}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    command = [sys.executable, "-m", "spanwise", "credit", "rollouts.jsonl", "--recipe", "recipe.yaml", "--output", "credit"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    rewards = read_rollouts(tmp_path / "credit").rewards
    assert all(0 < value < 1 for name in ("good_plan", "good_answer") for value in rewards[name].value_n)


def test_it_judges_in_a_run_of_verl(judge_url, tmp_path):
    python = Path(__file__).parents[2] / ".venv-verl" / "bin" / "python"
    write_task(tmp_path, digits_task("easy", train_size=16, eval_size=8))
    judge = {**WORD, "base_url": judge_url}
    (tmp_path / "recipe.yaml").write_text(
        "method: bae_paper\nlayout: {solution: [reasoning, answer], confidence: [analysis, confidence]}\nobjectives:\n"
        "  - {reward: correct, pays: [solution], baseline: group, if_missing: 0.0}\n"
        f"  - {{reward: judge, pays: [confidence], baseline: group, if_missing: 0.0, options: {json.dumps(judge)}}}\n"
    )
    overrides = options(
        tmp_path, prompts=8, group=4, steps=2, algorithm__adv_estimator="spanwise", data__max_response_length=20,
        _algorithm__spanwise__recipe=tmp_path / "recipe.yaml", _algorithm__spanwise__folder="run",
        _algorithm__spanwise__keep_rollouts=1, actor_rollout_ref__actor__loss_agg_mode="seq-mean-token-sum",
        reward__num_workers=2,
    )  # fmt: skip
    finished = Run(tmp_path, "sync", run(tmp_path, overrides, timeout=600, python=str(python)))
    assert len(finished.metrics) == 2
    rewards = read_rollouts(tmp_path / "run", tokenizer=tmp_path / "model").rewards["judge"].value_n.tolist()
    judged = [value for value in rewards if not math.isnan(value)]
    assert len(rewards) == 64
    assert len(judged) > 32
    assert all(0 < value < 1 for value in judged)
    assert all(line["credit/confidence/mean_abs"] > 0 for line in finished.metrics)
