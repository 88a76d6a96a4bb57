"""Fidelity of baselines that are given several outcomes: figures against plain loops, and what must not matter."""

import math
from itertools import product

import pytest
import torch

from spanwise.credit import blended_baseline
from spanwise.errors import AlignmentError, RecipeError
from spanwise.fidelity import FIGURES, Rerolls, measure_fidelity

NAN = math.nan
ARMS = {
    "outcome": {"baseline": "outcome"},
    "strict": {"baseline": "outcome", "back_off": False},
    "LOO": {"baseline": "outcome", "leave_one_out": True},
    "first": {"baseline": "outcome", "outcomes": 1},
    "first, backing off": {"baseline": "outcome", "outcomes": 1, "back_off": True},
    "group": {"baseline": "group"},
    "blended": {"baseline": "blended"},
    "blended, first": {"baseline": "blended", "outcomes": 1},
}


def rolled(x, s, m, *, columns=2, seed=0, judged=0):
    """Over-confident reports around a level of each prompt and outcome; some outcomes and reports are missing."""
    g = torch.Generator().manual_seed(seed)
    outcome = (torch.rand(x, s, columns, generator=g) < torch.rand(x, 1, columns, generator=g)).double()
    level = 0.5 + 0.3 * torch.rand(x, 1, generator=g) + 0.1 * outcome[..., -1]
    confidence = (level + 0.15 * (2 * torch.rand(x, s, generator=g) - 1)).double()
    again = level.flatten()[:, None] + 0.15 * (2 * torch.rand(x * s, m, generator=g) - 1)
    confidence[torch.rand(x, s, generator=g) < 0.1] = NAN
    outcome[torch.rand(x, s, columns, generator=g) < 0.05] = NAN
    return Rerolls(confidence, outcome, torch.arange(x * s).reshape(x, s), again.double(), judged=judged)


def slow_rmses(data, name):
    """rmse, rmse_wrong, rmse_right and rmse_alone of all completions as one batch, from their definitions."""
    (x, s), rows = data.prefix_xs.shape, []
    for i, j in product(range(x), range(s)):
        kind = tuple(data.outcome_xs[i, j].tolist())
        q, c = float(data.confidence_xs[i, j]), kind[data.judged]
        rows.append((i, kind, -((q - c) ** 2), c, data.again_dm[int(data.prefix_xs[i, j])].tolist()))
    columns = {"first": 1, "first, backing off": 1}.get(name, len(rows[0][1]))
    levels = {"group": [columns], "strict": [0], "first": [0]}.get(name, range(columns + 1))
    terms = []
    for i, kind, r, c, again in rows:
        if math.isnan(r):
            continue
        gain = 0.0
        for dropped in levels:
            kept = kind[: columns - dropped]
            mates = [row for row in rows if row[0] == i and row[1][: columns - dropped] == kept and not math.isnan(row[2])]
            if any(math.isnan(value) for value in kept) or len(mates) < 2:
                continue
            mean = sum(row[2] for row in mates) / len(mates)
            gain = (r - mean) * (len(mates) / (len(mates) - 1) if name == "LOO" else 1)
            break
        scores = [-((v - c) ** 2) for v in again]
        mean = sum(scores) / len(scores)
        noise = sum((v - mean) ** 2 for v in scores) / (len(scores) - 1) / len(scores)
        alone = [row[1] for row in rows if row[0] == i and not math.isnan(row[2])].count(kind) == 1
        alone = alone and not any(math.isnan(value) for value in kind)
        terms.append(((gain - (r - mean)) ** 2 - noise, c, alone))
    picks = [lambda c, a: True, lambda c, a: c == 0, lambda c, a: c == 1, lambda c, a: a]
    kept = [[error for error, c, alone in terms if pick(c, alone)] for pick in picks]
    return [math.sqrt(max(sum(errors), 0) / len(errors)) for errors in kept]


@pytest.mark.parametrize("judged", [0, 1, 2])
def test_figures_of_one_batch_equal_plain_loops(judged):
    data = rolled(24, 6, 5, columns=3, seed=judged, judged=judged)
    arms = {name: options for name, options in ARMS.items() if "blended" not in name}
    found = measure_fidelity(data, baselines=arms, group_sizes=[6], batch=24 * 6, resamples=1, draws=2)
    for name in arms:
        got = [found.value(name, 6, figure) for figure in FIGURES[:4]]
        assert got == pytest.approx(slow_rmses(data, name), rel=1e-9), name
    assert found.value("outcome", 6, "rmse") != found.value("strict", 6, "rmse")


OPTIONS = {"group_sizes": [4], "batch": 64, "resamples": 4, "draws": 8}


def test_more_outcomes_help_where_reports_follow_them():
    # Reports are higher by .1 where the second outcome is 1: who is compared with his like has no error from that.
    found = measure_fidelity(rolled(200, 16, 16), baselines=ARMS, group_sizes=[16], batch=512, resamples=8, draws=8)
    assert found.value("outcome", 16, "correlation") > found.value("first, backing off", 16, "correlation") + 0.005
    assert found.value("first", 16, "correlation") > found.value("group", 16, "correlation") + 0.05


