"""Dumps of verl: which rows are one group. Traces of verifiers: ids, branches, results before 1.0, missing scores."""

import json
from pathlib import Path

import numpy as np
import pytest

import trl_small
from rollout_files import UNSCORED, episode, node, small_episode, tagged, texts, trace, verl_file, write_lines
from spanwise.rollouts import read_rollouts


@pytest.mark.parametrize(
    ("uids", "groups"),
    [
        (["sample-0_0_0", "sample-0_1_0", "sample-1_0_0", "sample-1_1_0"], [0, 0, 1, 1]),  # the keys of V1
        (["p", "q", "p", "q"], [0, 1, 0, 1]),
        (["p", "q", "r", "s"], [0] * 4),  # a name for each row says nothing of prompts
        (["p", None, "p", "q"], [0] * 4),
        ([7, 8, 7, 8], [0, 1, 0, 1]),  # numbers, as other tools write them
    ],
)
def test_uids_that_rows_share_are_the_groups_of_equal_prompts_and_a_row_without_one_is_told(uids, groups, tmp_path):
    table = read_rollouts(verl_file(tmp_path / "1.jsonl", [tagged("4", "0.5")] * 4, uid=uids))
    assert (table.group_n.tolist(), "uid" in table.note) == (groups, None in uids)


def read_episodes(folder, *episodes, **options):
    return read_rollouts(write_lines(folder / "traces.jsonl", episodes), **options)


def test_every_branch_that_trains_is_a_row_of_one_rollout(tmp_path):
    other = node("assistant", tagged("9", "0.1"), parent=0, sampled=True)
    record = trace(tagged("4", "0.9"), "4", {"right": 1.0}, extra=[other])
    table = read_episodes(tmp_path, episode(record), episode(trace(tagged("5", "0.9"), "4", {"right": 0})))
    assert texts(table) == [tagged("4", "0.9"), tagged("9", "0.1"), tagged("5", "0.9")]
    assert (table.rollout_n.tolist(), table.group_n.tolist()) == ([0, 0, 1], [0, 0, 0])
    assert table.rewards["right"].value_n.tolist() == [1.0, 1.0, 0.0]
    assert "1 of 2 traces have several branches" in table.note
    assert read_episodes(tmp_path, small_episode("4", {}, answer=["4", "four"])).columns["answer"] == ['["4", "four"]']


def test_a_message_that_branches_share_is_trained_in_the_first_and_the_prompt_of_the_others(tmp_path):
    nodes = [node("user", "2+2=", parent=None), node("assistant", "hm", parent=0, sampled=True)]
    for said, heard in (("go", "four"), ("stop", "five")):
        nodes += [node("tool", said, parent=1), node("assistant", heard, parent=len(nodes), sampled=True)]
    nodes.append(node("tool", "bye", parent=1))  # an end that no model spoke at
    table = read_episodes(tmp_path, episode(trace("", "4", {}) | {"nodes": nodes}))
    assert texts(table) == ["hmgofour", "five"]
    assert table.trainable.tolist() == [True, False, True, True]
    said = [{"role": role, "content": text} for role, text in (("user", "2+2="), ("assistant", "hm"), ("tool", "stop"))]
    assert [json.loads(prompt) for prompt in table.prompts] == [said[:1], said]


@pytest.mark.parametrize("accepted", [False, True])
def test_an_attempt_to_shorten_the_history_trains_if_the_agent_went_on_from_it(tmp_path, accepted):
    attempt = node("assistant", "short", parent=0, sampled=True)
    attempt["semantic_parents"] = [{"node": 1, "type": "compaction_attempt"}]
    after = node("assistant", "done", parent=None, sampled=True)
    after["semantic_parents"] = [{"node": 2, "type": "compaction"}] if accepted else []
    table = read_episodes(tmp_path, episode(trace("long", "4", {}, extra=[attempt, after])))
    assert texts(table) == (["long", "short", "done"] if accepted else ["long", "done"])


def test_results_of_verifiers_before_1_0(tmp_path):
    rows = [
        {"example_id": i, "prompt": [{"role": "user", "content": "2+2="}], "answer": "4", "reward": r, "error": error,
         "completion": [{"role": "assistant", "content": tagged("4", "0.5")}], "metrics": {"exact": r}, "exact": r}
        for i, r, error in ((0, 1.0, None), (0, 0.0, None), (1, 0.0, {"error": "Timeout"}))
    ]  # fmt: skip
    table = read_rollouts(write_lines(tmp_path / "results.jsonl", rows).parent)
    assert table.group_n.tolist() == [0, 0, 1]
    assert table.rewards["exact"].status_n.tolist() == [0, 0, UNSCORED]
    assert table.columns["answer"] == ["4"] * 3


def test_a_tokenizer_is_not_asked_for_where_it_was_given(tmp_path):
    """One of two traces has no token ids, so all texts are tokenised again."""
    trl_small.tokenizer().save_pretrained(tmp_path / "model")
    episodes = [small_episode("4", {"exact": 1.0}) for _ in range(2)]
    episodes[0]["traces"][0]["nodes"][1] |= {"token_ids": [1], "mask": [1]}
    assert "--tokenizer" in read_episodes(tmp_path, *episodes).note
    assert "--tokenizer" not in read_episodes(tmp_path, *episodes, tokenizer=tmp_path / "model").note


def test_failed_rollouts_beside_others_are_counted(tmp_path):
    lines = [small_episode("a", {}), small_episode("b", {}) | {"traces": [], "errors": [{"type": "Timeout"}]}]
    note = read_episodes(tmp_path, *lines).note
    assert "1 of 2 episodes hold no message that a trained model sampled (1 failed with Timeout)." in note
    none = [{"prompt": "2+2=", "completion": [], "reward": 0.0, "error": "RateLimit"}] * 2
    note = read_rollouts(write_lines(tmp_path / "results.jsonl", none)).note
    assert "2 of 2 episodes hold no message that a trained model sampled (2 failed with RateLimit)." in note


def test_what_the_trainer_credited_stands_at_every_token_of_every_branch(tmp_path):
    """Two traces of verifiers 0.4.0: a turn that both branches share, then an answer in each; and one attempt that was given up."""
    trl_small.tokenizer().save_pretrained(tmp_path / "model")
    table = read_rollouts(Path(__file__).with_name("written") / "verifiers_branches", tokenizer=tmp_path / "model")
    assert table.has_ids
    first, second = "<answer>5</answer><confidence>0.9</confidence>", "<answer>4</answer><confidence>0.7</confidence>"
    assert texts(table)[:2] == [f"a<eos>+1={first}<eos>", f"{second}<eos>"]
    assert table.rollout_n.tolist() == [0, 0, 1, 1]
    assert table.trainable.sum() == 2 * (2 + 9 + 9)
    assert table.as_recorded.says == "the file's 'advantages'"
    expected = [*[0.5] * 2, *[0.0] * 3, *[0.5] * 18]
    assert table.as_recorded.value.tolist() == [*expected, *(-value for value in expected)]
    logprobs = table.token_values["logprobs"][: len(expected)]
    np.testing.assert_array_equal(logprobs, [-0.5 if value else np.nan for value in expected])
