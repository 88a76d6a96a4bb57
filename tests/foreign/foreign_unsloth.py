"""Whole steps of Unsloth's own GRPO trainer, on CPU, through our door: `make test-unsloth`.

Unsloth's switch for its own tests lets it be imported without a GPU; its trainer is then written as on a GPU, from TRL's.
"""

import os

os.environ |= dict.fromkeys(
    ("UNSLOTH_ALLOW_CPU", "UNSLOTH_DISABLE_STATISTICS", "HF_HUB_OFFLINE", "TORCHDYNAMO_DISABLE"), "1"
)
os.environ["UNSLOTH_MIXED_PRECISION"] = "bfloat16"  # no autocast: gradients in float32
os.environ.setdefault("UNSLOTH_COMPILE_LOCATION", "runs/unsloth_compiled")

from functools import partial

import pytest
import torch
import unsloth  # noqa: F401 - before trl
from unsloth.models.rl import _patch_trl_rl_trainers
from unsloth.models.vision import FastBaseModel

_patch_trl_rl_trainers("grpo_trainer")

import trl_conformance_small as rollouts  # noqa: E402
import trl_small as small  # noqa: E402
from spanwise.engines import unsloth as door  # noqa: E402
from spanwise.engines.shared import KL_LOSS_TYPES  # noqa: E402
from spanwise.errors import RecipeError, SpanwiseError  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")  # their packages warn of themselves
SAID = {False: small.SAID, True: small.SAID_WITH_TOOLS}
#: Micro-batches that hold both prompts.
FOUR = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}


def with_switches(policy):
    """Add the two methods that Unsloth's loader gives a model."""
    for name in ("for_training", "for_inference"):
        setattr(policy, name, partial(getattr(FastBaseModel, name), policy))
    return policy


def model(**options):
    return with_switches(small.policy(dtype=torch.float32, **options))


@pytest.fixture(autouse=True)
def different_prompts(monkeypatch):
    """Prompts of 4 and 7 tokens: their padding lies on the left, and a micro-batch holds both."""
    rows = [{"prompt": "2+2=", "answer": "4"}, {"prompt": "0001+2=", "answer": "3"}]
    monkeypatch.setattr(small, "prompts", lambda count=2: small.Dataset.from_list([rows[i % 2] for i in range(count)]))


def run_of(folder, *, extra=None, **options):
    return small.trainer(folder, kind=door.UnslothSpanGRPOTrainer, extra={"model": model(), **(extra or {})}, **options)


def paper(completions=small.SAID, **options):
    return small.paper_gradient(small.policy(dtype=torch.float32), completions, **options)


def same(gradient, expected):
    return small.largest_difference(gradient, expected) < 5e-6


