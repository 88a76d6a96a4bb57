"""SkyRL's own critic under a recipe: its values on their tokens, its targets, and whole runs."""

import json
import math

import pytest
import skyrl_small as small
import torch
from skyrl.train.generators.utils import merge_stepwise_output

from oracles import textbook
from spanwise.errors import RewardError

HEAD = "layout: {turn: []}\nobjectives: [{reward: environment, pays: turn}]\n"
ONE = f"{HEAD}method: gae\noptions: {{lam: 0.5}}\n"


def config(data, recipe=ONE, *, layout="merged", prompts=4, samples=3, **changes):
    """With a critic that starts as a copy of the policy's trunk."""
    critic = {"trainer.critic.model.path": small.model_path(data), "trainer.critic.optimizer_config.lr": 0.01}
    changes = {**critic, "trainer.critic_mini_batch_size": prompts, **changes}
    return small.config(data, recipe=recipe, layout=layout, prompts=prompts, samples=samples, **changes)


def generated(layout):
    """Rollouts of several turns as a generator returns them, and the prompt of each row."""
    output = small.ragged(0)
    output = dict(merge_stepwise_output(output)) if layout == "flat" else output
    uids = [trajectory.instance_id for trajectory in output["trajectory_ids"]]
    if layout == "flat":
        del output["trajectory_ids"], output["is_last_step"]
    return output, uids


@pytest.mark.parametrize(("dp", "mini_batch"), [(1, 4), (4, 4), (4, 2)])
@pytest.mark.parametrize("layout", ["flat", "merged"])
def test_every_value_lies_on_its_own_token(data, layout, dp, mini_batch):
    """The value before a token is the critic's for the row alone, without padding, also if mini-batches are filled up."""
    cfg = config(data, layout=layout, **{"trainer.critic_mini_batch_size": mini_batch})
    trainer = small.trainer(cfg, dp=dp)
    batch, trained = small.up_to_values(trainer, *generated(layout))
    critic = trainer.dispatch.critic.model.eval()
    assert len(trained["response_ids"]) == 12
    for n, (prompt, reply) in enumerate(zip(trained["prompt_token_ids"], trained["response_ids"], strict=True)):
        ids = torch.tensor([[*prompt, *reply]])
        with torch.no_grad():
            own_t = critic(ids, len(reply), torch.ones_like(ids))[0]
        torch.testing.assert_close(batch["values"][n, -len(reply) :], own_t, atol=1e-5, rtol=0)


def recipe_of(method, **changes):
    critic = changes.pop("critic", {})
    return f"{HEAD}method: {method}\noptions: {json.dumps(changes)}\ncritic: {json.dumps(critic)}\n"


def backwards(reward, values, lams, gamma):
    """The textbook's recursion with one reward at the end; lams[k] weighs A[k] in the advantage before it."""
    places = [*range(len(values))]
    rewards = {**dict.fromkeys(places, 0.0), places[-1]: reward}
    return textbook(places, rewards, values, 0.0, gamma, lambda _, later: lams[later])


LAMBDAS = {
    "gae": ({"lam": 0.9, "gamma": 0.8}, lambda size, logp: [0.9] * size),
    "gae, decoupled": ({"gae_lambda_policy": 0.3, "critic": {"gae_lambda_value": 0.7}}, lambda size, logp: [0.3] * size),
    "sae": ({"lam": 0.5, "threshold": 0.07}, lambda size, logp: [0.5 if p < math.log(0.07) else 1.0 for p in logp]),
}


@pytest.mark.parametrize("name", LAMBDAS)
@pytest.mark.parametrize("layout", ["flat", "merged"])
def test_advantages_and_returns_are_those_of_loops(data, layout, name):
    """Only tokens that the model sampled are steps; the environment's tokens are skipped and their values never read."""
    options, lams = LAMBDAS[name]
    trainer = small.trainer(config(data, recipe_of(name[:3], **options), layout=layout), dp=2)
    batch, trained = small.up_to_values(trainer, *generated(layout))
    before, gamma = batch["values"].clone(), options.get("gamma", 1.0)
    critic_lam = options.get("critic", {}).get("gae_lambda_value", 1.0)
    trainer.compute_advantages_and_returns(batch)
    cut = 0
    for n, mask in enumerate(trained["loss_masks"]):
        sampled = torch.tensor(mask) > 0
        values, logp = ([*batch_nt[n, -len(mask) :][sampled].tolist()] for batch_nt in (before, batch["action_log_probs"]))
        reward, size = trained["rewards"][n][-1] if layout == "merged" else sum(trained["rewards"][n]), len(values)
        cut += size < len(mask)
        adv = backwards(reward, values, lams(size, logp), gamma)
        target = [v + a for v, a in zip(values, backwards(reward, values, [critic_lam] * size, gamma), strict=True)]
        assert trainer.last_advantages[n, -len(mask) :][sampled].tolist() == pytest.approx([a / size for a in adv], abs=1e-5)
        assert batch["returns"][n, -len(mask) :][sampled].tolist() == pytest.approx(target, abs=1e-5)
    assert cut > 6
    trained_nt = batch["loss_mask"] > 0
    for field in ("advantages", "returns", "values"):
        assert bool((batch[field][~trained_nt] == 0).all())
    assert torch.equal(batch["values"][trained_nt], before[trained_nt])


