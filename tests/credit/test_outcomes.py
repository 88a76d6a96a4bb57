"""Several outcomes: hand numbers, and the blended baseline over tuples against loops; test_comparison_exact has the others."""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from credit_batches import report_batches
from helpers import NAN, assert_close, double
from spanwise.credit import advantage, assign, blended_baseline
from spanwise.errors import AlignmentError, RecipeError
from spanwise.objective import Objective
from spanwise.types import Scores

# Right and complete, of two prompts; rewards that work out by hand.
REWARD = double([6, 2, 1, 4, 0, 5, 3, 1])
PROMPT = torch.tensor([-1, -1, -1, -1, -1, -1, -7, -7])
PAIRS = double([[1, 1], [1, 1], [0, 1], [0, 0], [0, 0], [1, 0], [1, 1], [0, 0]])


def test_hand_numbers_of_backing_off():
    # (1,1) {6,2} and (0,0) {4,0} have mates; the lone (0,1) is compared with all wrong ones {1,4,0}, the lone (1,0) with all
    # right ones {6,2,5}; the other prompt has one of each kind and compares {3,1}.
    result = advantage(REWARD, PROMPT, baseline="outcome", outcome_no=PAIRS)
    assert_close(result.advantage_n, [2, -2, -2 / 3, 2, -2, 2 / 3, 1, -1], 1e-11)
    assert not result.alone_n.any()
    assert result.comparison.level_nm.flatten().tolist() == [0, 0, 1, 0, 0, 1, 2, 2]


def test_hand_numbers_of_unknown_outcomes():
    # The second outcome of completion 0 is unknown: with its fellow right ones {6,2,5}, as 1 and 5 are, which are alone of their
    # kind now. The first of 3 is unknown: with its whole prompt, mean 18/6. It is no wrong one: 2 and 4 are {1,0}.
    outcome = PAIRS.clone()
    outcome[0, 1] = outcome[3, 0] = NAN
    result = advantage(REWARD, PROMPT, baseline="outcome", outcome_no=outcome)
    assert_close(result.advantage_n, [5 / 3, -7 / 3, 1 / 2, 1, -1 / 2, 2 / 3, 1, -1], 1e-11)
    assert result.comparison.level_nm.flatten().tolist() == [1, 1, 1, 2, 1, 1, 2, 2]
    strict = advantage(REWARD, PROMPT, baseline="outcome", outcome_no=outcome, back_off=False)
    assert strict.advantage_n.tolist() == [0] * 8
    assert strict.alone_n.all()


def test_hand_numbers_of_rewards_that_are_missing():
    # An absent (1,1) is measured by {6,2}, an absent (0,1) by {4,0} (there is no other (0,1)), an absent (2,2) by the group.
    reward = double([6, 2, NAN, 4, 0, NAN, NAN])
    outcome = double([[1, 1], [1, 1], [0, 1], [0, 0], [0, 0], [1, 1], [2, 2]])
    result = advantage(reward, torch.full((7,), -4), baseline="outcome", outcome_no=outcome, if_missing=-1.0)
    assert_close(result.missing_n, [0, 0, -3, 0, 0, -5, -4], 1e-11)
    assert_close(result.advantage_n, [2, -2, 0, 2, -2, 0, 0], 1e-11)
    # Scaled by the deviation of that level, which the missing ones of that level join: squares 8 + 5^2 of {6,2} and its one, 8 +
    # 3^2 of {4,0} and its one, 20 + 3 x 4^2 of the group of four and all three.
    scaled = advantage(reward, torch.full((7,), -4), baseline="outcome", outcome_no=outcome, if_missing=-1.0, scale="std")
    right, wrong, group = math.sqrt(33 / 2), math.sqrt(17 / 2), math.sqrt(68 / 6)
    assert_close(scaled.missing_n, [0, 0, -3 / wrong, 0, 0, -5 / right, -4 / group], 1e-11)
    unjoined = math.sqrt(8)  # {4,0} are (0,0), of which none is missing
    assert_close(scaled.advantage_n, [2 / right, -2 / right, 0, 2 / unjoined, -2 / unjoined, 0, 0], 1e-11)


