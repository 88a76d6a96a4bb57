"""The arithmetic of a credit, as a reader would write it down: `+0.81 = 1 − 0.19`."""

from __future__ import annotations

import math
from collections.abc import Sequence

from spanwise.rollouts import CreditPart

#: Significant digits that are shown.
DIGITS = 4
_MINUS = "\u2212"


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


def equation(part: CreditPart) -> str:
    """The arithmetic of a part; empty where there is none.

    >>> equation(CreditPart("correct", 1.0, 0.19, 1.0, 1.0, 0.81)), equation(CreditPart("brier", -1.0, -0.5, 0.25, 0.5, -1.0))
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


def added(total: float, terms: Sequence[tuple[float, str, str]]) -> str:
    """A sum of named terms: the amount, how it is written, what it is of.

    >>> added(0.3, [(0.25, "0.25", "correct"), (0.05, "0.05", "form")])
    '+0.3 = 0.25 (correct) + 0.05 (form)'
    >>> added(-0.4, [(-0.5, "−0.5", "correct"), (0.1, "0.5 · 0.2", "form")])
    '−0.4 = −0.5 (correct) + 0.5 · 0.2 (form)'
    """
    text = " + ".join(f"{number} ({name})" for _, number, name in terms)
    return f"{shown(total, sign=True)} = {text.replace(f'+ {_MINUS}', f'{_MINUS} ')}"


def signed(value: float) -> str:
    """A factor; in brackets if it is negative."""
    said = shown(value)
    return f"({said})" if said.startswith(_MINUS) else said
