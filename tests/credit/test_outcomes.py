"""Several outcomes: the blended baseline over tuples against loops; test_comparison_exact has the others."""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from credit_batches import PAIR, SAME, report_batches
from helpers import NAN, assert_close, double
from oracles import average, deviation
from spanwise.credit import advantage, assign, blended_baseline
from spanwise.errors import AlignmentError, RecipeError
from spanwise.objective import Objective
from spanwise.types import Scores


def slow_blended(batch):
    reward, group, outcome, by_outcome, judged = (v.tolist() if isinstance(v, torch.Tensor) else v for v in batch)
    kinds = [None if any(math.isnan(v) for v in row) else tuple(row) for row in outcome]
    n, present = len(reward), [not math.isnan(r) for r in reward]

    def pooled(lists, otherwise):
        """Variance around each list's own mean."""
        free = sum(len(values) - 1 for values in lists)
        return sum((v - average(values)) ** 2 for values in lists for v in values) / free if free else otherwise

    def between(values, noises):
        """Variance of means of other prompts, their sampling noise left out, for a new one."""
        return max(0.0, deviation(values, 1) ** 2 - average(noises)) * (1 + 1 / len(values))

    result = []
    for i in range(n):
        if kinds[i] is None:
            result.append(NAN)
            continue
        verdict = int(kinds[i][judged]) if judged is not None and kinds[i][judged] in (0.0, 1.0) else None
        alike, other = {}, {}
        for j in range(n):
            if present[j] and kinds[j] == kinds[i]:
                alike.setdefault(group[j], []).append((j, reward[j]))
            elif present[j] and kinds[j] is not None and verdict is not None:
                other.setdefault(group[j], []).append(by_outcome[j][verdict])
        away = {g: [r for _, r in rows] for g, rows in alike.items() if g != group[i]}
        mates = [r for j, r in alike.get(group[i], []) if j != i]
        noise = pooled(away.values(), 0.0)
        low = min((r for rows in alike.values() for _, r in rows), default=0.0)
        looked_at = [r for rows in alike.values() for _, r in rows] + [r for values in other.values() for r in values]
        floor = 1e-12 * sum((r - low) ** 2 for r in looked_at) / n + 1e-24
        estimates = [(average(mates), noise / len(mates))] if mates else []
        everywhere = [r for values in away.values() for r in values]
        if len(away) >= 2:
            spread = between([average(v) for v in away.values()], [noise / len(v) for v in away.values()])
            estimates.append((average(everywhere), spread + noise / len(everywhere)))
        shared = [g for g in away if g in other]
        if len(shared) >= 2 and group[i] in other:
            crossed = pooled([v for g, v in other.items() if g != group[i]], noise)
            gaps = [average(away[g]) - average(other[g]) for g in shared]
            drift = between(gaps, [noise / len(away[g]) + crossed / len(other[g]) for g in shared])
            estimates.append((average(other[group[i]]) + average(gaps), drift + crossed / len(other[group[i]])))
        if not estimates and everywhere:
            estimates = [(average(everywhere), 1.0)]
        weights = [1 / max(v, floor) for _, v in estimates]
        total = sum(weights)
        result.append(sum(w * e for w, (e, _) in zip(weights, estimates, strict=True)) / total if estimates else NAN)
    return double(result)


def lopsided():
    """Three prompts with a right and a wrong answer each, all complete; the verdict is the second outcome."""
    q = double([0.9, 0.6, 0.8, 0.4, 0.5, 0.3])
    outcome = double([[1, 1], [1, 0]] * 3)
    by_outcome = torch.stack([-(q**2), -((q - 1) ** 2)], dim=1)
    return -((q - outcome[:, 1]) ** 2), torch.tensor([4, 4, -1, -1, 9, 9]), outcome, by_outcome, 1


@given(batch=report_batches())
@example(batch=lopsided())
@settings(max_examples=150, deadline=None)
def test_blended_equals_the_slow_oracle(batch):
    reward, group, outcome, by_outcome, judged = batch
    actual = blended_baseline(reward, group, outcome, by_outcome, judged=judged)
    assert_close(actual, slow_blended(batch), 1e-8, equal_nan=True)
    without = blended_baseline(reward, group, outcome)  # nothing can be re-scored
    assert_close(without, slow_blended((*batch[:4], None)), 1e-8, equal_nan=True)


