"""The registered estimators against verl's own, on the same tensors, through verl's own `compute_advantage`."""

import inspect
import warnings

import driver
import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from verl import DataProto
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, get_policy_loss_fn
from verl.trainer.ppo.ray_trainer import compute_advantage
from verl_small import actor_config

from spanwise import RecipeError

REWARDS = torch.tensor([1.0, 0.0, 0.5, -2.0, 1.0, 1.0, 3.0])
GROUPS = ["a", "b", "a", "b", "a", "c", "c"]


def data_of(width=5, rewards=REWARDS, groups=GROUPS, rejected=()):
    generator = torch.Generator().manual_seed(0)
    length_n = torch.randint(1, width + 1, (len(rewards),), generator=generator)
    mask_nt = (torch.arange(width) < length_n[:, None]).long()
    mask_nt[[*rejected]] = 0
    reward_nt = torch.zeros(len(rewards), width)
    reward_nt[torch.arange(len(rewards)), length_n - 1] = rewards
    uid = np.array(groups, dtype=object)
    return DataProto.from_dict({"token_level_rewards": reward_nt, "response_mask": mask_nt}, non_tensors={"uid": uid})


def run(name, data, config=None, **kwargs):
    config = OmegaConf.create({"adv_estimator": name, "gamma": 1.0} if config is None else config)
    with warnings.catch_warnings(action="error"):
        return compute_advantage(data, name, config=config, **kwargs).batch["advantages"]


@pytest.mark.parametrize("rejected", [(), (2,)])
@pytest.mark.parametrize(("ours", "theirs"), [("rloo", "rloo"), ("grpo", "grpo"), ("dr_grpo", "grpo")])
def test_as_verls(ours, theirs, rejected):
    """Rollout correction clears a rollout's mask but keeps its reward, with which others are still compared."""
    plain = {"norm_adv_by_std_in_grpo": False} if ours == "dr_grpo" else {}
    found_nt = run(f"spanwise_{ours}", data_of(rejected=rejected))
    expected_nt = run(theirs, data_of(rejected=rejected), **plain)
    assert torch.allclose(found_nt, expected_nt, atol=1e-6)
    assert found_nt.dtype == torch.float32
    assert not found_nt[[*rejected]].any()


def test_a_reward_on_tool_output_counts():
    """A rollout that ends inside a tool response has its outcome on a masked token; verl's gae and remax lose it."""
    data = data_of(rewards=torch.tensor([1.0, 0.0]), groups=["a", "a"])
    data.batch["response_mask"] = torch.tensor([[1, 1, 0, 0, 0], [1, 1, 0, 0, 0]])
    data.batch["token_level_rewards"] = torch.tensor([[0.0, 0, 0, 1, 0], [0, 0, 0, 0, 0]])
    assert run("spanwise_rloo", data).tolist() == [[1.0, 1, 0, 0, 0], [-1.0, -1, 0, 0, 0]]


def test_options_of_the_method_and_what_verl_tells_its_own_grpo_alone():
    """verl hands `norm_adv_by_std_in_grpo` to no other estimator."""
    config = {"spanwise": {"options": {"leave_one_out": True}}}
    found_nt = run("spanwise_dr_grpo", data_of(rewards=torch.tensor([1.0, 0.0]), groups=["a", "a"]), config)
    assert found_nt[:, 0].tolist() == [1.0, -1.0]  # without the option: .5 and -.5
    for wrong in ({"ddoff": 0}, {"ddof": 8}):
        with pytest.raises(RecipeError, match="ddof"):
            run("spanwise_grpo", data_of(), {"spanwise": {"options": wrong}})
    undivided = OmegaConf.create({"norm_adv_by_std_in_grpo": False})
    with pytest.raises(RecipeError, match="spanwise_dr_grpo"):
        run("spanwise_grpo", data_of(), undivided)
    run("spanwise_rloo", data_of(), undivided)  # rloo divides by nothing


def test_the_signature_takes_what_verl_may_pass():
    """An open change of verl passes the batch to any estimator whose signature asks for it."""
    for name, function in ADV_ESTIMATOR_REGISTRY.items():
        if str(name).startswith("spanwise_"):
            assert {"non_tensor_batch", "batch"} <= set(inspect.signature(function).parameters)
    data, rloo = data_of().batch, ADV_ESTIMATOR_REGISTRY["spanwise_rloo"]
    result = rloo(**dict(data), index=GROUPS, non_tensor_batch={}, batch=data, gamma=1.0)
    assert torch.equal(result[0], run("spanwise_rloo", data_of()))
    with pytest.raises(RecipeError, match="no uid"):
        rloo(**dict(data))


def test_aspo_has_verls_reduction():
    """verl has no ASPO; ours is reduced by verl's agg_loss, weighted by rollout correction."""
    ratio_nt, one_nt = torch.tensor([[0.5, 1.1, 1.5, 0.1]]), torch.ones(1, 4)
    batch = {"old_log_prob": torch.zeros(1, 4), "log_prob": ratio_nt.log(), "advantages": one_nt, "response_mask": one_nt}
    batch["config"] = actor_config(clip_ratio_low=0.2, clip_ratio_high=0.2, clip_ratio_c=3.0)
    # -1/0.5, -1/1.1, dropped, -min(10, 3); the mean of the four
    loss, metrics = get_policy_loss_fn("spanwise_aspo")(**batch)
    assert float(loss) == pytest.approx(-(2 + 1 / 1.1 + 3) / 4, rel=1e-6)
    assert "actor/ppo_kl" in metrics
    halved, _ = get_policy_loss_fn("spanwise_aspo")(**batch, rollout_is_weights=one_nt / 2)
    assert float(halved) == pytest.approx(float(loss) / 2)


@pytest.mark.usefixtures("queue")
def test_the_benchmark_of_the_driver_runs(capsys):
    """It calls verl's own `_compute_advantage` and `_compute_metrics`, as a step does."""
    with warnings.catch_warnings(action="ignore"):
        driver.compare([64], [4], group=4, repeats=1)
    printed = capsys.readouterr().out
    assert [name in printed for name in ("verl grpo", "spanwise", "verl's metrics")] == [True] * 3
