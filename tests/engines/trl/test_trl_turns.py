"""Completions of several turns through TRL: what is left out, logged and refused, and turns that nobody describes.

Their advantages and gradient: `test_trl_conformance.py`; groups on two processes: `test_trl_ranks.py`.
"""

from itertools import groupby
from operator import itemgetter

import pytest
import torch
from datasets import Dataset

import opened_folder
import trl_conformance_small as rollouts
import trl_small as small
from chain_agent import AGENT_LAYOUT, Episode, solved
from play_turns import rollout_function
from spanwise.commands.credit.credit import credit_rollouts
from spanwise.errors import AlignmentError, DataError
from spanwise.tasks.embedded import build_model, build_tokenizer

#: The environment pays a turn that has no confidence.
pytestmark = pytest.mark.filterwarnings("ignore:.*spanwise ignores rewards of completions:UserWarning")
#: Rollouts of three turns, of one and of two; two rollouts of two turns each.
THREE, TWO = rollouts.groups("turns")


def rows_of(group):
    return [row for row, _ in group]


def sampled_runs(row, values):
    """The values of each run of sampled tokens."""
    runs = groupby(zip(row["sampled"], values, strict=True), key=itemgetter(0))
    return [[value for _, value in run] for is_sampled, run in runs if is_sampled]


@pytest.mark.parametrize("loss_type", ["dapo", "bnpo"])  # whose normalisers count the tokens of the others
def test_a_completion_that_the_trainer_leaves_out_learns_nothing_and_changes_no_other(tmp_path, loss_type):
    first, (row, values), third = THREE
    without_end = {**row, "ids": row["ids"][:-1], "sampled": row["sampled"][:-1]}
    cut = [first, (without_end, values[:-1]), third]
    run = rollouts.trainer(tmp_path, "turns", rows_of(cut), mask_truncated_completions=True, loss_type=loss_type)
    assert small.largest_difference(small.step(run), rollouts.gradient(cut, unlearned={1})) < small.EXACT


def test_what_trl_logs_is_of_completions(tmp_path):
    """Both rollouts end with the right answer; the environment pays their turns 1 and 1, and 0 and 1."""
    run = rollouts.trained(tmp_path, "turns", rows_of(TWO))
    log, table = run.state.log_history[0], run._logs
    assert (log["rewards/correct/mean"], log["rewards/environment/mean"], log["reward"]) == (1.0, 0.75, 1.75)
    assert list(table["extra"]["credit/solution"]) == [0.0, 0.0]
    assert list(table["extra"]["credit/confidence"]) == list(table["advantages"]) == [0.25, -0.25]


def test_turns_of_another_number_than_the_completion_has_are_refused(tmp_path):
    first, *others = rows_of(THREE)  # the first has three turns
    with pytest.raises(AlignmentError, match="Completion 0 has"):
        rollouts.trained(tmp_path, "turns", [{**first, "turns": [{}, {}]}, *others])


def test_a_reward_per_turn_reads_the_environment_of_its_completion_and_logs_no_column_for_completions(tmp_path):
    """Rollouts of 3, 1 and 2 turns, in the environments 10, 20 and 30."""

    def rollout(batch, trainer):
        trainer.environments = [10, 20, 30]
        return rollouts.replayed(rows_of(THREE))(batch, trainer)

    def run_with(reward):
        objectives = [small.Objective(reward, pays="solution", scope="turn", name="paid")]
        extra = {"scheme": small.scheme(objectives=objectives), "rollout_func": rollout}
        return rollouts.trained(tmp_path, "turns", rows_of(THREE), extra=extra).last_rollouts

    table = run_with(lambda environments: [*map(float, environments)])
    assert table.reading.scores.reward_nm.flatten().tolist() == [10.0, 10.0, 10.0, 20.0, 30.0, 30.0]
    assert "environments" not in table.batch.columns
    with pytest.raises(DataError, match=r"6 values .* 3 completions"):
        run_with(lambda environments, log_extra: log_extra("paid", environments) or [*map(float, environments)])


def one_turn(row):
    """A rollout that ends with its first turn, in which the model calls no tool."""
    length = [*row["sampled"], 0].index(0)
    return {**row, "ids": row["ids"][:length], "sampled": row["sampled"][:length], "turns": row["turns"][:1]}


def test_a_run_folder_in_which_no_rollout_has_a_second_turn_is_credited_as_in_training(tmp_path):
    args = small.config(tmp_path / "run", num_generations=3, per_device_train_batch_size=3, keep_rollouts=1)
    run = rollouts.trained(tmp_path, "turns", [one_turn(row) for row in rows_of(THREE)], extra={"args": args})
    again = credit_rollouts(tmp_path / "run", methods=["recipe"])
    assert again.table.rollout_n.tolist() == [0, 1, 2]
    assert torch.allclose(again.applied[0].credit.block_nk, run.last_rollouts.credit.block_nk)


def test_a_run_folder_says_which_turns_are_of_one_rollout_and_its_commands_credit_them_as_training_did(tmp_path):
    args = small.config(tmp_path / "run", num_generations=3, per_device_train_batch_size=3, keep_rollouts=1)
    rollouts.trained(tmp_path, "turns", rows_of(THREE), extra={"args": args})
    advantages = [run_t for row, values in THREE for run_t in sampled_runs(row, values)]
    rows = opened_folder.check(tmp_path / "run", advantages, [[1] * len(values) for values in advantages])
    assert [row["rollout"] for row in rows] == [0, 0, 0, 1, 2, 2]
    again = credit_rollouts(tmp_path / "run", methods=["recipe"])
    stored = [[row["credit/bae/solution"], row["credit/bae/confidence"] or 0.0] for row in rows]
    assert again.applied[0].credit.block_nk.tolist() == [pytest.approx(credit, abs=1e-6) for credit in stored]


def test_conversations_train_a_real_policy_on_a_real_environment(tmp_path):
    chains = Dataset.from_dict({"prompt": ["7+3*4-2=", "1+2*3+4-5="]})
    tokenizer = build_tokenizer()
    objectives = [small.Objective(solved, pays="turn", scope="rollout")]
    extra = {
        "scheme": small.scheme("gigpo", AGENT_LAYOUT, objectives, {"per": "completion"}), "model": build_model(tokenizer, 0),
        "processing_class": tokenizer, "train_dataset": chains, "rollout_func": rollout_function(Episode, max_turn_tokens=4),
    }  # fmt: skip
    run = small.trainer(tmp_path, extra=extra, max_completion_length=64)
    before = small.weights(run.model)
    with pytest.warns(UserWarning, match="No completion has tags|Every advantage of the batch"):  # a random policy
        run.train()
    rollouts = run.last_rollouts
    assert len(rollouts.batch.columns["solved"]) == len(rollouts.prompts) >= 8
    assert set(rollouts.prompts) == set(chains["prompt"])
    moved = any(not torch.equal(before[name], value) for name, value in small.weights(run.model).items())
    assert moved == rollouts.credit.has_signal
