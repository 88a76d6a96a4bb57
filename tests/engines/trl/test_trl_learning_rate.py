"""When a learning rate must change on the way from TRL's trainer to ours, and by what factor (docs/howto/from_grpotrainer.md).

Scripted completions of 12 tokens, two blocks of six each, and one reward for both: the credit of every token is the same in both
trainers, so nothing but the scale of the loss differs.
"""

from functools import cache

import pytest
from trl import GRPOTrainer

from spanwise.objective import Objective
from trl_small import LAYOUT, beside_a_reference, config, largest_difference, many_a, plain, policy, say, step, trainer

TOKENS, LONGEST, BLOCKS = 12, 16, 2
THOUGHTS = ("aba", "bba", "aaa", "baa", "aaa", "bba", "aba", "baa")
PARTS = zip(THOUGHTS, "44353777", (0.9, 0.6, 0.8, 0.1, 0.7, 0.2, 0.5, 0.3), strict=True)
SAID = [say(thought, answer, confidence, 1.0) for thought, answer, confidence in PARTS]


@pytest.fixture(scope="module")
def gradient(tmp_path_factory):
    """The change of the weights in a training, which in one plain step is the gradient; each training is made once."""

    @cache
    def gradient_of(*, ours, loss_type="dr_grpo", per="block", beta=0.0, **options):
        folder = tmp_path_factory.mktemp("run")
        options |= {"loss_type": loss_type, "max_completion_length": LONGEST, "beta": beta}
        extra = {"model": beside_a_reference(folder) if beta else policy()}
        if ours:
            extra |= {"objectives": [Objective(many_a, pays=LAYOUT.names)], "credit": {"per": per}}
            return step(trainer(folder, scripts=SAID, extra=extra, **options))
        extra |= {"scheme": None, "reward_funcs": [many_a], "args": plain(config(folder, **options, scale_rewards="none"))}
        return step(trainer(folder, scripts=SAID, kind=lambda scheme, **extra: GRPOTrainer(**extra), extra=extra))

    return gradient_of


def factor_between(left, right):
    sizes = [sum(float((part**2).sum()) for part in gradient.values()) ** 0.5 for gradient in (left, right)]
    scaled = {name: part * sizes[0] / sizes[1] for name, part in right.items()}
    assert largest_difference(scaled, left) < 1e-6, "they differ by more than a factor"  # advantages are in float32
    return sizes[0] / sizes[1]


FACTORS = dict.fromkeys(("grpo", "dapo", "bnpo"), BLOCKS)
FACTORS |= {"dr_grpo": BLOCKS * LONGEST / TOKENS, "luspo": BLOCKS / TOKENS}


@pytest.mark.parametrize(("loss_type", "factor"), FACTORS.items())
def test_the_gradient_is_larger_by_this_factor(gradient, loss_type, factor):
    ours, theirs = gradient(ours=True), gradient(ours=False, loss_type=loss_type)  # whatever our own loss_type
    assert factor_between(ours, theirs) == pytest.approx(factor, rel=1e-6)


def test_adam_keeps_its_learning_rate(gradient):
    adam = {"optim": "adamw_torch", "max_steps": 3, "adam_epsilon": 1e-12, "learning_rate": 1e-2}
    assert largest_difference(gradient(ours=True, **adam), gradient(ours=False, **adam)) < 1e-5


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "luspo"])
def test_beta_keeps_its_weight_beside_the_policy_term_times_the_blocks(gradient, loss_type):
    """TRL divides its KL term as the policy term, so the ratio of the two knows nothing of `loss_type`; lengths are equal here."""
    theirs = gradient(ours=False, loss_type=loss_type, beta=0.5)
    assert factor_between(gradient(ours=True, beta=0.5 * BLOCKS), theirs) > 0
    assert factor_between(gradient(ours=True, per="completion", beta=0.5), theirs) > 0
    with pytest.raises(AssertionError, match="more than a factor"):
        factor_between(gradient(ours=True, beta=0.5), theirs)


@pytest.mark.parametrize("loss_type", ["dapo", "dr_grpo"])
def test_an_entropy_bonus_keeps_its_weight_times_the_factor(gradient, loss_type):
    theirs, factor = gradient(ours=False, loss_type=loss_type, entropy_coef=0.1), FACTORS[loss_type]
    assert factor_between(gradient(ours=True, entropy_coef=0.1 * factor), theirs) == pytest.approx(factor, rel=1e-6)
