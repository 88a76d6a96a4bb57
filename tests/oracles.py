"""Slow oracles: every method once more, as plain loops over completions and tokens, sharing no code with the library."""

import math
import re
from collections import Counter
from fractions import Fraction
from itertools import combinations, product

import torch

from helpers import NAN, double
from spanwise.types import Fault


def average(values):
    return sum(values) / len(values)


def deviation(values, ddof):
    free = len(values) - ddof
    return math.sqrt(sum((v - average(values)) ** 2 for v in values) / free) if free > 0 else 0.0


def z_scores(values, ddof, eps):
    std = deviation(values, ddof)
    return [(v - average(values)) / (std + eps) if std > 1e-12 else 0.0 for v in values]


def slow_whitened(value, weight, ddof, eps, eps_at="variance", shift=True):
    used = [i for i, v in enumerate(value) if v is not None and weight[i] > 0]
    total = sum(weight[i] for i in used)
    if not used or total <= max(ddof, 1):
        return [0.0] * len(value)
    mean = sum(weight[i] * value[i] for i in used) / total
    variance = sum(weight[i] * (value[i] - mean) ** 2 for i in used) / (total - ddof)
    if variance < 1e-24:
        return [0.0] * len(value)
    under_root = {"std": variance, "variance": variance + eps, "floor": max(variance, eps)}[eps_at]
    divisor = math.sqrt(under_root) + (eps if eps_at == "std" else 0.0)
    return [(value[i] - (mean if shift else 0.0)) / divisor if i in used else 0.0 for i in range(len(value))]


def slow_gdpo(batch, weights, length, ddof, conflict=None):
    """GDPO, and with `conflict` GD2PO, after the authors' code."""
    reward_nm, group = batch[0].tolist(), batch[1].tolist()
    n = len(reward_nm)
    terms = [[0.0] * len(weights) for _ in range(n)]
    for m, weight in enumerate(weights):
        for g in set(group):
            inside = [i for i in range(n) if group[i] == g and not math.isnan(reward_nm[i][m])]
            for i, z in zip(inside, z_scores([reward_nm[i][m] for i in inside], ddof, 1e-6), strict=True):
                terms[i][m] = weight * z if len(inside) > 1 else 0.0
    absent = [all(map(math.isnan, row)) for row in reward_nm]
    value = [None if absent[i] else sum(terms[i]) if abs(sum(terms[i])) > 1e-12 else 0.0 for i in range(n)]
    if conflict is not None:
        cancels = [abs(sum(term)) < conflict * (sum(map(abs, term)) + 1e-6) for term in terms]
        fights = [max(terms[i]) > 1e-8 and min(terms[i]) < -1e-8 and cancels[i] for i in range(n)]
        for i in range(n):
            mates = [not fights[j] for j in range(n) if group[j] == group[i] and not absent[j]]
            value[i] = None if fights[i] or absent[i] else value[i] * average(mates)
    shift = length is not None or conflict is not None
    return slow_whitened(value, length or [1] * n, ddof, 1e-6, eps_at="std", shift=shift)


def slow_reinforce_plus_plus(reward_nt, mask_nt, gamma, ddof):
    """The returns of the tokens, whitened over the batch; a completion whose reward is absent takes no part."""
    returns = slow_recursion(reward_nt, torch.zeros_like(reward_nt), mask_nt, gamma=gamma, lam_after=lambda *_: 1.0)
    known_nt = mask_nt & ~(reward_nt.isnan() & mask_nt).any(dim=1, keepdim=True)
    flat = [value if known else None for value, known in zip(returns.flatten().tolist(), known_nt.flatten(), strict=True)]
    return double(slow_whitened(flat, [1] * len(flat), ddof, 1e-8)).reshape(reward_nt.shape)


def slow_recursion(reward, value, mask, *, gamma, lam_after, bootstrap=None):
    """Delete masked tokens, then the textbook loop; lam_after(i, k, next) is the weight of A[next] in A[k]."""
    result = torch.zeros(reward.shape, dtype=torch.float64)
    for i in range(len(reward)):
        kept = [t for t in range(reward.shape[1]) if mask[i, t]]
        rewards = dict.fromkeys(kept, 0.0)
        end = 0.0 if bootstrap is None else float(bootstrap[i])
        if any(math.isnan(reward[i, t]) for t in kept) or math.isnan(end):
            continue
        for t in range(reward.shape[1]):
            before = [k for k in kept if k <= t]
            if before and not math.isnan(reward[i, t]):
                rewards[before[-1]] += float(reward[i, t])
        result[i, kept] = double(textbook(kept, rewards, value[i], end, gamma, lambda k, n, i=i: lam_after(i, k, n)))
    return result


