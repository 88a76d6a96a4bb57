"""Explain a credit: sentences on a completion, the arithmetic of each block's credit, and the share that each token carries."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from spanwise.rollouts import CreditPart
from spanwise.rollouts.rows import COMPLETION, TokenRow

#: Significant digits that are shown.
DIGITS = 4
_MINUS = "\u2212"
#: The largest number of blocks that a sentence names one by one.
_NAMED = 3
#: A term of a sum: its amount, the amount as text, and its name.
_Term = tuple[float, str, str]
#: Statuses of a reward that the completion left out.
LEFT_OUT = ("absent", "unparsable")
#: The reasons why a reward that exists has no baseline.
_NOTHING = {
    "singleton": "nobody to compare it with",
    "no_scale": "there is no spread to divide the difference by",
}


@dataclass(frozen=True)
class Rule:
    """The rule by which a method credits, as far as a page explains it.

    Attributes:
        kind: what it credits: "block", "completion", "token", "step"; "" is not known.
        about: a sentence on it.
        objectives: by name, what a recipe says of each: the blocks that it `pays`, its `weight`, `if_missing`, and its `baseline`
            with what that is `given`, where its credit is compared block by block.
        verdict: the objective that a score of the completion's own is mixed with; "": there is none.

    Example:
        >>> rule = Rule("block", objectives={"brier": {"pays": ["confidence"], "baseline": "outcome", "given": ["correct"]}})
        >>> rule_words(rule.objectives["brier"]["baseline"], rule.objectives["brier"]["given"])
        'same prompt, same correct'
    """

    kind: str = ""
    about: str = ""
    objectives: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    verdict: str = ""


def rule_words(baseline: str | None, given: Sequence[str]) -> str:
    """Say which completions a baseline is the mean of.

    >>> rule_words("outcome", ["correct"]), rule_words("group", []), rule_words("none", [])
    ('same prompt, same correct', 'same prompt', 'nothing is subtracted')
    """
    words = {
        "none": "nothing is subtracted",
        "batch": "all of the step",
        "outcome": "".join(["same prompt", *(f", same {name}" for name in given)]),
        "blended": f"blended of its own and other prompts, same {' and '.join(given)}",
    }
    return words.get(baseline or "", "same prompt")


def shown(value: float | None, *, sign: bool = False) -> str:
    """Format a number with four significant digits."""
    if value is None or math.isnan(value):
        return "none"
    text = f"{value:.{DIGITS}g}"
    text = "0" if float(text) == 0 else text
    return (f"+{text}" if sign and value > 0 and text != "0" else text).replace("-", _MINUS)


def _factor(value: float) -> str:
    """Format a number within a sum, in brackets if it is negative."""
    text = shown(value)
    return f"({text})" if text.startswith(_MINUS) else text


def equation(part: CreditPart) -> str:
    """Write down the arithmetic of one part; empty if there is none."""
    if part.worth is None or part.baseline is None or part.divisor is None:
        return ""
    difference = f"{shown(part.worth)} {_MINUS} {_factor(part.baseline)}"
    if part.weight != 1.0 or part.divisor != 1.0:
        difference = f"({difference})"
    weight = "" if part.weight == 1.0 else f"{shown(part.weight)} · "
    divisor = "" if part.divisor == 1.0 else f" / {shown(part.divisor)}"
    return f"{shown(part.part, sign=True)} = {weight}{difference}{divisor}"


def added(total: float, terms: Sequence[_Term]) -> str:
    """Write down a sum of named terms."""
    text = " + ".join(f"{number} ({name})" for _, number, name in terms)
    return f"{shown(total, sign=True)} = {text.replace(f'+ {_MINUS}', f'{_MINUS} ')}"


def _term(weight: float, value: float, name: str) -> _Term:
    return weight * value, shown(value) if weight == 1.0 else f"{shown(weight)} · {_factor(value)}", name


def credits(row: TokenRow, method: str, rule: Rule) -> dict[str, float]:
    """Return the credit of each block that the completion has, or once that of the completion, if a method gives it one number."""
    credit = row.credit.get(method, {})
    known = {block: value for block, value in credit.items() if value is not None and math.isfinite(value)}
    pays_all = all(known.keys() <= set(objective["pays"]) for objective in rule.objectives.values())
    return {COMPLETION: next(iter(known.values()))} if rule.kind == "completion" and known and pays_all else known


def unit(rows: Sequence[TokenRow], method: str, rule: Rule) -> float:
    """Return the usual size of a method's credit: the 98th percentile of all that is not 0, or 1 if all is 0."""
    sizes = [abs(value) for row in rows for value in credits(row, method, rule).values() if value]
    return float(np.quantile(sizes, 0.98, method="higher")) if sizes else 1.0


