"""Which objectives pay a block, from a recipe as it was resolved or a scheme as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spanwise.credit import METHODS
from spanwise.modes.laser.config import Laser
from spanwise.report import Paid, Rule, rule_words
from spanwise.rollouts.schema import RECORDED


def paid_of(method: str, objectives: Sequence[Mapping[str, Any]], laser: Mapping[str, Any] | None = None) -> dict[str, Paid]:
    """Block -> the objectives that pay it, whether its credit is the reward of the only one minus a baseline, and a score in it.

    Args:
        method: its name.
        objectives: as `Scheme.plain` writes them.
        laser: the score that is mixed into the credit of the blocks that its verdict pays.

    Example:
        >>> paid_of("bae", [{"reward": "equals", "name": "equals.a", "pays": ["a"], "weight": 1.0}])
        {'a': Paid(objectives=['equals.a'], plain=True, mixed=False)}
    """
    found: dict[str, list[Mapping[str, Any]]] = {}
    for objective in objectives:
        pays = objective.get("pays") or []
        for block in [pays] if isinstance(pays, str) else pays:
            found.setdefault(block, []).append(objective)
    verdict = None if laser is None else Laser.of(laser).verdict
    by_block = method in METHODS and METHODS[method].kind == "block"
    return {
        block: Paid(
            names := [str(one.get("name") or one.get("reward")) for one in listed],
            by_block and len(listed) == 1 and listed[0].get("weight", 1.0) == 1.0 and listed[0].get("scale") != "std",
            mixed=verdict in names,
        )
        for block, listed in found.items()
    }


def rule_of(method: str, objectives: Sequence[Mapping[str, Any]], laser: Mapping[str, Any] | None = None) -> Rule:
    """How a method credits, as far as a page explains it; `method` and the others as in `paid_of`.

    Example:
        >>> rule = rule_of("bae", [{"name": "brier", "pays": ["b"], "baseline": "outcome", "given": ["correct"]}])
        >>> rule.kind, rule.baselines
        ('block', {'brier': 'same prompt, same correct'})
    """
    if method == RECORDED or method not in METHODS:
        return Rule()
    chosen = METHODS[method]
    listed = {str(one.get("name") or one.get("reward")): one for one in objectives}
    named: dict[str, list[str]] = {}
    for name, one in listed.items():
        given = one.get("given") or []
        named[name] = [given] if isinstance(given, str) else [str(each) for each in given]
    by_block = chosen.kind == "block"
    return Rule(
        kind=chosen.kind,
        about=f"{method}: {chosen.summary}",
        baselines={
            name: rule_words(one["baseline"], named[name])
            for name, one in listed.items()
            if by_block and one.get("baseline")
        },
        weights={name: float(one.get("weight", 1.0)) for name, one in listed.items()},
        missing={name: one.get("if_missing") for name, one in listed.items()},
        verdict="" if laser is None else Laser.of(laser).verdict,
    )
