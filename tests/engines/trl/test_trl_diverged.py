"""A number that is not finite stops the run before a weight changes, and the error names the completion."""

import pytest
import torch

from spanwise.engines.trl.fold import check_gradient
from spanwise.errors import DivergedError
from spanwise.objective import Objective
from trl_small import LAYOUT, policy, prompts, trainer, weights


def adam(folder, *, extra=None, **options):
    options |= {"optim": "adamw_torch", "learning_rate": 1e-2, "max_steps": 3}
    return trainer(folder, extra={"train_dataset": prompts(4), **(extra or {})}, **options)


def stopped(run, match):
    """Train until it stops; nothing but finite numbers and the weights of the step before are left."""
    before, step = {}, run.training_step

    def watched(*args, **options):
        before.update(weights(run.model))
        return step(*args, **options)

    run.training_step = watched
    with pytest.raises(DivergedError, match=match):
        run.train()
    for name, value in weights(run.model).items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize(("where", "token"), [(slice(None), r"token 0"), (slice(-1, None), r"(masked )?token 12")])
def test_a_loss_that_is_not_finite_names_the_completion(tmp_path, where, token):
    run = adam(tmp_path)

    def broken(model, args, options, output):
        if run.state.global_step == 1 and torch.is_grad_enabled():
            lost = torch.zeros_like(output.log_probs)
            lost[2, where] = torch.nan
            output.log_probs = output.log_probs + lost
        return output

    run.model.register_forward_hook(broken, with_kwargs=True)
    stopped(run, rf"Step 1: the loss is nan. In completion \d .* log-probability of {token} is nan")
    assert run.state.global_step == 1


@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
def test_a_gradient_that_is_not_finite_under_a_finite_loss_names_its_parameter(tmp_path, max_grad_norm):
    """Clipping by a norm that is NaN would make every gradient NaN."""
    run = adam(tmp_path, max_grad_norm=max_grad_norm)
    run.model.lm_head.weight.register_hook(lambda grad: grad * torch.nan if run.state.global_step == 1 else grad)
    count = len(list(run.model.parameters()))
    stopped(run, rf"Step 1: the gradient has the norm nan\. .* not finite in 1 of {count} .* the first is lm_head.weight")
    assert run.state.global_step == 1


def test_advantages_that_are_not_finite_name_the_completion_and_its_credit(tmp_path):
    """5e39 is a number in the float64 of the credit, and none in the float32 of the advantages."""
    huge = Objective("correct", pays=("solution",), weight=1e40, options={"verify": "exact"})
    run = adam(tmp_path, extra={"layout": LAYOUT, "objectives": [huge]})
    stopped(run, r"completion 0 of 8 at token 0 is inf\. The credits of the completion's blocks are 5e\+39, 0")


def test_a_float16_scaler_skips_steps_of_its_own_accord():
    model = policy()
    for value in model.parameters():
        value.grad = torch.full_like(value, torch.inf)
    check_gradient(model, scaled=True, step=4)
    with pytest.raises(DivergedError, match=r"Step 4: the gradient has the norm inf\. The gradient is not finite in [1-9]"):
        check_gradient(model, scaled=False, step=4)