def textbook(kept, rewards, value, end, gamma, lam_after):
    """A[k] = r[k] + gamma V[k+1] - V[k] + gamma lam[k] A[k+1] over a list of tokens; lam_after(k, next) weighs A[next] in A[k]."""
    result, after, later = [0.0] * len(kept), end, 0.0
    for place in reversed(range(len(kept))):
        k = kept[place]
        result[place] = rewards[k] + gamma * after - float(value[k]) + gamma * later
        after = float(value[k])
        later = lam_after(kept[place - 1], k) * result[place] if place else 0.0
    return result


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def chances(drawn, marked, total):
    """Count the draws that hold each number of marked members, and all draws."""
    ways = [math.comb(marked, k) * math.comb(total - marked, drawn - k) if k <= drawn else 0 for k in range(marked + 1)]
    return ways, math.comb(total, drawn)


def slow_ktae(adv, ids, mask, correct, group, form, h1, h2, h3, k1=2.0, b=0.5):
    result = torch.where(mask, adv, 0.0)
    n, width = ids.shape
    text = [[int(ids[i, t]) for t in range(width) if mask[i, t]] for i in range(n)]
    for i in range(n):
        mates = [j for j in range(n) if group[j] == group[i] and not math.isnan(correct[j])]
        sides = [[j for j in mates if correct[j] > 0], [j for j in mates if correct[j] <= 0]]
        if math.isnan(correct[i]) or not all(sides):
            continue
        tokens = [[w for j in side for w in text[j]] for side in sides]
        average = (len(tokens[0]) + len(tokens[1])) / 2
        for t in range(width):
            if not mask[i, t]:
                continue
            w = int(ids[i, t])
            with_w = [sum(w in text[j] for j in side) for side in sides]
            table = [with_w, [len(sides[0]) - with_w[0], len(sides[1]) - with_w[1]]]
            ways, every = chances(sum(with_w), len(sides[0]), len(mates))
            p = ways[with_w[0]] / every  # one draw of the hypergeometric distribution; else Fisher's exact test, two-sided
            if form != "paper":
                p = sum(way for way in ways if way <= ways[with_w[0]]) / every
            tf = []
            for side in tokens:
                f = Counter(side)[w] / len(side) if side else 0.0
                tf.append(f * (k1 + 1) / (f + k1 * (1 - b + b * len(side) / average)) if f else 0.0)

            def entropy(*counts):
                return -sum(c / sum(counts) * math.log2(c / sum(counts)) for c in counts if c)

            total = len(mates)
            gain = entropy(len(sides[0]), len(sides[1])) - sum(sum(row) / total * entropy(*row) for row in table if sum(row))
            direction = math.asin((with_w[0] / len(sides[0])) ** 0.5) - math.asin((with_w[1] / len(sides[1])) ** 0.5)
            direction += h3 * (tf[0] / (tf[1] + 1e-5) - tf[1] / (tf[0] + 1e-5))
            key = (h1 * (0.0 if p > 1 - 1e-9 else math.exp(-2 * p)) + h2 * gain) * direction
            key = max(-500.0, min(500.0, key))
            result[i, t] += sigmoid(key) - 0.5 if form == "paper" else 2 * (sigmoid(key / (h1 + h2)) - 0.5)
    return result


def slow_oar(adv, importance, mask, q, beta, floor, to_length):
    result = torch.zeros_like(adv)
    for i in range(len(adv)):
        kept = [t for t in range(adv.shape[1]) if mask[i, t]]
        if not kept:
            continue
        level = [math.log(1 + float(importance[i, t])) for t in kept]
        level = [(x - min(level)) / (max(level) - min(level) or 1.0) for x in level]
        cut = float(torch.quantile(double(level), q))
        weight = [max(x / (cut + 1e-8), floor) if x < cut else 1 + beta * (x - cut) / (1 - cut + 1e-8) for x in level]
        scale = len(weight) / sum(weight) if to_length else 1.0
        result[i, kept] = adv[i, kept] * double(weight) * scale
    return result


def columns(batch):
    return [value if isinstance(value, list) else value.tolist() for value in batch]


