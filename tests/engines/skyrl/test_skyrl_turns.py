"""Turns as SkyRL lays them out: every row gets the credit of its own tokens, merged or not, and a rollout has one vote."""

import asyncio
import json
from pathlib import Path

import pytest
import skyrl_small as small
import torch
from skyrl.train.fully_async_trainer import FullyAsyncRayPPOTrainer, GeneratedOutputGroup
from skyrl.train.generators.utils import apply_overlong_filtering, merge_stepwise_output

from spanwise.engines.skyrl.main import trainer_class
from spanwise.engines.skyrl.rows import SampledRows
from spanwise.errors import DataError

OUTCOME = small.BROADCAST.replace("rloo", "dr_grpo")


def through(data, recipe, output, *, merged=False, dp=1, **changes):
    """Credit a generator's output; returns the trainer, the batch for the workers and the rows in SkyRL's order."""
    prompts = len({trajectory.instance_id for trajectory in output["trajectory_ids"]})
    layout = "merged" if merged else "stepwise"
    trainer = small.trainer(small.config(data, recipe=recipe, layout=layout, prompts=prompts, samples=3, **changes), dp=dp)
    batch, trained = small.up_to_values(trainer, output)
    return trainer, trainer.compute_advantages_and_returns(batch), trained


def rollout_ids(output):
    return [(t.instance_id, t.repetition_id) for t in output["trajectory_ids"]]


def rollout_credit(output):
    """Dr. GRPO by hand: what each rollout ended with, less the mean over the rollouts of its prompt, one vote each."""
    rows = zip(rollout_ids(output), output["rewards"], output["is_last_step"], strict=True)
    ended = {rollout: reward for rollout, reward, last in rows if last}
    group = {prompt: [r for (p, _), r in ended.items() if p == prompt] for prompt, _ in ended}
    return {rollout: reward - sum(group[rollout[0]]) / len(group[rollout[0]]) for rollout, reward in ended.items()}


def trained_tokens(output):
    """Count the trained tokens of each rollout; a turn that the loss leaves out counts with all of its tokens."""
    tokens: dict = {}
    for rollout, mask in zip(rollout_ids(output), output["loss_masks"], strict=True):
        tokens[rollout] = tokens.get(rollout, 0) + (sum(mask) or len(mask))
    return tokens


def test_a_list_of_the_generator_that_replaces_a_column_of_the_dataset_is_told(data):
    output = small.ragged(0)
    output["reward_spec.ground_truth"] = ["4"] * len(output["rewards"])
    with pytest.warns(UserWarning, match=r"the dataset have columns called reward_spec.ground_truth"):
        through(data, OUTCOME, output)


def test_a_batch_that_the_loss_leaves_out_whole_is_told(data):
    """SkyRL's overlong filtering empties all masks if every reply was cut off; credit and its metrics are there all the same."""
    output = small.ragged(0)
    output["loss_masks"] = [[0] * len(mask) for mask in output["loss_masks"]]
    with pytest.warns(UserWarning, match="nothing is learned"):
        trainer, batch, _ = through(data, OUTCOME, output)
    assert bool((batch["advantages"] == 0).all())
    assert trainer.all_metrics["credit/turn/mean_abs"] > 0


ALL = [(seed, merged, "") for seed in range(4) for merged in (False, True)]


@pytest.mark.parametrize(("seed", "merged", "left_out"), [*ALL, (0, False, "rollout"), (3, False, "last turn")])
def test_every_trained_token_has_the_credit_of_its_rollout(data, seed, merged, left_out):
    """A filter may mask an overlong rollout, or a turn that was cut off; its last reward still has one vote in its prompt."""
    output = small.ragged(seed)
    rollouts = rollout_ids(output)
    gone = [n for n, rollout in enumerate(rollouts) if rollout == rollouts[0] and left_out]
    gone = gone[-1:] if left_out == "last turn" else gone
    for n in gone:
        output["loss_masks"][n] = [0] * len(output["loss_masks"][n])
    trainer, batch, trained = through(data, OUTCOME, output, merged=merged, dp=4)
    real = len(trained["response_ids"])
    assert (real < len(output["response_ids"])) == merged
    credit, tokens = rollout_credit(output), trained_tokens(output)
    assert not batch["loss_mask"][gone].any()
    assert not left_out or (credit[rollouts[0]] != 0 and (output["is_last_step"][gone[-1]]))
    mask_nt, adv_nt = batch["loss_mask"][:real], trainer.last_advantages
    expected_n = torch.tensor([credit[rollout] / tokens[rollout] for rollout in rollout_ids(trained)])
    torch.testing.assert_close(adv_nt, expected_n[:, None] * mask_nt, atol=1e-6, rtol=0)
    assert bool((batch["advantages"][real:] == 0).all())  # SkyRL's padding
    assert len(batch["advantages"]) % 4 == 0
    # A metric that a batch cannot have would be NaN, which must not reach a tracker.
    assert trainer.all_metrics["credit/malformed"] == 0.0
    assert all(value == value for name, value in trainer.all_metrics.items() if name.startswith("credit/"))


