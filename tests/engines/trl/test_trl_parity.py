"""One block and one reward against TRL's own `GRPOTrainer`: the training is the same, up to the scale of the loss.

Completions are sampled by TRL in both, in float32, from equal seeds: a difference in any weight would change what is sampled.
"""

import pyarrow.parquet as pq
import pytest
import torch
from trl import GRPOTrainer

import trl_small as small
from spanwise.engines.trl import SpanGRPOTrainer
from spanwise.layout import Layout
from spanwise.objective import Objective
from spanwise.scheme import Scheme

LONGEST = 8
TRL_EPS = 1e-4


def trained(folder, *, scheme=None, **options):
    """Train four steps, without a scheme by TRL alone: the weights after each, the norms and the last table of completions."""
    usual = {
        "optim": "adamw_torch", "learning_rate": 1e-2, "max_steps": 4, "max_grad_norm": 1.0, "max_completion_length": LONGEST,
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "shuffle_dataset": True,
    }  # fmt: skip
    args, steps = small.config(folder, **{**usual, **options}), small.EveryStep()
    shared = {"model": small.policy(dtype=torch.float32), "train_dataset": small.prompts(6)}
    shared |= {"processing_class": small.tokenizer(), "callbacks": [steps]}
    torch.manual_seed(0)
    if scheme is None:
        run = GRPOTrainer(args=small.plain(args), reward_funcs=[small.many_a], **shared)
    else:
        run = SpanGRPOTrainer(args=args, scheme=scheme, **shared)
    run.train()
    table = pq.read_table(next((folder / "completions").glob("*4.parquet"))) if options.get("log_completions") else None
    return steps.weights, [line["grad_norm"] for line in run.state.log_history if "grad_norm" in line], table


def scheme(method="bae", per="completion"):
    objective = Objective(small.many_a, pays="completion", scale="std" if method == "bae" else None)
    return Scheme.preset(method, Layout({"completion": []}), objectives=[objective], per=per, eps=TRL_EPS)


def far_apart(ours, theirs):
    return max(small.largest_difference(mine, other) for mine, other in zip(ours, theirs, strict=True))


TABLE = {"loss_type": "grpo", "log_completions": True}


@pytest.fixture(scope="module")
def of_trl(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("trl"), **TABLE)


@pytest.mark.parametrize("method", ["bae", "grpo"])
def test_one_block_is_trls_own_trainer(of_trl, tmp_path, method):
    theirs, their_norms, their_table = of_trl
    ours, our_norms, our_table = trained(tmp_path, scheme=scheme(method), **TABLE)
    assert our_norms[0] == their_norms[0]
    assert far_apart(ours, theirs) < 1e-5
    assert far_apart(theirs[1:], theirs[:-1]) > 1e-3, "the steps were too small to show anything"
    for name in ("prompt", "completion", "many_a"):
        assert our_table[name].to_pylist() == their_table[name].to_pylist()
    assert our_table["advantage"].to_pylist() == pytest.approx(their_table["advantage"].to_pylist(), abs=1e-5)
    assert our_table["credit/completion"] == our_table["advantage"]


HALVES = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "steps_per_generation": 2}


@pytest.mark.parametrize(
    ("loss_type", "per", "options"),
    [
        ("sapo", "completion", {}), ("dr_grpo", LONGEST, {}), ("luspo", 1, {}), ("cispo", "batch", {"epsilon_high": 3.0}),
        ("bnpo", "batch", {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}), ("dapo", "batch", HALVES),
    ],
)  # fmt: skip
def test_the_share_that_is_trls_loss(tmp_path, loss_type, per, options):
    theirs, their_norms, _ = trained(tmp_path / "trl", loss_type=loss_type, **options)
    ours, our_norms, _ = trained(tmp_path / "ours", loss_type=loss_type, scheme=scheme(per=per), **options)
    assert our_norms == pytest.approx(their_norms, rel=1e-5)
    assert far_apart(ours, theirs) < 1e-5
