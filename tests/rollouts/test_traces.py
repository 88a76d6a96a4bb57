"""Traces as trajectories, through the pipeline and back into the file; `tests/foreign` holds them against verifiers' own types."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import trl_small
from rollout_files import LAYOUT, records, small_episode, write_lines
from spanwise import Scheme, advantages, credit_batch, read
from spanwise.credit import merge_counts
from spanwise.errors import DataError
from spanwise.layout import Layout
from spanwise.rollouts import read_rollouts, read_traces, write_traces
from spanwise.segment import Vocabulary
from spanwise.trajectories import onto_turns, turn_batch
from spanwise.types import Status

FILE = Path(__file__).with_name("written") / "verifiers_branches" / "traces.jsonl"
ANSWER = ("advantages", "logprobs", "reference_logprobs", "trainer_logprobs", "entropies", "loss_weights/rl")


def test_a_turn_for_every_message_that_was_sampled():
    rollout, other = read_traces(FILE)
    assert (rollout.id, rollout.rewards, rollout.group == other.group) == ("t0", {"exact": 1.0, "reward": 1.0}, True)
    assert rollout.extra["task"]["answer"] == "4"
    shared, first, second = rollout.turns  # the attempt to shorten the history was given up
    assert [turn.extra["node"] for turn in rollout.turns] == [1, 3, 6]
    assert [turn.parent for turn in rollout.turns] == [None, 0, 0]
    assert shared.prompt_ids == (9, 18, 9, 19, 20)  # 2+2=, and the head of the answer
    assert (shared.response_ids, shared.mask) == ((21, 1), (1, 1))
    assert first.prompt_ids == (18, 8, 19)
    assert second.prompt_ids == (18, 9, 19, 20)
    assert set(second.per_token) == set(ANSWER)
    assert second.per_token["advantages"] == [0.5] * 9
    assert [branch.turns for branch in rollout.branches()] == [(0, 1), (2,)]
    assert rollout.rows().merged() == rollout  # what the messages share is what the tokens share
    counts = {"trajectories": 1, "rows": 3, "row_tokens": 7 + 19 + 20, "branches": 2, "branch_tokens": 19 + 20}
    assert merge_counts([rollout]) == {**counts, "trained_tokens": 20}


def test_the_credit_of_a_method_goes_back_into_the_file(tmp_path):
    """Blocks inside turns: right and wrong, leave-one-out of two rollouts, shared out over the 20 tokens of each."""
    scheme, rollouts = Scheme.preset("rloo", Layout(LAYOUT), per="completion"), read_traces(FILE)
    vocabulary = Vocabulary(tuple(piece.encode() for piece in trl_small.PIECES))
    batch, recorded = turn_batch(rollouts, columns={"answer": [rollout.extra["task"]["answer"] for rollout in rollouts]})
    reading = read(batch, scheme, vocabulary, recorded={"correct": recorded["exact"]})
    advantages_nt = advantages(credit_batch(reading, batch, scheme), reading.spans, scheme, dtype=torch.float64)
    write_traces(tmp_path / "out.jsonl", FILE, onto_turns(rollouts, "advantages", advantages_nt))
    for old, new, sign in zip(records(FILE), records(tmp_path / "out.jsonl"), (1.0, -1.0), strict=True):
        nodes = new["traces"][0]["nodes"]
        assert [len(nodes[i]["advantages"]) for i in (1, 3, 6)] == [2, 9, 9]
        for i in (1, 3, 6):
            assert nodes[i]["advantages"] == pytest.approx([sign / 20] * len(nodes[i]["advantages"]))
            nodes[i]["advantages"] = old["traces"][0]["nodes"][i]["advantages"]
        assert new == old


def test_a_trace_may_be_written_in_place_and_others_stay(tmp_path):
    file = tmp_path / "traces.jsonl"
    file.write_text(FILE.read_text())
    rollout, other = read_traces(file)
    turns = tuple(replace(t, per_token={"mine": [2.0 * len(t.mask)] * len(t.mask)}) for t in other.turns)
    write_traces(file, file, [replace(other, turns=turns)], entry="mine")
    reread = read_traces(file)
    assert reread[0] == rollout
    assert [t.per_token["advantages"][0] for t in reread[1].turns] == [4.0, 18.0, 18.0]
    assert [path.name for path in tmp_path.iterdir()] == ["traces.jsonl"]  # nothing half-written stays behind


def test_rewards_that_are_missing_or_no_number_have_a_status(tmp_path):
    (record, *_) = records(FILE)
    record["traces"][0]["rewards"] = {
        "a": {"score": None}, "b": {"score": 0.5, "weight": 2.0}, "c": float("inf"), "d": "why", "e": {"weight": 3.0},
        "f": {"score": 0.25, "weight": None},
    }  # fmt: skip
    (rollout,) = read_traces(write_lines(tmp_path / "t.jsonl", [record]))
    scored = {"b": 0.5, "f": 0.25, "reward": 2.0 * 0.5 + 0.25}  # a weight that is not written is 1
    assert rollout.rewards == {**dict.fromkeys("ace", Status.UNSCORED), **scored}


def test_group_id_0_is_an_id(tmp_path):
    """Both episodes are of group 0, though their prompts differ."""
    episodes = [small_episode("4", {"exact": 1.0}, group=0), small_episode("5", {"exact": 0.0}, group=0)]
    episodes[1]["traces"][0]["nodes"][0]["message"] = {"role": "user", "content": "3+2="}
    path = write_lines(tmp_path / "traces.jsonl", episodes)
    assert read_rollouts(path).group_n.tolist() == [0, 0]


def test_a_trace_that_failed_has_no_rewards_and_one_whose_second_attempt_succeeded_has(tmp_path):
    """Of a failed trace prime-rl trains nothing, and the mean of its group leaves it out, though some rewards may be scored."""
    (failed, *_), (silent, *_), (retried, *_) = (records(FILE) for _ in range(3))
    half = {"exact": {"score": 1.0, "weight": 1.0}, "judge": None}
    same = {"rewards": half, "metrics": {"kind": "easy"}, "errors": [{"type": "JudgeError", "message": "no answer"}]}
    failed["traces"][0] |= {**same, "ok": False}
    silent["traces"][0] = {name: value for name, value in silent["traces"][0].items() if name != "ok"} | same
    retried["traces"][0] |= {**same, "ok": True}
    none, unknown, some = read_traces(write_lines(tmp_path / "t.jsonl", [failed, silent, retried]))
    assert none.rewards == unknown.rewards == dict.fromkeys(("exact", "judge", "reward"), Status.UNSCORED)
    assert some.rewards == {"exact": 1.0, "judge": Status.UNSCORED, "reward": 1.0}


def test_sentences(tmp_path):
    rollout, other = read_traces(FILE)

    def first_turn(**changes):
        return replace(rollout, turns=(replace(rollout.turns[0], **changes), *rollout.turns[1:]))

    for trajectory, names in (
        (first_turn(per_token={}), "Turn 0 of trajectory 't0' has no 'advantages'"),
        (first_turn(per_token={"advantages": [float("nan"), 0.0]}), "Turn 0 of trajectory 't0' has nan in 'advantages'"),
        (first_turn(extra={"node": 3}), "Turn 0 of trajectory 't0' has 2 sampled tokens, but '.*' holds 9"),
        (replace(other, extra={"episode": 7, "trace": 0}), "'t1'"),
    ):
        with pytest.raises(DataError, match=names):
            write_traces(tmp_path / "out.jsonl", FILE, [trajectory])
    assert list(tmp_path.iterdir()) == []
    record = records(FILE)[0]
    record["traces"][0]["nodes"][1] |= {"token_ids": [], "mask": []} | dict.fromkeys(ANSWER[:5]) | {"loss_weights": None}
    with pytest.raises(DataError, match=r"Line 1 of .*: node 1 of trace 't0' has no token ids"):
        read_traces(write_lines(tmp_path / "t.jsonl", [record]))