def test_a_turn_that_says_no_state_starts_from_all_that_the_model_saw(data):
    output = small.ragged(2)
    output["right"] = [float(n % 2) for n, _ in enumerate(output["rewards"])]
    explicit, _, _ = through(data, small.GIGPO, {**output, "anchors": [tuple(ids) for ids in output["prompt_token_ids"]]})
    bare, _, _ = through(data, small.GIGPO, output)
    distinct, _, _ = through(data, small.GIGPO, {**output, "anchors": list(range(len(output["rewards"])))})
    assert torch.equal(bare.last_advantages, explicit.last_advantages)
    assert not torch.equal(bare.last_advantages, distinct.last_advantages)


def test_what_merging_changes_in_skyrl_itself():
    """Token rewards 1 and 5 of two turns: the score of the rollout is 5 in rows and 6 merged; a recipe says which it means."""
    talk = small.one_talk(([2], [8], [1.0], [1]), ([2, 8, 3], [9], [5.0], [1]), right=[1.0, 0.0])
    merged = merge_stepwise_output(dict(talk))
    assert sum(merged["rewards"][0]) == 6.0
    assert "right" not in merged
    rows = SampledRows.of(talk, ["0", "0"], merged, stepwise=True)
    assert rows.place_s == [(0, 0), (0, 2)]
    batch, _ = rows.turns(lambda uids: {}, width=3)
    assert batch.columns == {"right": [1.0, 0.0], "environment": [1.0, 5.0], "completion_ids": [[8], [9]]}


def test_a_conversation_left_out_of_the_loss_is_read_and_compared():
    """SkyRL's `apply_overlong_filtering` masks one of two conversations of a prompt."""
    masks = apply_overlong_filtering([[1, 0, 1, 1], [1, 1, 0]], ["stop", "length"])
    assert masks == [[1, 0, 1, 1], [0, 0, 0]]
    conversations = zip([[3], [3]], [[7, 8, 9, 2], [7, 8, 9]], [1.0, 0.0], masks, strict=True)
    flat = small.output_of(*conversations)
    rows = SampledRows.of(flat, ["0", "0"], flat, stepwise=False)
    batch, turns = rows.turns(lambda uids: {}, width=4)
    trained = [ids[mask > 0].tolist() for ids, mask in zip(batch.ids_nt, batch.mask_nt, strict=True)]
    assert trained == [[7], [9, 2], [7, 8, 9]]
    assert batch.columns["environment"] == [None, 1.0, 0.0]
    assert turns.row_s.tolist() == [0, 0, 1]
    assert turns.place_su.tolist() == [[0, -1, -1], [2, 3, -1], [1, 2, 3]]  # rows are right-aligned
    assert turns.put(batch.ids_nt * batch.mask_nt, rows=2).tolist() == [[7, 0, 9, 2], [0, 7, 8, 9]]


def test_a_turn_said_twice_is_two_turns():
    """A retry from the same context with the same words: SkyRL merges what comes after it with the second one."""
    retry = small.one_talk(([2], [8], 0.0, [1]), ([2], [8], 0.0, [1]), ([2, 8, 3], [9], 1.0, [1]))
    merged = merge_stepwise_output(dict(retry))
    assert merged["response_ids"] == [[8], [8, 3, 9]]
    assert SampledRows.of(retry, ["0"] * 3, merged, stepwise=True).place_s == [(0, 0), (1, 0), (1, 2)]


@pytest.mark.parametrize("ours", [True, False])
def test_old_log_probabilities_of_several_mini_batches(data, ours):
    """Step-wise rows, two mini-batches, three ranks, a policy that did not move: SkyRL compares rows with others'.

    If the second half fails, SkyRL has fixed this, and `_execute_forward_pass` can go.
    """
    output = small.ragged(5)
    changes = {"trainer.policy_mini_batch_size": 2}
    recipe = OUTCOME if ours else None
    trainer = small.trainer(small.config(data, recipe=recipe, layout="stepwise", prompts=4, samples=3, **changes), dp=3)
    batch, _ = small.up_to_values(trainer, output)
    first = batch.metadata["policy_mini_batch_boundaries"][0][1]
    assert first % 3
    now = trainer.dispatch.forward("policy", batch).loss_fn_outputs
    width = batch["loss_mask"].shape[1]
    now_nt = torch.tensor([row["logprobs"] for row in now])[:, :width]
    off = float(((now_nt - batch["action_log_probs"]).abs() * batch["loss_mask"]).max())
    assert off < 1e-5 if ours else off > 0.1


