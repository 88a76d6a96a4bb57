"""Explain the credit of a completion: in sentences, in the arithmetic of each block's credit, and by the share of each token."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from spanwise.rollouts import CreditPart
from spanwise.rollouts.rows import COMPLETION, TokenRow

#: The number of significant digits in a number on a report page.
DIGITS = 4
_MINUS = "\u2212"
#: The largest number of blocks that a sentence names one by one.
_NAMED = 3
#: A term of a sum that is shown as text: its amount, the amount as text, and its name.
_Term = tuple[float, str, str]
#: The statuses of a reward whose block the completion left out or wrote unreadably.
LEFT_OUT = ("absent", "unparsable")
#: Maps a reason in `CreditPart.reason` to words that say why a reward has no baseline.
_NO_BASELINE = {
    "singleton": "nobody to compare it with",
    "no_scale": "there is no spread to divide the difference by",
}


@dataclass(frozen=True)
class Rule:
    """How a credit method works, as far as a report page explains it: what the method credits, and by which objectives.

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
    """Say in words which completions a reward baseline averages over.

    >>> rule_words("outcome", ["correct"]), rule_words("group", []), rule_words("none", [])
    ('same prompt, same correct', 'same prompt', 'nothing is subtracted')
    """
    words_of_baseline = {
        "none": "nothing is subtracted",
        "batch": "all of the step",
        "outcome": "".join(["same prompt", *(f", same {name}" for name in given)]),
        "blended": f"blended of its own and other prompts, same {' and '.join(given)}",
    }
    return words_of_baseline.get(baseline or "", "same prompt")


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
    """Return one objective's credit as an equation of reward, baseline and divisor; an empty text without a baseline."""
    if part.worth is None or part.baseline is None or part.divisor is None:
        return ""
    difference = f"{shown(part.worth)} {_MINUS} {_factor(part.baseline)}"
    if part.weight != 1.0 or part.divisor != 1.0:
        difference = f"({difference})"
    weight = "" if part.weight == 1.0 else f"{shown(part.weight)} · "
    divisor = "" if part.divisor == 1.0 else f" / {shown(part.divisor)}"
    return f"{shown(part.part, sign=True)} = {weight}{difference}{divisor}"


def added(total: float, terms: Sequence[_Term]) -> str:
    """Return a sum of named terms as text, such as `+0.5 = 0.8 (correct) − 0.3 (brier)`."""
    sum_text = " + ".join(f"{number} ({name})" for _, number, name in terms)
    return f"{shown(total, sign=True)} = {sum_text.replace(f'+ {_MINUS}', f'{_MINUS} ')}"


def _term(weight: float, value: float, name: str) -> _Term:
    """Build the named term `weight * value` of a sum that is shown as text."""
    return weight * value, shown(value) if weight == 1.0 else f"{shown(weight)} · {_factor(value)}", name


def credits(row: TokenRow, method: str, rule: Rule) -> dict[str, float]:
    """Return the credit of each block in a completion, or of the whole completion if the method gives it one number."""
    credit = row.credit.get(method, {})
    block_credit = {block: value for block, value in credit.items() if value is not None and math.isfinite(value)}
    pays_all = all(block_credit.keys() <= set(objective["pays"]) for objective in rule.objectives.values())
    is_one_number = rule.kind == "completion" and block_credit and pays_all
    return {COMPLETION: next(iter(block_credit.values()))} if is_one_number else block_credit


def unit(rows: Sequence[TokenRow], method: str, rule: Rule) -> float:
    """Return the usual size of a method's credit: the 98th percentile of the sizes above 0, or 1 if all credit is 0."""
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
    sentence = ", ".join(phrases) or f"{len(row.tokens)} token{'' if len(row.tokens) == 1 else 's'}"
    phrase_of_status = {"absent": " without a confidence", "unparsable": " with a confidence that cannot be read"}
    for name, value in row.stated.items():
        if name in stating and value is not None and not math.isnan(value):
            sentence += f" with confidence {f'{value:.1f}' if value in (0, 1) else shown(value)}"
            break
        if name in stating and row.statuses.get(name) in phrase_of_status:
            sentence += phrase_of_status[row.statuses[name]]
            break
    return sentence[:1].upper() + sentence[1:]