def slow_blended(batch):
    """The blended baseline over tuples, as loops over completions."""
    reward, group, outcome, by_outcome, judged = (v.tolist() if isinstance(v, torch.Tensor) else v for v in batch)
    kinds = [None if any(math.isnan(v) for v in row) else tuple(row) for row in outcome]
    n, present = len(reward), [not math.isnan(r) for r in reward]

    def mean(values):
        return sum(values) / len(values)

    def scatter(lists):
        """Sum of squares around each list's own mean, and its degrees of freedom."""
        return sum((v - mean(values)) ** 2 for values in lists for v in values), sum(len(values) - 1 for values in lists)

    def between(values, noises):
        """Variance of means of other prompts, their sampling noise left out, for a new one."""
        around = sum((v - mean(values)) ** 2 for v in values) / (len(values) - 1)
        return max(0.0, around - mean(noises)) * (1 + 1 / len(values))

    result = []
    for i in range(n):
        if kinds[i] is None:
            result.append(NAN)
            continue
        verdict = int(kinds[i][judged]) if kinds[i][judged] in (0.0, 1.0) else None
        alike, other = {}, {}
        for j in range(n):
            if present[j] and kinds[j] == kinds[i]:
                alike.setdefault(group[j], []).append((j, reward[j]))
            elif present[j] and kinds[j] is not None and verdict is not None:
                other.setdefault(group[j], []).append(by_outcome[j][verdict])
        away = {g: [r for _, r in rows] for g, rows in alike.items() if g != group[i]}
        mates = [r for j, r in alike.get(group[i], []) if j != i]
        square, free = scatter(away.values())
        noise = square / free if free else 0.0
        low = min((r for rows in alike.values() for _, r in rows), default=0.0)
        looked_at = [r for rows in alike.values() for _, r in rows] + [r for values in other.values() for r in values]
        floor = 1e-12 * sum((r - low) ** 2 for r in looked_at) / n + 1e-24
        estimates = [(mean(mates), noise / len(mates))] if mates else []
        everywhere = [r for values in away.values() for r in values]
        if len(away) >= 2:
            spread = between([mean(v) for v in away.values()], [noise / len(v) for v in away.values()])
            estimates.append((mean(everywhere), spread + noise / len(everywhere)))
        shared = [g for g in away if g in other]
        if len(shared) >= 2 and group[i] in other:
            square, free = scatter([v for g, v in other.items() if g != group[i]])
            crossed = square / free if free else noise
            gaps = [mean(away[g]) - mean(other[g]) for g in shared]
            drift = between(gaps, [noise / len(away[g]) + crossed / len(other[g]) for g in shared])
            estimates.append((mean(other[group[i]]) + mean(gaps), drift + crossed / len(other[group[i]])))
        if not estimates and everywhere:
            estimates = [(mean(everywhere), 1.0)]
        weights = [1 / max(v, floor) for _, v in estimates]
        total = sum(weights)
        result.append(sum(w * e for w, (e, _) in zip(weights, estimates, strict=True)) / total if estimates else NAN)
    return double(result)


@given(batch=report_batches())
@settings(max_examples=200, deadline=None)
def test_blended_equals_the_slow_oracle(batch):
    reward, group, outcome, by_outcome, judged = batch
    actual = blended_baseline(reward, group, outcome, by_outcome, judged=judged)
    torch.testing.assert_close(actual, slow_blended(batch), atol=1e-8, rtol=1e-8, equal_nan=True)


def test_blended_weighs_estimates_without_any_variance_alike():
    # Right ones: -1 in every prompt. Re-scored, the wrong ones of the first two prompts would have -1 too, that of the third
    # -.5625: both mu (-1) and x (-.5625) have a variance of 0, and the sum over all prompts less the own one is 0 but for rounding.
    reward = double([0.0] * 5 + [0.0, -0.0625, -1.0, -1.0, -1.0])
    group = torch.tensor([0] * 5 + [1, 2, 0, 1, 2])
    right = double([0.0] * 7 + [1.0] * 3)
    by_outcome = double([[0.0, -1.0]] * 6 + [[-0.0625, -0.5625]] + [[0.0, -1.0]] * 3)
    assert float(blended_baseline(reward, group, right, by_outcome)[9]) == pytest.approx((-1 - 0.5625) / 2)