def test_a_constant_outcome_changes_nothing():
    one = rolled(20, 6, 5, columns=1)
    constant = torch.full_like(one.outcome_xs, 3.0)
    first = measure_fidelity(
        one, baselines={n: o for n, o in ARMS.items() if "outcomes" not in o and n not in ("outcome", "LOO")}, **OPTIONS
    )
    for place in (0, 1):
        both = torch.cat([constant, one.outcome_xs] if place == 0 else [one.outcome_xs, constant], dim=2)
        data = Rerolls(one.confidence_xs, both, one.prefix_xs, one.again_dm, judged=1 - place)
        found = measure_fidelity(data, baselines={name: ARMS[name] for name in first.baselines}, **OPTIONS)
        torch.testing.assert_close(found.value_bgf, first.value_bgf, equal_nan=True)
        torch.testing.assert_close(found.draw_rbgf, first.draw_rbgf, equal_nan=True)


def test_one_outcome_as_a_column_is_one_outcome():
    column = rolled(20, 6, 5, columns=1)
    flat = Rerolls(column.confidence_xs, column.outcome_xs[..., 0], column.prefix_xs, column.again_dm)
    one, other = measure_fidelity(column, **OPTIONS), measure_fidelity(flat, **OPTIONS)
    assert torch.equal(one.draw_rbgf.nan_to_num(), other.draw_rbgf.nan_to_num())


def test_outcomes_that_a_baseline_is_not_given_change_nothing_for_it():
    data = rolled(20, 6, 5)
    other = data.outcome_xs.clone()
    other[..., 1] = torch.rand(other.shape[:2], generator=torch.Generator().manual_seed(5)).round()
    moved = Rerolls(data.confidence_xs, other, data.prefix_xs, data.again_dm)
    arms = {name: ARMS[name] for name in ("first", "first, backing off", "blended, first", "group")}
    one, two = measure_fidelity(data, baselines=arms, **OPTIONS), measure_fidelity(moved, baselines=arms, **OPTIONS)
    alone = FIGURES.index("rmse_alone")  # who is the only one of a kind is a matter of all outcomes
    keep = [k for k in range(len(FIGURES)) if k != alone]
    torch.testing.assert_close(one.value_bgf[..., keep], two.value_bgf[..., keep], equal_nan=True)


def test_blended_rescores_only_by_an_outcome_it_is_given():
    data = rolled(40, 6, 5, judged=1)
    known, unknown = {"baseline": "blended"}, {"baseline": "blended", "outcomes": 1}
    found = measure_fidelity(data, baselines={"known": known, "unknown": unknown}, **OPTIONS)
    data_reward = -((data.confidence_xs - data.outcome_xs[..., 1]) ** 2).flatten()
    whole = measure_fidelity(data, baselines={"unknown": unknown}, group_sizes=[6], batch=240, resamples=1, draws=2)
    alone = blended_baseline(data_reward, torch.arange(40).repeat_interleave(6), data.outcome_xs[..., 0].flatten())
    value = -((data.again_dm - data.outcome_xs[..., 1].flatten()[:, None]) ** 2)
    gain, target = (data_reward - alone).nan_to_num(nan=0.0), data_reward - value.mean(dim=1)
    terms = ((gain - target) ** 2 - value.var(dim=1) / 5)[~data_reward.isnan()]
    assert whole.value("unknown", 6, "rmse") == pytest.approx(float(terms.mean()) ** 0.5)
    # The same data with the verdict first: then the first outcome is enough to re-score by, and gives other figures.
    turned = Rerolls(data.confidence_xs, data.outcome_xs.flip(2), data.prefix_xs, data.again_dm)
    first = measure_fidelity(turned, baselines={"known": known, "first": unknown}, **OPTIONS)
    torch.testing.assert_close(first.value_bgf[0], found.value_bgf[0], equal_nan=True)
    assert abs(first.value("first", 4, "rmse") - found.value("unknown", 4, "rmse")) > 0.01


def test_sentences():
    data = rolled(8, 4, 3)
    with pytest.raises(RecipeError, match="no outcome 2 to judge confidences by; there are 2"):
        Rerolls(data.confidence_xs, data.outcome_xs, data.prefix_xs, data.again_dm, judged=2)
    for count in (0, 3):
        with pytest.raises(RecipeError, match=f"Baseline 'x' is to be given {count} outcomes; there are 2"):
            measure_fidelity(data, baselines={"x": {"baseline": "outcome", "outcomes": count}}, group_sizes=[4])


def test_shapes_are_said(unchecked_shapes):
    data = rolled(8, 4, 3)
    with pytest.raises(AlignmentError, match=r"have the shapes \(8, 3\), \(8, 4\)"):
        Rerolls(data.confidence_xs, data.outcome_xs[:, :3], data.prefix_xs, data.again_dm)