def clause(row: TokenRow, method: str, rule: Rule) -> str:
    """Say how one method treats a completion: `bae praises the solution (+1) and blames the confidence (−0.8)`."""
    advantages = [float(value) for value in row.advantages[method] if not math.isnan(value)]
    credit, stop = credits(row, method, rule), row.stop.get(method)
    if not advantages:
        return f"{method} trains none of its tokens"
    if not credit and not stop:
        return f"{method} gives its tokens {_range(min(advantages), max(advantages))}"
    phrases = []
    for verb, sign in (("praises", 1), ("blames", -1)):
        blocks = {block: value for block, value in credit.items() if value * sign > 0}
        if len(blocks) > _NAMED:
            largest = max(blocks, key=lambda block: abs(blocks[block]))
            phrases.append(f"{verb} {len(blocks)} blocks, most of all {largest} ({shown(blocks[largest], sign=True)})")
        elif blocks:
            named_blocks = (f"the {block} ({shown(value, sign=True)})" for block, value in blocks.items())
            phrases.append(f"{verb} {' and '.join(named_blocks)}")
    zero_blocks = [block for block, value in credit.items() if value == 0]
    if zero_blocks and phrases:
        names = f"the {' and the '.join(zero_blocks)}" if len(zero_blocks) <= _NAMED else f"{len(zero_blocks)} blocks"
        phrases.append(f"gives {names} 0")
    elif zero_blocks:
        is_alone = {part.reason for part in row.parts.get(method, ())} == {"singleton"}
        phrases.append(f"gives it exactly 0{', with nobody to compare it with' if is_alone else ''}")
    if stop:
        phrases.append(f"{'charges' if stop < 0 else 'pays'} {shown(stop, sign=True)} for the missing blocks")
    return f"{method} {' and '.join(phrases)}{', on average over tokens' if rule.kind == 'token' else ''}"


def explained(row: TokenRow, method: str, rule: Rule) -> dict[str, Any]:
    """Explain a completion's credit under one method: the arithmetic of each block, or a note if the file does not hold it."""
    blocks = {
        block: _explain_block(row, method, rule, block, credit) for block, credit in credits(row, method, rule).items()
    }
    note = ""
    if not any(block["terms"] for block in blocks.values()) and blocks:
        note = f"The file does not say what the credit of {method} is made of. {rule.about}".strip()
        if rule.kind in ("token", "step"):
            note = f"{method} credits each {rule.kind} by itself; the credit of a block is the mean over its tokens."
            note = f"{note} {rule.about}".strip()
        elif method == "recorded":
            note = "recorded is the credit that the trainer wrote into the file; the file does not say how it was computed."
    return {
        "note": note,
        "blocks": blocks,
        "stop": _explain_stop(row, method, rule),
        "strata": {part.objective: part.stratum for part in row.parts.get(method, ()) if part.stratum >= 0},
    }


def _explain_block(row: TokenRow, method: str, rule: Rule, block: str, credit: float) -> dict[str, Any]:
    """Explain the credit of a block: the objectives' credits that add up to it, and the share of each token."""
    paying = [name for name, objective in rule.objectives.items() if block == COMPLETION or block in objective["pays"]]
    parts = list(row.parts.get(method, ()))
    if not paying or len(parts) != 1:  # a lone part may be for the sum of all objectives, so it stays
        parts = [part for part in parts if part.objective in paying]
    score_share, score = row.own.get(method, (0.0, 0.0)) if rule.verdict in paying else (0.0, 0.0)
    terms: list[_Term] = []
    for part in parts:
        mixed_share = score_share if len(parts) == 1 or part.objective == rule.verdict else 0.0
        terms.append(_term(1 - mixed_share, part.part, part.objective))
        if mixed_share:
            terms.append(_term(mixed_share * part.weight, score, "its own score"))
    total = math.fsum(amount for amount, *_ in terms)
    is_exact = abs(total - credit) <= 1e-6 * (1 + abs(credit))
    token_share, tokens_text = _token_shares(row, method, block, credit)
    warning = f"The recorded parts add up to {shown(total, sign=True)}, which is not the credit: do not rely on them."
    return {
        "credit": shown(credit, sign=True),
        "total": added(credit, terms) if is_exact and len(terms) > 1 else "",
        "terms": [
            {"objective": part.objective, "credit": shown(part.part, sign=True), "sum": equation(part),
             "worth": _name_worth(row, rule, part), "note": _baseline_note(row, rule, part),
             "said": row.notes.get(part.objective) or ""}
            for part in parts if is_exact
        ],
        "warning": warning if parts and not is_exact else "",
        "each": token_share,
        "share": tokens_text,
    }  # fmt: skip


