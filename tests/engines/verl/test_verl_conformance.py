"""The rollouts of `conformance.json` through verl's agent loop worker, the reward manager and the trainer's advantages."""

import pytest
import torch
from verl_small import config_of, manager_of, outputs_of, scored

import conformance
from spanwise.engines.verl.carry import KEY, Rows, credited
from spanwise.engines.verl.settings import prepare


def carried(folder, recipe, rollouts):
    """Score each rollout (a list of rows) as verl does; returns its training rows, our advantages by dtype, and the scheme."""
    conformance.tokenizer().save_pretrained(folder / "model")
    config = config_of(folder, recipe=recipe)
    prepare(config)
    manager = manager_of(config)
    rows, places = [], []
    for number, rollout in enumerate(rollouts):
        outputs = outputs_of(manager.tokenizer, [row["ids"] for row in rollout], [row["sampled"] for row in rollout])
        for output, row in zip(outputs, rollout, strict=True):
            output.extra_fields = {name: row[name] for name in ("paid", "turns", "anchor") if name in row}
        scored(manager, outputs, reward_model={"ground_truth": rollout[0]["answer"]})
        rows += rollout
        packed = outputs[-1].extra_fields["reward_extra_info"][KEY]
        places += [(packed, number, n) for n in range(len(rollout))]
    width = max(len(row["ids"]) for row in rows) + 3
    mask_nt = torch.tensor([[*row["sampled"], *[0] * (width - len(row["ids"]))] for row in rows])
    readings = Rows(*zip(*places, strict=True))
    by_dtype = {}
    for dtype in (torch.float32, torch.float64):
        adv_nt = credited(readings, [row["group"] for row in rows], mask_nt, manager.step, dtype=dtype)[0]
        by_dtype[dtype] = [values[: len(row["ids"])] for values, row in zip(adv_nt.tolist(), rows, strict=True)]
        assert adv_nt.dtype == dtype
    return rows, by_dtype, manager.scheme


def check(folder, name, rollouts, expected, *, of=lambda values: values):
    """The rollouts get the advantages of the file, and in float64 those of the pipeline to the last bit."""
    rows, by_dtype, rule = carried(folder, conformance.RECIPES[name], rollouts)
    conformance.assert_rows(by_dtype[torch.float32], expected)
    conformance.assert_rows(by_dtype[torch.float64], expected, 1e-12)
    rows = conformance.expected(name)[0] if "turns" in rows[0] else rows
    assert by_dtype[torch.float64] == of(conformance.by_pipeline(rows, rule))


@pytest.mark.parametrize("name", ["blocks", "waits", "fields"])
def test_blocks(tmp_path, name):
    rows, expected = conformance.expected(name)
    check(tmp_path, name, [[row] for row in rows], expected)


@pytest.mark.parametrize("name", ["turns", "gigpo"])
def test_turns_as_outputs_of_one_rollout(tmp_path, name):
    rows, expected = conformance.expected(name)
    by_rollout = {}
    for row in rows:
        by_rollout.setdefault(row["rollout"], []).append(row)
    check(tmp_path, name, list(by_rollout.values()), expected)


@pytest.mark.parametrize("name", ["turns", "gigpo"])
def test_turns_in_one_conversation(tmp_path, name):
    """verl's own layout of several turns: one response, in which the environment's tokens are masked."""
    (whole, expected), (rows, _) = conformance.expected(name, whole=True), conformance.expected(name)
    check(tmp_path, name, [[row] for row in whole], expected, of=lambda values: conformance.of_sequences(rows, values))