def from_step(i, trajectory, step):
    """The rows of a trajectory from row i on, in the order of their steps."""
    return sorted(
        (k for k in range(len(step)) if trajectory[k] == trajectory[i] and step[k] >= step[i]), key=lambda k: step[k]
    )


def slow_returns(batch, gamma):
    reward, _, trajectory, step, _ = columns(batch)
    result = [0.0] * len(reward)
    for i in range(len(reward)):
        for k in reversed(from_step(i, trajectory, step)):
            result[i] = reward[k] + gamma * result[i]
    return result


def slow_normal(value, members, scale, ddof, eps):
    """(value - mean) over (deviation + eps) of the members that have a value."""
    present = [v for v in members if not math.isnan(v)]
    if math.isnan(value) or len(set(present)) < 2:
        return 0.0
    divisor = deviation(present, ddof) + eps if scale == "std" else 1.0
    return (value - math.fsum(present) / len(present)) / divisor


def slow_gigpo(batch, *, gamma, scale, over, reward, step_weight, ddof, eps):
    rewards, task, trajectory, step, state = columns(batch)
    n, result = len(rewards), []
    returns = slow_returns(batch, gamma)

    def episode(name):
        rows = sorted((step[k], k) for k in range(n) if trajectory[k] == name)
        values = [rewards[k] for _, k in rows]
        return values[-1] if reward == "last" else math.fsum(values)

    for i in range(n):
        rows = [k for k in range(n) if task[k] == task[i]]
        names = [trajectory[k] for k in rows]
        episodes = [episode(name) for name in (names if over == "rows" else sorted(set(names)))]
        value = slow_normal(episode(trajectory[i]), episodes, scale, ddof, eps)
        if state[i] is not None:
            mates = [returns[k] for k in rows if state[k] == state[i]]
            value += step_weight * slow_normal(returns[i], mates, scale, ddof, eps)
        result.append(value)
    return torch.tensor(result, dtype=torch.float64)


def slow_gagpo(batch, gamma, lam):
    rewards, task, trajectory, step, state = columns(batch)
    n, returns = len(rewards), slow_returns(batch, gamma)

    def value(i):
        mates = [k for k in range(n) if k == i or (task[k] == task[i] and state[k] == state[i] and state[i] is not None)]
        present = [returns[k] for k in mates if not math.isnan(returns[k])]
        return average(present) if present else NAN

    result = []
    for i in range(n):
        later, total = from_step(i, trajectory, step), 0.0
        for distance, k in enumerate(later):
            following = value(later[distance + 1]) if distance + 1 < len(later) else 0.0
            total += (gamma * lam) ** distance * (rewards[k] + gamma * following - value(k))
        result.append(0.0 if math.isnan(total) else total)
    return torch.tensor(result, dtype=torch.float64)


def slow_loss(name, logp, old, adv):
    """The loss of one token."""
    r = math.exp(logp - old)
    if name == "aspo":
        if adv > 0:
            return 0.0 if r > 1.2 else -adv * min(1 / r, 1.6)
        return 0.0 if r < 0.8 else -adv * min(r, 1.6)
    p, q = math.exp(logp), math.exp(old)
    if name == "dppo_tv":
        return -adv * min(r, 20) * ((p - q <= 0.15) if adv > 0 else (q - p <= 0.1))
    distance = q * math.log(q / p) + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))
    back = (p < q) if adv > 0 else (p > q)
    return -adv * min(r, 2) * (back or distance <= (0.03 if adv > 0 else 0.05))


