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
    return tuple(
        plain
        for objective in objectives
        for plain in ([_with_blocks(objective, layout)] if objective.each is None else _each(objective, layout))
    )


def _with_blocks(objective: Objective, layout: Layout) -> Objective:
    """The objective with the names of the paid blocks in the place of patterns."""
    if all(name in layout.names or "*" not in name for name in objective.pays):
        return objective
    known = [(name,) if name in layout.names or "*" not in name else layout.matching(name) for name in objective.pays]
    return replace(objective, pays=tuple(dict.fromkeys(name for names in known for name in names)))


def _each(objective: Objective, layout: Layout) -> list[Objective]:
    """An objective for every block that `each` matches."""
    pays = _with_blocks(objective, layout).pays
    objectives: list[Objective] = []
    for block in layout.matching(objective.each or ""):
        # The nearest first: backing off drops the last one first, and that says least.
        earlier = tuple(one.name for one in reversed(objectives))
        given = tuple(name for entry in objective.given for name in (earlier if entry == EARLIER else (entry,)))
        alone = not given and objective.baseline in ("outcome", "blended")  # the first block has nothing before it
        objectives.append(
            replace(
                objective,
                baseline="group" if alone else objective.baseline,
                back_off=None if alone else objective.back_off,
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
        parameters = parameters_of(objective)
        if "block" not in objective.options and not any(
            one.name == "block" or one.kind is one.VAR_KEYWORD for one in parameters
        ):
            raise RecipeError(
                f"Objective '{objective.name}' is for each block, and its reward function would not hear which: every block would "
                f"get the same number. Give it a parameter 'block', the name of the block: def f(blocks, block)."
            )
        return {"block": block}
    entry = REWARDS.find(objective.reward)
    if "block" in entry.options:
        return {"block": block}
    if not entry.tags or any(option in objective.options for option in entry.tags):
        return {}
    keys = layout.keys[block]
    if len(keys) != 1:
        raise RecipeError(
            f"Objective '{objective.name}' is for each block, and block '{block}' is made of {', '.join(keys) or 'nothing'}; say "
            f"which part it reads, as in options: {{{entry.tags[0]}: {keys[0] if keys else 'answer'}}}."
        )
    return {entry.tags[0]: keys[0]}
