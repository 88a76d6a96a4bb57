"""Why a number is what it is: the arithmetic of each block's credit, and what its tokens carry of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from spanwise.report.arithmetic import DIGITS, added, equation, shown, signed
from spanwise.report.view import Rule
from spanwise.rollouts import CreditPart
from spanwise.rollouts.rows import TokenRow

#: An amount of a sum, as it is written, and what it is of.
_Term = tuple[float, str, str]
#: Statuses of a reward that the completion left out.
LEFT_OUT = ("absent", "unparsable")
#: Why a reward that is there has no baseline.
_NOTHING = {
    "singleton": "nobody to compare it with",
    "no_scale": "there is no spread that the difference could be divided by",
}


def explained(row: TokenRow, method: str, rule: Rule) -> dict[str, Any]:
    """Everything about one method: `note`, where it has no arithmetic, and its `blocks`.

    Each block has its `credit`, the `total` of several terms, `terms` (objective, worth, equation, what the baseline is) and
    the `share` of its tokens. `strata` are numbers by objective: equal ones were compared.
    """
    blocks = {
        block: _block(row, method, rule, block, credit)
        for block, credit in row.credit.get(method, {}).items()
        if credit is not None and not math.isnan(credit)
    }
    has_arithmetic = any(one["terms"] for one in blocks.values())
    return {
        "note": "" if has_arithmetic or not blocks else _no_arithmetic(method, rule),
        "blocks": blocks,
        "stop": _stop(row, method, rule),
        "strata": {part.objective: part.stratum for part in row.parts.get(method, ()) if part.stratum >= 0},
    }


def _block(row: TokenRow, method: str, rule: Rule, block: str, credit: float) -> dict[str, Any]:
    paying, parts = rule.pays.get(block, ()), list(row.parts.get(method, ()))
    if not paying or len(parts) != 1:  # else one number may stand for all objectives together
        parts = [part for part in parts if part.objective in paying]
    share, own = row.own.get(method, (0.0, 0.0)) if rule.verdict in paying else (0.0, 0.0)
    terms: list[_Term] = []
    for part in parts:
        if share and (len(parts) == 1 or part.objective == rule.verdict):
            terms.append(((1 - share) * part.part, f"{shown(1 - share)} · {signed(part.part)}", part.objective))
            mixed = share * part.weight
            terms.append((mixed * own, f"{shown(mixed)} · {signed(own)}", "its own score"))
        else:
            terms.append((part.part, shown(part.part), part.objective))
    total = math.fsum(amount for amount, *_ in terms)
    exact = abs(total - credit) <= 1e-6 * (1 + abs(credit))
    warning = f"What is recorded adds up to {shown(total, sign=True)}, which is not the credit: do not rely on it."
    return {
        "credit": shown(credit, sign=True),
        "total": added(credit, terms) if exact and len(terms) > 1 else "",
        "terms": [
            {"objective": part.objective, "credit": shown(part.part, sign=True), "sum": equation(part),
             "worth": _worth(row, rule, part), "note": _compared(row, rule, part)}
            for part in parts if exact
        ],
        "warning": warning if parts and not exact else "",
        "share": _share(row, method, block, credit),
    }  # fmt: skip


def _worth(row: TokenRow, rule: Rule, part: CreditPart) -> str:
    """What is compared where it is no plain reward: a sum, or what stands for a reward that was left out."""
    if part.worth is None:
        return ""
    if part.objective in row.statuses or part.objective in row.rewards or not rule.weights:
        status = row.statuses.get(part.objective)
        return f"{part.objective} is {status}, and counts as {shown(part.worth)}" if status in LEFT_OUT else ""
    terms: list[_Term] = []
    for name, weight in rule.weights.items():
        left_out = row.rewards.get(name) is None and row.statuses.get(name) in LEFT_OUT
        reward = rule.missing.get(name) if left_out else row.rewards.get(name)
        if reward is None:
            return ""
        number = shown(reward) if weight == 1.0 else f"{shown(weight)} · {signed(reward)}"
        terms.append((weight * reward, number, f"{name}, left out" if left_out else name))
    # Of turns, whose rewards are summed over the rollout, this row may hold some.
    total = math.fsum(amount for amount, *_ in terms)
    same = math.isclose(total, part.worth, rel_tol=1e-9, abs_tol=1e-9)
    return added(part.worth, terms).removeprefix("+") if same else ""


def _compared(row: TokenRow, rule: Rule, part: CreditPart) -> str:
    """What the baseline is, or why there is none."""
    if part.baseline is None:
        status = row.statuses.get(part.objective) or "ok"
        if part.part != 0:
            return f"No single baseline gives this number. {rule.about}".strip()
        if part.reason in _NOTHING:
            return f"{_NOTHING[part.reason]}, so the credit is exactly 0"
        why = "a reward is absent, so"
        if status in LEFT_OUT:
            why = f"the reward is {status} and nothing stands for it, so"
        elif status != "ok":
            why = f"the check failed ({status}), so there is no reward;"
        return f"{why} it gets no credit and joins no baseline"
    words = rule.baselines.get(part.objective, "")
    if part.averaged:
        compared = f"compared{f' ({words})' if words else ''}"
        words = f"the mean of the {part.averaged} {'others' if part.averaged < part.members else compared}"
    scale = "" if part.divisor == 1.0 else f"; divided by {shown(part.divisor)}, the scale of those compared"
    return f"baseline {shown(part.baseline)}{f': {words}' if words else ''}{scale}"


def _share(row: TokenRow, method: str, block: str, credit: float) -> str:
    """What the tokens of a block carry of its credit; where that is all of it, its sum is written as the credit is."""
    advantages = {t: float(value) for t, value in enumerate(row.advantages[method]) if not math.isnan(value)}
    if advantages and row.stop.get(method):
        advantages[max(advantages)] -= row.stop[method]
    pieces = row.spans.get(block)
    if pieces is None:  # the only block of a method is the whole completion
        pieces = [(0, len(row.tokens))] if len(row.credit[method]) == 1 else []
    values = [advantages[t] for t in sorted({t for piece in pieces for t in range(*piece)} & advantages.keys())]
    if not values:
        return ""
    low, high, total = min(values), max(values), math.fsum(values)
    tokens = f"{len(values)} token{'s' if len(values) > 1 else ''}"
    together = shown(credit if math.isclose(total, credit, rel_tol=1e-5, abs_tol=1e-9) else total, sign=True)
    if math.isclose(low, high, rel_tol=1e-5, abs_tol=1e-12):
        where = "its one token" if len(values) == 1 else f"each of its {tokens}"
        return f"{shown(low, sign=True)} on {where}, together {together}"
    return f"{shown(low, sign=True)} to {shown(high, sign=True)} on its {tokens}, together {together}"


def _stop(row: TokenRow, method: str, rule: Rule) -> str:
    """The credit for leaving out every block that an objective pays."""
    stop, credit = row.stop.get(method), row.credit.get(method, {})
    if not stop:
        return ""
    parts = []
    for part in row.parts.get(method, ()):
        blocks = [block for block, paying in rule.pays.items() if part.objective in paying]
        if row.statuses.get(part.objective) in LEFT_OUT and blocks and all(credit.get(block) is None for block in blocks):
            parts.append(part)
    sums = [equation(part) for part in parts if equation(part)]
    if len(parts) > 1:
        sums = [added(stop, [(part.part, shown(part.part), part.objective) for part in parts]), *sums]
    exact = abs(math.fsum(part.part for part in parts) - stop) <= 1e-6 * (1 + abs(stop))
    terms = f": {', of which '.join(sums)}" if exact and sums else ""
    return f"{shown(stop, sign=True)} on the last token{terms}"


def _no_arithmetic(method: str, rule: Rule) -> str:
    if rule.kind in ("token", "step"):
        each = f"{method} credits each {rule.kind} by itself, so no difference of two numbers gives a block's credit."
        return f"{each} What stands here is the mean over its tokens. {rule.about}".strip()
    if method == "recorded":
        return "recorded is what the trainer wrote down; the file does not say how it came about."
    return f"The file does not say what the credit of {method} is made of. {rule.about}".strip()


def rule_words(baseline: str | None, given: Sequence[str]) -> str:
    """What a baseline is the mean of.

    >>> rule_words("outcome", ["correct"]), rule_words("group", []), rule_words("none", [])
    ('same prompt, same correct', 'same prompt', 'nothing is subtracted')
    """
    if baseline == "none":
        return "nothing is subtracted"
    if baseline == "batch":
        return "all of the step"
    if baseline == "blended":
        return f"blended of its own and other prompts, same {' and '.join(given)}"
    return "same prompt" + "".join(f", same {name}" for name in (given if baseline == "outcome" else ()))


def units(rows: Sequence[TokenRow], methods: Sequence[str]) -> list[float]:
    """The usual size of each method's credit: the 98th percentile of what is not 0; 1 where all of it is 0."""
    sizes_of = {
        method: [abs(value) for row in rows for value in _known(row, method).values() if value] for method in methods
    }
    return [float(np.quantile(sizes, 0.98, method="higher")) if sizes else 1.0 for sizes in sizes_of.values()]


def credits(row: TokenRow, method: str) -> dict[str, float]:
    """The credit of each block that is there, rounded as it is shown."""
    return {block: float(f"{value:.{DIGITS}g}") for block, value in _known(row, method).items()}


def _known(row: TokenRow, method: str) -> dict[str, float]:
    credit = row.credit.get(method, {})
    return {block: value for block, value in credit.items() if value is not None and math.isfinite(value)}
