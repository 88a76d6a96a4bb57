"""The gradient of one real TRL step against the paper's objective, written out token by token in float64."""

import math

import pytest
import torch
from peft import LoraConfig, get_peft_model

import trl_small as small
from spanwise.engines.trl import fold
from spanwise.errors import RecipeError, SpanwiseError


@pytest.mark.parametrize("loss_type", fold.LOSS_TYPES)
def test_one_step_is_the_gradient_of_the_paper(tmp_path, loss_type):
    """With tools, micro-batches and a KL term, which is the token mean of each completion under every `loss_type`."""
    beta, replies, extra = 0.3, small.SAID_WITH_TOOLS, {"model": small.beside_a_reference(tmp_path)}
    shape = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "max_completion_length": 160}
    options = {"loss_type": loss_type, "beta": beta, "extra": extra, **shape}
    run = small.trainer(tmp_path / "run", scripts=replies, tools=True, **options)
    reward = small.paper_gradient(small.policy(), replies, loss_type=loss_type)
    expected = small.added(reward, small.kl_gradient(small.policy(), replies, beta=beta))
    assert small.largest_difference(small.step(run), expected) < small.EXACT
    assert run.beta == beta
    assert not run._canary_due


@pytest.mark.parametrize("corrected", [True, False])
def test_the_kl_term_off_policy_and_what_is_logged_of_it(tmp_path, corrected):
    beta, extra = 0.3, {"model": small.beside_a_reference(tmp_path)}
    options = {"beta": beta, "use_bias_correction_kl": corrected, "extra": extra}
    run, gradient, moved, old = small.second_step(tmp_path / "run", 0.01, **options)
    other = [row.detach() for row in small.log_probs(small.policy(seed=1), small.SAID)]
    reward, kl = small.paper_gradient(moved, old=old), small.kl_gradient(moved, beta=beta, old=old, corrected=corrected)
    assert small.largest_difference(gradient, small.added(reward, kl)) < small.EXACT
    log_ratio = torch.cat(other) - torch.cat(old)
    assert run.state.log_history[0]["kl"] == pytest.approx(float((log_ratio.exp() - log_ratio - 1).mean()))


CLIPS = {"dr_grpo": 0.2, "cispo": 0.2, "sapo": 0.2, "dapo": 0.2, "vespo": 0.2, "dppo_tv": 0.01, "dppo_kl": 0.0005}


@pytest.mark.parametrize("loss_type", CLIPS)
def test_off_policy_step_is_clipped_like_the_paper(tmp_path, loss_type):
    clip, rate = CLIPS[loss_type], 0.01 if loss_type == "vespo" else 0.05
    run, gradient, moved, old = small.second_step(tmp_path, rate, loss_type=loss_type, epsilon=clip)
    expected = small.paper_gradient(moved, loss_type=loss_type, old=old, clip=clip)
    assert small.largest_difference(gradient, expected) < small.EXACT
    if loss_type in ("dr_grpo", "vespo", "dppo_tv", "dppo_kl"):
        unclipped = "dr_grpo" if loss_type == "vespo" else loss_type  # VESPO has no clip, and weighs tokens by their sign
        other = small.paper_gradient(moved, loss_type=unclipped, old=old, clip=1e9)
        assert small.largest_difference(gradient, other) > 0.01, "the step was too small to clip anything"
    dropped = [line["dppo/dropped"] for line in run.state.log_history if "dppo/dropped" in line]
    assert (not dropped) if "dppo" not in loss_type else dropped[0] == 0 < dropped[1] < 1
    assert run.loss_type == loss_type  # TRL's own is back
    assert not run._canary_due


@pytest.mark.parametrize("loss_type", ["dr_grpo", "cispo", "sapo", "luspo"])
@pytest.mark.parametrize("level", ["block", "sequence"])
def test_a_shared_ratio_is_the_geometric_mean_and_each_token_keeps_its_own_advantage(tmp_path, loss_type, level):
    # Every ratio of the first step on a batch is 1; the second step clips.
    clip, replies = 0.01, small.SAID_WITH_TOOLS
    options = {"loss_type": loss_type, "epsilon": clip, "importance_sampling_level": level}
    run, gradient, moved, old = small.second_step(tmp_path, 0.05, scripts=replies, tools=True, **options)
    paper = {"loss_type": loss_type, "old": old, "clip": clip}
    expected = {name: small.paper_gradient(moved, replies, level=name, **paper) for name in fold.RATIO_LEVELS}
    assert small.largest_difference(gradient, expected[level]) < small.EXACT
    if loss_type != "cispo":  # whose clip of .01 is under every ratio
        others = [other for name, other in expected.items() if name != level]
        assert all(small.largest_difference(gradient, other) > 0.01 for other in others)
    assert not run._canary_due


