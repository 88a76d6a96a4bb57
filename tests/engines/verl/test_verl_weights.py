"""verl's own `agg_loss` on folded advantages is the mean over rollouts of the sum over tokens, however the batch is cut."""

import itertools

import pytest
import torch
from verl.trainer.ppo.core_algos import agg_loss, get_policy_loss_fn
from verl_small import actor_config

from spanwise.engines.verl.carry import MODES, loss_factor
from spanwise.errors import RecipeError

GENERATOR = torch.Generator().manual_seed(5)
ROWS, WIDTH = 12, 7


def batch(padding):
    length_n = torch.randint(1, WIDTH + 1, (ROWS,), generator=GENERATOR)
    if padding:
        length_n[-padding:] = 0
    mask_nt = (torch.arange(WIDTH) < length_n[:, None]).long()
    return torch.randn(ROWS, WIDTH, generator=GENERATOR).double() * mask_nt, mask_nt


def reduced(adv_nt, mask_nt, mode, mini_batch, micro, ranks):
    """The loss that FSDP accumulates over an optimiser step through `ppo_loss`: a mean over ranks of sums over micro-batches."""
    total = 0.0
    for step in range(0, ROWS, mini_batch):
        rows = torch.arange(step, step + mini_batch)
        for rank in range(ranks):
            for part in rows[rank::ranks].split(micro):
                longest = int(mask_nt[part].sum(dim=1).max().clamp(min=1))  # a micro-batch is padded to its own longest
                sizes = {"dp_size": ranks, "batch_num_tokens": int(mask_nt[rows].sum()), "global_batch_size": mini_batch}
                sizes["loss_scale_factor"] = 9 if mode == "seq-mean-token-sum-norm" else None
                loss = agg_loss(-adv_nt[part, :longest], mask_nt[part, :longest].bool(), mode, **sizes)
                total += float(loss) / ranks
    return total / (ROWS // mini_batch)  # the mean over optimiser steps


@pytest.mark.parametrize(("mode", "padding"), [*itertools.product(MODES, [0, 2])])
@pytest.mark.parametrize(("mini_batch", "micro", "ranks"), [(12, 12, 1), (12, 5, 2), (4, 1, 2), (6, 2, 1)])
def test_is_the_objective(mode, padding, mini_batch, micro, ranks):
    adv_nt, mask_nt = batch(padding)
    sizes = {"rollouts": ROWS - padding, "tokens": int(mask_nt.sum()), "rows": ROWS, "mini_batch": mini_batch}
    if mode == "token-mean" and mini_batch < ROWS:
        with pytest.raises(RecipeError, match=rf"12 rows has mini-batches of {mini_batch}.*seq-mean-token-mean"):
            loss_factor(mask_nt, mode=mode, **sizes)
        return
    factor = loss_factor(mask_nt, mode=mode, horizon=9, **sizes).double()
    objective = -float(adv_nt.sum()) / (ROWS - padding)
    assert reduced(adv_nt * factor, mask_nt, mode, mini_batch, micro, ranks) == pytest.approx(objective, rel=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_losses_of_verl_are_linear_in_a_positive_factor(mode):
    """For every loss that is let through: this linearity is what allows advantages to be scaled."""
    adv_nt, mask_nt = batch(0)
    logp_nt = torch.randn(ROWS, WIDTH, generator=GENERATOR).double() - 2
    old_nt = logp_nt + 0.3 * torch.randn(ROWS, WIDTH, generator=GENERATOR).double()
    config = actor_config(clip_ratio_low=0.2, clip_ratio_high=0.2, loss_scale_factor=9)
    rows = {"old_log_prob": old_nt, "log_prob": logp_nt, "response_mask": mask_nt.bool()}
    for name in ("vanilla", "dppo_tv", "dppo_kl", "gspo", "sapo", "gpg", "cispo", "spanwise_aspo"):
        loss, tripled = (
            float(get_policy_loss_fn(name)(**rows, advantages=scale * adv_nt, loss_agg_mode=mode, config=config)[0])
            for scale in (1.0, 3.0)
        )
        assert tripled == pytest.approx(3 * loss, rel=1e-6), name
