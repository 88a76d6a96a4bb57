"""Which groups SkyRL trains on: dynamic sampling and the zero-variance filter look at the credit of blocks."""

import asyncio
from types import SimpleNamespace

import pytest
import skyrl_small as small
import torch
from skyrl.train.generators.utils import prepare_generator_input

from spanwise.engines.skyrl.config import check
from spanwise.engines.skyrl.main import trainer_class
from spanwise.errors import RecipeError

ALGORITHM = "trainer.algorithm."
#: For each kind of group the right turns of its two rollouts; the environment's reward, their share, differs in the third.
SCRIPTED = {"same": [[1, 1], [1, 1]], "blocks": [[1, 0], [0, 1]], "rewards": [[1, 1], [0, 0]]}
#: Groups with credit in some turn, worked out by hand, and groups whose rewards differ.
USEFUL, VARIED = {"blocks", "rewards"}, {"rewards"}


def scripted(kinds):
    """A generator's script: `SCRIPTED` says which turns of a group's rollouts are right."""

    def script(plans):
        replies = []
        for row, plan in enumerate(plans):
            is_right = SCRIPTED[kinds[row // 2 % len(kinds)]][row % 2]
            signs = [small.right(sign) + 1 - fits for sign, fits in zip(plan, is_right, strict=True)]
            replies.append([small.FIRST_SAID + sign % small.SIGNS for sign in signs])
        return replies

    return script


def of_two_turns(tmp_path, kinds, **changes):
    data = small.write_dataset(tmp_path / "two.jsonl", turns=(2,))
    cfg = small.config(data, **{"recipe": small.BY_TURN, "prompts": len(kinds), "samples": 2, "steps": 1, **changes})
    return small.trainer(cfg, script=scripted(kinds))


def sampled(trainer, number=0):
    """The generator's output for the next prompts of the dataset, and their ids."""
    request, uids = prepare_generator_input(list(trainer.train_dataloader)[number], 2, {}, "signs", "train", 1)
    return asyncio.run(trainer.generate(request)), uids


def test_a_full_batch_is_collected_of_the_groups_in_which_a_block_gets_credit(tmp_path):
    kinds = ["same", "blocks", "rewards", "same"]
    trainer = of_two_turns(tmp_path, kinds, **{f"{ALGORITHM}dynamic_sampling.type": "filter"})
    first, first_uids = sampled(trainer)
    output, uids, more = trainer.handle_dynamic_sampling(first, first_uids)
    assert more, "two of four groups are useful"
    second, second_uids = sampled(trainer, 1)
    output, uids, more = trainer.handle_dynamic_sampling(second, second_uids)
    assert not more
    useful = [first_uids[2], first_uids[4], second_uids[2], second_uids[4]]
    assert uids == [uid for uid in useful for _ in range(2)]
    assert output["rewards"] == [0.5, 0.5, 1.0, 0.0] * 2, "the environment's own rewards are back"
    assert "spanwise_rewards" not in output


def test_groups_that_teach_nothing_are_replaced(tmp_path):
    trainer = of_two_turns(tmp_path, ["same", "blocks", "rewards"], **{f"{ALGORITHM}dynamic_sampling.type": "replace"})
    output, uids = sampled(trainer)
    replaced, replaced_uids, more = trainer.handle_dynamic_sampling(output, list(uids))
    assert not more
    assert replaced_uids[2:] == uids[2:]
    assert replaced_uids[0] in (uids[2], uids[4])
    assert replaced["rewards"][:2] in ([0.5, 0.5], [1.0, 0.0])


@pytest.mark.parametrize("layout", ["flat", "stepwise", "merged"])
def test_the_filter_leaves_out_what_teaches_no_block_and_changes_no_other_advantage(tmp_path, layout):
    kinds, batches, trainers = ["same", "blocks", "rewards"], {}, {}
    for on in (False, True):
        trainer = of_two_turns(tmp_path, kinds, layout=layout, **{f"{ALGORITHM}zero_variance_filter": on})
        batch = small.batch_of(trainer)
        masks = batch["loss_mask"].clone()
        batches[on], trainers[on] = trainer.compute_advantages_and_returns(batch), trainer
        rows = trainer.last_rows
        kind_of = dict(zip(dict.fromkeys(rows.uids), kinds, strict=True))
        left_out = torch.tensor([on and kind_of[rows.uids[s]] not in USEFUL for s in rows.source_row_n])
        size = len(left_out)
        assert torch.equal(batches[on]["loss_mask"][:size], masks[:size] * ~left_out[:, None])
    assert torch.equal(trainers[True].last_advantages, trainers[False].last_advantages)
    assert trainers[True].all_metrics["reward/num_zero_variance_filtered"] == 1
    assert "reward/num_zero_variance_filtered" not in trainers[False].all_metrics
    assert trainers[True].cfg.trainer.algorithm.zero_variance_filter


def test_a_whole_training_on_useful_groups(data):
    sampling = {f"{ALGORITHM}dynamic_sampling.type": "filter", f"{ALGORITHM}zero_variance_filter": True}
    trainer = small.run(small.trainer(small.config(data, recipe=small.BY_TURN, steps=4, **sampling)))
    logged = trainer.tracker.logged
    assert len(logged) == 4
    assert all(line["credit/no_signal"] == 0 for line in logged)
    assert all(line["reward/num_zero_variance_filtered"] == 0 for line in logged), "useless groups never arrive"


@pytest.mark.parametrize("layout", ["flat", "stepwise"])
def test_asynchronous_training_keeps_the_groups_with_credit(tmp_path, layout):
    trainer = of_two_turns(tmp_path, list(SCRIPTED), layout=layout)
    output, uids = sampled(trainer)
    if layout == "stepwise":
        uids = [trajectory.instance_id for trajectory in output["trajectory_ids"]]
    kept = {}
    for kind, uid in zip(SCRIPTED, dict.fromkeys(uids), strict=True):
        rows = [row for row, of_row in enumerate(uids) if of_row == uid]
        part = {name: [values[n] for n in rows] for name, values in output.items() if isinstance(values, list)}
        cfg = SimpleNamespace(trainer=SimpleNamespace(fully_async=SimpleNamespace(enabled=True)))
        kept[kind] = trainer_class(cfg)._should_keep_group(trainer, SimpleNamespace(generator_output=part, uid=uid))
    assert {kind for kind, is_kept in kept.items() if is_kept} == USEFUL != VARIED


def test_the_release_that_loses_columns_is_refused(data, monkeypatch):
    monkeypatch.setattr("spanwise.engines.skyrl.config.version", lambda package: "0.3.0")
    sampling = {f"{ALGORITHM}dynamic_sampling.type": "filter"}
    with pytest.raises(RecipeError, match=r"Under SkyRL 0\.3\.0, .* drops the columns.*Install skyrl 0\.4"):
        check(small.config(data, recipe=small.BY_TURN, **sampling))