def opening(row: TokenRow, outcome: str | None, stating: set[str]) -> str:
    """Describe a completion: `Right with confidence 0.1`; a missing confidence is named only if others state one."""
    phrases = ["cut off"] if "truncated" in row.fault else ["malformed"] if row.fault else []
    reward, status = row.rewards.get(outcome or ""), row.statuses.get(outcome or "", "")
    if reward is not None:
        phrases.append({1.0: "right", 0.0: "wrong"}.get(reward) or f"{outcome} {shown(reward)}")
    elif status in LEFT_OUT:
        phrases.append("no answer that can be read")
    elif status not in ("", "ok"):
        phrases.append(f"neither right nor wrong, as the check failed ({status})")
    text = ", ".join(phrases) or f"{len(row.tokens)} token{'' if len(row.tokens) == 1 else 's'}"
    phrase_of_status = {"absent": " without a confidence", "unparsable": " with a confidence that cannot be read"}
    for name, value in row.stated.items():
        if name in stating and value is not None and not math.isnan(value):
            text += f" with confidence {f'{value:.1f}' if value in (0, 1) else shown(value)}"
            break
        if name in stating and row.statuses.get(name) in phrase_of_status:
            text += phrase_of_status[row.statuses[name]]
            break
    return text[:1].upper() + text[1:]


def clause(row: TokenRow, method: str, rule: Rule) -> str:
    """Say how one method treats a completion: `bae praises the solution (+1) and blames the confidence (−0.8)`."""
    numbers = [float(value) for value in row.advantages[method] if not math.isnan(value)]
    credit, stop = credits(row, method, rule), row.stop.get(method)
    if not numbers:
        return f"{method} trains none of its tokens"
    if not credit and not stop:
        return f"{method} gives its tokens {_range(min(numbers), max(numbers))}"
    parts = []
    for verb, sign in (("praises", 1), ("blames", -1)):
        blocks = {block: value for block, value in credit.items() if value * sign > 0}
        if len(blocks) > _NAMED:
            largest = max(blocks, key=lambda block: abs(blocks[block]))
            parts.append(f"{verb} {len(blocks)} blocks, most of all {largest} ({shown(blocks[largest], sign=True)})")
        elif blocks:
            names = (f"the {block} ({shown(value, sign=True)})" for block, value in blocks.items())
            parts.append(f"{verb} {' and '.join(names)}")
    zeros = [block for block, value in credit.items() if value == 0]
    if zeros and parts:
        parts.append(f"gives {'the ' + ' and the '.join(zeros) if len(zeros) <= _NAMED else f'{len(zeros)} blocks'} 0")
    elif zeros:
        alone = {part.reason for part in row.parts.get(method, ())} == {"singleton"}
        parts.append(f"gives it exactly 0{', with nobody to compare it with' if alone else ''}")
    if stop:
        parts.append(f"{'charges' if stop < 0 else 'pays'} {shown(stop, sign=True)} for what it leaves out")
    return f"{method} {' and '.join(parts)}{', on average over tokens' if rule.kind == 'token' else ''}"


def explained(row: TokenRow, method: str, rule: Rule) -> dict[str, Any]:
    """Explain the credit under one method: the arithmetic of its `blocks`, or a `note` if it has none."""
    blocks = {block: _block(row, method, rule, block, credit) for block, credit in credits(row, method, rule).items()}
    note = ""
    if not any(block["terms"] for block in blocks.values()) and blocks:
        note = f"The file does not say what the credit of {method} is made of. {rule.about}".strip()
        if rule.kind in ("token", "step"):
            each = f"{method} credits each {rule.kind} by itself, so a block's credit is not one number minus another."
            note = f"{each} This is the mean over its tokens. {rule.about}".strip()
        elif method == "recorded":
            note = "recorded is what the trainer wrote down; the file does not say how it came about."
    return {
        "note": note,
        "blocks": blocks,
        "stop": _stop(row, method, rule),
        "strata": {part.objective: part.stratum for part in row.parts.get(method, ()) if part.stratum >= 0},
    }


def _block(row: TokenRow, method: str, rule: Rule, block: str, credit: float) -> dict[str, Any]:
    paying = [name for name, objective in rule.objectives.items() if block == COMPLETION or block in objective["pays"]]
    parts = list(row.parts.get(method, ()))
    if not paying or len(parts) != 1:  # otherwise one number may stand for all objectives together
        parts = [part for part in parts if part.objective in paying]
    share, score = row.own.get(method, (0.0, 0.0)) if rule.verdict in paying else (0.0, 0.0)
    terms: list[_Term] = []
    for part in parts:
        mixed = share if len(parts) == 1 or part.objective == rule.verdict else 0.0
        terms.append(_term(1 - mixed, part.part, part.objective))
        if mixed:
            terms.append(_term(mixed * part.weight, score, "its own score"))
    total = math.fsum(amount for amount, *_ in terms)
    exact = abs(total - credit) <= 1e-6 * (1 + abs(credit))
    each, share_text = _share(row, method, block, credit)
    warning = f"The recorded parts add up to {shown(total, sign=True)}, which is not the credit: do not rely on them."
    return {
        "credit": shown(credit, sign=True),
        "total": added(credit, terms) if exact and len(terms) > 1 else "",
        "terms": [
            {"objective": part.objective, "credit": shown(part.part, sign=True), "sum": equation(part),
             "worth": _worth(row, rule, part), "note": _compared(row, rule, part), "said": row.notes.get(part.objective) or ""}
            for part in parts if exact
        ],
        "warning": warning if parts and not exact else "",
        "each": each,
        "share": share_text,
    }  # fmt: skip


