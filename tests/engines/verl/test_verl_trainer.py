"""V1's `_compute_advantage` on a real TransferQueue that verl's own agent loop worker filled."""

import warnings

import pytest
import ray
import torch
import transfer_queue as tq
from queue_small import filled
from verl_small import TEXT, WHOLE, config_of, manager_of

from spanwise import Batch, advantages, credit, read
from spanwise.errors import AlignmentError, RecipeError


@pytest.fixture(scope="module", autouse=True)
def queue():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray.init(num_cpus=4, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
        tq.init()
        yield
        tq.close()
        ray.shutdown()


def trainer_of(config, mode="sync"):
    from verl.trainer.ppo.v1 import get_trainer_cls

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return get_trainer_cls(mode)(config=config)


def advantages_of(batch):
    return list(tq.kv_batch_get(keys=batch.keys, partition_id="train", select_fields=["advantages"])["advantages"].unbind())


PROMPTS = [
    [[TEXT.format(4, 0.9)], [TEXT.format(5, 0.2)], ["<answer>4</answer>"], [TEXT.format(4, 0.3)]],
    [[TEXT.format(5, "high")], [TEXT.format(4, 0.7)]],
]


def test_advantages_are_those_of_the_pipeline(tmp_path):
    config = config_of(tmp_path)
    trainer = trainer_of(config)
    manager = manager_of(config)
    batch, shown = filled(manager, PROMPTS), {}
    trainer._compute_advantage(batch, shown)
    ids = [manager.tokenizer(texts[0])["input_ids"] for prompt in PROMPTS for texts in prompt]
    whole = Batch.jagged(ids, [0, 0, 0, 0, 1, 1], columns={"answer": ["4"] * 6})
    reading = read(whole, manager.scheme, manager.vocabulary)
    expected_nt = advantages(credit(reading, whole, manager.scheme), reading.spans, manager.scheme)
    for row, expected_t, length in zip(advantages_of(batch), expected_nt, map(len, ids), strict=True):
        assert torch.equal(row, expected_t[:length])
    assert shown["credit/solution/mean_abs"] > 0
    assert shown["credit/malformed"] == pytest.approx(1 / 6)
