"""The gradient of one real TRL step against the paper's objective, written out token by token in float64."""

import math

import pytest
import torch
from peft import LoraConfig, get_peft_model

import trl_small as small
from spanwise.engines.trl.fold import LOSS_TYPES, RATIO_LEVELS, dppo_term
from spanwise.errors import RecipeError


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
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


@pytest.mark.parametrize("loss_type", ["bnpo", "dapo"])
def test_two_optimizer_steps_on_one_generation_batch_add_up(tmp_path, loss_type):
    # Steps so small that the weights stay put: the two half-batches then sum to twice the whole batch's gradient.
    rate = 1e-7
    shape = {"per_device_train_batch_size": 4, "steps_per_generation": 2, "max_steps": 2}
    run = small.trainer(tmp_path, loss_type=loss_type, learning_rate=rate, **shape)
    half = {name: value / 2 for name, value in small.step(run, rate).items()}
    assert small.largest_difference(half, small.paper_gradient(small.policy(), loss_type=loss_type)) < 5e-6
    assert not run._canary_due  # it also runs when old log-probabilities are kept


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
    expected = {name: small.paper_gradient(moved, replies, level=name, **paper) for name in RATIO_LEVELS}
    assert small.largest_difference(gradient, expected[level]) < small.EXACT
    if loss_type != "cispo":  # whose clip of .01 is under every ratio
        others = [other for name, other in expected.items() if name != level]
        assert all(small.largest_difference(gradient, other) > 0.01 for other in others)
    assert not run._canary_due


def test_dppo_counts_from_the_sampler_where_trl_knows_it(tmp_path):
    logps, mask = torch.tensor([[0.5, 0.5]]).log().requires_grad_(), torch.ones(1, 2)
    inputs = {"advantages": torch.ones(1, 2), "old_per_token_logps": torch.tensor([[0.5, 0.5]]).log()}

    def gradient(**more):
        term, dropped = dppo_term(logps, {**inputs, **more}, mask, small.config(tmp_path, loss_type="dppo_tv", epsilon=0.2))
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


def test_truncated_completions_count_in_the_baselines_and_are_not_trained(tmp_path):
    cut = [small.cut(reply) if i == 2 else reply for i, reply in enumerate(small.SAID_WITH_TOOLS)]
    run = small.trainer(tmp_path, scripts=cut, tools=True, mask_truncated_completions=True, loss_type="dapo")
    assert small.largest_difference(small.step(run), small.paper_gradient(small.policy(), cut, unlearned={2})) < small.EXACT


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