def slow_fidelity(data, score, name):
    """Every completion in one batch, group by prompt; figures straight from their definitions."""
    rows, (x, s) = [], data.prefix_xs.shape
    for i, j in product(range(x), range(s)):
        q, c, d = float(data.confidence_xs[i, j]), float(data.outcome_xs[i, j]), int(data.prefix_xs[i, j])
        rerolls = [] if d < 0 else [v for v in data.again_dm[d].tolist() if v == v]
        rows.append((i, q, c, score(q, c), rerolls))
    alone, advantages = [], []
    for i, _, c, r, _ in rows:
        others = {
            "none": [],
            "batch": [row for row in rows if row[3] == row[3]],
            "group": [row for row in rows if row[0] == i and row[3] == row[3]],
        }.get(name, [row for row in rows if row[0] == i and row[2] == c and row[3] == row[3]])
        alone.append(sum(row[0] == i and row[2] == c and row[3] == row[3] for row in rows) == 1)
        count, total = len(others), sum(row[3] for row in others)
        if name == "none":
            advantages.append(r)
        elif count < 2:
            advantages.append(0.0)
        else:
            advantages.append(r - (total - r) / (count - 1) if "LOO" in name else r - total / count)
    use = []
    for (_, q, c, r, rerolls), a, single in zip(rows, advantages, alone, strict=True):
        if r == r and len(rerolls) >= 2:
            values = [score(v, c) for v in rerolls]
            target, noise = r - average(values), deviation(values, 1) ** 2 / len(values)
            use.append((a, target, noise, (q - sum(rerolls) / len(rerolls)) ** 2, c, single))

    def rmse(keep):
        kept = [(a - t) ** 2 - noise for a, t, noise, _, c, single in use if keep(c, single)]
        return root(sum(kept), len(kept))

    weight_gradient = [(a, t, noise, size) for a, t, noise, size, _, _ in use]
    return {
        **slow_figures([(a, t, noise, 1.0) for a, t, noise, *_ in use]),
        "rmse_wrong": rmse(lambda c, single: c == 0),
        "rmse_right": rmse(lambda c, single: c == 1),
        "rmse_alone": rmse(lambda c, single: single),
        "gradient_noise": root(unexplained(weight_gradient), sum(w * (t**2 - noise) for _, t, noise, w in weight_gradient)),
    }


def root(top, below):
    return math.sqrt(max(top, 0.0) / below) if below else NAN


def unexplained(rows):
    """Least squares of w (k A - target)^2 over k, without the target's noise."""
    square = sum(w * a**2 for a, _, _, w in rows)
    k = sum(w * a * t for a, t, _, w in rows) / square if square else 0.0
    return sum(w * ((k * a - t) ** 2 - noise) for a, t, noise, w in rows)


def slow_figures(rows):
    """The figures of rows of (advantage, target, noise of the target, weight), straight from their definitions."""
    n = sum(w for *_, w in rows)
    mean_a, mean_t = sum(a * w for a, _, _, w in rows) / n, sum(t * w for _, t, _, w in rows) / n
    var_a, var_t = sum((a - mean_a) ** 2 * w for a, _, _, w in rows), sum((t - mean_t) ** 2 * w for _, t, _, w in rows)
    covariance = sum((a - mean_a) * (t - mean_t) * w for a, t, _, w in rows)
    return {
        "correlation": covariance / math.sqrt(var_a * var_t) if var_a * var_t > 0 else NAN,
        "ceiling": root(var_t - sum(noise * w for _, _, noise, w in rows), var_t),
        "rmse": root(sum(((a - t) ** 2 - noise) * w for a, t, noise, w in rows), n),
        "rmse_scaled": root(unexplained(rows), n),
    }


def slow_voting(rows, n):
    """Expected correctness of each way over all subsets of n, as fractions."""
    rows = [((a or "").strip(), c, q) for a, c, q in rows]
    value = {}
    for text in {a for a, *_ in rows if a}:
        judged = [c for a, c, _ in rows if a == text]
        value[text] = Fraction(sum(judged), len(judged))
    totals = dict.fromkeys(("pass@k", "majority", "weighted", "maxconf"), Fraction(0))
    subsets = list(combinations(rows, n))
    for subset in subsets:
        totals["pass@k"] += max(c for _, c, *_ in subset)
        for name, weigh in (("majority", lambda row: 1), ("weighted", lambda row: row[2] or 0)):
            votes = {}
            for row in subset:
                if row[0]:
                    votes[row[0]] = votes.get(row[0], 0) + weigh(row)
            tied = [value[text] for text, vote in votes.items() if vote == max(votes.values())]
            totals[name] += sum(tied) / Fraction(len(tied)) if tied else 0
        ranks = [-99 if q is None else q for *_, q in subset]
        tied = [row[1] for row, rank in zip(subset, ranks, strict=True) if rank == max(ranks)]
        totals["maxconf"] += Fraction(sum(tied), len(tied))
    weightless = all(q is None for *_, q in rows)
    left_out = ("weighted", "maxconf") if weightless else ()
    return {name: float(total / len(subsets)) for name, total in totals.items() if name not in left_out}


def marks_of(data, layout):
    """Every tag of the layout, by comparing at every byte: (name, opens, first byte)."""
    marks = [(layout.prefilled, True, -1)] if layout.prefilled else []
    for at in range(len(data)):
        for tag in sorted(set(layout.tags)):
            if data[at:].startswith(f"<{tag}>".encode()):
                marks.append((tag, True, at))
            if data[at:].startswith(f"</{tag}>".encode()):
                marks.append((tag, False, at))
    return marks


