"""A TRL environment that owns its reward: `get_reward`, called by TRL's own trainer after real generations, pays a block."""

import asyncio
from itertools import cycle

import pytest
from datasets import Dataset
from trl.chat_template_utils import qwen3_chat_template

import trl_small as small
from spanwise import Layout, Objective, Scheme
from spanwise.errors import RecipeError
from tokenizers_small import byte_level

pytestmark = pytest.mark.filterwarnings("ignore:You are using 'environment_factory'")


class Room:
    """Pay the n-th rollout n mod 4."""

    numbers = cycle(range(4))

    def reset(self, **kwargs):
        self.number = next(Room.numbers)

    def look(self) -> str:
        """Look around.

        Returns:
            What is there.
        """
        return "a door"

    def get_reward(self):
        return float(self.number)


class SlowRoom(Room):
    loop = None

    async def get_reward(self):
        SlowRoom.loop = asyncio.get_running_loop()
        return float(self.number)


def trainer(folder, environment, reward, row=None):
    tokenizer = byte_level(special=("<|im_start|>", "<|im_end|>"))
    tokenizer.eos_token, tokenizer.pad_token, tokenizer.chat_template = "<|im_end|>", "<|im_end|>", qwen3_chat_template
    extra = {
        "model": small.policy(words=len(tokenizer)),
        "train_dataset": Dataset.from_list([row or {"prompt": [{"role": "user", "content": "Go."}]}] * 4),
        "processing_class": tokenizer, "rollout_func": None, "environment_factory": environment,
        "scheme": Scheme.preset("rloo", Layout({"all": []}), objectives=[Objective(reward, pays="all")], per="completion"),
    }  # fmt: skip
    return small.trainer(folder, extra=extra, per_device_train_batch_size=4, max_completion_length=6)


@pytest.mark.parametrize(
    ("environment", "row"),
    [(Room, None), (SlowRoom, None), ({"room": Room}, {"environment": "room"})],
    ids=["sync", "async", "rows without a prompt"],
)
def test_get_reward_pays_the_blocks_of_the_objective_environment(tmp_path, environment, row):
    run = trainer(tmp_path, environment, "environment", row)
    run.train()
    rewards = run.last_rollouts.reading.scores.reward_nm[:, 0].tolist()
    assert sorted(rewards) == [0.0, 1.0, 2.0, 3.0]
    expected = [reward - (6.0 - reward) / 3 for reward in rewards]  # minus the mean of the three others
    assert run.last_rollouts.credit.block_nk[:, 0].tolist() == pytest.approx(expected)
    assert run.reward_func_names == ["environment"]
    if environment is SlowRoom:  # its asynchronous tools run there, too
        assert SlowRoom.loop is run.async_loop
    assert run.state.log_history[0]["rewards/environment/mean"] == 1.5


def test_get_reward_that_pays_no_block_is_refused(tmp_path):
    with pytest.raises(RecipeError, match="Room has a get_reward"):
        trainer(tmp_path, Room, "format")
