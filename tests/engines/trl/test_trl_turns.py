"""Completions of several turns through TRL: the gradient by hand, what is refused, what is logged, groups on two processes."""

from dataclasses import replace

import pytest
import torch
from datasets import Dataset

import trl_small as small
from chain_agent import AGENT_LAYOUT, Episode
from play_turns import rollout_function
from spanwise.errors import AlignmentError, DataError
from spanwise.tasks.embedded import build_model, build_tokenizer
from trl_turns_small import SCHEMES, TALKS, gradient, scripted, talks_of, trainer


@pytest.mark.parametrize("name", SCHEMES)
def test_one_step_is_the_gradient_of_the_objective(tmp_path, name):
    run = trainer(tmp_path, name, per_device_train_batch_size=2, gradient_accumulation_steps=4)
    assert small.largest_difference(small.step(run), gradient(name, talks_of(name))) < small.EXACT
    assert not run._canary_due


def test_a_completion_that_the_trainer_leaves_out_learns_nothing_and_changes_no_other(tmp_path):
    talks = [replace(talk, end=()) if i == 1 else talk for i, talk in enumerate(TALKS)]
    run = trainer(tmp_path, "turns", talks=talks, mask_truncated_completions=True)
    assert small.largest_difference(small.step(run), gradient("turns", talks, unlearned={1})) < small.EXACT


def test_what_trl_logs_is_of_completions(tmp_path):
    run = trainer(tmp_path, "turns")
    run.train()
    log = run.state.log_history[0]
    by_rollout = [small.mean([turn.right for turn in talk.turns]) for talk in TALKS]
    assert log["rewards/right/mean"] == pytest.approx(small.mean(by_rollout))
    assert log["reward"] == pytest.approx(small.mean(by_rollout))
    assert len(run._logs["advantages"]) == len(TALKS)
    credit, level = list(run._logs["extra"]["credit/turn"]), small.mean(by_rollout[:4])
    assert credit[:4] == pytest.approx([value - level for value in by_rollout[:4]])
    run = trainer(tmp_path, "outcome")
    run.train()
    assert run.state.log_history[0]["rewards/solved/mean"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("name", "n", "entry", "error"),
    [
        ("turns", 3, [{}, {}], AlignmentError),  # it has three turns
        ("gigpo", 3, [{}, {}], AlignmentError),
        ("gigpo", 2, 1, DataError),  # no list
        ("gigpo", None, None, DataError),  # nobody names the states
    ],
)
def test_what_does_not_describe_the_turns_is_refused(tmp_path, name, n, entry, error):
    facts = "nothing" if n is None else [entry if i == n else talk.facts for i, talk in enumerate(TALKS)]
    with pytest.raises(error, match="turns" if n is None else f"Completion {n} has"):
        trainer(tmp_path, name, facts=facts).train()


def test_turns_are_runs_of_the_mask_where_nobody_says_what_they_are(tmp_path):
    """`correct` reads the answer of each turn; the dataset's answers are 4 and 3."""
    objectives = [small.Objective("correct", pays="turn", scope="turn", options={"verify": "exact"})]
    extra = {**SCHEMES["turns"], "objectives": objectives, "rollout_func": scripted(TALKS, facts="nothing")}
    run = small.trainer(tmp_path, extra=extra, max_completion_length=32)
    run.train()
    rewards = run.last_rollouts.reading.scores.reward_nm.flatten().tolist()
    gold = ["4"] * 4 + ["3"] * 4
    assert rewards == [float(turn.digit == want) for talk, want in zip(TALKS, gold, strict=True) for turn in talk.turns]


def test_conversations_train_a_real_policy_on_a_real_environment(tmp_path):
    chains = Dataset.from_dict({"prompt": ["7+3*4-2=", "1+2*3+4-5="]})
    tokenizer = build_tokenizer()
    extra = {
        **SCHEMES["gigpo"], "layout": AGENT_LAYOUT, "model": build_model(tokenizer, 0), "processing_class": tokenizer,
        "train_dataset": chains, "rollout_func": rollout_function(Episode, max_turn_tokens=4),
    }  # fmt: skip
    run = small.trainer(tmp_path, extra=extra, max_completion_length=64)
    before = small.weights(run.model)
    with pytest.warns(UserWarning, match="contain no tags at all|Every advantage of the batch"):  # a random policy
        run.train()
    rollouts = run.last_rollouts
    assert len(rollouts.batch.columns["solved"]) == len(rollouts.prompts) >= 8
    assert set(rollouts.prompts) == set(chains["prompt"])
    moved = any(not torch.equal(before[name], value) for name, value in small.weights(run.model).items())
    assert moved == rollouts.credit.has_signal
