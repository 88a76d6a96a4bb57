"""The rollouts of `conformance.json` through verl's agent loop worker, the reward manager and the trainer's advantages."""

import pytest
import torch
from verl_small import config_of, manager_of, outputs_of, scored

import conformance
from spanwise.engines.verl.carry import KEY, Rows, credited
from spanwise.engines.verl.settings import prepare

SAVED = conformance.load()


def carried(folder, recipe, rollouts):
    """Score each rollout, a list of rows, as verl does; the rows it trains on, and our numbers for them."""
    conformance.tokenizer().save_pretrained(folder / "model")
    config = config_of(folder, recipe=recipe)
    prepare(config)
    manager = manager_of(config)
    rows, packed, session, step = [], [], [], []
    for number, rollout in enumerate(rollouts):
        outputs = outputs_of(manager.tokenizer, [row["ids"] for row in rollout], [row["sampled"] for row in rollout])
        for output, row in zip(outputs, rollout, strict=True):
            output.extra_fields = {name: row[name] for name in ("paid", "turns", "anchor") if name in row}
        gold = {"reward_model": {"ground_truth": rollout[0]["answer"]}}
        scored(config, outputs, manager, **gold)
        for n, row in enumerate(rollout):
            rows.append(row)
            packed.append(outputs[-1].extra_fields["reward_extra_info"][KEY])
            session.append(number)
            step.append(n)
    width = max(len(row["ids"]) for row in rows) + 3
    mask_nt = torch.tensor([[*row["sampled"], *[0] * (width - len(row["ids"]))] for row in rows])
    beside = Rows(packed, session, step)
    found = {}
    for dtype in (torch.float32, torch.float64):
        adv_nt = credited(beside, [row["group"] for row in rows], mask_nt, manager.step, dtype=dtype)[0]
        found[dtype] = [values[: len(row["ids"])] for values, row in zip(adv_nt.tolist(), rows, strict=True)]
        assert adv_nt.dtype == dtype
    return rows, found, manager.scheme


def check(found, expected, exact=None):
    for n, (row, values) in enumerate(zip(found[torch.float32], expected, strict=True)):
        assert row == pytest.approx(values, abs=1e-6)
        assert found[torch.float64][n] == pytest.approx(values, abs=1e-12)
    if exact is not None:
        assert found[torch.float64] == exact


@pytest.mark.parametrize("name", ["blocks", "waits", "fields"])
def test_blocks(tmp_path, name):
    rows, found, rule = carried(
        tmp_path, conformance.RECIPES[name], [[row] for row in SAVED["rollouts"][conformance.ROWS[name]]]
    )
    check(found, SAVED["advantages"][name], conformance.by_pipeline(rows, rule))


def test_a_judge_from_its_cache(tmp_path):
    saved = SAVED["rollouts"]["flat"]
    rows, found, rule = carried(tmp_path, conformance.judged(tmp_path, saved), [[row] for row in saved])
    check(found, SAVED["advantages"]["blocks"], conformance.by_pipeline(rows, rule))


@pytest.mark.parametrize("name", ["turns", "gigpo"])
def test_turns_as_outputs_of_one_rollout(tmp_path, name):
    by_rollout = {}
    for row in SAVED["rollouts"]["turns"]:
        by_rollout.setdefault(row["rollout"], []).append(row)
    rows, found, rule = carried(tmp_path, conformance.RECIPES[name], list(by_rollout.values()))
    check(found, SAVED["advantages"][name], conformance.by_pipeline(rows, rule))


@pytest.mark.parametrize("name", ["turns", "gigpo"])
def test_turns_in_one_conversation(tmp_path, name):
    """verl's own layout of several turns: one response, in which the environment's tokens are masked."""
    whole = conformance.sequences(SAVED["rollouts"]["turns"])
    _, found, rule = carried(tmp_path, conformance.RECIPES[name], [[one] for one in whole])
    rows = SAVED["rollouts"]["turns"]
    exact = conformance.of_sequences(rows, conformance.by_pipeline(rows, rule))
    check(found, conformance.of_sequences(rows, SAVED["advantages"][name]), exact)