def test_blended_weighs_estimates_without_any_variance_alike():
    # Right ones: -1 in every prompt. Re-scored, the wrong ones of the first two prompts would have -1 too, that of the third
    # -.5625: both mu (-1) and x (-.5625) have a variance of 0, and the sum over all prompts less the own one is 0 but for rounding.
    reward = double([0.0] * 5 + [0.0, -0.0625, -1.0, -1.0, -1.0])
    group = torch.tensor([0] * 5 + [1, 2, 0, 1, 2])
    right = double([0.0] * 7 + [1.0] * 3)
    by_outcome = double([[0.0, -1.0]] * 6 + [[-0.0625, -0.5625]] + [[0.0, -1.0]] * 3)
    assert float(blended_baseline(reward, group, right, by_outcome)[9]) == pytest.approx((-1 - 0.5625) / 2)


def run(batch, baseline):
    reward, group, outcome, by_outcome, judged = batch
    options = {"outcome_no": outcome, "by_outcome_n2": by_outcome, "judged": judged}
    return advantage(reward, group, baseline=baseline, **options).advantage_n


@pytest.mark.parametrize("baseline", ["outcome", "blended"])
@given(batch=report_batches(), poison=st.sampled_from([NAN, 0.0, 1.0, 1e9, math.inf]))
@settings(max_examples=40, deadline=None)
def test_an_absent_reward_is_as_if_deleted_whatever_else_is_said_of_it(batch, baseline, poison):
    reward, group, outcome, by_outcome, judged = batch
    kept, gone = ~reward.isnan(), reward.isnan()
    poisoned = (reward, group, outcome.clone(), by_outcome.clone(), judged)
    poisoned[2][gone] = poison
    poisoned[3][gone] = poison
    result = run(poisoned, baseline)
    assert_close(result[kept], run((*(x[kept] for x in batch[:4]), judged), baseline), 1e-8)
    assert result[gone].abs().sum() == 0


@given(batch=report_batches())
@example(batch=lopsided())
@settings(max_examples=40, deadline=None)
def test_assign_rescores_by_what_the_report_is_judged_by(batch):
    reward, group, outcome, by_outcome, judged = batch
    names = tuple(f"o{k}" for k in range(outcome.shape[1]))
    reward_nm = torch.cat([outcome, reward[:, None]], dim=1)
    by_outcome_nmo = torch.stack([*[torch.full_like(by_outcome, NAN)] * len(names), by_outcome], dim=1)
    scores = Scores((*names, "brier"), reward_nm, reward_nm.isnan().to(torch.int8), by_outcome_nmo)
    objectives = [Objective("correct", pays="a", name=name, weight=0.0) for name in names]

    def credit_of(**options):
        report = Objective("brier", pays="b", given=names, baseline="blended", **options)
        present = torch.ones(len(reward), 2, dtype=torch.bool)
        return assign(scores, group, present, objectives=[*objectives, report], block_names=("a", "b")).block_nk[:, 1]

    expected = (reward - slow_blended(batch)).nan_to_num(nan=0.0)
    assert_close(credit_of(options={"of": names[judged]}), expected, 1e-8)
    # Judged by something that its baseline is not given, nothing can be re-scored.
    without = blended_baseline(reward, group, outcome)
    assert_close(credit_of(options={"of": "elsewhere"}), (reward - without).nan_to_num(nan=0.0), 1e-8)


PAIRS = double([[1, 1], [0, 1]])


@pytest.mark.parametrize(
    "options",
    [
        {"baseline": "outcome"},
        {"baseline": "blended", "outcome_no": PAIRS[:, :0]},
        {"baseline": "group", "back_off": True},
        {"baseline": "none", "back_off": False},
        {"baseline": "blended", "outcome_no": PAIRS, "back_off": True},
        {"baseline": "blended", "outcome_no": PAIRS, "by_outcome_n2": PAIRS},  # by which of the two?
        {"baseline": "blended", "outcome_no": PAIRS, "by_outcome_n2": PAIRS, "judged": 2},
        {"baseline": "blended", "outcome_no": PAIRS[:, 0], "by_outcome_n2": PAIRS, "judged": -1},
    ],
)
def test_what_does_not_go_together_is_refused(options, unchecked_shapes):
    with pytest.raises(RecipeError):
        advantage(PAIR, SAME, **options)
    with pytest.raises(AlignmentError, match="1 outcomes for 2"):
        advantage(PAIR, SAME, baseline="outcome", outcome_no=PAIRS[:1])
