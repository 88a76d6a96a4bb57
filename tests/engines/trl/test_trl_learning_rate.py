"""When a learning rate must change on the way from TRL's trainer to ours, and by what factor (docs/howto/from_grpotrainer.md).

Scripted completions of 12 tokens, two blocks of six each, and one reward for both: the credit of every token is the same in both
trainers, so nothing but the scale of the loss differs.
"""

from functools import cache

import pytest
from trl import GRPOTrainer

from spanwise.objective import Objective
from trl_small import beside_a_reference, config, largest_difference, plain, policy, say, step, trainer

TOKENS, LONGEST, BLOCKS = 12, 16, 2
SAID = [
    say(f"{thought}a", answer, confidence, right)
    for thought, answer, confidence, right in zip(
        ("ab", "bb", "aa", "ba", "aa", "bb", "ab", "ba"), "44353777", (0.9, 0.6, 0.8, 0.1, 0.7, 0.2, 0.5, 0.3),
        (1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0), strict=True,
    )
]  # fmt: skip


def right(completions, answer, **columns):
    return [float(f"<answer>{gold}" in text.replace(" ", "")) for text, gold in zip(completions, answer, strict=True)]


@pytest.fixture(scope="module")
def moved(tmp_path_factory):
    """The change of the weights in a training, divided by the learning rate; each training is made once."""

    @cache
    def move(*, ours, loss_type="dr_grpo", per="block", learning_rate=1e-2, beta=0.0, **options):
        folder = tmp_path_factory.mktemp("run")
        model = beside_a_reference(folder) if beta else policy()
        options |= {"loss_type": loss_type, "learning_rate": learning_rate, "max_completion_length": LONGEST, "beta": beta}
        if ours:
            objectives = [Objective(right, pays=["solution", "confidence"])]
            extra = {"objectives": objectives, "credit": {"per": per}, "model": model}
            run = trainer(folder, scripts=SAID, extra=extra, **options)
        else:
            args = plain(config(folder, **options, scale_rewards="none"))
            extra = {"scheme": None, "reward_funcs": [right], "args": args, "model": model}
            run = trainer(folder, scripts=SAID, kind=lambda scheme, **extra: GRPOTrainer(**extra), extra=extra)
        return step(run, learning_rate)

    return move


def factor_between(left, right_):
    sizes = [sum(float((part**2).sum()) for part in gradient.values()) ** 0.5 for gradient in (left, right_)]
    scaled = {name: part * sizes[0] / sizes[1] for name, part in right_.items()}
    assert largest_difference(scaled, left) < 1e-6, "they differ by more than a factor"  # advantages are in float32
    return sizes[0] / sizes[1]


FACTORS = dict.fromkeys(("grpo", "dapo", "bnpo"), BLOCKS)
FACTORS |= {"dr_grpo": BLOCKS * LONGEST / TOKENS, "luspo": BLOCKS / TOKENS}


@pytest.mark.parametrize(("loss_type", "factor"), FACTORS.items())
def test_the_gradient_is_larger_by_this_factor(moved, loss_type, factor):
    ours, theirs = moved(ours=True), moved(ours=False, loss_type=loss_type)  # whatever our own loss_type
    assert factor_between(ours, theirs) == pytest.approx(factor, rel=1e-6)


def test_adam_keeps_its_learning_rate(moved):
    ours, theirs = (moved(ours=ours, optim="adamw_torch", max_steps=3, adam_epsilon=1e-12) for ours in (True, False))
    assert largest_difference(ours, theirs) < 1e-5


def test_plain_descent_divides_it_by_the_factor(moved):
    factor = FACTORS["dr_grpo"]
    ours, theirs = moved(ours=True, learning_rate=1e-2 / factor, max_steps=3), moved(ours=False, max_steps=3)
    assert largest_difference({name: part / factor for name, part in ours.items()}, theirs) < 1e-6
    assert largest_difference(moved(ours=True, max_steps=3), theirs) > 1.0


def test_a_bound_on_the_norm_meets_the_larger_gradient_first(moved):
    unbound = moved(ours=False)
    norm = sum(float((part**2).sum()) for part in unbound.values()) ** 0.5
    ours, theirs = (moved(ours=ours, max_grad_norm=1.5 * norm) for ours in (True, False))  # ours is 2.67 times theirs
    assert factor_between(theirs, unbound) == pytest.approx(1.0, rel=1e-6)
    assert factor_between(ours, unbound) == pytest.approx(1.5, rel=1e-4)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "luspo"])
def test_beta_keeps_its_weight_beside_the_policy_term_times_the_blocks(moved, loss_type):
    """TRL divides its KL term as the policy term, so the ratio of the two knows nothing of `loss_type`; lengths are equal here."""
    theirs = moved(ours=False, loss_type=loss_type, beta=0.5)
    assert factor_between(moved(ours=True, beta=0.5 * BLOCKS), theirs) > 0
    assert factor_between(moved(ours=True, per="completion", beta=0.5), theirs) > 0
    with pytest.raises(AssertionError, match="more than a factor"):
        factor_between(moved(ours=True, beta=0.5), theirs)


@pytest.mark.parametrize("loss_type", ["dapo", "dr_grpo"])
def test_an_entropy_bonus_keeps_its_weight_times_the_factor(moved, loss_type):
    theirs, factor = moved(ours=False, loss_type=loss_type, entropy_coef=0.1), FACTORS[loss_type]
    assert factor_between(moved(ours=True, entropy_coef=0.1 * factor), theirs) == pytest.approx(factor, rel=1e-6)
