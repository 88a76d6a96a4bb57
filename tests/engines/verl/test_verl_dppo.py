"""DPPO in verl: its own loss on our folded advantages, against the objective written out token by token."""

import math
import warnings

import pytest
import torch
from verl_small import actor_config, config_of

from spanwise.engines.verl.carry import MODES, loss_factor
from spanwise.engines.verl.settings import prepare

ROWS, WIDTH = 8, 6


def slow_gradient(logp_nt, old_nt, adv_nt, mask_nt, name, *, delta, cap):
    """By each log-probability, of minus the mean over rollouts of the sum over tokens of kept weight times advantage."""
    gradient_nt = torch.zeros_like(logp_nt)
    for i, t in mask_nt.nonzero().tolist():
        logp, old, adv = float(logp_nt[i, t]), float(old_nt[i, t]), float(adv_nt[i, t])
        now, before = math.exp(logp), math.exp(old)
        if name == "dppo_tv":
            kept = (now - before if adv > 0 else before - now) <= delta
        else:
            others = (1 - before) * math.log((1 - before + 1e-8) / (1 - now + 1e-8))
            back = now <= before if adv > 0 else now >= before
            kept = back or before * (old - logp) + others <= delta
        gradient_nt[i, t] = -adv * min(math.exp(logp - old), cap) * kept / ROWS
    return gradient_nt


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("name", "delta"), [("dppo_tv", 0.05), ("dppo_kl", 0.01)])
def test_the_gradient_is_that_of_the_objective(name, delta, mode):
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    generator = torch.Generator().manual_seed(3)
    mask_nt = torch.arange(WIDTH) < torch.randint(1, WIDTH + 1, (ROWS, 1), generator=generator)
    adv_nt = torch.randn(ROWS, WIDTH, generator=generator).double() * mask_nt
    old_nt = (torch.rand(ROWS, WIDTH, generator=generator).double() * 0.5 + 0.05).log()
    moved_nt = 0.3 * torch.randn(ROWS, WIDTH, generator=generator).double()
    logp_nt = (old_nt + moved_nt).clamp(max=-0.01).requires_grad_()
    config = actor_config(clip_ratio_low=delta, clip_ratio_high=delta, clip_ratio_c=1.25, loss_scale_factor=9)
    tokens = int(mask_nt.sum())
    config.global_batch_info.update(dp_size=1, batch_num_tokens=tokens, global_batch_size=ROWS, loss_scale_factor=9)
    factor_n1 = loss_factor(mask_nt.long(), mode=mode, rollouts=ROWS, mini_batch=ROWS, tokens=tokens, horizon=9)
    given = {"old_log_prob": old_nt, "log_prob": logp_nt, "advantages": adv_nt * factor_n1, "response_mask": mask_nt}
    loss, shown = get_policy_loss_fn(name)(**given, loss_agg_mode=mode, config=config)
    want_nt = slow_gradient(logp_nt.detach(), old_nt, adv_nt, mask_nt, name, delta=delta, cap=1.25)
    torch.testing.assert_close(torch.autograd.grad(loss, logp_nt)[0], want_nt, rtol=1e-5, atol=1e-9)
    assert 0 < shown["actor/pg_clipfrac"] < 1
    assert bool((logp_nt - old_nt)[mask_nt].exp().max() > 1.25), "no weight was cut"


def test_the_largest_weight_of_ppo_is_remarked_on(tmp_path):
    dppo = "actor_rollout_ref.actor.policy_loss.loss_mode=dppo_tv"
    with pytest.warns(UserWarning, match="clip_ratio_c. Yours is 3"):
        prepare(config_of(tmp_path, dppo))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepare(config_of(tmp_path, dppo, "actor_rollout_ref.actor.clip_ratio_c=20"))