def test_without_an_inner_mask_it_is_skyrls_own_gae(data):
    """SkyRL's recursion counts every token as a step and whitens; without an inner mask both agree, returns included."""
    output, uids = generated("flat")
    output["loss_masks"] = [[1] * len(mask) for mask in output["loss_masks"]]
    settings = {"advantage_estimator": "gae", "gamma": 0.9, "lambd": 0.7}
    changes = {f"trainer.algorithm.{name}": value for name, value in settings.items()}
    skyrls = small.trainer(config(data, None, layout="flat", **changes))
    theirs, _ = small.up_to_values(skyrls, output, uids)
    expected = skyrls.compute_advantages_and_returns(theirs)
    recipe = recipe_of("gae", gamma=0.9, lam=0.7, whiten=True, critic={"gae_lambda_value": 0.7})
    trainer = small.trainer(config(data, recipe, layout="flat"))
    ours, _ = small.up_to_values(trainer, output, uids)
    trainer.compute_advantages_and_returns(ours)
    mask_nt = expected["response_mask"] > 0
    found_nt = trainer.last_advantages * mask_nt.sum(dim=1, keepdim=True)
    torch.testing.assert_close(found_nt[mask_nt], expected["advantages"][mask_nt], atol=1e-5, rtol=0)
    torch.testing.assert_close(ours["returns"][mask_nt], expected["returns"][mask_nt], atol=1e-5, rtol=0)


@pytest.mark.parametrize("poison", [1e9, float("nan")])
@pytest.mark.parametrize("layout", ["flat", "merged"])
@pytest.mark.parametrize("method", ["gae", "sae"])
def test_what_stands_at_masked_tokens_changes_nothing(data, method, layout, poison):
    """Numbers at a row left out, at padding and at the environment's words move no advantage, no return and no critic."""
    output, uids = generated(layout)
    n = next(n for n, mask in enumerate(output["loss_masks"]) if len(mask) > 3)
    output["loss_masks"][n] = [0] * len(output["loss_masks"][n])
    results = []
    for value in (None, poison):
        recipe = recipe_of(method, lam=0.5, whiten=True) if method == "gae" else recipe_of(method)
        trainer = small.trainer(config(data, recipe, layout=layout))
        batch, _ = small.up_to_values(trainer, output, uids)
        for field in () if value is None else ("values", "action_log_probs"):
            batch[field] = torch.where(batch["loss_mask"] > 0, batch[field], value)
        trainer.compute_advantages_and_returns(batch)
        logged = torch.tensor(list(trainer._execute_training_step("critic", batch).values()))
        weights = [p.detach().clone() for p in trainer.dispatch.critic.model.parameters()]
        results.append([batch["advantages"], batch["returns"], logged, *weights])
    assert all(torch.equal(clean, poisoned) for clean, poisoned in zip(*results, strict=True))
    assert not torch.equal(results[0][-1], small.trainer(config(data)).dispatch.critic.model.value_head.weight)


def test_a_value_that_is_not_finite_stops_before_anything_is_trained(data):
    trainer = small.trainer(config(data))
    batch, _ = small.up_to_values(trainer, *generated("merged"))
    row, token = (int(x) for x in torch.nonzero(batch["loss_mask"])[5])
    batch["values"][row, token] = float("nan")
    with pytest.raises(RewardError, match=f"completion {row} is nan at trainable token {token}"):
        trainer.compute_advantages_and_returns(batch)


def test_a_rollout_without_its_reward_moves_neither(data):
    """After a failed check a rollout has no advantage, and its target is the critic's own value."""
    output, uids = generated("merged")
    output["paid"] = [None if t.instance_id == "1" else 1.0 for t in output["trajectory_ids"]]
    recipe = recipe_of("gae").replace("pays: turn", "pays: turn, options: {column: paid}")
    trainer = small.trainer(config(data, recipe))
    batch, trained = small.up_to_values(trainer, output, uids)
    trainer.compute_advantages_and_returns(batch)
    silent_n = torch.tensor([t.instance_id == "1" for t in trained["trajectory_ids"]])
    assert int(silent_n.sum()) == 3
    assert bool((batch["advantages"][silent_n] == 0).all())
    assert torch.equal(batch["returns"][silent_n], batch["values"][silent_n])
    trained_nt = batch["loss_mask"][~silent_n] > 0
    torch.testing.assert_close(batch["returns"][~silent_n][trained_nt], torch.ones(int(trained_nt.sum())))


def decided(plans):
    """Answers that are all right or all wrong, depending on the first sign, so that a critic can tell from the prompt."""
    return [[small.FIRST_SAID + (small.right(sign) + plan[0] % 2) % small.SIGNS for sign in plan] for plan in plans]


@pytest.mark.parametrize(("layout", "dp", "mini_batch"), [("flat", 2, 12), ("merged", 3, 8)])
def test_the_critic_is_fitted_while_the_policy_waits(data, layout, dp, mini_batch):
    """`train()` with SkyRL's critic model, loss and worker: pre-training on a frozen policy, then both."""
    recipe = recipe_of("gae", lam=0.95, critic={"policy_training_start_step": 7})
    changes = {"trainer.critic_mini_batch_size": mini_batch, "trainer.max_training_steps": 9}
    trainer = small.trainer(config(data, recipe, layout=layout, prompts=24, samples=2, **changes), dp=dp, script=decided)
    weights = [*trainer.dispatch.model.parameters(), *trainer.dispatch.critic.model.parameters()]
    start = [weight.clone() for weight in weights]
    small.run(trainer)
    assert not any(map(torch.equal, start, weights))
    assert len(trainer.dispatch.fitted) == 9 * 24 // mini_batch
    assert len(trainer.dispatch.trained) == 2
    logged = trainer.tracker.logged
    assert logged[0]["critic/explained_variance"] < 0.0
    assert logged[-1]["critic/explained_variance"] > 0.9
    assert logged[-1]["critic/critic_loss"] < 0.1 * logged[0]["critic/critic_loss"]
    assert ["policy/policy_loss" in line for line in logged] == [False] * 7 + [True] * 2
