"""SkyRL's own critic under a recipe: its values on their tokens, its targets, and whole runs."""

import pytest
import skyrl_small as small
import torch
from critic_worker import call
from skyrl.train.generators.utils import merge_stepwise_output
from skyrl.train.trainer import RayPPOTrainer

ONE = "layout: {turn: []}\nmethod: gae\noptions: {lam: 0.5}\nobjectives: [{reward: environment, pays: turn}]\n"


def config(data, recipe=ONE, *, layout="merged", prompts=4, samples=3, **changes):
    """With a critic that starts as a copy of the policy's trunk."""
    critic = {
        "trainer.critic.model.path": small.model_path(data),
        "trainer.critic_mini_batch_size": prompts,
        "trainer.critic.optimizer_config.lr": 0.01,
    }
    return small.config(data, recipe=recipe, layout=layout, prompts=prompts, samples=samples, **{**critic, **changes})


def generated(layout, seed=0, **shape):
    """Rollouts of several turns as a generator returns them, and the prompt of each row."""
    output = small.ragged(seed, **shape)
    if layout == "flat":
        output = dict(merge_stepwise_output(output))
        uids = [trajectory.instance_id for trajectory in output.pop("trajectory_ids")]
        del output["is_last_step"]
        return output, uids
    return output, [trajectory.instance_id for trajectory in output["trajectory_ids"]]


def up_to_values(made, output, uids):
    """What `train` makes of a generator's output before the advantages."""
    trained, uids = made.postprocess_generator_output(dict(output), uids)
    return made.fwd_logprobs_values_reward(made.convert_to_training_input(trained, uids)), trained


@pytest.mark.parametrize(("dp", "mini_batch"), [(1, 4), (4, 4), (4, 2)])
@pytest.mark.parametrize("layout", ["flat", "merged"])
def test_every_value_lies_on_its_own_token(data, layout, dp, mini_batch):
    """As the critic gives it for the row alone, without padding: before each token, also where mini-batches are filled up."""
    cfg = config(data, layout=layout, **{"trainer.critic_mini_batch_size": mini_batch})
    made = small.trainer(cfg, dp=dp)
    batch, trained = up_to_values(made, *generated(layout))
    critic = made.dispatch.critic.model.eval()
    assert len(trained["response_ids"]) == 12
    for n, (prompt, said) in enumerate(zip(trained["prompt_token_ids"], trained["response_ids"], strict=True)):
        ids = torch.tensor([[*prompt, *said]])
        with torch.no_grad():
            own_t = critic(ids, len(said), torch.ones_like(ids))[0]
        torch.testing.assert_close(batch["values"][n, -len(said) :], own_t, atol=1e-5, rtol=0)


@pytest.mark.parametrize("layout", ["flat", "merged"])
def test_skyrl_itself_gives_rows_the_values_of_others(data, layout):
    """Why `_execute_forward_pass` is ours; where this fails, SkyRL has mended it, and it can go."""
    cfg = config(data, layout=layout, **{"trainer.critic_mini_batch_size": 2})
    made = small.trainer(cfg, dp=4)
    made._execute_forward_pass = lambda *given, **named: RayPPOTrainer._execute_forward_pass(made, *given, **named)
    batch, _ = up_to_values(made, *generated(layout))
    whole = torch.tensor([row["values"] for row in call(made.dispatch.critic, "forward", batch).loss_fn_outputs])
    off_n = ((batch["values"] - whole).abs() * batch["loss_mask"]).amax(dim=1)
    assert bool((off_n[:6] < 1e-5).all())
    assert bool((off_n[6:] > 1e-3).any())
