"""Estimators in SkyRL's own registry, called by SkyRL's own code."""

import numpy as np
import pytest
import ray
import skyrl_small as small
import torch
from skyrl.backends.skyrl_train.utils import ppo_utils
from skyrl.backends.skyrl_train.utils.ppo_utils import AdvantageEstimatorRegistry
from skyrl.train.utils import validate_cfg

from spanwise.credit import METHODS
from spanwise.credit.registry import outcome_methods
from spanwise.engines.skyrl.estimators import register
from spanwise.errors import RecipeError
from spanwise.registry import register as plug_in


@pytest.fixture(autouse=True)
def registered():
    ppo_utils.repopulate_all_registries()
    register()


def called(name, reward_nt, mask_nt, index, **changes):
    return ppo_utils.compute_advantages_and_returns(
        token_level_rewards=reward_nt, response_mask=mask_nt, index=index, adv_estimator=name, config=None, **changes
    )


# Two groups of three and two, a singleton: rewards 1 0 0 | 4 2 | 5.
REWARD = torch.zeros(6, 3)
REWARD[:, 2] = torch.tensor([1.0, 0.0, 0.0, 4.0, 2.0, 5.0])
UIDS = ["7", "7", "7", "9", "9", "11"]
BY_HAND = {
    "rloo": [1.0, -0.5, -0.5, 2.0, -2.0, 0.0],
    "dr_grpo": [2 / 3, -1 / 3, -1 / 3, 1.0, -1.0, 0.0],
    "maxrl": [2.0, -1.0, -1.0, 1 / 3, -1 / 3, 0.0],
}


@pytest.mark.parametrize("name", BY_HAND)
def test_flat_and_stepwise_arguments_by_hand(name):
    flat = called(f"spanwise_{name}", REWARD, torch.tensor([[0, 1, 1]] * 6), list(UIDS))
    rows = called(f"spanwise_{name}", REWARD, torch.ones(6, 3), np.array(UIDS))
    for adv_nt, returns_nt in (flat, rows):
        assert adv_nt[:, 2].tolist() == pytest.approx(BY_HAND[name], abs=1e-5)
        assert torch.equal(adv_nt, returns_nt)
        assert adv_nt.dtype == torch.float32
    assert (flat[0][:, 0] == 0).all()
    assert torch.equal(rows[0][:, 0], rows[0][:, 2])


@pytest.fixture
def batch_mean():
    """A method of a plug-in whose baseline is the mean of the batch."""

    @plug_in("batch_mean", kind="completion", paper="none")
    def batch_mean(reward_n, group_n):
        """Subtract the mean of the batch."""
        return reward_n - reward_n.mean()

    register()
    yield
    del METHODS["batch_mean"], AdvantageEstimatorRegistry._functions["spanwise_batch_mean"]


@pytest.mark.usefixtures("batch_mean")
@pytest.mark.parametrize("name", [*outcome_methods(), "batch_mean"])
def test_padding_changes_nobody(name):
    padded = torch.cat([REWARD, REWARD[:1], REWARD[:1]])
    with_pads, _ = called(f"spanwise_{name}", padded, torch.ones(8, 3), np.array([*UIDS, "pad0", "pad1"]))
    without, _ = called(f"spanwise_{name}", REWARD, torch.ones(6, 3), np.array(UIDS))
    assert torch.equal(with_pads[:6], without)
    assert (with_pads[6:] == 0).all()


def test_a_prompt_whose_id_begins_like_padding_is_a_prompt():
    adv_nt, _ = called("spanwise_rloo", REWARD[:2], torch.ones(2, 3), ["padlock", "padlock"])
    assert adv_nt[:, 0].tolist() == [1.0, -1.0]


def test_registering_again_does_nothing():
    before = dict(AdvantageEstimatorRegistry._functions)
    register()
    assert AdvantageEstimatorRegistry._functions == before
    assert {f"spanwise_{name}" for name, method in METHODS.items() if method.preset} <= before.keys()


@pytest.mark.parametrize("name", ["spanwise_gae", "spanwise_bae", "spanwise"])
def test_what_the_registry_cannot_carry_is_refused_where_skyrl_does_not(data, name):
    """SkyRL refuses temporal estimators in step-wise training by two names; under any other name it takes them."""
    cfg = small.config(data, layout="stepwise", **{"trainer.algorithm.advantage_estimator": name})
    assert name in AdvantageEstimatorRegistry.list_available()
    cfg.generator.inference_engine.num_engines = 1
    validate_cfg(cfg)
    trainer = small.trainer(cfg, dp=3)
    batch = small.batch_of(trainer)
    with pytest.raises(RecipeError, match="override_entrypoint"):
        trainer.compute_advantages_and_returns(batch)
    cfg.trainer.algorithm.advantage_estimator = "gae"
    cfg.trainer.critic.model.path, cfg.trainer.critic_mini_batch_size = "some", 6
    with pytest.raises(ValueError, match="step_wise_trajectories"):
        validate_cfg(cfg)


def test_an_estimator_takes_what_skyrls_trainer_passes_and_padding_is_known_by_its_ids(data):
    """Padding rows are copies of row 0, each alone in its group."""
    calls = []

    def spy(**arguments):
        calls.append(arguments)
        return AdvantageEstimatorRegistry.get("spanwise_rloo")(**arguments)

    AdvantageEstimatorRegistry._functions["spy"] = spy
    try:
        run = small.trainer(small.config(data, layout="stepwise", **{"trainer.algorithm.advantage_estimator": "spy"}), dp=3)
        credited = run.compute_advantages_and_returns(small.batch_of(run))
    finally:
        del AdvantageEstimatorRegistry._functions["spy"]
    pads = [uid for uid in calls[0]["index"] if uid.startswith("pad")]
    assert pads == [f"pad{n}" for n in range(len(pads))] != []
    assert bool((calls[0]["response_mask"] == 1).all())
    assert bool((credited["advantages"] != 0).any())


def test_an_option_that_would_change_nothing():
    with pytest.raises(RecipeError, match="spanwise_dr_grpo"):
        called("spanwise_grpo", REWARD, torch.ones(6, 3), UIDS, grpo_norm_by_std=False)


def test_a_fresh_worker_of_ray_has_them():
    @ray.remote
    def rloo_of(reward_nt):
        from skyrl.backends.skyrl_train.utils.ppo_utils import AdvantageEstimatorRegistry as Registry

        adv, _ = Registry.get("spanwise_rloo")(token_level_rewards=reward_nt, response_mask=reward_nt * 0 + 1, index=UIDS)
        return adv[:, 0].tolist()

    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        ppo_utils.sync_registries()
        assert ray.get(rloo_of.remote(REWARD)) == BY_HAND["rloo"]
    finally:
        ray.shutdown()
        AdvantageEstimatorRegistry._ray_actor = None
        AdvantageEstimatorRegistry._synced_to_actor = False
