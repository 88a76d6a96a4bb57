"""The trainer's pure parts on numbers worked out by hand."""

import math
import re

import pytest
import torch

from spanwise.engines.trl.config import SpanGRPOConfig, check_prefilled, check_use
from spanwise.engines.trl.fold import check_own_advantage, fold_factor, surrogate_slope, token_kl
from spanwise.errors import SpanwiseError
from spanwise.layout import Layout


def test_slopes_of_the_surrogates(tmp_path):
    ratio = torch.tensor([[1.0, 0.5, 1.1, 1.3]], dtype=torch.float64)
    adv = torch.tensor([[1.0, -1.0, -1.0, 0.5]], dtype=torch.float64)
    inputs, nan = {"old_per_token_logps": torch.zeros_like(ratio), "advantages": adv}, math.nan

    def slope(**options):
        quiet = {"use_cpu": True, "bf16": False, "gradient_checkpointing": None}
        args = SpanGRPOConfig(str(tmp_path), epsilon=0.2, **quiet, **options)
        return surrogate_slope(ratio.log(), inputs, args)[0].tolist()

    assert slope(loss_type="grpo", epsilon_high=0.28) == pytest.approx([1.0, nan, 1.1, nan], nan_ok=True)
    assert slope(loss_type="grpo", epsilon_high=0.28, delta=1.05) == pytest.approx([1.0, nan, nan, nan], nan_ok=True)
    soft = slope(loss_type="sapo", sapo_temperature_pos=1.0, sapo_temperature_neg=2.0)
    gates = [0.5, 1 / (1 + math.exp(1.0)), 1 / (1 + math.exp(-0.2)), 1 / (1 + math.exp(-0.3))]  # temperatures 1, 2, 2, 1
    assert soft == pytest.approx([4 * gate * (1 - gate) * r for gate, r in zip(gates, ratio[0].tolist(), strict=True)])
    assert slope(loss_type="cispo", epsilon_high=1.2) == pytest.approx([1.0, 0.5, 1.1, 1.2])


def test_the_canary_on_losses_of_other_shapes():
    logps, advantages = torch.zeros(1, 2, requires_grad=True), torch.tensor([[2.0, -1.0]], requires_grad=True)
    mask = torch.ones(1, 2)
    options = {"factor_b1": torch.ones(1, 1), "accumulation": 1, "height_bt": mask}
    with pytest.raises(SpanwiseError, match="any token"):  # no log-probability is in it
        check_own_advantage(-advantages.sum(), logps, advantages, mask, **options)
    loss = -(advantages * 3 * logps.exp()).sum() / 3
    check_own_advantage(loss, logps, advantages, mask, **options)
    clipped = -(advantages * torch.tensor([[1.0, 7.0]]) * logps.exp()).sum()
    check_own_advantage(clipped, logps, advantages, mask, **{**options, "height_bt": torch.tensor([[1.0, math.nan]])})
    loss.backward()  # it stays usable
    assert logps.grad.tolist() == [[-2.0, 1.0]]


def test_versions_of_trl(tmp_path):
    plain, liger = (SpanGRPOConfig(str(tmp_path), use_cpu=True, bf16=False, use_liger_kernel=x) for x in (False, True))
    check_use(liger, trl_version="1.14.0")
    for version in ("1.10.0", "1.14.2", "1.16.0", "1.17.0.dev0"):
        check_use(plain, trl_version=version)
    for args, version in ((plain, "1.9.2"), (plain, "1.15.0"), (liger, "1.13.0")):
        with pytest.raises(SpanwiseError, match=re.escape(f"trl {version}")):
            check_use(args, trl_version=version)


def test_white_space_after_a_prefilled_tag_and_a_prompt_that_only_mentions_one():
    for ending in ("<answer>", "<answer>\n", "<answer> "):
        check_prefilled("Say:" + ending, Layout({"all": ["answer"]}, prefilled="answer"))
    check_prefilled("Put it in <answer> and </answer>.", Layout({"all": ["answer"]}))


def test_nothing_is_read_at_a_masked_token_and_an_empty_batch_divides_by_one():
    kl_bt = token_kl(torch.tensor([[-2.0, math.nan]]), torch.tensor([[-1.0, 0.0]]), torch.tensor([[1, 0]]))
    torch.testing.assert_close(kl_bt, torch.tensor([[math.e - 2, 0.0]]))  # exp(d) - d - 1 at d = 1
    factor = fold_factor(torch.zeros(2, 3), loss_type="bnpo", max_completion_length=9, num_items=0.0)
    assert factor.flatten().tolist() == [0.5, 0.5]
