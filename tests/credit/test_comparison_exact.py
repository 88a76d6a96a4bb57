"""What credit says of itself is how it was made: 50,000 random rows against loops that follow the equations of the documentation.

Rewards are fractions of 8, so that means and differences are exact, and a 0 of the loops is a 0 of the tensors.
"""

import math
import random
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from fractions import Fraction as F
from typing import Any

import pytest
import torch

from credit_batches import LARGE
from helpers import NAN, double
from spanwise import Objective
from spanwise.credit import METHODS, assign, assign_turns, blended_baseline, gdpo, group_index
from spanwise.credit.spread import fill_missing
from spanwise.types import Scores, Status, Zero

BLOCKS = ("a", "b")
SIZE, LEFT_OUT = 500, (Status.ABSENT, Status.UNPARSABLE)
#: Batches of each method below; together 50,000 rows.
SHARES = {"bae": 50, "dcpo": 7, "grpo_verif": 7, "grpo": 5, "dr_grpo": 5, "rloo": 5, "maxrl": 4, "opo": 5, "rlcr": 5,
          "gdpo": 3, "reinforce++-baseline": 4, "ha_dw": 4}  # fmt: skip


def test_every_method_by_number_has_its_share():
    by_number = {name for name in METHODS if METHODS[name].kind in ("block", "completion") and METHODS[name].preset}
    assert by_number - {"bae_paper", "rlcr_paper"} == set(SHARES)  # these are presets of the same functions


