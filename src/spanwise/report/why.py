"""Why a number is what it is: the arithmetic of each block's credit, and what its tokens carry of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from spanwise.report.arithmetic import DIGITS, added, equation, shown, signed
from spanwise.report.view import Rule, TokenView
from spanwise.rollouts.rows import CreditPart, TokenRow

#: Statuses of a reward that the completion left out.
LEFT_OUT = ("absent", "unparsable")
#: Why a reward that is there has no baseline.
_NOTHING = {
    "singleton": "nobody to compare it with",
    "no_scale": "there is no spread that the difference could be divided by",
}


class Reasons:
    """What the token view says of why each number is what it is.

    Args:
        view: methods and completions.
    """

    def __init__(self, view: TokenView) -> None:
        self.view = view

    def _rule(self, method: str) -> Rule:
        return self.view.rules.get(method, Rule())

    def of(self, row: TokenRow, method: str) -> dict[str, Any]:
        """Everything about one method: `note`, where it has no arithmetic, and its `blocks`.

        Each block has its `credit`, the `total` of several terms, `terms` (objective, worth, equation, what the baseline is) and
        the `share` of its tokens. `strata` are numbers by objective: equal ones were compared.
        """
        parts = row.parts.get(method, ())
        blocks = {}
        for block, credit in row.credit.get(method, {}).items():
            if credit is not None and not math.isnan(credit):
                blocks[block] = self._block(row, method, block, credit) | {"share": self._share(row, method, block)}
        explained = [one for one in blocks.values() if one["terms"]]
        return {
            "note": "" if explained or not blocks else self._no_arithmetic(method),
            "blocks": blocks,
            "stop": self._stop(row, method),
            "strata": {part.objective: part.stratum for part in parts if part.stratum >= 0},
        }

    def _block(self, row: TokenRow, method: str, block: str, credit: float) -> dict[str, Any]:
        found = {"credit": shown(credit, sign=True), "total": "", "terms": [], "warning": ""}
        paying, parts, verdict = (
            self._rule(method).pays.get(block, ()),
            row.parts.get(method, ()),
            self._rule(method).verdict,
        )
        joined = bool(paying) and len(parts) == 1 and parts[0].objective not in paying
        listed = parts if joined else [part for part in parts if part.objective in paying]
        if not listed:
            return found
        share, own = row.own.get(method, (0.0, 0.0)) if verdict in paying else (0.0, 0.0)
        terms: list[tuple[str, str]] = []
        total = 0.0
        for part in listed:
            mixed = share if share and (len(listed) == 1 or part.objective == verdict) else 0.0
            number = f"{shown(1 - mixed)} · {signed(part.part)}" if mixed else shown(part.part)
            terms.append((number, part.objective))
            total += (1 - mixed) * part.part
            if mixed:
                terms.append((f"{shown(mixed * part.weight)} · {signed(own)}", "its own score"))
                total += mixed * part.weight * own
        if abs(total - credit) > 1e-6 * (1 + abs(credit)):
            found["warning"] = (
                f"What is recorded adds up to {shown(total, sign=True)}, which is not the credit: do not rely on it."
            )
            return found
        found["total"] = added(credit, terms) if len(terms) > 1 else ""
        found["terms"] = [self._term(row, method, part) for part in listed]
        return found

    def _term(self, row: TokenRow, method: str, part: CreditPart) -> dict[str, str]:
        return {
            "objective": part.objective,
            "credit": shown(part.part, sign=True),
            "sum": equation(part),
            "worth": self._worth(row, method, part),
            "note": self._compared(row, method, part),
        }

    def _worth(self, row: TokenRow, method: str, part: CreditPart) -> str:
        """What is compared where it is no plain reward: a sum, or what stands for a reward that was left out."""
        weights = self._rule(method).weights
        if part.worth is None:
            return ""
        if part.objective not in row.statuses and part.objective not in row.rewards and weights:
            standing = self._rule(method).missing
            named, amounts = [], []
            for name, weight in weights.items():
                reward = row.rewards.get(name)
                instead = reward is None and row.statuses.get(name) in LEFT_OUT
                reward = standing.get(name) if instead else reward
                if reward is None:
                    return ""
                number = shown(reward) if weight == 1.0 else f"{shown(weight)} · {signed(reward)}"
                named.append((number, f"{name}, left out" if instead else name))
                amounts.append(weight * reward)
            total = math.fsum(amounts)  # of turns, whose rewards are summed over the rollout, this row may hold some only
            same = math.isclose(total, part.worth, rel_tol=1e-9, abs_tol=1e-9)
            return added(part.worth, named).removeprefix("+") if same else ""
        status = row.statuses.get(part.objective, "ok")
        if status in LEFT_OUT:
            return f"{part.objective} is {status}, and counts as {shown(part.worth)}"
        return ""

    def _compared(self, row: TokenRow, method: str, part: CreditPart) -> str:
        """What the baseline is, or why there is none."""
        status = row.statuses.get(part.objective, "ok")
        if part.baseline is None:
            if part.part != 0:
                return f"No single baseline gives this number. {self._rule(method).about}".strip()
            if part.reason in _NOTHING:
                return f"{_NOTHING[part.reason]}, so the credit is exactly 0"
            if status in LEFT_OUT:
                return f"the reward is {status} and nothing stands for it, so it gets no credit and joins no baseline"
            if status not in ("ok", ""):
                return f"the check failed ({status}), so there is no reward; it gets no credit and joins no baseline"
            return "a reward is absent, so it gets no credit and joins no baseline"
        rule = self._rule(method).baselines.get(part.objective, "")
        words = rule
        if part.averaged:
            others = part.averaged < part.members
            about = "others" if others else f"compared{f' ({rule})' if rule else ''}"
            words = f"the mean of the {part.averaged} {about}"
        said = f"baseline {shown(part.baseline)}{f': {words}' if words else ''}"
        return said if part.divisor == 1.0 else f"{said}; divided by {shown(part.divisor)}, the scale of those compared"

    def _share(self, row: TokenRow, method: str, block: str) -> str:
        """What the tokens of a block carry of its credit; where that is all of it, its sum is written as the credit is."""
        values, credit = self._carried(row, method, block), float(row.credit[method][block] or 0.0)
        if not values:
            return ""
        low, high, many = min(values), max(values), len(values)
        tokens = f"{many} token{'s' if many > 1 else ''}"
        total = math.fsum(values)
        together = shown(credit if math.isclose(total, credit, rel_tol=1e-5, abs_tol=1e-9) else total, sign=True)
        if math.isclose(low, high, rel_tol=1e-5, abs_tol=1e-12):
            return f"{shown(low, sign=True)} on {'its one token' if many == 1 else f'each of its {tokens}'}, together {together}"
        return f"{shown(low, sign=True)} to {shown(high, sign=True)} on its {tokens}, together {together}"

    def _carried(self, row: TokenRow, method: str, block: str) -> list[float]:
        """The advantages of a block's tokens, without the stop credit; of all tokens, where the method's only block is all."""
        advantages = [float(value) for value in row.advantages[method]]
        trained = [t for t, value in enumerate(advantages) if not math.isnan(value)]
        if trained and row.stop.get(method):
            advantages[trained[-1]] -= row.stop[method]
        pieces = row.spans.get(block)
        if pieces is None:
            return [advantages[t] for t in trained] if len(row.credit.get(method, {})) == 1 else []
        inside = {t for start, end in pieces for t in range(start, end)}
        return [advantages[t] for t in trained if t in inside]

    def _stop(self, row: TokenRow, method: str) -> str:
        stop = row.stop.get(method)
        if not stop:
            return ""
        parts = [part for part in row.parts.get(method, ()) if self._unpaid(row, method, part.objective)]
        sums = [equation(part) for part in parts if equation(part)]
        exact = abs(math.fsum(part.part for part in parts) - stop) <= 1e-6 * (1 + abs(stop))
        if len(parts) > 1 and exact:
            sums = [added(stop, [(shown(part.part), part.objective) for part in parts]), *sums]
        said = f": {', of which '.join(sums)}" if exact and sums else ""
        return f"{shown(stop, sign=True)} on the last token{said}"

    def _unpaid(self, row: TokenRow, method: str, objective: str) -> bool:
        """Whether a completion left an objective's reward out and has none of the blocks that it pays."""
        credit = row.credit.get(method, {})
        blocks = [block for block, paying in self._rule(method).pays.items() if objective in paying]
        return (
            row.statuses.get(objective) in LEFT_OUT and bool(blocks) and all(credit.get(block) is None for block in blocks)
        )

    def _no_arithmetic(self, method: str) -> str:
        kind, about = self._rule(method).kind, self._rule(method).about
        if kind in ("token", "step"):
            each = f"{method} credits each {kind} by itself, so no difference of two numbers gives a block's credit."
            return f"{each} What stands here is the mean over its tokens. {about}".strip()
        if method == "recorded":
            return "recorded is what the trainer wrote down; the file does not say how it came about."
        return f"The file does not say what the credit of {method} is made of. {about}".strip()


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
    found = []
    for method in methods:
        sizes = sorted(
            abs(value)
            for row in rows
            for value in row.credit.get(method, {}).values()
            if value is not None and math.isfinite(value) and value != 0
        )
        found.append(sizes[min(len(sizes) - 1, math.ceil(0.98 * (len(sizes) - 1)))] if sizes else 1.0)
    return found


def credits(row: TokenRow, method: str) -> Mapping[str, float | None]:
    """The credit of each block that is there, rounded as it is shown."""
    known = row.credit.get(method, {})
    return {
        block: float(f"{value:.{DIGITS}g}") for block, value in known.items() if value is not None and math.isfinite(value)
    }
