"""The V0 trainer: verl's own agent loop worker makes the batch, verl's own `compute_advantage` is called as `fit` calls it."""

import pytest
from legacy_small import batch_of, credited, trainer_of
from verl.trainer.ppo.core_algos import agg_loss
from verl.workers.utils.padding import left_right_2_no_padding
from verl_small import TEXT, V0, WHOLE, config_of, manager_of

from spanwise import RecipeError

PROMPTS = [("b", TEXT.format(4, 0.9)), ("a", TEXT.format(5, 0.2)), ("b", "<answer>5</answer>"), ("a", TEXT.format(4, 0.3))]


pytestmark = pytest.mark.usefixtures("loop")


@pytest.fixture
def config(tmp_path):
    return config_of(tmp_path, *V0)


def test_another_estimator_is_left_alone(tmp_path, config):
    trainer_of(config)
    manager = manager_of(config)
    plain = config_of(tmp_path, name="rloo")
    batch = credited(plain, batch_of(manager, [("a", "<answer>4</answer>"), ("a", "<answer>5</answer>")]))
    assert batch.batch["advantages"][:, 0].tolist() == [1.0, -1.0]


def test_an_agent_loop_that_scores_itself_is_refused(config):
    trainer_of(config)
    batch = batch_of(manager_of(config), PROMPTS)
    del batch.non_tensor_batch["spanwise"]
    with pytest.raises(RecipeError, match="The agent loop scored row 0 itself"):
        credited(config, batch)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_verl_divides_by_the_tokens_that_rejection_left(tmp_path, mode):
    """At a ratio of 1 verl's loss is the mean over rollouts of the sum of their advantages, without rejected tokens."""
    config = config_of(tmp_path, *V0, f"actor_rollout_ref.actor.loss_agg_mode={mode}", recipe=WHOLE)
    trainer_of(config)
    batch = batch_of(manager_of(config), [("a", f"<answer>{digit}</answer>") for digit in (4, 5, 5)])
    batch.batch["response_mask"][1:] = 0  # rewards 1, 0, 0: rloo pays the first rollout 1
    batch = credited(config, batch)
    unpadded = left_right_2_no_padding(batch.to_tensordict())
    how = {"batch_num_tokens": int(unpadded["loss_mask"].sum()), "global_batch_size": 3}
    loss = agg_loss(-batch.batch["advantages"], batch.batch["response_mask"], mode, **how)
    assert float(loss) == pytest.approx(-1 / 3)
