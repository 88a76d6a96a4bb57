"""DPPO in TRL: the gradient of real steps against the paper's objective, written out token by token in float64."""

import pytest
import torch
from transformers import TrainerCallback

from spanwise.engines.trl import SpanGRPOConfig
from spanwise.engines.trl.fold import dppo_term
from spanwise.errors import RecipeError
from trl_small import (
    SAID,
    THIRD_PARTY,
    config,
    largest_difference,
    log_probs,
    paper_gradient,
    policy,
    questions,
    trainer,
    weights,
)

pytestmark = THIRD_PARTY
EXACT = 2e-6  # TRL keeps advantages in float32


class _Weights(TrainerCallback):
    def __init__(self):
        self.after = []

    def on_step_end(self, args, state, control, model, **kwargs):
        self.after.append(weights(model))


@pytest.mark.parametrize(("loss_type", "delta"), [("dppo_tv", 0.01), ("dppo_kl", 0.0005)])
def test_an_off_policy_step_leaves_out_what_has_moved_far(tmp_path, loss_type, delta):
    rate, seen = 0.05, _Weights()
    options = {"num_iterations": 2, "max_steps": 2, "learning_rate": rate, "epsilon": delta}
    run = trainer(tmp_path, loss_type=loss_type, **options, extra={"callbacks": [seen]})
    run.train()
    first, second = seen.after
    found = {name: (first[name] - second[name]) / rate for name in first}
    with torch.no_grad():
        old = log_probs(policy(), SAID, questions(SAID))
    moved = policy()
    moved.load_state_dict(first, strict=False)
    want = paper_gradient(moved, loss_type=loss_type, old=old, clip=delta)
    assert largest_difference(found, want) < EXACT
    unbounded = paper_gradient(moved, loss_type=loss_type, old=old, clip=1e9)
    assert largest_difference(found, unbounded) > 0.01, "the step was too small to leave anything out"
    dropped = [line["dppo/dropped"] for line in run.state.log_history if "dppo/dropped" in line]
    assert dropped[0] == 0 < dropped[1] < 1
    assert run.loss_type == loss_type  # TRL's own is back


def test_the_divergence_is_from_the_sampler_where_trl_knows_it(tmp_path):
    logps, mask = torch.tensor([[0.5, 0.5]]).log().requires_grad_(), torch.ones(1, 2)
    inputs = {"advantages": torch.ones(1, 2), "old_per_token_logps": torch.tensor([[0.5, 0.5]]).log()}

    def gradient(**more):
        term, dropped = dppo_term(logps, {**inputs, **more}, mask, config(tmp_path, loss_type="dppo_tv", epsilon=0.2))
        return torch.autograd.grad(term, logps)[0].tolist()[0], float(dropped)

    assert gradient() == ([-1.0, -1.0], 0.0)
    sampled = torch.tensor([[0.25, 0.4]]).log()
    assert gradient(sampling_per_token_logps=sampled) == ([0.0, pytest.approx(-1.25)], 0.5)


def test_what_acts_on_trls_own_term_is_refused(tmp_path):
    assert config(tmp_path, loss_type="dppo_kl").loss_type == "dppo_kl"
    for option in ({"delta": 2.0}, {"off_policy_mask_threshold": 0.5}, {"top_entropy_quantile": 0.2}):
        with pytest.raises(RecipeError, match=rf"^{next(iter(option))} is .*'dppo_tv' ignores .*use another loss_type"):
            SpanGRPOConfig(
                str(tmp_path), use_cpu=True, bf16=False, gradient_checkpointing=False, loss_type="dppo_tv", **option
            )


def test_the_entropy_bonus_stays_trls_and_the_logged_policy_loss_is_dppos(tmp_path):
    run = trainer(tmp_path, loss_type="dppo_tv", entropy_coef=0.1)
    run.train()
    line = run.state.log_history[0]
    assert line["policy_loss"] != 0
    assert line["loss"] == pytest.approx(line["policy_loss"] - 0.1 * line["entropy"], abs=1e-3)
