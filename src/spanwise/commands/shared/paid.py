"""How a method credits, from a recipe as it was resolved or a scheme as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spanwise.credit import METHODS
from spanwise.modes.laser.config import Laser
from spanwise.report import Rule, rule_words
from spanwise.rollouts.schema import RECORDED


def rule_of(method: str, objectives: Sequence[Mapping[str, Any]], laser: Mapping[str, Any] | None = None) -> Rule:
    """How a method credits, as far as a page explains it.

    Args:
        method: its name.
        objectives: as `Scheme.plain` writes them.
        laser: the score that is mixed into the credit of the blocks that its verdict pays.

    Example:
        >>> rule = rule_of("bae", [{"name": "brier", "pays": ["b"], "baseline": "outcome", "given": ["correct"]}])
        >>> rule.kind, rule.baselines, rule.pays
        ('block', {'brier': 'same prompt, same correct'}, {'b': ['brier']})
    """
    if method == RECORDED or method not in METHODS:
        return Rule()
    chosen = METHODS[method]
    listed = {str(one.get("name") or one.get("reward")): one for one in objectives}
    pays: dict[str, list[str]] = {}
    for name, one in listed.items():
        blocks = one.get("pays") or []
        for block in [blocks] if isinstance(blocks, str) else blocks:
            pays.setdefault(block, []).append(name)
    named: dict[str, list[str]] = {}
    for name, one in listed.items():
        given = one.get("given") or []
        named[name] = [given] if isinstance(given, str) else [str(each) for each in given]
    by_block = chosen.kind == "block"
    return Rule(
        kind=chosen.kind,
        about=f"{method}: {chosen.summary}",
        pays=pays,
        baselines={
            name: rule_words(one["baseline"], named[name])
            for name, one in listed.items()
            if by_block and one.get("baseline")
        },
        weights={name: float(one.get("weight", 1.0)) for name, one in listed.items()},
        missing={name: one.get("if_missing") for name, one in listed.items()},
        verdict="" if laser is None else Laser.of(laser).verdict,
    )