def test_blended_rescores_by_the_outcome_that_judges():
    # Three prompts, each with a (complete, right) = (1,1) and a (1,0). Brier of the reports .9 .6 | .8 .4 | .5 .3, so
    # own rewards of right ones -.01 -.04 -.25 and of wrong ones -.36 -.16 -.09; re-scored as right, the wrong ones would have
    # -.16 -.36 -.49. For the right one of prompt 0: others of its kind {-.04, -.25}; gaps -.04+.36 = .32 and -.25+.49 = .24.
    reward, group, outcome, by_outcome, _ = lopsided()
    right, wrong = blended_baseline(reward, group, outcome, by_outcome, judged=1)[:2].tolist()
    # No two of one kind in a prompt: no noise. mu = -.145 with t2 = .02205 * 3/2; x = -.16 + .28 with d2 = .0032 * 3/2.
    mu, x = 1 / (0.02205 * 1.5), 1 / (0.0032 * 1.5)
    assert right == pytest.approx((mu * -0.145 + x * 0.12) / (mu + x))
    # For the wrong one: mu = -.125 with t2 = .00245 * 3/2; the right ones re-scored as wrong have -.81 -.64 -.25, so that the gaps
    # are -.16+.64 = .48 and -.09+.25 = .16, and x = -.81 + .32 with d2 = .0512 * 3/2.
    mu, x = 1 / (0.00245 * 1.5), 1 / (0.0512 * 1.5)
    assert wrong == pytest.approx((mu * -0.125 + x * -0.49) / (mu + x))
    # Nobody says that the other column judges: it is 1 for all, so the right ones would keep their own -.01.
    assert float(blended_baseline(reward, group, outcome, by_outcome, judged=0)[1]) > wrong + 0.01
    assert blended_baseline(reward, group, outcome)[:2].tolist() == pytest.approx([-0.145, -0.125])


BASELINES = ["outcome", "blended"]


def run(batch, baseline, **options):
    reward, group, outcome, by_outcome, judged = batch
    return advantage(
        reward, group, baseline=baseline, outcome_no=outcome, by_outcome_n2=by_outcome, judged=judged, **options
    ).advantage_n


@pytest.mark.parametrize("baseline", BASELINES)
@given(batch=report_batches(), data=st.data())
@settings(max_examples=40, deadline=None)
def test_other_codes_of_the_outcomes_change_nothing(batch, baseline, data):
    outcome = batch[2].clone()
    for column in range(outcome.shape[1]):
        if baseline == "blended" and column == batch[4]:
            continue  # a verdict is 0 or 1
        zero, one = data.draw(st.permutations([0.0, 1.0, -2.5, 2.0**53 - 1, 2.0**53 - 2]))[:2]
        outcome[:, column] = double([{0.0: zero, 1.0: one}.get(old, NAN) for old in batch[2][:, column].tolist()])
    assert_close(run((*batch[:2], outcome, *batch[3:]), baseline), run(batch, baseline), 1e-8)


@pytest.mark.parametrize("baseline", BASELINES)
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
@settings(max_examples=60, deadline=None)
def test_alone_under_blended_is_having_no_baseline(batch):
    reward, group, outcome, by_outcome, judged = batch
    compared = advantage(reward, group, baseline="blended", outcome_no=outcome)
    baseline = blended_baseline(reward, group, outcome, by_outcome, judged=judged)
    assert compared.alone_n.tolist() == (baseline.isnan() & ~reward.isnan()).tolist()
    rows = [tuple(row) for row in outcome.tolist()]
    for i, row in enumerate(rows):
        others = [j for j, other in enumerate(rows) if j != i and other == row and not math.isnan(reward[j])]
        assert bool(compared.alone_n[i]) == (not math.isnan(reward[i]) and not others)


def lopsided():
    """Three prompts with a right and a wrong answer each, all complete; the verdict is the second outcome."""
    q = double([0.9, 0.6, 0.8, 0.4, 0.5, 0.3])
    outcome = double([[1, 1], [1, 0]] * 3)
    by_outcome = torch.stack([-(q**2), -((q - 1) ** 2)], dim=1)
    return -((q - outcome[:, 1]) ** 2), torch.tensor([4, 4, -1, -1, 9, 9]), outcome, by_outcome, 1


@given(batch=report_batches())
@example(batch=lopsided())
@settings(max_examples=40, deadline=None)
def test_assign_rescores_by_what_the_report_is_judged_by(batch):
    reward, group, outcome, by_outcome, judged = batch
    names = tuple(f"o{k}" for k in range(outcome.shape[1]))
    nothing = torch.full_like(by_outcome, NAN)
    reward_nm = torch.cat([outcome, reward[:, None]], dim=1)
    by_outcome_nmo = torch.stack([*[nothing] * len(names), by_outcome], dim=1)
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
        advantage(REWARD, PROMPT, **options)
    with pytest.raises(AlignmentError, match="7 outcomes for 8"):
        advantage(REWARD, PROMPT, baseline="outcome", outcome_no=PAIRS[:7])


@pytest.mark.parametrize("baseline", BASELINES)
def test_no_completion_at_all(baseline):
    nobody = torch.zeros(0, dtype=torch.float64)
    result = advantage(nobody, nobody.long(), baseline=baseline, outcome_no=torch.zeros(0, 2, dtype=torch.float64))
    assert [len(x) for x in result[:3]] == [0, 0, 0]
    assert result.comparison.baseline_nm.shape == (0, 1)
