"""The sentence above a completion: what it is, and what each method makes of it. The page joins the clauses of two methods."""

from __future__ import annotations

import math

from spanwise.report.arithmetic import DIGITS, shown
from spanwise.report.view import Rule, TokenView
from spanwise.report.why import LEFT_OUT
from spanwise.rollouts.rows import TokenRow

#: Blocks that a sentence names one by one.
_NAMED = 3


def openings(view: TokenView) -> list[str]:
    """What each completion is: `Right with confidence 0.1`. A number is missed only where another completion states one."""
    stating = {name for row in view.completions for name, value in row.stated.items() if _known(value)}
    found = [_opening(row, view.outcome, stating) for row in view.completions]
    return [said[:1].upper() + said[1:] for said in found]


def _opening(row: TokenRow, outcome: str | None, stating: set[str]) -> str:
    words = ["cut off"] if "truncated" in row.fault else ["malformed"] if row.fault else []
    reward = None if outcome is None else row.rewards.get(outcome)
    status = row.statuses.get(outcome or "", "")
    if reward in (0, 1):
        words.append("right" if reward else "wrong")
    elif reward is not None:
        words.append(f"{outcome} {shown(reward)}")
    elif status in LEFT_OUT:
        words.append("no answer that can be read")
    elif status not in ("", "ok"):
        words.append(f"neither right nor wrong, as the check failed ({status})")
    opening = ", ".join(words) or f"{len(row.tokens)} token{'' if len(row.tokens) == 1 else 's'}"
    unstated = {"absent": " without a confidence", "unparsable": " with a confidence that cannot be read"}
    for name, value in row.stated.items():
        if name in stating and value is not None and _known(value):
            return f"{opening} with confidence {_plain(value)}"
        if name in stating and row.statuses.get(name) in unstated:
            return opening + unstated[row.statuses[name]]
    return opening


def clause(row: TokenRow, method: str, rule: Rule) -> str:
    """What one method makes of a completion: `bae praises the solution (+1) and blames the confidence (−0.8)`."""
    known = [float(value) for value in row.advantages[method] if not math.isnan(value)]
    if not known:
        return f"{method} trains none of its tokens"
    credit = {block: value for block, value in row.credit.get(method, {}).items() if value is not None and value == value}
    if not credit and not row.stop.get(method):
        low, high = min(known), max(known)
        several = shown(low, sign=True) if low == high else f"{shown(low, sign=True)} to {shown(high, sign=True)}"
        return f"{method} gives its tokens {several}"
    parts = []
    for verb, sign in (("praises", 1), ("blames", -1)):
        blocks = {block: value for block, value in credit.items() if value * sign > 0}
        if len(blocks) > _NAMED:
            most = max(blocks, key=lambda block: abs(blocks[block]))
            parts.append(f"{verb} {len(blocks)} blocks, most of all {most} ({shown(blocks[most], sign=True)})")
        elif blocks:
            named = (f"the {block} ({shown(value, sign=True)})" for block, value in blocks.items())
            parts.append(f"{verb} {' and '.join(named)}")
    zeros = [block for block, value in credit.items() if value == 0]
    if zeros and parts:
        parts.append(f"gives {'the ' + ' and the '.join(zeros) if len(zeros) <= _NAMED else f'{len(zeros)} blocks'} 0")
    elif zeros:
        alone = {part.reason for part in row.parts.get(method, ())} == {"singleton"}
        parts.append(f"gives it exactly 0{', with nobody to compare it with' if alone else ''}")
    if stop := row.stop.get(method):
        parts.append(f"{'charges' if stop < 0 else 'pays'} {shown(stop, sign=True)} for what it leaves out")
    return f"{method} {' and '.join(parts)}{', on average over tokens' if rule.kind == 'token' else ''}"


def _known(value: float | None) -> bool:
    return value is not None and not math.isnan(value)


def _plain(value: float) -> str:
    """A confidence with one digit behind the point at least.

    >>> _plain(0.0), _plain(0.85), _plain(1.0)
    ('0.0', '0.85', '1.0')
    """
    return f"{value:.{DIGITS}g}" if f"{value:.{DIGITS}g}" not in ("0", "1") else f"{value:.1f}"
