"""SkyRL's dump of an evaluation, written by SkyRL's own function, is read under its own column names."""

import pytest
import skyrl_small as small
from skyrl.train.utils.trainer_utils import dump_per_dataset_eval_results

from rollout_files import records, texts
from spanwise.rollouts import read_rollouts


@pytest.mark.parametrize("rewards", [[1.0, 0.0, 0.5], [[0.0, 1.0], [0.0], [0.75, 0.0, -0.25]]])
def test_what_skyrl_dumps_is_what_is_read(tmp_path, rewards):
    """SkyRL's own generator gives a reward to each token, and SkyRL's metrics add a completion's rewards up."""
    tokenizer = small.tokenizer()
    prompts, replies = ["2+2=", "2+2=", "3+3= é"], ["4 é", "5", "<answer>6</answer>"]
    ids = {name: [tokenizer.encode(text) for text in column] for name, column in (("prompt", prompts), ("reply", replies))}
    outputs = {
        "prompt_token_ids": ids["prompt"], "response_ids": ids["reply"], "rewards": rewards,
        "stop_reasons": ["stop", "length", "stop"],
    }  # fmt: skip
    dump_per_dataset_eval_results(
        tmp_path, tokenizer, outputs, ["sums"] * 3, ["env"] * 3, [{"level": n} for n in range(3)], {"all": 0.5}
    )
    table = read_rollouts(tmp_path / "sums.jsonl")
    lines = records(tmp_path / "sums.jsonl")
    assert list(table.prompts) == [line["input_prompt"] for line in lines]
    assert texts(table) == [line["output_response"] for line in lines]
    assert table.rewards["score"].value_n.tolist() == [1.0, 0.0, 0.5]
    assert table.group_n.tolist() == [0, 0, 1]
    assert table.columns["stop_reason"] == ["stop", "length", "stop"]