def _name_worth(row: TokenRow, rule: Rule, part: CreditPart) -> str:
    """Describe the number that is compared with a baseline, if it is no single reward but a sum or a stand-in; else return ""."""
    if part.worth is None:
        return ""
    if part.objective in row.statuses or part.objective in row.rewards or not rule.objectives:
        status = row.statuses.get(part.objective)
        return f"{part.objective} is {status}, and counts as {shown(part.worth)}" if status in LEFT_OUT else ""
    terms: list[_Term] = []
    for name, objective in rule.objectives.items():
        is_left_out = row.rewards.get(name) is None and row.statuses.get(name) in LEFT_OUT
        reward = objective.get("if_missing") if is_left_out else row.rewards.get(name)
        if reward is None:
            return ""
        terms.append(_term(objective.get("weight", 1.0), reward, f"{name}, left out" if is_left_out else name))
    # In a rollout of several turns, the compared sum also covers rewards of other turns, so these terms may not add up to it.
    total = math.fsum(amount for amount, *_ in terms)
    is_same = math.isclose(total, part.worth, rel_tol=1e-9, abs_tol=1e-9)
    return added(part.worth, terms).removeprefix("+") if is_same else ""


def _baseline_note(row: TokenRow, rule: Rule, part: CreditPart) -> str:
    """Describe the baseline and the divisor behind one objective's credit, or say why the credit has none."""
    if part.baseline is None:
        status = row.statuses.get(part.objective) or "ok"
        if part.part != 0:
            return f"No single baseline gives this number. {rule.about}".strip()
        if part.reason in _NO_BASELINE:
            return f"{_NO_BASELINE[part.reason]}, so the credit is exactly 0"
        reason = "a reward is absent, so"
        if status in LEFT_OUT:
            reason = f"the reward is {status} and has no if_missing, so"
        elif status != "ok":
            reason = f"the check failed ({status}), so there is no reward;"
        return f"{reason} it gets no credit and joins no baseline"
    objective = rule.objectives.get(part.objective, {})
    baseline_text = rule_words(objective["baseline"], objective["given"]) if objective.get("baseline") else ""
    if part.averaged:
        compared_text = f"compared{f' ({baseline_text})' if baseline_text else ''}"
        baseline_text = f"the mean of the {part.averaged} {'others' if part.averaged < part.members else compared_text}"
    scale = "" if part.divisor == 1.0 else f"; divided by {shown(part.divisor)}, the scale of those compared"
    return f"baseline {shown(part.baseline)}{f': {baseline_text}' if baseline_text else ''}{scale}"


def _token_shares(row: TokenRow, method: str, block: str, credit: float) -> tuple[str, str]:
    """Say how much credit each token of a block carries, and all of them together; empty if no token is trained."""
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
    tokens_text = "its one token" if count == 1 else f"{'each of ' if are_equal else ''}its {count} tokens"
    return shown(low, sign=True) if are_equal else _range(low, high), f"on {tokens_text}, together {total_text}"


def _range(low: float, high: float) -> str:
    return shown(low, sign=True) if low == high else f"{shown(low, sign=True)} to {shown(high, sign=True)}"


def _explain_stop(row: TokenRow, method: str, rule: Rule) -> str:
    """Explain the credit on the last token for leaving out every block that an objective rewards; empty without such credit."""
    stop, credit = row.stop.get(method), row.credit.get(method, {})
    if not stop:
        return ""
    parts = []
    for part in row.parts.get(method, ()):
        blocks = rule.objectives.get(part.objective, {}).get("pays")
        if row.statuses.get(part.objective) in LEFT_OUT and blocks and all(credit.get(block) is None for block in blocks):
            parts.append(part)
    equations = [text for part in parts if (text := equation(part))]
    if len(parts) > 1:
        equations = [added(stop, [_term(1.0, part.part, part.objective) for part in parts]), *equations]
    is_exact = abs(math.fsum(part.part for part in parts) - stop) <= 1e-6 * (1 + abs(stop))
    arithmetic = f": {', where '.join(equations)}" if is_exact and equations else ""
    return f"{shown(stop, sign=True)} on the last token{arithmetic}"