def slow_segment(data, layout):
    """Block of every byte, {block: first byte}, faults and contents of `data`, following the written rules one by one."""
    marks = marks_of(data, layout)
    slots = [(k, tag) for k, (_, tags) in enumerate(layout.blocks) for tag in tags]
    taken, missing, position = {}, [], -2
    for k, tag in slots:
        options = [m for m in marks if m[0] == tag and m[1] and m[2] > position]
        if options:
            taken[options[0]] = k
            position = options[0][2]
        else:
            missing.append(tag)
    owner, current = [], 0
    for at in range(len(data)):
        current = max([current, *(k for mark, k in taken.items() if mark[2] == at)])
        owner.append(current)
    pieces = {k: b"".join(data[i : i + 1] for i in range(len(data)) if owner[i] == k) for k in range(len(layout.names))}
    opening = f"<{layout.prefilled}>".encode() if layout.prefilled else b""
    read = pieces | {0: opening + pieces[0]}
    return owner, pieces, faults(marks, taken, owner, layout, missing, read), contents(read, layout)


def faults(marks, taken, owner, layout, missing, read):
    fault = Fault.NONE
    outside = set()
    for n, (tag, opens, at) in enumerate(marks):
        before = {u: [m[1] for m in marks[:n] if m[0] == u] for u in layout.tags}
        if opens:
            fault |= Fault.NESTED if any(u != tag and kinds and kinds[-1] for u, kinds in before.items()) else 0
            k = owner[at] if at >= 0 else 0
            allowed = tag in layout.blocks[k][1]
            first = not any(m[0] == tag and m[1] and (owner[m[2]] if m[2] >= 0 else 0) == k for m in marks[:n])
            if (tag, opens, at) not in taken and (first or not allowed):
                outside.add(tag)
        elif not (before[tag] and before[tag][-1]):
            fault |= Fault.ORDER
    last = {tag: opens for tag, opens, _ in marks}
    fault |= Fault.TRUNCATED if any(last.values()) else 0
    for k, (_, tags) in enumerate(layout.blocks):
        fault |= Fault.DUPLICATE if any(read[k].count(f"<{tag}>".encode()) > 1 for tag in tags) else 0
    fault |= Fault.ORDER if outside else 0
    return fault | (Fault.MISSING if set(missing) - outside else 0)


def contents(read, layout):
    texts = {}
    for k, (_, tags) in enumerate(layout.blocks):
        for tag in tags:
            pairs = re.findall(rf"<{tag}>((?:(?!</?{tag}>).)*)</{tag}>".encode(), read[k], re.DOTALL)
            texts[k, tag] = pairs[-1].decode(errors="replace") if pairs else None
    return texts


def owners_of_tokens(tokens, owner):
    """A token goes with its first byte; one without bytes with the byte before it, at the start with the first byte."""
    owners, at = [], 0
    for token in tokens:
        byte = at if token else max(at - 1, 0)
        owners.append(owner[byte] if byte < len(owner) else 0)
        at += len(token)
    return owners


def slow_token_fidelity(trajectories, value_nt, name, *, decision=0.97, cut=None):
    """The figures of one estimator, straight from their definitions, by kind of token; `cut`: of segments."""
    rows = []
    for n in range(len(trajectories.reward_n)):
        places = [t for t in range(value_nt.shape[1]) if trajectories.mask_nt[n, t]]
        reward = float(trajectories.reward_n[n])
        mc = [float(trajectories.value_nt[n, t]) for t in places] + [reward]
        noise = [float(trajectories.noise_nt[n, t]) for t in places] + [0.0]
        v = [float(value_nt[n, t]) for t in places] + [reward]
        p = [math.exp(float(trajectories.logp_nt[n, t])) for t in places]
        group = [r for r, x in zip(trajectories.reward_n.tolist(), trajectories.prompt_n.tolist(), strict=True)
                 if x == trajectories.prompt_n[n]]  # fmt: skip
        for k in range(len(places)):
            if name.startswith("GRPO c - g"):
                a = reward - sum(group) / len(group) if len(group) > 1 else 0.0
            elif name.startswith("GRPO"):
                a = reward - v[0]
            else:  # every later surprise, weighted by lambda for each boundary on the way to it
                cuts, lam = _slow_cuts(name, p)
                weight, a = 1.0, 0.0
                for j in range(k, len(places)):
                    weight *= lam if j > k and j in cuts else 1.0
                    a += weight * (v[j + 1] - v[j])
            start, stop = k, k + 1
            weight = 1.0 if trajectories.weight_nt is None else float(trajectories.weight_nt[n, places[k]])
            if cut is not None:
                cuts, weight = _slow_boundaries(p, *cut), 1.0
                start = max((j for j in range(k + 1) if j in cuts), default=0)
                stop = min((j for j in range(k + 1, len(places)) if j in cuts), default=len(places))
            if weight > 0 and not math.isnan(mc[stop] - mc[start]):
                rows.append((a, mc[stop] - mc[start], noise[stop] + noise[start], weight, p[k] < decision))
    kinds = {"all": rows, "decision": [row for row in rows if row[4]]}
    return {kind: {**slow_figures([row[:4] for row in use]), "count": len(use)} for kind, use in kinds.items()}


