"""Why a number is what it is: the arithmetic of each block's credit, what its tokens carry of it, and a sentence on both."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spanwise.report.tokens import Paid, TokenRow, TokenView

#: Significant digits that are shown.
DIGITS = 4
_MINUS = "\u2212"
_LEFT_OUT = ("absent", "unparsable")
#: Blocks that a sentence names one by one.
_NAMED = 3


@dataclass(frozen=True)
class Part:
    """What one objective credits a completion with: `part = weight * (worth - baseline) / divisor`.

    Attributes:
        objective: its name; several joined by " + " whose sum is compared.
        worth: the reward, or what stands for one that was left out; None: there is none.
        baseline, divisor: None where no such numbers gave the part.
        weight: of the objective.
        part: what it credits.
        stratum: completions of one number were compared with each other; -1: with nobody.
    """

    objective: str
    worth: float | None
    baseline: float | None
    divisor: float | None
    weight: float
    part: float
    stratum: int = -1


def shown(value: float | None, *, sign: bool = False) -> str:
    """A number with four significant digits.

    >>> shown(-0.81239), shown(0.5, sign=True), shown(0.0, sign=True), shown(None)
    ('−0.8124', '+0.5', '0', 'none')
    """
    if value is None or math.isnan(value):
        return "none"
    text = f"{value:.{DIGITS}g}"
    text = "0" if float(text) == 0 else text
    return (f"+{text}" if sign and value > 0 and text != "0" else text).replace("-", _MINUS)


def equation(part: Part) -> str:
    """The arithmetic of a part; empty where there is none.

    >>> equation(Part("correct", 1.0, 0.19, 1.0, 1.0, 0.81)), equation(Part("brier", -1.0, -0.5, 0.25, 0.5, -1.0))
    ('+0.81 = 1 − 0.19', '−1 = 0.5 · (−1 − (−0.5)) / 0.25')
    """
    if part.worth is None or part.baseline is None or part.divisor is None:
        return ""
    baseline = shown(part.baseline)
    difference = f"{shown(part.worth)} {_MINUS} {f'({baseline})' if part.baseline < 0 and baseline != '0' else baseline}"
    if part.weight != 1.0 or part.divisor != 1.0:
        difference = f"({difference})"
    weight = "" if part.weight == 1.0 else f"{shown(part.weight)} · "
    divisor = "" if part.divisor == 1.0 else f" / {shown(part.divisor)}"
    return f"{shown(part.part, sign=True)} = {weight}{difference}{divisor}"


def added(total: float, terms: Sequence[tuple[str, str]]) -> str:
    """A sum of named terms.

    >>> added(0.3, [("0.25", "correct"), ("0.05", "form")]), added(-0.4, [("−0.5", "correct"), ("0.5 · 0.2", "form")])
    ('+0.3 = 0.25 (correct) + 0.05 (form)', '−0.4 = −0.5 (correct) + 0.5 · 0.2 (form)')
    """
    said = ""
    for number, name in terms:
        minus = said and number.startswith(_MINUS)
        said += (
            f"{f' {_MINUS} ' if minus else ' + ' if said else ''}{number.removeprefix(_MINUS) if minus else number} ({name})"
        )
    return f"{shown(total, sign=True)} = {said}"


@dataclass(frozen=True)
class Rule:
    """What is known of how a method credits.

    Attributes:
        kind: what it credits: "block", "completion", "token", "step"; "" is not known.
        about: a sentence on it.
        baselines: objective -> what its baseline is the mean of, in words.
        weights: objective -> weight.
        missing: objective -> what stands for a reward that is left out; None: nothing.
        verdict: the objective that a score of the completion's own is mixed with; "": there is none.

    Example:
        >>> rule = Rule("block", baselines={"brier": "same prompt, same correct"}, missing={"brier": -1.0})
        >>> rule.baselines["brier"], rule.missing["brier"]
        ('same prompt, same correct', -1.0)
    """

    kind: str = ""
    about: str = ""
    baselines: Mapping[str, str] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)
    missing: Mapping[str, float | None] = field(default_factory=dict)
    verdict: str = ""


class Reasons:
    """What the token view says of why each number is what it is.

    Args:
        view: methods and completions.
    """

    def __init__(self, view: TokenView) -> None:
        self.view = view
        self._worths: dict[tuple[str, int, int], list[float]] = {}
        self._stating = {name for row in view.completions for name, value in row.stated.items() if _number(value)}
        for row in view.completions:
            for method, listed in row.parts.items():
                for place, part in enumerate(listed):
                    if part.worth is not None and part.stratum >= 0:
                        self._worths.setdefault((method, place, part.stratum), []).append(part.worth)

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
                paid = self.view.paid.get(method, {}).get(block)
                blocks[block] = self._block(row, method, block, credit, paid) | {"share": self._share(row, method, block)}
        explained = [one for one in blocks.values() if one["terms"]]
        return {
            "note": "" if explained or not blocks else self._no_arithmetic(method),
            "blocks": blocks,
            "stop": self._stop(row, method),
            "strata": {part.objective: part.stratum for part in parts if part.stratum >= 0},
        }

    def _block(self, row: TokenRow, method: str, block: str, credit: float, paid: Paid | None) -> dict[str, Any]:
        found = {"credit": shown(credit, sign=True), "total": "", "terms": [], "warning": ""}
        listed = self._parts_of(row, method, credit, paid)
        if not listed:
            return found
        share, own = row.own.get(method, (0.0, 0.0)) if paid is not None and paid.mixed else (0.0, 0.0)
        verdict = self._rule(method).verdict
        terms: list[tuple[str, str]] = []
        total = 0.0
        for part in listed:
            mixed = share if share and (len(listed) == 1 or part.objective == verdict) else 0.0
            number = f"{shown(1 - mixed)} · {_signed(part.part)}" if mixed else shown(part.part)
            terms.append((number, part.objective))
            total += (1 - mixed) * part.part
            if mixed:
                terms.append((f"{shown(mixed * part.weight)} · {_signed(own)}", "its own score"))
                total += mixed * part.weight * own
        if abs(total - credit) > 1e-6 * (1 + abs(credit)):
            found["warning"] = (
                f"What is recorded adds up to {shown(total, sign=True)}, which is not the credit: do not rely on it."
            )
            return found
        found["total"] = added(credit, terms) if len(terms) > 1 else ""
        found["terms"] = [self._term(row, method, part) for part in listed]
        return found

    def _parts_of(self, row: TokenRow, method: str, credit: float, paid: Paid | None) -> list[Part]:
        """What pays a block; of a file that does not say its parts, where a block has one plain objective."""
        if paid is None:
            return []
        parts = row.parts.get(method, ())
        if parts:
            joined = len(parts) == 1 and parts[0].objective not in paid.objectives
            return list(parts) if joined else [part for part in parts if part.objective in paid.objectives]
        reward = row.rewards.get(paid.objectives[0]) if paid.plain else None
        share, own = row.own.get(method, (0.0, 0.0)) if paid.mixed else (0.0, 0.0)
        if reward is None or share >= 1:
            return []
        apart = (credit - share * own) / (1 - share)
        return [Part(paid.objectives[0], reward, reward - apart, 1.0, 1.0, apart)]

    def _term(self, row: TokenRow, method: str, part: Part) -> dict[str, str]:
        return {
            "objective": part.objective,
            "credit": shown(part.part, sign=True),
            "sum": equation(part),
            "worth": self._worth(row, method, part),
            "note": self._compared(row, method, part),
        }

    def _worth(self, row: TokenRow, method: str, part: Part) -> str:
        """What is compared where it is no plain reward: a sum, or what stands for a reward that was left out."""
        weights = self._rule(method).weights
        if part.worth is None:
            return ""
        if part.objective not in row.statuses and part.objective not in row.rewards and weights:
            standing = self._rule(method).missing
            named = []
            for name, weight in weights.items():
                reward = row.rewards.get(name)
                instead = reward is None and row.statuses.get(name) in _LEFT_OUT
                reward = standing.get(name) if instead else reward
                if reward is None:
                    return ""
                number = shown(reward) if weight == 1.0 else f"{shown(weight)} · {_signed(reward)}"
                named.append((number, f"{name}, left out" if instead else name))
            return added(part.worth, named).removeprefix("+")
        status = row.statuses.get(part.objective, "ok")
        if status in _LEFT_OUT:
            return f"{part.objective} is {status}, and counts as {shown(part.worth)}"
        return ""

    def _compared(self, row: TokenRow, method: str, part: Part) -> str:
        """What the baseline is, or why there is none."""
        status = row.statuses.get(part.objective, "ok")
        if part.baseline is None:
            if part.part != 0:
                return f"No single baseline gives this number. {self._rule(method).about}".strip()
            if part.worth is not None:
                return "nobody to compare it with, so the credit is exactly 0"
            if status in _LEFT_OUT:
                return f"the reward is {status} and nothing stands for it, so it gets no credit and joins no baseline"
            if status not in ("ok", ""):
                return f"the check failed ({status}), so there is no reward; it gets no credit and joins no baseline"
            return "a reward is absent, so it gets no credit and joins no baseline"
        rule = self._rule(method).baselines.get(part.objective, "")
        place = [one.objective for one in row.parts.get(method, ())].index(part.objective) if method in row.parts else -1
        worths = self._worths.get((method, place, part.stratum), []) if part.stratum >= 0 else []
        mean = math.fsum(worths) / len(worths) if worths else math.nan
        words = rule
        if len(worths) > 1 and math.isclose(mean, part.baseline, rel_tol=1e-9, abs_tol=1e-9):
            words = f"the mean of the {len(worths)} compared{f' ({rule})' if rule else ''}"
        elif len(worths) > 1 and part.worth is not None:
            others = (math.fsum(worths) - part.worth) / (len(worths) - 1)
            if math.isclose(others, part.baseline, rel_tol=1e-9, abs_tol=1e-9):
                words = f"the mean of the {len(worths) - 1} others"
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
        blocks = [block for block, paid in self.view.paid.get(method, {}).items() if objective in paid.objectives]
        return (
            row.statuses.get(objective) in _LEFT_OUT and bool(blocks) and all(credit.get(block) is None for block in blocks)
        )

    def _no_arithmetic(self, method: str) -> str:
        kind, about = self._rule(method).kind, self._rule(method).about
        if kind in ("token", "step"):
            each = f"{method} credits each {kind} by itself, so no difference of two numbers gives a block's credit."
            return f"{each} What stands here is the mean over its tokens. {about}".strip()
        if method == "recorded":
            return "recorded is what the trainer wrote down; the file does not say how it came about."
        return f"The file does not say what the credit of {method} is made of. {about}".strip()

    # ---- sentences ----
    def headline(self, row: TokenRow, left: str, right: str) -> str:
        """One sentence on a completion and what two methods make of it."""
        clauses = [self._clause(row, method) for method in dict.fromkeys((left, right))]
        said = f"{self._opening(row)}: {', '.join(clauses)}."
        return said[:1].upper() + said[1:]

    def _opening(self, row: TokenRow) -> str:
        words = ["cut off"] if "truncated" in row.fault else ["malformed"] if row.fault else []
        outcome = self.view.outcome
        reward = None if outcome is None else row.rewards.get(outcome)
        status = row.statuses.get(outcome or "", "")
        if reward in (0, 1):
            words.append("right" if reward else "wrong")
        elif reward is not None:
            words.append(f"{outcome} {shown(reward)}")
        elif status in _LEFT_OUT:
            words.append("no answer that can be read")
        elif status not in ("", "ok"):
            words.append(f"neither right nor wrong, as the check failed ({status})")
        found = ", ".join(words) or f"{len(row.tokens)} token{'' if len(row.tokens) == 1 else 's'}"
        for name in row.stated:
            if name in self._stating:
                status, value = row.statuses.get(name, ""), row.stated[name]
                if value is not None and _number(value):
                    return f"{found} with confidence {_plain(value)}"
                if status in _LEFT_OUT:
                    return f"{found}{' without a confidence' if status == 'absent' else ' with a confidence that cannot be read'}"
        return found

    def _clause(self, row: TokenRow, method: str) -> str:
        known = [float(value) for value in row.advantages[method] if not math.isnan(float(value))]
        if not known:
            return f"{method} trains none of its tokens"
        credit = {
            block: value for block, value in row.credit.get(method, {}).items() if value is not None and value == value
        }
        if not credit and not row.stop.get(method):
            low, high = min(known), max(known)
            several = shown(low, sign=True) if low == high else f"{shown(low, sign=True)} to {shown(high, sign=True)}"
            return f"{method} gives its tokens {several}"
        verbs = [
            _verb("praises", [(block, value) for block, value in credit.items() if value > 0]),
            _verb("blames", [(block, value) for block, value in credit.items() if value < 0]),
        ]
        said = [verb for verb in verbs if verb]
        zero = [block for block, value in credit.items() if value == 0]
        parts = row.parts.get(method, ())
        alone = parts and all(part.baseline is None and part.part == 0 and part.worth is not None for part in parts)
        if zero and not said:
            said.append("gives it exactly 0, with nobody to compare it with" if alone else "gives it exactly 0")
        elif zero:
            named = f"the {' and the '.join(zero)}" if len(zero) <= _NAMED else f"{len(zero)} blocks"
            said.append(f"gives {named} 0")
        if stop := row.stop.get(method):
            said.append(f"{'charges' if stop < 0 else 'pays'} {shown(stop, sign=True)} for what it leaves out")
        average = ", on average over tokens" if self._rule(method).kind == "token" else ""
        return f"{method} {' and '.join(said)}{average}"


def _verb(verb: str, blocks: Sequence[tuple[str, float]]) -> str:
    if not blocks:
        return ""
    if len(blocks) <= _NAMED:
        return f"{verb} {' and '.join(f'the {block} ({shown(value, sign=True)})' for block, value in blocks)}"
    block, value = max(blocks, key=lambda one: abs(one[1]))
    return f"{verb} {len(blocks)} blocks, most of all {block} ({shown(value, sign=True)})"


def _signed(value: float) -> str:
    """A factor; in brackets if it is negative."""
    said = shown(value)
    return f"({said})" if said.startswith(_MINUS) else said


def _number(value: float | None) -> bool:
    return value is not None and not math.isnan(value)


def _plain(value: float) -> str:
    """A confidence with one digit behind the point at least.

    >>> _plain(0.0), _plain(0.85), _plain(1.0)
    ('0.0', '0.85', '1.0')
    """
    return f"{value:.{DIGITS}g}" if f"{value:.{DIGITS}g}" not in ("0", "1") else f"{value:.1f}"


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
