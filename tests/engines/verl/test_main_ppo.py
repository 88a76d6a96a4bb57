"""Whole runs of `python -m verl.trainer.main_ppo` on CPU with a recipe: the advantages in verl's loss are those of the files.

All but the plug-in of `cpu/verl_on_cpu.py` is verl's own, and spanwise is the installed wheel: nothing here imports the
adapter, its entry point registers it. What each token was trained with is recorded where the loss takes it and compared with
credit computed from the rollouts that verl dumped.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from verl_runs import GROUP, PROMPTS, RUNS, STEPS, environment, read_again

import spanwise
from spanwise import pipeline
from spanwise.credit import value_target
from spanwise.layout import Layout
from spanwise.objective import Objective
from spanwise.rollouts import read_rollouts
from spanwise.scheme import Scheme

pytestmark = pytest.mark.timeout(900)

#: The modes whose rollouts come from weights one step old; their loss sums over tokens.
LATE = ("colocate_async", "separate_async")
WITH_CRITIC = [name for name, (_, _, has_critic) in RUNS.items() if has_critic]
LAYOUT = Layout({"solution": ["reasoning", "answer"], "confidence": ["analysis", "confidence"]})
CORRECT = Objective("correct", pays=("solution",), if_missing=0.0)
PAIR = CORRECT, Objective("brier", pays=("confidence",), given="correct", if_missing=-1.0)
STRATA = tuple(replace(one, baseline=baseline) for one, baseline in zip(PAIR, ("group", "outcome"), strict=True))
PAID = (
    Objective("environment", pays=("solution", "confidence"), baseline="group"),
    Objective("environment", name="nines", pays=("confidence",), baseline="group", options={"column": "nines"}),
)
VALUE_LAM = 0.9
#: The same rules, written out without the recipes.
SCHEMES = {
    "sync": Scheme("bae_paper", LAYOUT, PAID),
    "colocate_async": Scheme("gae", LAYOUT, PAIR, "completion", {"lam": 0.8}, values="shared"),
    "separate_async": Scheme("bae_paper", LAYOUT, STRATA),
    "v0": Scheme("sae", LAYOUT, PAIR, "completion", {"lam": 0.8}, values="shared"),
}


@pytest.fixture(params=list(RUNS))
def finished(request, whole_run):
    return whole_run(request.param)


def test_what_runs_is_the_installed_wheel():
    assert "site-packages" in spanwise.__file__, "not an editable install; run `make test-verl`"


def test_every_token_was_trained_with_what_the_dumped_rollouts_say(finished):
    """With a critic also with what its values say: the recursion's advantages over the completion's length."""
    scheme, paid = SCHEMES[finished.name], torch.zeros(2)
    for step in finished.trained_steps:
        rows = finished.trained(step)
        batch, reading = read_again(finished, rows, step, scheme)
        credit = pipeline.credit_batch(reading, batch, scheme)
        expected_nt = pipeline.advantages(credit, reading.spans, scheme)
        for row, expected_t in zip(rows, expected_nt, strict=True):
            undone = 1 if finished.name in LATE else len(row["ids"])  # of a loss that averages over its tokens
            expected = expected_t[: len(row["ids"])] * undone
            torch.testing.assert_close(torch.tensor(row["advantages"]), expected, atol=1e-6, rtol=1e-6)

        logged, metrics = finished.metrics[step - 1], pipeline.metrics(credit, reading, scheme)
        assert {name: logged[name] for name in metrics} == pytest.approx(metrics, abs=1e-9)
        paid += torch.stack([expected_nt[reading.spans.block_nt == k].abs().max() for k in range(2)])
    assert (paid > 1e-3).all(), "both blocks were paid at least once, or this test has compared zeros"


def test_the_weights_moved_and_the_next_rollouts_came_from_them(finished):
    start = load_file(finished.folder / "model" / "model.safetensors")
    end = load_file(finished.folder / f"checkpoints/global_step_{STEPS}/actor/huggingface/model.safetensors")
    moved = [name for name, weight in start.items() if not torch.equal(weight, end[name].to(weight.dtype))]
    assert set(moved) == set(start)
    assert len(finished.metrics) == STEPS
    # Sampled with other weights than those that are trained, probabilities differ by far more than rounding.
    late = [line.get("training/off_policy/trajectory_staleness/max", 0) for line in finished.metrics]
    # How many steps late, verl's own scheduling decides: on a busy machine a trajectory may wait for two, or for none.
    assert (late[0] == 0 and any(late)) if finished.name in LATE else late == [0] * STEPS
    gaps = [line["training/rollout_probs_diff_max"] for line in finished.metrics]
    assert all((gap > 1e-3) if steps else (gap < 1e-4) for gap, steps in zip(gaps, late, strict=True))


def test_the_console_and_the_dump_carry_the_blocks(finished):
    for name in ("credit/solution/mean_abs", "credit/confidence/mean_abs", "credit/malformed"):
        assert f"{name}:" in finished.log
    groups = read_rollouts(finished.folder / "rollouts", tokenizer=finished.folder / "model").group_n
    assert groups.bincount().tolist() == [GROUP] * (STEPS * PROMPTS)
    weighted = [line["score"] for step in range(1, STEPS + 1) for line in finished.dumped(step)]
    assert min(weighted) < 0 < max(weighted)  # with a Brier score or a penalty, not the answer alone


def test_a_run_is_paid_by_the_reward_manager_and_the_function_of_its_configuration(whole_run):
    """Manager `dapo` with its penalty on length; a second number of the function pays the other block."""
    finished = whole_run("sync")
    table = read_rollouts(finished.folder / "run", tokenizer=finished.folder / "model")
    rewards = {name: reward.value_n.tolist() for name, reward in table.rewards.items()}
    expected = [environment(*pair) for pair in zip(rewards["nines"], table.tokens.lengths.tolist(), strict=True)]
    assert rewards["environment"] == pytest.approx(expected)
    assert min(expected) < 0
    assert {0.0, 1.0} <= {*rewards["nines"]}
    # verl sampled other prompts for the groups in which neither number differs.
    pairs_by_group: dict[int, set] = {}
    for group, *pair in zip(table.group_n.tolist(), rewards["environment"], rewards["nines"], strict=True):
        pairs_by_group.setdefault(group, set()).add(tuple(pair))
    assert len(pairs_by_group) == STEPS * PROMPTS
    assert all(len(pairs) > 1 for pairs in pairs_by_group.values())
    assert "filter_groups/evicted_samples" in finished.log


@pytest.mark.parametrize("name", WITH_CRITIC)
def test_the_critic_was_fitted_to_the_targets_of_the_recipe(whole_run, name):
    finished, scheme = whole_run(name), SCHEMES[name]
    for step in range(1, STEPS + 1):
        rows = finished.seen("critic", step)
        batch, reading = read_again(finished, rows, step, scheme)
        (part,) = pipeline.streams(reading, batch, scheme).inputs(batch.value_nt)
        for row, target_t in zip(rows, value_target(**part, lam=VALUE_LAM), strict=True):
            expected = target_t[: len(row["ids"])]
            torch.testing.assert_close(torch.tensor(row["returns"]), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", WITH_CRITIC)
def test_the_critic_learned_and_the_policy_waited(whole_run, name):
    finished = whole_run(name)
    start = load_file(finished.folder / "model" / "model.safetensors")
    saved = finished.folder / f"checkpoints/global_step_{STEPS}"
    critic = load_file(saved / "critic/huggingface/model.safetensors")
    trunk = {name: weight for name, weight in critic.items() if name in start}
    assert len(trunk) >= len(start) - 1
    assert all(not torch.equal(weight, start[name].to(weight.dtype)) for name, weight in trunk.items())
    waited = 2 if name == "v0" else 0  # verl counts from 1, so its first step of the policy is 3
    assert finished.trained_steps == [*range(1 + waited, STEPS + 1)]
    assert len(list((finished.folder / "record" / "actor").iterdir())) == STEPS - waited