def _slow_cuts(name, p):
    """Return the tokens before which lambda applies, and lambda, from an estimator's name."""
    family, *words = name.replace(",", "").split()
    if family == "SAE":
        return _slow_boundaries(p, float(words[1]), words[0]), float(words[2])
    lam = max(0.0, 1 - 1 / (float(words[1]) * len(p))) if words[0] == "adaptive" else float(words[0])
    return set(range(len(p))), lam


def _slow_boundaries(p, threshold, boundary):
    """The tokens that open a segment: the unlikely ones, or those after them."""
    return {k + (boundary == "end") for k, q in enumerate(p) if q < threshold}


def slow_ece(pairs):
    """Expected calibration error of (confidence in hundredths, right) over ten bins, and one of its own for exactly 1."""
    gaps = [0.0] * 11
    for hundredths, right in pairs:  # integer arithmetic: .29 and .3 fall where a human puts them
        gaps[hundredths // 10] += float(right) - hundredths / 100
    return sum(map(abs, gaps)) / len(pairs)


def slow_streams(block, reward, status, value, logp, bootstrap, *, objectives, names, shared, method, gamma, lam):
    """Rewards of blocks under a critic: tokens outside a stream are taken out of a list, then comes the textbook loop."""
    token = torch.zeros(block.shape, dtype=torch.float64)
    stop = torch.zeros(len(block), dtype=torch.float64)
    for i, row in enumerate(block.tolist()):
        trained = [t for t, k in enumerate(row) if k >= 0]
        worth, left, ends, paid = [], [], [], []
        for m, objective in enumerate(objectives):
            left.append(int(status[i, m]) in (1, 2))
            stand_in = NAN if objective.if_missing is None else objective.if_missing
            worth.append(stand_in if left[m] else float(reward[i, m]))
            paid.append([t for t in trained if names[row[t]] in objective.pays])
            ends.append((paid[m] or trained or [None])[-1])
        if not trained:
            continue
        if shared:
            if not any(math.isnan(w) for w in worth):
                rewards = dict.fromkeys(trained, 0.0)
                for m, objective in enumerate(objectives):
                    rewards[ends[m]] += objective.weight * worth[m]
                lam_after = _lam_of(method, trained, logp[i], lam)
                token[i, trained] = double(
                    textbook(trained, rewards, value[i, :, 0], float(bootstrap[i, 0]), gamma, lam_after)
                )
            continue
        for m, objective in enumerate(objectives):
            kept = paid[m] or ([trained[-1]] if left[m] else [])
            if math.isnan(worth[m]) or not kept:
                continue
            rewards = dict.fromkeys(kept, 0.0) | {kept[-1]: worth[m]}
            behind = float(bootstrap[i, m]) if kept[-1] == trained[-1] else 0.0
            loop = double(textbook(kept, rewards, value[i, :, m], behind, gamma, _lam_of(method, kept, logp[i], lam)))
            if paid[m]:
                token[i, kept] += objective.weight * loop
            else:
                stop[i] += objective.weight * loop[0]
    return token, stop


def _lam_of(method, kept, logp, lam):
    """The weight of A[next] in A[k] for a method, as `textbook` asks for it."""
    if method == "adaptive":
        lam = max(0.0, 1 - 1 / (0.7 * len(kept)))
    if method not in ("start", "end"):
        return lambda k, n: lam
    return lambda k, n: lam if math.exp(float(logp[n if method == "start" else k])) < 0.4 else 1.0
