"""`spanwise why`: reasons and counts worked out by hand; for SAE decisions and the critic's delay on values that are known."""

import re

import numpy as np
import pytest

import rollout_files
import trl_small
from border.case import command
from rollout_files import LAYOUT, WELL_FORMED, own_run, sae_run, tagged, trl_file, verl_file, write_lines, write_own
from spanwise.commands.credit.credit import credit_rollouts
from spanwise.commands.why.why import why
from spanwise.errors import RecipeError

OURS = {"overrides": {"layout": LAYOUT}}


def counted(zeros):
    return {(count.reason.name, count.objective): (count.tokens, count.completions, count.rows) for count in zeros.counts(3)}


def printed(*words, code=0):
    return " ".join(command("why", *words, code=code).split())


def test_the_table_and_one_completion_as_they_are_printed(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    outputs = [tagged("5", "0.9"), tagged("7", "0.2"), "so <answer>6"]
    file = verl_file(tmp_path / "1.jsonl", outputs, acc=[0.0, 0.0, 0.0])
    words = [file, "--methods", "grpo,bae_paper", "--set", "layout={solution: [answer], confidence: [confidence]}"]
    table = printed(*words)
    assert "unanimous: all wrong (correct) 3" in table
    assert "Block 'confidence' is missing in 1 of 3 completions (row 2)" in table
    assert "Rewards: correct from the file's 'acc', brier from the text." in table
    text = printed(*words, "--completion", "1")
    assert "Completion 1 of " in text
    assert "compared with rows 0, 1, 2; prompt '2+2='" in text
    assert "Reward correct: 0 in this row. In all compared rows: 0 0 0" in text
    assert "Reward brier: -0.04 in this row. In all compared rows: -0.81 -0.04 -" in text
    assert "solution 0 0 unanimous: all wrong (correct)" in text
    length = int(credit_rollouts(file, **OURS).file_spans.length_nk[1, 1])
    assert f"confidence 0.385 {0.385 / length:.4g} credited" in text  # -.04 minus the mean of -.81 and -.04, over its tokens
    assert "Its tags: missing, truncated." in printed(*words, "--completion", "2")
    verl_file(file, [outputs[0], *outputs[2:] * 4], acc=[0.0] * 5)
    assert "Block 'confidence' is missing in 4 of 5 completions (rows 1, 2, 3, ...)" in printed(*words)


def test_what_a_trainer_recorded_has_reasons_too(tmp_path):
    right, advantage = [1.0] * 4 + [1.0, 0.0, 1.0, 0.0], [0.0] * 4 + [1.0, 0.0, -1.0, 0.0]
    file = trl_file(tmp_path / "a.parquet", WELL_FORMED * 2, prompt=[*"aaaabbbb"], correct=right, advantage=advantage)
    zeros = why(file, methods=["recorded"], **OURS)["recorded"]
    assert {key: value[1:] for key, value in counted(zeros).items()} == {
        ("CREDITED", ""): (2, (4, 6)),
        ("ALL_RIGHT", "correct"): (4, (0, 1, 2)),
        ("RECORDED", ""): (2, (5, 7)),
    }
    # A column may say what is right. The options of a method that is not there are refused: only `correct` is read.
    file = trl_file(tmp_path / "a.parquet", WELL_FORMED, advantage=[0.0] * 4, acc=[0.0, 1.0, 0.0, 1.0], grade=[0.0] * 4)
    options = {"methods": ["recorded"], **OURS}
    assert counted(why(file, reward={"correct": "grade"}, **options)["recorded"]).keys() == {("ALL_WRONG", "correct")}
    assert counted(why(file, **options)["recorded"]).keys() == {("ALL_EQUAL", "")}
    with pytest.raises(RecipeError, match="'brier'"):
        why(file, reward={"brier": "grade"}, **options)


@pytest.mark.parametrize(("branch_counts", "reason"), [((2,), "SINGLETON"), ((2, 1), "ALL_RIGHT")])
def test_branches_of_a_trace_are_one_rollout_of_recorded_credit(branch_counts, reason, tmp_path):
    """One trace of two branches is compared with no other; beside a second right one, all two of two rollouts are right."""
    node, rewards = rollout_files.node, {"correct": 1.0}
    answer = {**node("assistant", "4", parent=0, sampled=True, ids=(1,), mask=(1,)), "advantages": [0.0]}
    nodes = [[node("user", "2+2=", parent=None), *[answer] * count] for count in branch_counts]
    file = write_lines(tmp_path / "t.jsonl", [rollout_files.small_episode("4", rewards, nodes=each) for each in nodes])
    zeros = why(file, methods=["recorded"], overrides={"layout": {"all": []}})["recorded"]
    assert [(name, count[1]) for (name, _), count in counted(zeros).items()] == [(reason, sum(branch_counts))]


def test_masked_left_out_timeout_and_unscored(tmp_path, monkeypatch):
    """Our rollouts with a tool's token, a completion left out of the loss, a check that timed out and one that never ran."""
    monkeypatch.setenv("COLUMNS", "160")
    tokens = [["<answer>", word, "</answer>"] for word in "75444"]
    columns = {
        "group": [0] * 5, "trainable": [[True, False, True]] * 5, "start/all": [0] * 5, "end/all": [3, 3, 0, 3, 3],
        "reward/correct": [1.0, 0.0, 1.0, None, None], "status/correct": ["ok", "ok", "ok", "timeout", "unscored"],
        "advantages/grpo": [[0.1, 0.0, 0.1]] * 2 + [[None] * 3] + [[0.0] * 3] * 2,
    }  # fmt: skip
    file = write_own(tmp_path / "step_000001.parquet", tokens, key="tokens", **columns)
    options = {"methods": ["rloo"], "overrides": {"layout": {"all": ["answer"]}}}
    zeros = why(file, **options)["rloo"]
    assert counted(zeros) == {
        ("CREDITED", ""): (4, 2, (0, 1)),
        ("MASKED", ""): (5, 0, (0, 1, 2)),
        ("LEFT_OUT", ""): (2, 1, (2,)),
        ("TIMEOUT", "correct"): (2, 1, (3,)),
        ("UNSCORED", "correct"): (2, 1, (4,)),
    }
    table = printed(file, "--methods", "rloo", "--set", "layout={all: [answer]}")
    assert re.search(r"masked\S* .*? 0 5 33.3% 0, 1, 2, \.\.\.", table)


def test_a_token_has_the_reason_of_its_own_block(tmp_path):
    """Two wrong answers of three tokens each, then confidences of one and two tokens that earn different rewards."""
    answer = ["<answer>", "5", "</answer>"]
    tokens = [[*answer, "<confidence>.9</confidence>"], [*answer, "<confidence>", ".2</confidence>"]]
    columns = {
        "group": [0] * 2, "start/solution": [0] * 2, "end/solution": [3] * 2, "start/confidence": [3] * 2, "end/confidence": [4, 5],
        "reward/correct": [0.0] * 2, "reward/brier": [-0.81, -0.04], "status/brier": ["ok"] * 2,
    }  # fmt: skip
    file = write_own(tmp_path / "step_000001.parquet", tokens, key="tokens", **columns)
    zeros = why(file, methods=["bae_paper"], **OURS)["bae_paper"]
    assert counted(zeros) == {("CREDITED", ""): (3, 2, (0, 1)), ("ALL_WRONG", "correct"): (6, 0, (0, 1))}


def test_a_run_of_ours_is_explained_by_its_own_method(tmp_path):
    run = own_run(tmp_path / "run", rewards=[1.0, 1.0, 0.0, None], status=["ok", "ok", "ok", "error"])
    assert list(why(run)) == ["bae"]
    assert "grpo" not in " ".join(credit_rollouts(run, own_only=True).notes)
    assert {"grpo", "bae"} <= set(why(run, methods=["grpo", "bae"]))
    with pytest.raises(RecipeError, match="-1"):
        why(run, completion=-1)


STRETCH, DECISIONS, ROWS = 8, 6, 40


@pytest.mark.parametrize(("delay", "lag"), [(0, "1 token"), (1, "2 tokens"), (5, "8 tokens"), (None, None)])
def test_decisions_are_counted_and_the_delay_is_found(delay, lag, tmp_path):
    """A decision of +1 or -1 every eight tokens, seen by the critic `delay` tokens late (None: never); the reward is their sum.

    .95^(1/8) is .9936; the last stretch ends with the completion, a token short.
    """
    draw = np.random.default_rng(0)
    trl_small.tokenizer().save_pretrained(tmp_path / "model")
    size = STRETCH * (DECISIONS + 1)
    effect_nk = draw.choice([-1.0, 1.0], (ROWS, DECISIONS))
    values = 0.1 * draw.standard_normal((ROWS, size))
    for k in range(DECISIONS if delay is not None else 0):
        values[:, STRETCH * (k + 1) + 1 + delay :] += effect_nk[:, [k]]
    probability = np.full((ROWS, size), 0.9)
    probability[:, STRETCH : STRETCH * (DECISIONS + 1) : STRETCH] = 0.1
    ids = trl_small.tokenizer().convert_tokens_to_ids(["<answer>", "4", "</answer>", *["a"] * (size - 3)])
    columns = {
        "completion_ids": [ids] * ROWS, "text": ["<answer>4</answer>" + "a" * (size - 3)] * ROWS,
        "reward/correct": effect_nk.sum(axis=1).tolist(), "values": values.tolist(), "logprobs": np.log(probability).tolist(),
    }  # fmt: skip
    text = printed(sae_run(tmp_path, **columns))
    assert (
        "sae: a completion has 6 decisions (tokens of probability < 0.2). The average distance between two decisions is 7.83 tokens"
        in text
    )
    assert "Over the average distance, 'sae' discounts as much as GAE with lambda 0.9935." in text
    sentence = f"after an unlikely token (decision), half of the critic's move towards the reward takes {lag}."
    assert (sentence if lag else "the critic's value does not move towards the reward") in text
