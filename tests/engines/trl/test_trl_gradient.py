"""The gradient of one real TRL step against the paper's objective, written out token by token in float64."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import TrainerCallback
from trl import GRPOConfig

from spanwise.engines.trl import LOSS_TYPES
from trl_small import (
    SAID,
    SAID_WITH_TOOLS,
    THIRD_PARTY,
    Said,
    config,
    largest_difference,
    log_probs,
    paper_gradient,
    policy,
    questions,
    say,
    step,
    trainer,
    weights,
)

pytestmark = THIRD_PARTY
EXACT = 2e-6  # TRL keeps advantages in float32


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("tools", [False, True], ids=["plain", "tools"])
def test_one_step_is_the_gradient_of_the_paper(tmp_path, loss_type, tools):
    said = SAID_WITH_TOOLS if tools else SAID
    want = paper_gradient(policy(), said, loss_type=loss_type)
    run = trainer(
        tmp_path,
        said=said,
        tools=tools,
        loss_type=loss_type,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
    )
    assert largest_difference(step(run), want) < EXACT
    assert not run._canary_due


def kl_gradient(model, said=SAID, *, beta, old=None, corrected=True):
    """Of beta times the mean over completions of the mean over trained tokens of r - log r - 1, r = reference / policy.

    `corrected`: each token times policy / old policy, which on-policy is 1 and has a gradient.
    """
    asked, total = questions(said), 0.0
    reference = [row.detach() for row in log_probs(policy(seed=1), said, asked)]
    for i, (one, row) in enumerate(zip(said, log_probs(model, said, asked), strict=True)):
        before = row.detach() if old is None else old[i]
        trained = [t for t, block in enumerate(one.blocks) if block >= 0]
        for t in trained:
            r = (reference[i][t] - row[t]).exp()
            ratio = (row[t] - before[t]).exp() if corrected else 1.0
            total = total + ratio * (r - r.log() - 1) / len(trained) / len(said)
    model.zero_grad()
    (beta * total).backward()
    return {name: value.grad.detach().clone() for name, value in model.named_parameters() if value.grad is not None}


def beside_a_reference(folder):
    """A policy whose reference, which TRL loads by the name in its config, is `policy(seed=1)`."""
    policy(seed=1).save_pretrained(folder / "reference")
    model = policy()
    model.config._name_or_path = str(folder / "reference")
    return model


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize(("longest", "rows"), [(16, 8), (160, 2)])
def test_the_kl_term_is_the_token_mean_of_each_completion(tmp_path, loss_type, longest, rows):
    beta, said = 0.3, SAID_WITH_TOOLS
    run = trainer(
        tmp_path / "run",
        said=said,
        tools=True,
        loss_type=loss_type,
        beta=beta,
        max_completion_length=longest,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=8 // rows,
        extra={"model": beside_a_reference(tmp_path)},
    )
    found = step(run)
    reward, kl = paper_gradient(policy(), said, loss_type=loss_type), kl_gradient(policy(), said, beta=beta)
    assert largest_difference(found, {name: value + kl[name] for name, value in reward.items()}) < EXACT
    assert run.beta == beta


@pytest.mark.parametrize("corrected", [True, False])
def test_the_kl_term_off_policy_and_what_is_logged_of_it(tmp_path, corrected):
    beta, rate, seen = 0.3, 0.01, _Weights()
    run = trainer(
        tmp_path / "run",
        num_iterations=2,
        max_steps=2,
        learning_rate=rate,
        beta=beta,
        use_bias_correction_kl=corrected,
        extra={"model": beside_a_reference(tmp_path), "callbacks": [seen]},
    )
    run.train()
    first, second = seen.after
    found = {name: (first[name] - second[name]) / rate for name in first}
    with torch.no_grad():
        old, other = (log_probs(model, SAID, questions(SAID)) for model in (policy(), policy(seed=1)))
    moved = policy()
    moved.load_state_dict(first, strict=False)
    reward, kl = paper_gradient(moved, old=old), kl_gradient(moved, beta=beta, old=old, corrected=corrected)
    assert largest_difference(found, {name: value + kl[name] for name, value in reward.items()}) < EXACT
    apart = torch.cat(other) - torch.cat(old)
    assert run.state.log_history[0]["kl"] == pytest.approx(float((apart.exp() - apart - 1).mean()))


@pytest.mark.parametrize("loss_type", ["dr_grpo", "grpo", "bnpo", "dapo"])
@pytest.mark.parametrize(("rows", "accumulation"), [(8, 1), (4, 2), (1, 8)])
def test_accumulation_changes_nothing(tmp_path, loss_type, rows, accumulation):
    run = trainer(
        tmp_path,
        loss_type=loss_type,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=accumulation,
    )
    assert largest_difference(step(run), paper_gradient(policy(), loss_type=loss_type)) < EXACT


@pytest.mark.parametrize("loss_type", ["dr_grpo", "bnpo", "dapo"])
def test_two_optimizer_steps_on_one_generation_batch_add_up(tmp_path, loss_type):
    # Steps so small that the weights stay put: the two half-batches then sum to twice the whole batch's gradient.
    small = 1e-7
    run = trainer(
        tmp_path,
        loss_type=loss_type,
        per_device_train_batch_size=4,
        steps_per_generation=2,
        max_steps=2,
        learning_rate=small,
    )
    half = {name: value / 2 for name, value in step(run, small).items()}
    assert largest_difference(half, paper_gradient(policy(), loss_type=loss_type)) < 5e-6
    assert not run._canary_due  # it also runs when old log-probabilities are kept


class _Weights(TrainerCallback):
    def __init__(self):
        self.after = []

    def on_step_end(self, args, state, control, model, **kwargs):
        self.after.append(weights(model))


@pytest.mark.parametrize("loss_type", ["dr_grpo", "cispo", "sapo", "dapo"])
def test_off_policy_step_is_clipped_like_the_paper(tmp_path, loss_type):
    rate, seen = 0.05, _Weights()
    run = trainer(
        tmp_path,
        loss_type=loss_type,
        num_iterations=2,
        max_steps=2,
        learning_rate=rate,
        extra={"callbacks": [seen]},
    )
    run.train()
    first, second = seen.after
    found = {name: (first[name] - second[name]) / rate for name in first}

    with torch.no_grad():
        old = log_probs(policy(), SAID, questions(SAID))
    moved = policy()
    moved.load_state_dict(first, strict=False)
    want = paper_gradient(moved, loss_type=loss_type, old=old)
    assert largest_difference(found, want) < EXACT
    if loss_type == "dr_grpo":
        unclipped = paper_gradient(moved, loss_type=loss_type, old=old, clip=1e9)
        assert largest_difference(found, unclipped) > 0.01, "the step was too small to clip anything"


def test_truncated_completions_count_in_the_baselines_and_are_not_trained(tmp_path):
    cut = say("ab", "4", 0.9, 1.0)
    said = [Said(cut.pieces[:-1], cut.blocks[:-1], cut.right, cut.confidence), *SAID[1:]]
    run = trainer(tmp_path, said=said, mask_truncated_completions=True)
    want = paper_gradient(policy(), said, unlearned={0})
    assert largest_difference(step(run), want) < EXACT


def test_truncated_completions_with_tools(tmp_path):
    cut = SAID_WITH_TOOLS[2]
    said = [*SAID_WITH_TOOLS]
    said[2] = Said(cut.pieces[:-1], cut.blocks[:-1], cut.right, cut.confidence)
    run = trainer(tmp_path, said=said, tools=True, mask_truncated_completions=True, loss_type="dapo")
    want = paper_gradient(policy(), said, unlearned={2})
    assert largest_difference(step(run), want) < EXACT


def test_padding_to_a_multiple_changes_nothing(tmp_path):
    run = trainer(tmp_path, pad_to_multiple_of=8, loss_type="grpo")
    assert largest_difference(step(run), paper_gradient(policy())) < EXACT
    assert run.last_rollouts.batch.ids_nt.shape == run.last_rollouts.advantages_nt.shape == (8, 16)


def test_lora_weights_get_the_same_gradient(tmp_path):
    def adapted():
        torch.manual_seed(3)
        lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
        return get_peft_model(policy(), lora, autocast_adapter_dtype=False).double()

    run = trainer(tmp_path, extra={"model": adapted()})
    found = step(run)
    want = paper_gradient(adapted())
    assert want
    assert all("lora" in name for name in want)
    assert largest_difference(found, want) < EXACT


def test_plain_grpo_config_is_accepted(tmp_path):
    usual = config(tmp_path)
    kept = ["per_device_train_batch_size", "num_generations", "max_completion_length", "max_steps", "learning_rate"]
    kept += ["lr_scheduler_type", "optim", "max_grad_norm", "shuffle_dataset", "use_cpu", "bf16", "save_strategy"]
    kept += ["gradient_checkpointing", "report_to", "disable_tqdm", "dataloader_pin_memory"]
    plain = GRPOConfig(str(tmp_path), **{name: getattr(usual, name) for name in kept})
    run = trainer(tmp_path, extra={"args": plain})
    assert run.loss_type == "dapo"
    assert largest_difference(step(run), paper_gradient(policy())) < EXACT


def test_a_constant_length_replaces_the_block_length(tmp_path):
    # per: 4 divides every block's credit by 4 tokens instead of its own number of tokens.
    said = [say("", "4", 0.9, 1.0), say("a", "3", 0.3, 0.0)] * 4
    run = trainer(tmp_path, said=said, extra={"credit": {"per": 4}})
    run.train()
    advantages_nt = run.last_rollouts.advantages_nt
    # Groups 1 0 1 0: correct is 1 - .5 or 0 - .5; equal confidences in every stratum get 0.
    assert advantages_nt[0, :3].tolist() == pytest.approx([0.125] * 3)
    assert advantages_nt[1, :4].tolist() == pytest.approx([-0.125] * 4)
    assert advantages_nt[:, 4:].abs().sum() == 0