@pytest.mark.parametrize(("rows", "tools"), [(2, False), (8, False), (4, True)])
@pytest.mark.parametrize("loss_type", door.LOSS_TYPES)
def test_one_step_is_the_gradient_of_the_paper(tmp_path, loss_type, rows, tools):
    completions, shape = SAID[tools], {"per_device_train_batch_size": rows, "gradient_accumulation_steps": 8 // rows}
    run = run_of(tmp_path, scripts=completions, tools=tools, loss_type=loss_type, **shape)
    assert same(small.step(run), paper(completions, loss_type=loss_type))
    assert not run._canary_due


@pytest.mark.parametrize("loss_type", KL_LOSS_TYPES)
def test_the_kl_is_the_token_mean_of_each_completion(tmp_path, loss_type):
    beta, policy = 0.3, model()
    small.beside_a_reference(tmp_path, dtype=torch.float32)
    policy.config._name_or_path = str(tmp_path / "reference")
    run = run_of(tmp_path / "run", loss_type=loss_type, beta=beta, extra={"model": policy}, **FOUR)
    kl = small.kl_gradient(small.policy(dtype=torch.float32), beta=beta, cut=10)  # where Unsloth cuts a token's divergence
    assert same(small.step(run), small.added(paper(loss_type=loss_type), kl))
    assert run.beta == beta


@pytest.mark.parametrize("loss_type", ["dr_grpo", "cispo", "sapo", "dapo"])
def test_a_second_step_on_one_batch_is_clipped_like_the_paper(tmp_path, loss_type):
    # Micro-batches of one prompt: their old log-probabilities are as wide as the longest prompt of the whole batch demands.
    shape = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    options = {"kind": door.UnslothSpanGRPOTrainer, "extra": {"model": model()}, "loss_type": loss_type, "epsilon": 0.2}
    _, gradient, moved, old = small.second_step(tmp_path, 0.05, dtype=torch.float32, **options, **shape)
    expected = small.paper_gradient(moved, loss_type=loss_type, old=old, clip=0.2)
    assert small.largest_difference(gradient, expected) < 5e-5  # weights of float32, divided by the rate


@pytest.mark.parametrize("tools", [False, True])
def test_a_padding_token_at_the_end_is_in_no_block(tmp_path, tools):
    """Unsloth's loss leaves it out, so that a block's credit is shared among its other tokens; some models have one for both."""
    completions = [small.replace(completion, blocks=[*completion.blocks[:-1], -1]) for completion in SAID[tools]]
    tokenizer = small.tokenizer()
    tokenizer.pad_token = "<eos>"
    run = run_of(tmp_path, scripts=SAID[tools], tools=tools, extra={"processing_class": tokenizer})
    assert same(small.step(run), paper(completions))
    assert not run._canary_due


@pytest.mark.parametrize("tools", [False, True])
def test_a_completion_with_a_padding_token_inside_is_left_out(tmp_path, tools):
    completions = list(SAID[tools])
    completions[2] = small.replace(completions[2], pieces=[*completions[2].pieces[:2], "<pad>", *completions[2].pieces[3:]])
    run = run_of(tmp_path, scripts=completions, tools=tools, **FOUR)
    assert same(small.step(run), paper(completions, unlearned=(2,)))


def test_completions_that_were_cut_off_are_left_out(tmp_path):
    completions = [small.cut(completion) if i in (0, 5) else completion for i, completion in enumerate(small.SAID)]
    run = run_of(tmp_path, scripts=completions, mask_truncated_completions=True, **FOUR)
    assert same(small.step(run), paper(completions, unlearned=(0, 5)))


CASES = {f"{recipe}-{group[0][0]['group']}": (recipe, group) for recipe, group in rollouts.CASES}


@pytest.mark.parametrize("case", CASES)
def test_the_advantages_are_those_of_the_definitions(tmp_path, monkeypatch, case):
    class Watched(door.UnslothSpanGRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            self.seen = super()._generate_and_score_completions(inputs)
            return self.seen

    monkeypatch.setattr(rollouts, "Watched", Watched)
    recipe, group = CASES[case]
    policy = model(words=len(rollouts.conformance.PIECES))
    run = rollouts.trained(tmp_path, recipe, [row for row, _ in group], extra={"model": policy})
    rollouts.assert_defined(run, group)


def beside(value_bt, inputs, *, pad_id):
    """Widen a table as if its rows did not move."""
    width = door.packed(value_bt, inputs, pad_id=pad_id).shape[1]
    return torch.nn.functional.pad(value_bt, (width - value_bt.shape[1], 0))


def average(value_bt, inputs, *, pad_id):
    return value_bt.mean(dim=1)


@pytest.mark.parametrize("move", [beside, average])
def test_a_table_that_does_not_move_and_one_number_for_a_completion_are_noticed(tmp_path, monkeypatch, move):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        moved = {**inputs, "advantages": move(inputs["advantages"].detach(), inputs, pad_id=self._pad_id)}
        return super(door._Packed, self).compute_loss(model, moved, return_outputs, num_items_in_batch)

    run = run_of(tmp_path)
    monkeypatch.setattr(door._Packed, "compute_loss", compute_loss)
    with pytest.raises(SpanwiseError, match="does not use the advantage of each token"):
        run.train()


def test_a_batch_without_advantages_tests_nothing_and_leaves_the_check_to_the_next(tmp_path):
    run = run_of(tmp_path, scripts=[small.SAID[0]] * 8)
    run.train()
    assert run._canary_due


def test_our_trainer_for_trl_says_where_the_door_is(tmp_path):
    with pytest.raises(RecipeError, match=r"spanwise\.engines\.unsloth"):
        small.trainer(tmp_path, extra={"model": model()})


def test_an_evaluation_and_adapters(tmp_path):
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"])
    policy = with_switches(get_peft_model(model(), adapters))
    options = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8}
    run = run_of(tmp_path, extra={"model": policy, "eval_dataset": small.prompts()}, **options)
    run.train()
    assert not run._canary_due
    assert any("eval_rewards/correct/mean" in line for line in run.state.log_history)


def test_the_config_that_unsloth_has_put_in_the_place_of_trls(tmp_path):
    ours = small.config(tmp_path)
    lengths = ("num_generations", "max_completion_length", "max_steps")
    names = (*lengths, "learning_rate", "lr_scheduler_type", "optim", "use_cpu")
    args = small.GRPOConfig(
        str(tmp_path), loss_type="dr_grpo", beta=0.0, per_device_train_batch_size=8, max_grad_norm=0.0, shuffle_dataset=False,
        report_to="none", save_strategy="no", bf16=False, weight_decay=0.0, gradient_accumulation_steps=1,
        **{name: getattr(ours, name) for name in names},
    )  # fmt: skip
    assert hasattr(args, "unsloth_grpo_mini_batch")
    run = run_of(tmp_path, extra={"args": args})
    assert same(small.step(run), paper())
    assert not run._canary_due