def test_bad_rewards_are_said_once(data):
    trainer = small.trainer(small.config(data, recipe=small.BROADCAST.replace("turn: []", "turn: [answer]"), steps=3))
    with pytest.warns(UserWarning, match="<answer> is in 0 of 48 completions") as caught:
        small.run(trainer)
    assert sum("<answer>" in str(warning.message) for warning in caught) == 1


def test_columns_of_the_dataset_reach_rewards(data):
    correct = "reward: correct, pays: turn, options: {tag: '', verify: exact, column: %s}"
    nested = small.BROADCAST.replace("reward: environment, pays: turn", correct)
    for column in ("reward_spec.ground_truth", "answer"):  # verl's name for it
        trainer = small.trainer(small.config(data, recipe=nested % column))
        trainer.compute_advantages_and_returns(small.batch_of(trainer))
    trainer = small.trainer(small.config(data, recipe=nested % "gold"))
    with pytest.raises(DataError, match=r"'gold'.*reward_spec\.ground_truth.*turns"):
        trainer.compute_advantages_and_returns(small.batch_of(trainer))


@pytest.mark.parametrize(("recipe", "texts"), [(small.BROADCAST, ["a0q1a1"]), (small.BY_TURN, ["a0", "a1"])])
def test_rewards_read_prompts_as_messages_and_completions_as_text(data, recipe, texts):
    flat = small.output_of(([2], [8, 3, 9], 1.0, [1, 0, 1]), right=[[1.0, 0.0]])
    trainer = small.trainer(small.config(data, recipe=recipe))
    columns = trainer._read(SampledRows.of(flat, ["0"], flat, stepwise=False), width=3).batch.columns
    prompt = json.loads(Path(data).read_text().splitlines()[0])["prompt"]
    assert (columns["prompts"], columns["completions"]) == ([prompt] * len(texts), texts)


def test_fully_asynchronous_training_takes_the_same_road(data):
    """The conversion and the credit of SkyRL's asynchronous trainer; its loop wants several GPUs."""
    changes = {
        "trainer.fully_async.enabled": True, "trainer.fully_async.num_parallel_generation_workers": 6,
        "trainer.algorithm.policy_loss_type": "rollout_is",
    }  # fmt: skip
    cfg = small.config(data, recipe=small.BY_TURN, layout="stepwise", samples=3, prompts=4, **changes)
    cls = trainer_class(cfg)
    assert issubclass(cls, FullyAsyncRayPPOTrainer)
    trainer = small.trainer(cfg, cls=cls)
    output = small.ragged(4)
    output["right"] = [float(n % 2) for n in range(len(output["rewards"]))]
    groups = []
    for prompt in map(str, range(4)):
        rows = [n for n, t in enumerate(output["trajectory_ids"]) if t.instance_id == prompt]
        part = {key: [values[n] for n in rows] for key, values in output.items() if isinstance(values, list)}
        part |= {**small.BARE, "rollout_metrics": {}}
        groups.append(GeneratedOutputGroup(generator_output=part, uid=prompt, global_step_when_scheduled=0))
    batch = trainer.fwd_logprobs_values_reward(trainer.convert_generation_group_mini_batch_to_training_input(groups))
    trainer.compute_advantages_and_returns(batch)
    plain, _, _ = through(data, small.BY_TURN, output)
    assert torch.equal(trainer.last_advantages, plain.last_advantages)
    assert asyncio.iscoroutinefunction(cls.train)


def test_a_turn_of_a_whole_conversation_is_paid_what_stands_until_the_next_turn():
    """Three turns that begin at 0, 3 and 5: .5 + 0 + .25, then 1 + 2, then 0 + 4."""
    rewards = [0.5, 0.0, 0.25, 1.0, 2.0, 0.0, 4.0]
    output = small.output_of(([9], [1, 2, 3, 4, 5, 6, 7], rewards, [1, 1, 0, 1, 0, 1, 1]))
    batch, _ = SampledRows.of(output, ["p"], output, stepwise=False).turns(lambda uids: {}, width=7)
    assert batch.columns["environment"] == [0.75, 3.0, 4.0]


@pytest.mark.parametrize("recipe", [small.BY_TURN, small.GIGPO], ids=["bae", "gigpo"])
def test_a_whole_conversation_with_one_value_for_its_turns_is_refused_where_each_is_paid(data, recipe):
    trainer = small.trainer(small.config(data, recipe=recipe))

    def read(right):
        flat = small.output_of(([3], [7, 8, 9, 2], 1.0, [1, 0, 1, 1]), right=[right])
        return trainer._read(SampledRows.of(flat, ["0"], flat, stepwise=False), width=4)

    assert read([1.0, 0.0]).batch.columns["right"] == [1.0, 0.0]
    with pytest.raises(DataError, match="for its 2 turns"):
        read(1.0)
