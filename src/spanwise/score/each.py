"""`written_out`: objectives with `each` and patterns of blocks, as one objective per block with plain names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from spanwise.errors import RecipeError
from spanwise.layout import Layout
from spanwise.objective import EARLIER, OWN, Objective
from spanwise.score.custom import parameters_of
from spanwise.score.reward import REWARDS


def written_out(objectives: Sequence[Objective], layout: Layout) -> tuple[Objective, ...]:
    """Objectives without `each`, whose paid blocks are plain names.

    Args:
        objectives: in order.
        layout: the blocks that patterns are looked for in.

    Raises:
        RecipeError: a pattern that no block matches; a block of several parts, of which nothing says which one is read.

    Example:
        >>> layout = Layout(["a", "b"], segmenter="json")
        >>> pair = written_out([Objective("equals", each="*", given="earlier", baseline="outcome")], layout)
        >>> [(o.name, o.pays, o.given, o.baseline, o.options) for o in pair]
        [('equals.a', ('a',), (), 'group', {'tag': 'a'}), ('equals.b', ('b',), ('equals.a',), 'outcome', {'tag': 'b'})]
    """
    plain: list[Objective] = []
    for objective in objectives:
        pays = _blocks(objective, layout)
        if objective.each is None:
            plain.append(objective if pays == objective.pays else replace(objective, pays=pays))
        else:
            plain += _each(objective, pays, layout)
    return tuple(plain)


def _blocks(objective: Objective, layout: Layout) -> tuple[str, ...]:
    """The paid blocks, patterns filled in."""
    patterns = [name for name in objective.pays if "*" in name and name not in layout.names]
    if not patterns:
        return objective.pays
    filled = (layout.matching(name) if name in patterns else (name,) for name in objective.pays)
    return tuple(dict.fromkeys(name for names in filled for name in names))


def _each(objective: Objective, pays: tuple[str, ...], layout: Layout) -> list[Objective]:
    assert objective.each is not None, "asked for by the caller"
    objectives: list[Objective] = []
    for block in layout.matching(objective.each):
        earlier = tuple(
            one.name for one in reversed(objectives)
        )  # backing off drops the last one first, and that says least
        given = tuple(name for entry in objective.given for name in (earlier if entry == EARLIER else (entry,)))
        own: dict[str, Any] = {"baseline": objective.baseline, "back_off": objective.back_off}
        if not given and objective.baseline in ("outcome", "blended"):  # the first block has nothing before it
            own = {"baseline": "group", "back_off": None}
        objectives.append(
            replace(
                objective,
                **own,
                each=None,
                name=f"{objective.name}.{block}",
                pays=tuple(dict.fromkeys(block if name == OWN else name for name in pays)) or (block,),
                given=given,
                options={**_reading(objective, block, layout), **objective.options},
            )
        )
    return objectives


def _reading(objective: Objective, block: str, layout: Layout) -> dict[str, Any]:
    """The option that tells a reward which part it reads, or a function which block."""
    if not isinstance(objective.reward, str):
        if "block" in objective.options:
            return {}
        parameters = parameters_of(objective.reward, objective.name)
        if not any(one.name == "block" or one.kind is one.VAR_KEYWORD for one in parameters):
            raise RecipeError(
                f"Objective '{objective.name}' is for each block, and its reward function would not hear which: every block would "
                f"get the same number. Give it a parameter 'block', the name of the block: def f(blocks, block)."
            )
        return {"block": block}
    entry = REWARDS.find(objective.reward)
    if "block" in entry.options:
        return {} if "block" in objective.options else {"block": block}
    if not entry.tags or any(option in objective.options for option in entry.tags):
        return {}
    keys = layout.keys[block]
    if len(keys) != 1:
        raise RecipeError(
            f"Objective '{objective.name}' is for each block, and block '{block}' is made of {', '.join(keys) or 'nothing'}; say "
            f"which part it reads, as in options: {{{entry.tags[0]}: {keys[0] if keys else 'answer'}}}."
        )
    return {entry.tags[0]: keys[0]}