def test_dppo_counts_from_the_sampler_where_trl_knows_it(tmp_path):
    logps, mask = torch.tensor([[0.5, 0.5]]).log().requires_grad_(), torch.ones(1, 2)
    inputs = {"advantages": torch.ones(1, 2), "old_per_token_logps": torch.tensor([[0.5, 0.5]]).log()}

    def gradient(**more):
        term, dropped = fold.dppo_term(
            logps, {**inputs, **more}, mask, small.config(tmp_path, loss_type="dppo_tv", epsilon=0.2)
        )
        return torch.autograd.grad(term, logps)[0].tolist()[0], float(dropped)

    assert gradient() == ([-1.0, -1.0], 0.0)
    sampled = torch.tensor([[0.25, 0.4]]).log()
    assert gradient(sampling_per_token_logps=sampled) == ([0.0, pytest.approx(-1.25)], 0.5)
    unknown = torch.tensor([[math.nan, 0.4]]).log()  # vLLM does not know the first
    assert gradient(sampling_per_token_logps=unknown) == ([-1.0, pytest.approx(-1.25)], 0.0)


def test_what_acts_on_trls_own_term_is_refused_under_dppo(tmp_path):
    options = {"delta": 2.0, "off_policy_mask_threshold": 0.5, "top_entropy_quantile": 0.2}
    for option, value in {**options, "importance_sampling_level": "block"}.items():
        with pytest.raises(RecipeError, match=f"^{option} "):
            small.config(tmp_path, loss_type="dppo_tv", **{option: value})


def test_under_dppo_the_entropy_bonus_stays_trls_and_the_logged_policy_loss_is_dppos(tmp_path):
    run = small.trainer(tmp_path, loss_type="dppo_tv", entropy_coef=0.1)
    run.train()
    line = run.state.log_history[0]
    assert line["policy_loss"] != 0
    assert line["loss"] == pytest.approx(line["policy_loss"] - 0.1 * line["entropy"], abs=1e-3)


def test_padding_to_a_multiple_and_trls_own_config_change_nothing(tmp_path):
    args = small.plain(small.config(tmp_path, pad_to_multiple_of=8, loss_type="grpo"))
    run = small.trainer(tmp_path, extra={"args": args})
    assert run.loss_type == "grpo"
    assert small.largest_difference(small.step(run), small.paper_gradient(small.policy())) < small.EXACT
    assert run.last_rollouts.batch.ids_nt.shape == run.last_rollouts.advantages_nt.shape == (8, 16)


def test_lora_weights_get_the_same_gradient(tmp_path):
    def adapted():
        torch.manual_seed(3)
        lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
        return get_peft_model(small.policy(), lora, autocast_adapter_dtype=False).double()

    want = small.paper_gradient(adapted())
    assert all("lora" in name for name in want)
    run = small.trainer(tmp_path, extra={"model": adapted()})
    assert small.largest_difference(small.step(run), want) < small.EXACT


def test_slopes_of_the_surrogates(tmp_path):
    ratio = torch.tensor([[1.0, 0.5, 1.1, 1.3]], dtype=torch.float64)
    adv = torch.tensor([[1.0, -1.0, -1.0, 0.5]], dtype=torch.float64)
    inputs, nan = {"old_per_token_logps": torch.zeros_like(ratio), "advantages": adv}, math.nan

    def slope(**options):
        return fold.surrogate_slope(ratio.log(), inputs, small.config(tmp_path, epsilon=0.2, **options))[0].tolist()

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
        fold.check_own_advantage(-advantages.sum(), logps, advantages, mask, **options)
    loss = -(advantages * 3 * logps.exp()).sum() / 3
    fold.check_own_advantage(loss, logps, advantages, mask, **options)
    clipped = -(advantages * torch.tensor([[1.0, 7.0]]) * logps.exp()).sum()
    fold.check_own_advantage(clipped, logps, advantages, mask, **{**options, "height_bt": torch.tensor([[1.0, math.nan]])})
    loss.backward()  # it stays usable
    assert logps.grad.tolist() == [[-2.0, 1.0]]


def test_nothing_is_read_at_a_masked_token_and_an_empty_batch_divides_by_one():
    kl_bt = fold.token_kl(torch.tensor([[-2.0, math.nan]]), torch.tensor([[-1.0, 0.0]]), torch.tensor([[1, 0]]))
    torch.testing.assert_close(kl_bt, torch.tensor([[math.e - 2, 0.0]]))  # exp(d) - d - 1 at d = 1
    factor = fold.fold_factor(torch.zeros(2, 3), loss_type="bnpo", max_completion_length=9, num_items=0.0)
    assert factor.flatten().tolist() == [0.5, 0.5]
