"""The rollouts that every engine is held against, through SkyRL's trainer: rows, merged rows, float64 and float32."""

from itertools import pairwise

import pytest
import skyrl_small as small
import torch
from skyrl.train.generators.base import TrajectoryID

import conformance
from spanwise.segment import Vocabulary

CASES = conformance.load()


class Prompts(list):
    """The dataset: a prompt's id is the number of its row."""

    def __init__(self, rows):
        groups = dict.fromkeys(row["group"] for row in rows)
        told = {row["group"]: row for row in rows}
        super().__init__(([], None, {"answer": told[group]["answer"]}, str(n)) for n, group in enumerate(groups))
        self.uid = {group: str(n) for n, group in enumerate(groups)}

    def collate_fn(self, rows):
        return rows


def trainer_of(cfg, dataset, dtype):
    made = small.trainer(cfg)
    made.train_dataset, made.advantage_dtype = dataset, dtype
    made.vocabulary = Vocabulary.from_tokenizer(conformance.tokenizer())
    return made


def generated(rows, uid):
    """As a generator returns it: groups together, the rows of a rollout in order; every row of the file is a turn."""
    order = sorted(range(len(rows)), key=lambda n: uid[rows[n]["group"]])
    rows = [rows[n] for n in order]
    rollouts = [row.get("rollout", n) for n, row in zip(order, rows, strict=True)]
    return order, {
        "prompt_token_ids": [row["prompt"] for row in rows],
        "response_ids": [row["ids"] for row in rows],
        "rewards": [0.0] * len(rows),
        "loss_masks": [row["sampled"] for row in rows],
        "paid": [row.get("paid") for row in rows],
        "anchors": [row.get("anchor") for row in rows],
        "trajectory_ids": [TrajectoryID(uid[row["group"]], key) for row, key in zip(rows, rollouts, strict=True)],
        "is_last_step": [*(a != b for a, b in pairwise(rollouts)), True],
        "stop_reasons": None,
        "rollout_logprobs": None,
    }


@pytest.mark.filterwarnings("ignore:.*leave out n:UserWarning")  # lists of different lengths, and nobody is charged
@pytest.mark.filterwarnings(
    "ignore:Step 0. Objective 'environment'"
)  # a turn is paid for a confidence that it does not state
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("layout", ["stepwise", "merged"])
@pytest.mark.parametrize("name", ["blocks", "waits", "fields", "turns", "gigpo"])
def test_it_gives_every_token_the_advantage_of_the_file(data, name, layout, dtype):
    rows = CASES["rollouts"][conformance.ROWS[name]]
    dataset = Prompts(rows)
    cfg = small.config(data, recipe=CASES["recipes"][name], layout=layout, prompts=len(dataset), samples=1)
    made = trainer_of(cfg, dataset, dtype)
    order, output = generated(rows, dataset.uid)
    trained, uids = made.postprocess_generator_output(dict(output), [t.instance_id for t in output["trajectory_ids"]])
    batch = made.convert_to_training_input(trained, uids)
    batch["values"] = None
    made.compute_advantages_and_returns(batch)
    exact = conformance.by_pipeline([rows[n] for n in order], made.scheme) if dtype == torch.float64 else None
    place = made.last_rows.place_s
    assert (len(trained["response_ids"]) < len(rows)) == (layout == "merged" and conformance.ROWS[name] == "turns")
    for n, (row, first) in zip(order, place, strict=True):
        width = made.last_advantages.shape[1]
        start = width - len(trained["response_ids"][row]) + first
        found = made.last_advantages[row, start : start + len(rows[n]["ids"])].tolist()
        expected = CASES["advantages"][name][n]
        if exact is not None:  # the very numbers of the pipeline
            assert found == exact[order.index(n)]
        assert found == pytest.approx(expected, abs=1e-12 if dtype == torch.float64 else 1e-6)


def flat(data, recipe, rows, dtype):
    """One prompt in SkyRL's flat layout, whose prompts all have equally many rollouts: each row a whole conversation."""
    dataset = Prompts(rows)
    cfg = small.config(data, recipe=recipe, prompts=1, samples=len(rows))
    made = trainer_of(cfg, dataset, dtype)
    each = {key: [[turn[key] for turn in row["turns"]] for row in rows] for key in ("paid", "anchor") if "turns" in rows[0]}
    output = {
        "prompt_token_ids": [row["prompt"] for row in rows],
        "response_ids": [row["ids"] for row in rows],
        "rewards": [0.0] * len(rows),
        "loss_masks": [row["sampled"] for row in rows],
        "stop_reasons": None,
        "rollout_logprobs": None,
        **({"paid": each["paid"], "anchors": each["anchor"]} if each else {}),
    }
    trained = made.postprocess_generator_output(output, [dataset.uid[rows[0]["group"]]] * len(rows))
    batch = made.convert_to_training_input(*trained)
    batch["values"] = None
    made.compute_advantages_and_returns(batch)
    width = made.last_advantages.shape[1]
    return [values[width - len(row["ids"]) :].tolist() for values, row in zip(made.last_advantages, rows, strict=True)]


@pytest.mark.filterwarnings("ignore:.*leave out n:UserWarning")
@pytest.mark.filterwarnings("ignore:Step 0. Objective 'environment'")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", ["blocks", "waits", "fields", "turns", "gigpo"])
def test_whole_conversations(data, name, dtype):
    rows, expected = CASES["rollouts"][conformance.ROWS[name]], CASES["advantages"][name]
    if conformance.ROWS[name] == "turns":
        rows, expected = conformance.sequences(rows), conformance.of_sequences(rows, expected)
    for group in dict.fromkeys(row["group"] for row in rows):
        pairs = [(row, values) for row, values in zip(rows, expected, strict=True) if row["group"] == group]
        found = flat(data, CASES["recipes"][name], [row for row, _ in pairs], dtype)
        for row, (_, values) in zip(found, pairs, strict=True):
            assert row == pytest.approx(values, abs=1e-12 if dtype == torch.float64 else 1e-6)
