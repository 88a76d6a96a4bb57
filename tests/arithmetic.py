"""Whether an equation that a page shows is true, to the digits it shows; an evaluator of its own."""

from __future__ import annotations

import ast
import re


def holds(text: str) -> bool:
    """Return whether both sides of `+0.3 = 0.25 (correct) + 0.05 (form)` are equal, to four digits of each number.

    >>> holds("+0.81 = 1 - 0.19"), holds("+0.81 = 1 - 0.2"), holds("-1 = 0.5 · (-1 - (-0.5)) / 0.25")
    (True, False, True)
    >>> holds("+0.3 = 0.25 (correct) + 0.05 (form)"), holds("+0.3 = 0.25 (correct) - 0.05 (form)")
    (True, False)
    """
    left, right = text.replace("\u2212", "-").replace("·", "*").split(" = ")
    plain = re.sub(r"\((?![-\d.(])[^()]*\)", "", right)  # the names of what is added
    low, high = _range(ast.parse(plain.strip(), mode="eval").body)
    total = float(left)
    return low - _half(total) <= total <= high + _half(total)


def _half(number: float) -> float:
    """Return half a unit of the fourth digit, and a little more."""
    return 0.501 * 10 ** (len(f"{abs(number):.0f}") - 4) if abs(number) >= 1 else abs(number) * 5.1e-4 + 1e-12


def _range(node: ast.expr) -> tuple[float, float]:
    """Return the smallest and the largest value that an expression of rounded numbers can have."""
    if isinstance(node, ast.Constant):
        number = float(node.value)  # type: ignore[arg-type]
        exact = float(number).is_integer() and number < 1000
        return (number, number) if exact else (number - _half(number), number + _half(number))
    if isinstance(node, ast.UnaryOp):
        low, high = _range(node.operand)
        return (-high, -low) if isinstance(node.op, ast.USub) else (low, high)
    assert isinstance(node, ast.BinOp), ast.dump(node)
    (a, b), (c, d) = _range(node.left), _range(node.right)
    combine = {
        ast.Add: lambda x, y: x + y, ast.Sub: lambda x, y: x - y, ast.Mult: lambda x, y: x * y, ast.Div: lambda x, y: x / y,
    }[type(node.op)]  # fmt: skip
    results = [combine(x, y) for x in (a, b) for y in (c, d)]
    return min(results), max(results)