class Rows:
    """Completions with two rewards: right or wrong, and graded; each may be missing for any reason."""

    def __init__(self, dice: random.Random, prices, *, negative: bool = True) -> None:
        self.count = n = SIZE
        ids = [dice.randrange(-(2**62), 2**62) for _ in range(n // 4)]
        self.group = [dice.choice(ids) for _ in range(n)]
        few, grades = dice.random(), range(-8 if negative else 0, 9)
        kinds = [Status.OK] * dice.choice((6, 20, 60)) + list(Status)
        self.status = [[dice.choice(kinds), dice.choice(kinds)] for _ in range(n)]
        right = [F(int(dice.random() < few)) for _ in range(n)]
        graded = [F(dice.choice((0, 8) if few < 0.3 else grades), 8) for _ in range(n)]
        self.value = [
            [v if s is Status.OK else None for v, s in zip(pair, status, strict=True)]
            for pair, status in zip(zip(right, graded, strict=True), self.status, strict=True)
        ]
        self.tidy = [dice.choice((0.0, 0.0, 1.0, None)) for _ in range(n)]
        self.seen = [dice.choice((0.0, *LARGE, None)) for _ in range(n)]
        self.cut = [dice.random() < 0.3 for _ in range(n)]
        self.length = [dice.choice((0, 1, 3, 7)) for _ in range(n)]
        self.prices, self.names = prices, ("right", "said")

    def only(self, m: int) -> None:
        self.value, self.status = [[pair[m]] for pair in self.value], [[pair[m]] for pair in self.status]
        self.prices, self.names = [self.prices[m]], (self.names[m],)

    def scores(self) -> Scores:
        reward = [[NAN if v is None else float(v) for v in pair] for pair in self.value]
        facts = [[NAN if v is None else v for v in pair] for pair in zip(self.tidy, self.seen, strict=True)]
        status = torch.tensor([[int(s) for s in pair] for pair in self.status], dtype=torch.int8)
        blank = torch.full((self.count, len(self.names), 2), NAN, dtype=torch.float64)
        return Scores(self.names, double(reward), status, blank, ("tidy", "seen"), double(facts))

    def stand_in(self, i: int, m: int):
        return self.prices[m] if self.status[i][m] in LEFT_OUT else None

    def missing(self, i: int, m: int) -> Zero:
        reasons = {Status.UNPARSABLE: Zero.UNPARSABLE, Status.UNSCORED: Zero.UNSCORED, Status.TIMEOUT: Zero.TIMEOUT,
                 Status.ERROR: Zero.ERROR}  # fmt: skip
        return reasons.get(self.status[i][m], Zero.TRUNCATED if self.cut[i] else Zero.ABSENT)


@dataclass
class Line:
    """How one number came about: `(worth - baseline) / divisor`, no baseline where there is nobody or nothing to divide by."""

    worth: Any
    baseline: Any
    divisor: Any
    reason: Zero
    about: int = -1  # no single objective
    level: int = 0
    members: int = 0
    stratum: Any = None


def compared_line(i, sets, values, instead, *, least, **options):
    """One row of one column; `sets` are the keys of all rows, level by level, the finest first."""
    by_level = [[] if key.of[i] is None else key.members[key.of[i]] for key in sets]
    level = next((n for n, members in enumerate(by_level) if len(members) >= max(least, 2)), len(sets) - 1)
    key, members = sets[level], by_level[level]
    line = line_at(i, key, members, values, instead, least=least, **options)
    line.level, line.members, line.stratum = level, len(members), None if key.of[i] is None else (level, key.of[i])
    return line


def line_at(i, key, members, values, instead, *, scale, leave_one_out, ddof, eps, least):
    is_missing, worth = values[i] is None, instead[i] if values[i] is None else values[i]
    if worth is None:
        return Line(None, None, None, Zero.ABSENT)
    if not members or (not is_missing and len(members) < max(least, 2)):
        return Line(worth, None, None, Zero.SINGLETON)
    mean, square, distinct = key.moments(key.of[i], values, instead)
    baseline, count = mean, len(members)
    if not is_missing and leave_one_out:
        baseline = (mean * count - worth) / (count - 1)
    divisor = 1.0
    if scale == "std":
        free = count + len(key.stands[key.of[i]]) - ddof
        divisor = math.sqrt(square / free) + eps if free > 0 else eps
    if scale == "mean":
        divisor = float(mean) + eps
    if worth == baseline and (distinct == 1 or divisor <= 0):  # nothing is divided
        return Line(worth, worth, 1.0, Zero.AT_BASELINE if is_missing or distinct > 1 else Zero.ALL_EQUAL)
    if divisor <= 0:
        return Line(worth, None, None, Zero.NO_SCALE)
    return Line(worth, baseline, divisor, Zero.AT_BASELINE if worth == baseline else Zero.CREDITED)


class Keys:
    """Who shares a stratum: the key of each row, and by key the rows that have a value or a stand-in."""

    def __init__(self, of, values, instead) -> None:
        self.of, self.members, self.stands, self.known = of, defaultdict(list), defaultdict(list), {}
        for i, key in enumerate(of):
            if key is not None and values[i] is not None:
                self.members[key].append(i)
            elif key is not None and instead[i] is not None:
                self.stands[key].append(i)

    def moments(self, key, values, instead):
        """The mean of the members, the squares of members and stand-ins around it, and how many values the members have."""
        if key not in self.known:
            members = [values[j] for j in self.members[key]]
            mean = sum(members, F(0)) / len(members)
            every = members + [instead[j] for j in self.stands[key]]
            square = sum((count * (v - mean) ** 2 for v, count in Counter(every).items()), F(0))
            self.known[key] = mean, square, len(set(members))
        return self.known[key]


def column(rows, values, instead, baseline, outcomes=(), *, back_off=None, **options):
    n, everyone = rows.count, [0] * rows.count
    keys = {"batch": [everyone], "group": [rows.group]}.get(baseline)
    if baseline == "none":
        worths = [instead[i] if values[i] is None else values[i] for i in range(n)]
        absent, reasons = (None, None, None, Zero.ABSENT), (Zero.AT_BASELINE, Zero.CREDITED)
        return [Line(*absent) if w is None else Line(w, F(0), 1.0, reasons[w != 0]) for w in worths]
    if keys is None:
        several = len(outcomes) > 1 if back_off is None else back_off
        depths = range(len(outcomes), -1, -1) if several else [len(outcomes)]
        keys = [[None if None in (t := tuple(o[i] for o in outcomes[:d])) else (rows.group[i], *t) for i in range(n)]
                for d in depths]  # fmt: skip
    sets = [Keys(key, values, instead) for key in keys]
    wider = [Keys(rows.group, values, instead), Keys(everyone, values, instead)]
    lines = []
    for i in range(n):
        line = compared_line(i, sets, values, instead, **options)
        for wide in wider:
            if values[i] is None and line.reason is Zero.SINGLETON:  # nobody there: the group, then the batch
                line = compared_line(i, [wide], values, instead, **{**options, "leave_one_out": False, "least": 2})
                line.stratum = None
        lines.append(line)
    return lines


def with_reasons(rows, lines, m, objective, verdict):
    for i, line in enumerate(lines):
        line.about = m
        if objective.weight == 0:
            line.reason = Zero.NO_WEIGHT
        elif line.reason is Zero.ABSENT:
            line.reason = rows.missing(i, m)
        elif line.reason is Zero.ALL_EQUAL and verdict and line.worth in (0, 1):
            line.reason = Zero.ALL_RIGHT if line.worth == 1 else Zero.ALL_WRONG
    return lines


def check(credit, lines, c):
    """One column of a comparison against the lines, and the formula against the credit."""
    comparison = credit.comparison
    adv = credit.adv_nm[:, c].tolist()
    table = [getattr(comparison, f"{key}_nm")[:, c].tolist() for key in ("worth", "baseline", "divisor", "reason", "about")]
    for i, (line, a, worth, baseline, divisor, reason, about) in enumerate(zip(lines, adv, *table, strict=True)):
        assert (Zero(reason), about) == (line.reason, line.about), (i, Zero(reason), line.reason)
        assert math.isnan(worth) if line.worth is None else math.isclose(worth, line.worth, rel_tol=1e-12), i
        if line.baseline is None:
            assert (math.isnan(baseline), math.isnan(divisor), a) == (True, True, 0), i
            continue
        assert math.isclose(baseline, line.baseline, rel_tol=1e-9, abs_tol=1e-9), (i, baseline, line.baseline)
        assert math.isclose(divisor, line.divisor, rel_tol=1e-9), (i, divisor, line.divisor)
        assert math.isclose((worth - baseline) / divisor, a, rel_tol=1e-9, abs_tol=1e-9), i
        assert a == 0 or line.reason in (Zero.CREDITED, Zero.NO_WEIGHT), (i, a)


def check_strata(credit, lines, values, m):
    """Levels, numbers of members, and that a stratum is who is compared at one level with the same completions."""
    comparison = credit.comparison
    table = (getattr(comparison, f"{name}_nm")[:, m].tolist() for name in ("level", "members", "stratum"))
    keys = set()
    for reward, line, level, members, stratum in zip(values, lines, *table, strict=True):
        if reward is not None:
            assert (level, members, stratum >= 0) == (line.level, line.members, line.stratum is not None)
            keys.add((stratum, line.stratum))
    assert len(keys) == len({key for _, key in keys}) == len({number for number, _ in keys})
    numbers = comparison.stratum_nm[:, m].unique()
    assert numbers[numbers >= 0].tolist() == list(range(int(numbers.max()) + 1))
    alone = [line.reason is Zero.SINGLETON for reward, line in zip(values, lines, strict=True) if reward is not None]
    assert int(credit.singleton_m[m]) == sum(alone)


def check_blocks(credit, objectives):
    parts_nm = credit.weight_m * credit.adv_nm
    for k, name in enumerate(BLOCKS):
        paying = [m for m, o in enumerate(objectives) if name in o.pays]
        total_n = parts_nm[:, paying].sum(dim=1) if len(credit.names) > 1 else parts_nm[:, 0]
        assert torch.allclose(credit.block_nk[:, k], total_n, rtol=1e-12, atol=1e-12)


def check_formula(comparison, adv_nm):
    """The parts of a comparison give the advantages; a reason says whether they are 0."""
    explained_nm = (comparison.worth_nm - comparison.baseline_nm) / comparison.divisor_nm
    assert torch.allclose(explained_nm.nan_to_num(), adv_nm, rtol=1e-9, atol=1e-9)  # 0 without a baseline
    assert torch.equal(comparison.reason_nm == int(Zero.CREDITED), adv_nm != 0)


def credited(rows, method, objectives, **options):
    inputs = {"length_n": torch.tensor(rows.length), "truncated_n": torch.tensor(rows.cut)}
    present_nk = torch.ones(rows.count, 2, dtype=torch.bool)
    return assign(
        rows.scores(), torch.tensor(rows.group), present_nk, objectives=objectives, block_names=BLOCKS, method=method,
        inputs=inputs, **options,
    )  # fmt: skip


def block_batch(dice, method):
    prices = [dice.choice((None, F(-1), F(1, 2))) for _ in range(2)]
    rows = Rows(dice, prices)
    ddof, eps = dice.choice((0, 1, 1, 2)), dice.choice((0.0, 1e-6, 0.1))
    least, loo = dice.choice((2, 2, 3, 4)), method == "bae" and dice.random() < 0.5
    rules = []
    for m, name in enumerate(("right", "said")):
        baseline = dice.choice(("none", "batch", "group", "outcome")[: 3 if m == 0 else 4]) if method == "bae" else "group"
        several = (("right",), ("right", "tidy"), ("tidy",), ("right", "tidy", "seen"))
        outcomes = dice.choice(several) if baseline == "outcome" else ()
        rules.append({
            "name": name, "pays": BLOCKS[m], "weight": dice.choice((1.0, 0.25, 0.0)), "given": outcomes, "baseline": baseline,
            "if_missing": None if prices[m] is None else float(prices[m]),
            "scale": dice.choice(("none", "std")) if method == "bae" and baseline != "none" else None,
            "back_off": dice.choice((None, True, False)) if baseline == "outcome" else None,
        })  # fmt: skip
    objectives = [Objective("format", **rule) for rule in rules]
    options = {"min_stratum": least, "ddof": ddof, "eps": eps} | ({"leave_one_out": loo} if method == "bae" else {})
    credit = credited(rows, method, objectives, **options)
    right = [None if pair[0] is None else float(pair[0]) for pair in rows.value]
    facts = {"right": right, "tidy": rows.tidy, "seen": rows.seen}
    for m, rule in enumerate(rules):
        values, instead = [pair[m] for pair in rows.value], [rows.stand_in(i, m) for i in range(rows.count)]
        scale = "std" if method != "bae" else rule["scale"]
        terms = {"scale": scale, "leave_one_out": loo, "ddof": ddof, "eps": eps, "least": least}
        outcomes = [facts[name] for name in rule["given"]]
        lines = column(rows, values, instead, rule["baseline"], outcomes, back_off=rule["back_off"], **terms)
        check_strata(credit, lines, values, m)
        if method == "grpo_verif" and m == 1:  # the second block weighs a fifth
            for line in lines:
                line.divisor = None if line.divisor is None else line.divisor / 0.2
        verdict = {v for v in values if v is not None} <= {F(0), F(1)}
        check(credit, with_reasons(rows, lines, m, objectives[m], verdict), m)
    check_blocks(credit, objectives)


def sum_reasons(rows, lines, totals, weights, values):
    """Say why a sum gives nothing: a missing reward, or a verdict on which the group agrees."""
    groups = defaultdict(list)
    for i, group in enumerate(rows.group):
        groups[group].append(i)
    for i, line in enumerate(lines):
        if totals[i] is None:
            missing = [(rows.missing(i, m), m) for m, weight in enumerate(weights) if weight and values[i][m] is None]
            line.reason, line.about = min(missing)
        elif line.reason is Zero.ALL_EQUAL:
            complete = [j for j in groups[rows.group[i]] if totals[j] is not None]
            for m in range(len(weights)):
                rewards = [rows.value[j][m] for j in groups[rows.group[i]] if rows.value[j][m] is not None]
                verdict = {pair[m] for pair in rows.value if pair[m] is not None} <= {F(0), F(1)}
                if verdict and len(rewards) == len(complete) and len(set(rewards)) == 1:
                    line.reason, line.about = Zero.ALL_RIGHT if rewards[0] == 1 else Zero.ALL_WRONG, m
                    break
    return lines


def mean_of(values, lengths):
    total = sum(lengths)
    return None if not total else sum((v * length for v, length in zip(values, lengths, strict=True)), F(0)) / total


def centred_again(rows, lines, *, ddof, eps):
    """REINFORCE++-baseline: the differences minus their mean over tokens, over their deviation over tokens."""
    c = [None if line.baseline is None else line.worth - line.baseline for line in lines]
    joins = [i for i in range(rows.count) if c[i] is not None and rows.length[i]]
    lengths = [rows.length[i] for i in joins]
    mean = mean_of([c[i] for i in joins], lengths)
    square = sum((rows.length[i] * (c[i] - mean) ** 2 for i in joins), F(0))
    divisor = math.sqrt(float(square) / (sum(lengths) - ddof) + eps)
    for i, line in enumerate(lines):
        if i in joins:
            line.baseline, line.divisor = line.baseline + mean, divisor
            if line.worth != line.baseline:
                line.reason = Zero.CREDITED
            elif line.reason is Zero.CREDITED:
                line.reason = Zero.AT_BASELINE
        elif c[i]:
            line.baseline, line.divisor, line.reason = None, None, Zero.EMPTY
    return lines


def completion_batch(dice, method):
    prices = [dice.choice((None, F(1, 2))) for _ in range(2)]
    weights = [F(1), F(1, 4)] if dice.random() < 0.7 else [F(1), F(0)]
    rows = Rows(dice, prices, negative=method != "maxrl")
    if method == "gdpo":  # with several rewards it has no single baseline
        rows.only(1)
        prices, weights = rows.prices, [F(1, 4)]
    objectives = [
        Objective("format", name=name, pays=BLOCKS, weight=float(weights[m]), if_missing=None if p is None else float(p))
        for m, (name, p) in enumerate(zip(rows.names, prices, strict=True))
    ]
    least, loo = dice.choice((2, 3)), method == "rloo" or (method in ("dr_grpo", "rlcr") and dice.random() < 0.5)
    options = {"min_stratum": least} | ({"leave_one_out": loo} if method in ("dr_grpo", "rlcr") else {})
    ddof, eps = dice.choice((0, 1)), dice.choice((1e-6, 0.1))
    if method in ("grpo", "gdpo", "reinforce++-baseline", "ha_dw"):
        options |= {"ddof": ddof, "eps": eps}
    options |= {"eps": eps} if method == "maxrl" else {}
    values = [[v if v is not None else rows.stand_in(i, m) for m, v in enumerate(rows.value[i])] for i in range(rows.count)]
    totals = [
        None if any(w and v is None for v, w in zip(pair, weights, strict=True))
        else sum((v * w for v, w in zip(pair, weights, strict=True) if w), F(0))
        for pair in values
    ]  # fmt: skip
    anchor, times = dice.choice((0.5, 0.2)), dice.choice((1.3, 1.0))
    options |= {"anchor": anchor, "lambda_scale": times} if method == "ha_dw" else {}
    credit = credited(rows, method, objectives, **options)
    scale = {"grpo": "std", "gdpo": "std", "ha_dw": "std", "maxrl": "mean"}.get(method, "none")
    terms = {"scale": scale, "leave_one_out": loo, "ddof": ddof, "eps": eps / (4 if method == "gdpo" else 1), "least": least}
    lines = column(rows, totals, [None] * rows.count, "group", **terms)
    if method == "ha_dw":  # hard groups weigh success more, easy ones failure
        for i, line in enumerate(lines):
            peers = [total for j, total in enumerate(totals) if rows.group[j] == rows.group[i] and total is not None]
            if line.reason is Zero.CREDITED:
                gap = float(sum(peers, F(0)) / len(peers)) - anchor
                sign = 1 if (line.worth > line.baseline) != (gap > 0) else -1
                line.divisor /= times * math.exp(sign * abs(gap))
    if method == "opo":
        for i, line in enumerate(lines):
            if line.baseline is not None:
                mates = [j for j, total in enumerate(totals) if rows.group[j] == rows.group[i] and total is not None]
                mean = mean_of([totals[j] for j in mates], [rows.length[j] for j in mates])
                line.baseline, line.divisor = (None, None) if mean is None else (mean, 1.0)
                if line.reason is not Zero.ALL_EQUAL:
                    line.reason = (
                        Zero.NO_SCALE if mean is None else Zero.AT_BASELINE if line.worth == mean else Zero.CREDITED
                    )
    if method == "reinforce++-baseline":
        lines = centred_again(rows, lines, ddof=ddof, eps=eps)
    if method == "gdpo":  # the weight stands in the worth; the results are divided by their deviation in the batch
        scores = [0.0 if line.baseline is None else float(line.worth - line.baseline) / line.divisor / 4
                for line, total in zip(lines, totals, strict=True) if total is not None]  # fmt: skip
        mean = sum(scores) / len(scores)
        std = math.sqrt(sum((s - mean) ** 2 for s in scores) / (len(scores) - ddof)) + eps
        for line in lines:
            if line.divisor is not None:
                line.divisor = std * (1.0 if line.reason is Zero.ALL_EQUAL else line.divisor * 4)
    check(credit, sum_reasons(rows, lines, totals, weights, values), 0)
    assert credit.names == (" + ".join(rows.names),)
    check_blocks(credit, objectives)


@pytest.mark.parametrize("method", SHARES)
def test_every_number_is_made_as_it_says(method, request):
    run = block_batch if METHODS[method].kind == "block" else completion_batch
    for seed in range(SHARES[method]):
        run(random.Random(f"{method} {seed}"), method)
        request.getfixturevalue("unchecked_shapes")  # the first batch has had them


@pytest.mark.parametrize("seed", range(10))
def test_many_objectives_and_what_borrows_from_other_prompts(seed):
    """Four objectives, one of which takes the blended baseline: each number is made as it says, and blocks add them up."""
    dice = random.Random(seed)
    rows = Rows(dice, [None, F(-1)])
    two, columns = rows.scores(), [0, 1, 1, 1]
    scores = replace(
        two, names=("right", "said", "again", "borrowed"), reward_nm=two.reward_nm[:, columns], status_nm=two.status_nm[:, columns],
        by_outcome_nmo=two.by_outcome_nmo[:, columns],
    )  # fmt: skip
    objectives = [
        Objective("format", "a", name="right", baseline="group", scale=dice.choice((None, "std"))),
        Objective("format", "b", name="said", baseline="outcome", given=("right", "tidy"), if_missing=-1.0),
        Objective("format", BLOCKS, name="again", baseline=dice.choice(("batch", "none")), weight=0.5),
        Objective("format", "b", name="borrowed", baseline="blended", given="right", if_missing=dice.choice((None, -1.0))),
    ]
    group_n, present_nk = torch.tensor(rows.group), torch.ones(rows.count, 2, dtype=torch.bool)
    credit = assign(scores, group_n, present_nk, objectives=objectives, block_names=BLOCKS, method="bae")
    comparison = credit.comparison
    check_formula(comparison, credit.adv_nm)
    check_blocks(credit, objectives)
    borrowed_n = blended_baseline(scores.reward_nm[:, 3], group_index(group_n), scores.reward_nm[:, 0])
    own_n = ~scores.reward_nm[:, 3].isnan()
    assert torch.allclose(comparison.baseline_nm[own_n, 3], borrowed_n[own_n], rtol=1e-9, atol=1e-9, equal_nan=True)
    assert torch.equal(comparison.reason_nm[own_n, 3] == int(Zero.SINGLETON), borrowed_n[own_n].isnan())


@pytest.mark.parametrize("seed", range(4))
def test_several_rewards_of_gdpo_have_no_one_baseline(seed):
    rows = Rows(random.Random(seed), [None, F(1, 2)])
    objectives = [Objective("format", BLOCKS, name="right"), Objective("format", BLOCKS, name="said", if_missing=0.5)]
    credit = credited(rows, "gdpo", objectives)
    reward_nm = fill_missing(rows.scores(), objectives)
    assert torch.allclose(credit.adv_nm[:, 0], gdpo(reward_nm, torch.tensor(rows.group)), rtol=0, atol=1e-9)
    assert credit.comparison.baseline_nm.isnan().all()
    assert torch.equal(credit.comparison.reason_nm == int(Zero.CREDITED), credit.adv_nm != 0)
    assert bool((credit.adv_nm != 0).any())


@pytest.mark.parametrize("seed", range(6))
def test_turns_are_compared_with_one_vote_per_rollout(seed):
    """Rewards of rollouts stand at all of their turns; those of turns are compared with the mean over rollouts of their means."""
    dice = random.Random(seed)
    rows, leave_one_out = Rows(dice, [None, dice.choice((None, F(-1)))]), bool(seed % 2)
    trajectory = [dice.randrange(-150, 150) for _ in range(rows.count)]
    rows.group = [t // 6 for t in trajectory]
    objectives = [
        Objective("format", "a", name="right", scope="rollout"),
        Objective("format", "b", name="said", scope="turn", if_missing=None if rows.prices[1] is None else -1.0),
    ]
    places = {"trajectory_s": torch.tensor(trajectory), "step_s": torch.arange(rows.count)}
    credit = assign_turns(
        rows.scores(), torch.tensor(rows.group), torch.ones(rows.count, 2).long(), objectives=objectives, block_names=BLOCKS,
        method="bae", leave_one_out=leave_one_out, inputs={"truncated_n": torch.tensor(rows.cut)}, **places,
    )  # fmt: skip
    comparison = credit.comparison
    check_formula(comparison, credit.adv_nm)
    first = {t: i for i, t in reversed(list(enumerate(trajectory)))}
    shared = torch.tensor([first[t] for t in trajectory])
    assert torch.equal(comparison.baseline_nm[:, 0].nan_to_num(), comparison.baseline_nm[shared, 0].nan_to_num())
    votes = defaultdict(lambda: defaultdict(list))
    for i, (_, grade) in enumerate(rows.value):
        if grade is not None:
            votes[rows.group[i]][trajectory[i]].append(grade)
    for i, (_, grade) in enumerate(rows.value):
        means = {t: sum(v, F(0)) / len(v) for t, v in votes[rows.group[i]].items()}
        baseline, reason = float(comparison.baseline_nm[i, 1]), Zero(int(comparison.reason_nm[i, 1]))
        stand_in = rows.stand_in(i, 1)
        if grade is None and stand_in is None:
            assert reason is rows.missing(i, 1)
        elif grade is None or len(means) > 1:
            assert means or stand_in is not None
            others = [v for t, v in means.items() if not leave_one_out or grade is None or t != trajectory[i]]
            if others:
                assert math.isclose(baseline, sum(others, F(0)) / len(others), rel_tol=1e-9, abs_tol=1e-9), i
        else:
            assert reason is Zero.SINGLETON
            assert math.isnan(baseline)
