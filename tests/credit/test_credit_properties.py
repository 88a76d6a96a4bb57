"""Properties that every baseline must have, against a slow oracle written as plain loops."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spanwise.credit import advantage, bae, blended_baseline, centred, dr_grpo, group_index, grpo
from spanwise.credit.strata import refine

NAN = float("nan")
BASELINES = ["none", "batch", "group", "outcome", "blended"]


@st.composite
def batches(draw):
    """Ragged groups in any order, some rewards absent, reports on a coarse grid so that ties happen."""
    n = draw(st.integers(1, 24))
    group = draw(st.lists(st.integers(0, 4), min_size=n, max_size=n))
    report = draw(st.lists(st.integers(0, 10), min_size=n, max_size=n))
    correct = draw(st.lists(st.sampled_from([0.0, 1.0]), min_size=n, max_size=n))
    absent = draw(st.lists(st.sampled_from([False, False, False, True]), min_size=n, max_size=n))
    q = torch.tensor(report, dtype=torch.float64) / 10
    c = torch.tensor(correct, dtype=torch.float64)
    reward = torch.where(torch.tensor(absent), NAN, -((q - c) ** 2))
    by_outcome = torch.stack([-(q**2), -((q - 1) ** 2)], dim=1)
    by_outcome[torch.tensor(absent)] = NAN
    return reward, torch.tensor(group), c, by_outcome


def run(batch, baseline, **options):
    reward, group, outcome, by_outcome = batch
    return advantage(reward, group, baseline=baseline, outcome_n=outcome, by_outcome_n2=by_outcome, **options).advantage_n


def oracle(batch, baseline, leave_one_out):
    reward, group, outcome, _ = (value.tolist() for value in batch)
    result = []
    for i, r in enumerate(reward):
        if math.isnan(r):
            result.append(0.0)
            continue
        mates = []
        for j, other in enumerate(reward):
            same = {
                "none": False,
                "batch": True,
                "group": group[i] == group[j],
                "outcome": group[i] == group[j] and outcome[i] == outcome[j],
            }[baseline]
            if same and not math.isnan(other):
                mates.append((j, other))
        if baseline == "none":
            result.append(r)
        elif len(mates) < 2:
            result.append(0.0)
        else:
            used = [value for j, value in mates if not (leave_one_out and j == i)]
            result.append(r - sum(used) / len(used))
    return torch.tensor(result, dtype=torch.float64)


@pytest.mark.parametrize("baseline", ["none", "batch", "group", "outcome"])
@pytest.mark.parametrize("leave_one_out", [False, True])
@given(batch=batches())
@settings(max_examples=60, deadline=None)
def test_equals_the_slow_oracle(batch, baseline, leave_one_out):
    torch.testing.assert_close(
        run(batch, baseline, leave_one_out=leave_one_out), oracle(batch, baseline, leave_one_out), atol=1e-12, rtol=0
    )


def slow_blended(batch):
    """Design section 4 as loops over completions; returns baselines."""
    reward, group, outcome, by_outcome = (value.tolist() for value in batch)
    n = len(reward)
    present = [not math.isnan(r) for r in reward]

    def mean(values):
        return sum(values) / len(values)

    def variance(values):
        return sum((v - mean(values)) ** 2 for v in values) / (len(values) - 1)

    def pooled(lists):
        free = sum(len(v) - 1 for v in lists)
        return sum((x - mean(v)) ** 2 for v in lists for x in v) / free if free else None

    baseline = []
    for i in range(n):
        o, prompts = outcome[i], sorted(set(group))
        own = {g: [reward[j] for j in range(n) if group[j] == g and outcome[j] == o and present[j]] for g in prompts}
        own = {g: v for g, v in own.items() if v}
        crossed = {
            g: [by_outcome[j][int(o)] for j in range(n) if group[j] == g and outcome[j] != o and present[j]] for g in prompts
        }
        crossed = {g: v for g, v in crossed.items() if v}
        same = [reward[j] for j in range(n) if outcome[j] == o and present[j]]
        everyone_here = [j for j in range(n) if outcome[j] == o]
        low = min(same) if same else 0.0
        floor = 1e-12 * sum((reward[j] - low) ** 2 for j in everyone_here if present[j]) / n + 1e-24
        away = [g for g in own if g != group[i]]
        noise = pooled([own[g] for g in away]) or 0.0
        estimates = []
        others = [reward[j] for j in range(n) if j != i and group[j] == group[i] and outcome[j] == o and present[j]]
        if others:
            estimates.append((mean(others), noise / len(others)))
        elsewhere = [r for g in away for r in own[g]]
        if len(away) >= 2:
            t2 = max(0.0, variance([mean(own[g]) for g in away]) - mean([noise / len(own[g]) for g in away]))
            estimates.append((mean(elsewhere), t2 * (1 + 1 / len(away)) + noise / len(elsewhere)))
        both = [g for g in away if g in crossed]
        if len(both) >= 2 and group[i] in crossed:
            crossed_noise = pooled([v for g, v in crossed.items() if g != group[i]])
            crossed_noise = noise if crossed_noise is None else crossed_noise
            gap = [mean(own[g]) - mean(crossed[g]) for g in both]
            d2 = variance(gap) - mean([noise / len(own[g]) + crossed_noise / len(crossed[g]) for g in both])
            mine = crossed[group[i]]
            estimates.append((mean(mine) + mean(gap), max(0.0, d2) * (1 + 1 / len(both)) + crossed_noise / len(mine)))
        if not estimates and elsewhere:
            estimates.append((mean(elsewhere), 1.0))
        if not estimates:
            baseline.append(NAN)
            continue
        weights = [1 / max(v, floor) for _, v in estimates]
        baseline.append(sum(w * e for w, (e, _) in zip(weights, estimates, strict=True)) / sum(weights))
    return torch.tensor(baseline, dtype=torch.float64)


@given(batch=batches())
@settings(max_examples=150, deadline=None)
def test_blended_equals_the_slow_oracle(batch):
    torch.testing.assert_close(blended_baseline(*batch), slow_blended(batch), atol=1e-9, rtol=1e-9, equal_nan=True)


@pytest.mark.parametrize("baseline", BASELINES)
@given(batch=batches(), data=st.data())
@settings(max_examples=40, deadline=None)
def test_permuting_completions_permutes_advantages(batch, baseline, data):
    order = torch.tensor(data.draw(st.permutations(range(len(batch[0])))))
    expected = run(batch, baseline)[order]
    torch.testing.assert_close(run(tuple(x[order] for x in batch), baseline), expected, atol=1e-9, rtol=0)


@pytest.mark.parametrize("baseline", BASELINES)
@given(batch=batches())
@settings(max_examples=40, deadline=None)
def test_absent_equals_deleted(batch, baseline):
    kept = ~batch[0].isnan()
    torch.testing.assert_close(run(batch, baseline)[kept], run(tuple(x[kept] for x in batch), baseline), atol=1e-9, rtol=0)
    assert run(batch, baseline)[~kept].abs().sum() == 0


@pytest.mark.parametrize("baseline", ["batch", "group", "outcome", "blended"])
@given(batch=batches(), shift=st.floats(-50, 50))
@settings(max_examples=40, deadline=None)
def test_shifting_all_rewards_changes_nothing(batch, baseline, shift):
    reward, group, outcome, by_outcome = batch
    moved = (reward + shift, group, outcome, by_outcome + shift)
    torch.testing.assert_close(run(moved, baseline), run(batch, baseline), atol=1e-6, rtol=0)


@pytest.mark.parametrize("baseline", ["group", "outcome"])
@given(batch=batches())
@settings(max_examples=40, deadline=None)
def test_strata_sum_to_zero_and_groups_do_not_mix(batch, baseline):
    result = run(batch, baseline)
    for g in batch[1].unique():
        inside = batch[1] == g
        assert abs(result[inside].sum().item()) < 1e-12
        alone = run(tuple(x[inside] for x in batch), baseline)
        torch.testing.assert_close(result[inside], alone, atol=1e-12, rtol=0)


@given(batch=batches())
@settings(max_examples=40, deadline=None)
def test_leave_one_out_is_n_over_n_minus_one(batch):
    reward, group, *_ = batch
    plain, without_self = centred(reward, group), centred(reward, group, leave_one_out=True)
    for i in range(len(reward)):
        n = int(((group == group[i]) & ~reward.isnan()).sum())
        assert without_self[i].item() == pytest.approx(plain[i].item() * n / (n - 1) if n > 1 else 0.0, abs=1e-12)


@given(batch=batches())
@settings(max_examples=40, deadline=None)
def test_blended_alone_in_the_batch_is_the_mean_of_the_others(batch):
    # With one prompt and no re-scoring only the other members of the stratum remain.
    reward, _, outcome, _ = batch
    one = torch.zeros(len(reward), dtype=torch.long)
    expected = centred(reward, refine(one, outcome), leave_one_out=True)
    result = advantage(reward, one, baseline="blended", outcome_n=outcome).advantage_n
    torch.testing.assert_close(result, expected, atol=1e-9, rtol=0)


@given(batch=batches(), data=st.data())
@settings(max_examples=80, deadline=None)
def test_blended_never_reads_the_own_reward(batch, data):
    # Neither in an estimate nor in a weight: whatever a completion earns, its baseline stays.
    reward = batch[0]
    i = data.draw(st.integers(0, len(reward) - 1))
    before = blended_baseline(*batch)[i]
    if not reward[i].isnan():
        reward[i] = data.draw(st.sampled_from([-1.0, -0.3, 0.0]))
        torch.testing.assert_close(blended_baseline(*batch)[i], before, atol=1e-7, rtol=1e-7, equal_nan=True)


def test_one_block_is_the_sequence_method():
    reward_n, group_n = torch.tensor([1.0, 0.0, 0.5, 0.2]), torch.tensor([0, 1, 0, 1])
    torch.testing.assert_close(bae(reward_n[:, None], group_n)[:, 0], dr_grpo(reward_n, group_n))


def test_one_outcome_makes_outcome_the_group():
    reward_n, group_n = torch.tensor([-0.1, -0.5, -0.2, -0.9]), torch.tensor([0, 1, 0, 1])
    by_outcome = advantage(reward_n, group_n, baseline="outcome", outcome_n=torch.ones(4)).advantage_n
    torch.testing.assert_close(by_outcome, dr_grpo(reward_n, group_n))


def test_grpo_is_scaled_dr_grpo():
    reward_n, group_n = torch.tensor([0.3, 0.1, 0.9, 0.4, 0.4]), torch.tensor([2, 2, 2, 5, 5])
    ratio = dr_grpo(reward_n, group_n)[:3] / grpo(reward_n, group_n, eps=0.0)[:3]
    torch.testing.assert_close(ratio, reward_n[:3].double().std().expand(3))


def test_string_groups():
    assert group_index(["x", "y", "x"]).tolist() == [0, 1, 0]


def test_mixed_precision_result_does_not_depend_on_input_dtype():
    reward = torch.tensor([0.25, 0.5, 1.0])
    group = torch.zeros(3, dtype=torch.long)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        assert grpo(reward.to(dtype), group).dtype == torch.float64
        torch.testing.assert_close(grpo(reward.to(dtype), group), grpo(reward.double(), group))
