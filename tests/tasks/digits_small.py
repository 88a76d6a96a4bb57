"""The digit chain as a person reads it."""

import re
from functools import cache


@cache
def by_hand(prompt: str, plus: bool = True) -> list[int]:
    """The digit after every step."""
    digits, value = [], int(prompt[0])
    for operator, operand in re.findall(r"([-+*~])(\d)", prompt):
        value = eval(f"({value} {'-+'[plus] if operator == '~' else operator} {operand}) % 10")
        digits.append(value)
    return digits