def _worth(row: TokenRow, rule: Rule, part: CreditPart) -> str:
    """Name the compared number if it is not a plain reward: a sum, or the value that stands for a missing reward."""
    if part.worth is None:
        return ""
    if part.objective in row.statuses or part.objective in row.rewards or not rule.objectives:
        status = row.statuses.get(part.objective)
        return f"{part.objective} is {status}, and counts as {shown(part.worth)}" if status in LEFT_OUT else ""
    terms: list[_Term] = []
    for name, objective in rule.objectives.items():
        left_out = row.rewards.get(name) is None and row.statuses.get(name) in LEFT_OUT
        reward = objective.get("if_missing") if left_out else row.rewards.get(name)
        if reward is None:
            return ""
        terms.append(_term(objective.get("weight", 1.0), reward, f"{name}, left out" if left_out else name))
    # With turns, rewards are summed over the rollout, of which this row may hold a part.
    total = math.fsum(amount for amount, *_ in terms)
    is_same = math.isclose(total, part.worth, rel_tol=1e-9, abs_tol=1e-9)
    return added(part.worth, terms).removeprefix("+") if is_same else ""


def _compared(row: TokenRow, rule: Rule, part: CreditPart) -> str:
    """Describe the baseline, or say why there is none."""
    if part.baseline is None:
        status = row.statuses.get(part.objective) or "ok"
        if part.part != 0:
            return f"No single baseline gives this number. {rule.about}".strip()
        if part.reason in _NOTHING:
            return f"{_NOTHING[part.reason]}, so the credit is exactly 0"
        reason = "a reward is absent, so"
        if status in LEFT_OUT:
            reason = f"the reward is {status} and nothing stands for it, so"
        elif status != "ok":
            reason = f"the check failed ({status}), so there is no reward;"
        return f"{reason} it gets no credit and joins no baseline"
    objective = rule.objectives.get(part.objective, {})
    words = rule_words(objective["baseline"], objective["given"]) if objective.get("baseline") else ""
    if part.averaged:
        phrase = f"compared{f' ({words})' if words else ''}"
        words = f"the mean of the {part.averaged} {'others' if part.averaged < part.members else phrase}"
    scale = "" if part.divisor == 1.0 else f"; divided by {shown(part.divisor)}, the scale of those compared"
    return f"baseline {shown(part.baseline)}{f': {words}' if words else ''}{scale}"


def _share(row: TokenRow, method: str, block: str, credit: float) -> tuple[str, str]:
    """Say which share of a block's credit each of its tokens carries, and what they carry together; empty where none is trained."""
    advantages = {t: float(value) for t, value in enumerate(row.advantages[method]) if not math.isnan(value)}
    if advantages and row.stop.get(method):
        advantages[max(advantages)] -= row.stop[method]
    pieces = row.spans.get(block)
    if pieces is None:  # a method with a single block credits the whole completion
        pieces = [(0, len(row.tokens))] if block == COMPLETION or len(row.credit[method]) == 1 else []
    values = [advantages[t] for t in sorted({t for piece in pieces for t in range(*piece)} & advantages.keys())]
    if not values:
        return "", ""
    low, high, total = min(values), max(values), math.fsum(values)
    total_text = shown(credit if math.isclose(total, credit, rel_tol=1e-5, abs_tol=1e-9) else total, sign=True)
    are_equal, count = math.isclose(low, high, rel_tol=1e-5, abs_tol=1e-12), len(values)
    place = "its one token" if count == 1 else f"{'each of ' if are_equal else ''}its {count} tokens"
    return shown(low, sign=True) if are_equal else _range(low, high), f"on {place}, together {total_text}"


def _range(low: float, high: float) -> str:
    return shown(low, sign=True) if low == high else f"{shown(low, sign=True)} to {shown(high, sign=True)}"


def _stop(row: TokenRow, method: str, rule: Rule) -> str:
    """Explain the credit for leaving out every block that an objective pays."""
    stop, credit = row.stop.get(method), row.credit.get(method, {})
    if not stop:
        return ""
    parts = []
    for part in row.parts.get(method, ()):
        blocks = rule.objectives.get(part.objective, {}).get("pays")
        if row.statuses.get(part.objective) in LEFT_OUT and blocks and all(credit.get(block) is None for block in blocks):
            parts.append(part)
    sums = [text for part in parts if (text := equation(part))]
    if len(parts) > 1:
        sums = [added(stop, [_term(1.0, part.part, part.objective) for part in parts]), *sums]
    exact = abs(math.fsum(part.part for part in parts) - stop) <= 1e-6 * (1 + abs(stop))
    terms = f": {', of which '.join(sums)}" if exact and sums else ""
    return f"{shown(stop, sign=True)} on the last token{terms}"
