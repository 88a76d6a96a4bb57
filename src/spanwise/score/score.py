"""`score_all`: every objective's reward of every completion; and objectives written out and checked before."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, product
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from spanwise.errors import RecipeError, RewardError, check_known, unknown
from spanwise.layout import Layout
from spanwise.objective import EARLIER, HIDDEN, OWN, Objective, Rubric, hidden_names, is_async
from spanwise.registry import is_registered
from spanwise.score.criteria import with_criteria
from spanwise.score.custom import (
    await_reward,
    call_reward,
    called,
    check_reward_function,
    named_errors,
    process_kept,
    reward_function,
    takes,
)
from spanwise.score.event_loop import run
from spanwise.score.foreign import Convention, rubric_functions
from spanwise.score.items import (
    CALL_OPTIONS,
    as_reward,
    await_items,
    call_items,
    check_call,
    item_calls,
    item_convention,
    together,
)
from spanwise.score.outcomes import OUTCOMES, find_outcome, judge_of, read_outcomes
from spanwise.score.reward import NAN, REWARDS, BuiltIn, Columns, Reward, Scored, Texts, as_notes, built_in, present
from spanwise.types import Scores, Status

#: The largest reward: squares of a batch stay finite in float64, and float32 has eight more powers of ten for weights and sums.
LARGEST = 1e30


def score_all(objectives: Sequence[Objective], text: Texts, *, columns: Columns, recorded: Scored | None = None) -> Scores:
    """Score every completion by every objective.

    Args:
        objectives: in order; an objective sees the ones before it (`given`).
        text: the blocks of each completion, as `find_blocks` reads them.
        columns: the dataset's columns, one row per completion.
        recorded: rewards that are known already, by objective; see `taken_as_recorded`.

    Raises:
        RecipeError: no objective, two of one name, or one that is given what is neither an objective before it nor an outcome.
        DataError: a reward reads a column that is not there.
        RewardError: a function raises, or returns what is no reward or no outcome.

    Example:
        >>> text = [{"solution": {"": "", "answer": "4"}, "confidence": {"": "", "confidence": "0.7"}}]
        >>> objectives = [Objective("correct", pays=("solution",)), Objective("brier", pays=("confidence",), given="correct")]
        >>> score_all(objectives, text, columns={"answer": ["4"]}).reward_nm
        tensor([[ 1.0000, -0.0900]], dtype=torch.float64)
    """
    _check_order(objectives)
    recorded = recorded or {}
    early = _score_early([one for one in objectives if one.name not in recorded], text, columns)
    scored: dict[str, Reward] = {}
    for objective in objectives:
        recorded_reward = recorded.get(objective.name)
        if recorded_reward is None:
            reward = _score_one(objective, text, columns, scored, early)
        else:
            reward = taken_as_recorded(objective, recorded_reward, text, columns=columns, scored=scored)
        scored[objective.name] = reward if objective.only is None else _only_right(reward, scored[objective.only])
    scores = as_scores(scored, *read_outcomes(objectives, text, columns=columns))
    measures = measures_of(objectives)
    if not measures:
        return scores
    tables = [_measured(scored[objective.name], len(measures_of([objective]))) for objective in objectives]
    return replace(scores, measured_nc=torch.cat(tables, dim=1), measures=measures)


def _only_right(reward: Reward, other: Reward) -> Reward:
    """Leave out the reward of every completion whose other reward is not 1."""
    out_n = other.value_n != 1.0
    status_n = torch.where(out_n, int(Status.UNSCORED), reward.status_n)
    by_outcome_n2 = reward.by_outcome_n2.masked_fill(out_n[:, None], NAN)
    return replace(reward, value_n=reward.value_n.masked_fill(out_n, NAN), status_n=status_n, by_outcome_n2=by_outcome_n2)


def measures_of(objectives: Sequence[Objective]) -> tuple[str, ...]:
    """Return what the rewards of objectives measure of themselves, as "<objective>/<measure>"."""
    entries = [(one.name, built_in(one)) for one in objectives]
    return tuple(f"{name}/{measure}" for name, entry in entries if entry is not None for measure in entry.measures)


def loads_model(objective: Objective) -> bool:
    """Return whether an objective's reward loads a model of its own."""
    entry = built_in(objective)
    return entry is not None and entry.loads_model


def _measured(reward: Reward, size: int) -> Float[Tensor, "n c"]:
    """Return what a reward measured; nothing for a recorded one."""
    nothing_nc = torch.zeros(len(reward.value_n), size, dtype=torch.float64)
    return nothing_nc if reward.measured_nc is None else reward.measured_nc


def as_scores(scored: Scored, outcome_names: Sequence[str] = (), outcome_no: Float[Tensor, "n o"] | None = None) -> Scores:
    """Put the rewards of all objectives side by side.

    Args:
        scored: objective -> its reward, in order.
        outcome_names, outcome_no: as `read_outcomes` gives them.

    Raises:
        RewardError: a reward is beyond 1e30, so that credit would overflow.

    Example:
        >>> as_scores({"a": Reward.of([1.0]), "b": Reward.of([None], stated=[0.5])}).stated_nm
        tensor([[   nan, 0.5000]], dtype=torch.float64)
    """

    def side_by_side(part: str) -> Tensor:
        columns = [(reward.value_n, getattr(reward, part)) for reward in scored.values()]
        return torch.stack([torch.full_like(like, NAN) if table is None else table for like, table in columns], dim=1)

    tables = map(side_by_side, ("value_n", "status_n", "by_outcome_n2", "stated_n", "unused_n"))
    reward_nm, status_nm, by_outcome_nmo, stated_nm, unused_nm = tables
    beyond_nm = reward_nm.abs() > LARGEST
    if beyond_nm.any():
        n, m = beyond_nm.nonzero()[0].tolist()
        raise RewardError(
            f"Objective '{tuple(scored)[m]}' gives completion {n} of {len(reward_nm)} the reward {float(reward_nm[n, m]):g}; "
            f"beyond {LARGEST:g} credit overflows. Return a smaller number, or None for no reward."
        )
    notes = [as_notes([None] * len(reward_nm)) if one.note_n is None else one.note_n for one in scored.values()]
    note_nm = np.stack(notes, axis=1) if any(one.note_n is not None for one in scored.values()) else None
    outcomes = tuple(outcome_names), outcome_no if outcome_names else None
    return Scores(tuple(scored), reward_nm, status_nm, by_outcome_nmo, *outcomes, stated_nm, unused_nm, note_nm)


def score_one(objective: Objective, text: Texts, *, columns: Columns, scored: Scored) -> Reward:
    """Score every completion by one objective.

    A completion that lacks every paid block has no reward (NaN, ABSENT), whatever the reward function says of it: what leaving it
    out costs is said in one place, the objective's `if_missing`. The number is kept as `unused_n`.

    Args:
        objective: what to score by.
        text: the blocks of each completion.
        columns: the dataset's columns, one row per completion.
        scored: the objectives scored before, by name.

    Raises:
        RecipeError: an unknown reward or option, one that is a stand-in for a secret, a paid block that the text does not know,
            or `given` that is neither in `scored` nor an outcome.
        DataError, RewardError: see `score_all`.

    Example:
        >>> def short(blocks):
        ...     return [1.0 for _ in blocks]
        >>> text = [{"solution": {"": "4"}}, {"solution": None}]
        >>> score_one(Objective(short, pays=("solution",)), text, columns={}, scored={}).value_n
        tensor([1., nan], dtype=torch.float64)
    """
    _check_given(objective, scored)
    return _score_one(objective, text, columns, scored, _score_early([objective], text, columns))


def _score_one(objective: Objective, text: Texts, columns: Columns, scored: Scored, early: Scored) -> Reward:
    """Score every completion by one objective, whose reward may have been computed early."""
    if objective.name in early:
        reward = early[objective.name]
    elif isinstance(objective.reward, str):
        what, function = _built_in_call(objective, text, columns, scored)
        reward = called(function, what=what, text=text, advice=_ADVICE)
    else:
        reward = call_reward(objective, text, columns)
    if len(reward.value_n) != len(text):
        size = len(reward.value_n)
        raise RewardError(f"Objective '{objective.name}': its reward returned {size} numbers for {len(text)} completions.")
    return reward.only_where(_has_blocks(objective, text))


#: What to do about a built-in reward that raised.
_ADVICE = "Look at its options and at the columns that it reads."


def _built_in_call(objective: Objective, text: Texts, columns: Columns, scored: Scored) -> tuple[str, partial[Any]]:
    """Return a built-in reward's name in a sentence, and its call."""
    entry = REWARDS.find(str(objective.reward))
    _check_options(objective, entry)
    judged = {} if entry.judged_by is None else {entry.judged_by: judge_of(objective)}
    options = {"columns": columns, "scored": scored, **objective.options, **judged}
    what = f"Objective '{objective.name}': the reward '{objective.reward}'"
    return what, partial(entry.function, text, pays=objective.pays, **options)


def _check_callable(objective: Objective, text: Texts) -> None:
    """Refuse an option that is a stand-in for a secret, and a paid block that the text does not know."""
    if secrets := hidden_names(objective.options):
        raise RecipeError(
            f"Objective '{objective.name}' has the option '{secrets[0]}' with {HIDDEN} in the place of a secret, and its reward "
            f"would get that word. Set it again in the recipe."
        )
    if text:
        _check_pays(objective, text[0])


def waits(objective: Objective) -> bool:
    """Return whether an objective's reward is awaited."""
    entry, convention = built_in(objective), item_convention(objective)
    if entry is not None:
        return is_async(entry.function)
    return is_async(objective.reward if convention is None else convention.prepare(objective.reward))


async def await_rewards(objectives: Sequence[Objective], text: Texts, columns: Columns) -> dict[str, Reward]:
    """Await the rewards of all objectives at once, on the loop that runs; every objective `waits`.

    Args:
        objectives: those whose rewards are awaited.
        text, columns: see `score_all`, which takes the result as `recorded`.
    """
    calls = _by_call(objectives, text)
    rewards = await together([_await_one(convention, group, text, columns) for convention, group in calls])
    return {name: reward for group in rewards for name, reward in group.items()}


async def _await_one(
    convention: Convention | None, group: Sequence[Objective], text: Texts, columns: Columns
) -> dict[str, Reward]:
    """Await one function for the objectives that read its results."""
    objective = group[0]
    if isinstance(objective.reward, str):
        what, function = _built_in_call(objective, text, columns, {})
        with named_errors(what, len(text), _ADVICE):
            return {objective.name: await function()}
    if convention is None:
        return {objective.name: await await_reward(objective, text, columns)}
    results = await await_items(objective, item_calls(objective, convention, text, columns))
    return {one.name: as_reward(one, convention, results, len(text)) for one in group}


def _score_early(objectives: Sequence[Objective], text: Texts, columns: Columns) -> dict[str, Reward]:
    """Score the objectives that are awaited, all at once, and those whose functions take one completion at a time."""
    waiting = [objective for objective in objectives if waits(objective)]
    rewards: dict[str, Reward] = {}
    if waiting:
        names = ", ".join(f"'{objective.name}'" for objective in waiting)
        with process_kept(f"A reward function that is awaited ({names})", text):
            rewards |= run(await_rewards(waiting, text, columns))
    for convention, group in _by_call([objective for objective in objectives if objective not in waiting], text):
        if convention is not None:
            what = reward_function(group[0])
            with process_kept(what, text), named_errors(what, len(text), _ADVICE):
                results = call_items(item_calls(group[0], convention, text, columns))
            rewards |= {one.name: as_reward(one, convention, results, len(text)) for one in group}
    return rewards


def _by_call(objectives: Sequence[Objective], text: Texts) -> list[tuple[Convention | None, list[Objective]]]:
    """Group the objectives that read different keys of what one call of a function returns; refuse what cannot be called."""
    groups: dict[Any, tuple[Convention | None, list[Objective]]] = {}
    for objective in objectives:
        _check_callable(objective, text)
        convention = item_convention(objective)
        one_by_one = id(objective.reward), repr(objective.options), objective.pays
        groups.setdefault(objective.name if convention is None else one_by_one, (convention, []))[1].append(objective)
    return list(groups.values())


def taken_as_recorded(objective: Objective, known: Reward, text: Texts, *, columns: Columns, scored: Scored) -> Reward:
    """Take a reward that was computed elsewhere, and add the outcomes and statuses that the text shows."""
    entry = built_in(objective)
    if entry is not None and entry.judged_by is not None:
        read = score_one(objective, text, columns=columns, scored=scored)
        # The completion left it out, whatever the file records.
        lost_n = (known.status_n == Status.ERROR) | (known.status_n == Status.UNSCORED)
        omitted_n = lost_n & ((read.status_n == Status.ABSENT) | (read.status_n == Status.UNPARSABLE))
        status_n = torch.where(omitted_n, read.status_n, known.status_n)
        known = replace(known, status_n=status_n, by_outcome_n2=read.by_outcome_n2, stated_n=read.stated_n)
    return known.only_where(_has_blocks(objective, text))


def _has_blocks(objective: Objective, text: Texts) -> Bool[Tensor, " n"]:
    """Return the completions that have one of the blocks an objective pays."""
    return torch.tensor([bool(present(blocks, objective.pays)) for blocks in text], dtype=torch.bool)


def check_objectives(objectives: Sequence[Objective], layout: Layout, *, recorded: Collection[str] = ()) -> None:
    """Refuse, before anything runs, objectives that cannot work with each other or with the layout.

    Names are unique; paid blocks are in the layout; `given` names earlier objectives and outcomes that can be found, and what
    judges a report (`judge_of`) is an earlier objective; no report is itself an outcome; rewards and their options are known,
    and reward functions can be called; the tags that built-in rewards read are in the blocks they read.

    Args:
        objectives: in order.
        layout: the blocks and their tags.
        recorded: objectives whose rewards are known already; they read no tags and no blocks.

    Raises:
        RecipeError: with the sentence that says what to change.

    Example:
        >>> check_objectives([Objective("correct", pays=("solution",))], Layout({"solution": ["answer"]}))
    """
    _check_order(objectives)
    reports = {objective.name: judge_of(objective) for objective in objectives}
    for position, objective in enumerate(objectives):
        _check_pays(objective, layout.keys)
        fine = next((name for name in objective.outcomes if reports.get(name) is not None), None)
        if fine is not None:
            raise RecipeError(
                f"Objective '{objective.name}' is given '{fine}', a score that hardly two completions share, so that none would "
                f"have its like. Give it the outcome behind that score, '{reports[fine]}', or use baseline: group."
            )
        entry = built_in(objective)
        if entry is None:
            convention = item_convention(objective)
            check_reward_function(objective, CALL_OPTIONS if convention else ())
            check_call(objective, convention)
            continue
        _check_options(objective, entry)
        if reports[objective.name] is not None:
            _check_earlier(objective, str(reports[objective.name]), [before.name for before in objectives[:position]])
        if objective.name not in recorded:
            _check_reading(objective, entry, layout)


def written_out(objectives: Sequence[Objective], layout: Layout) -> tuple[Objective, ...]:
    """Write out objectives: without `criteria` and `each`, and with plain names of paid blocks.

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
    functions = chain.from_iterable(_of_rubric(objective) for objective in objectives)
    single = chain.from_iterable(with_criteria(objective, layout) for objective in functions)
    plain = (
        [_with_blocks(objective, layout)] if objective.each is None else _each(objective, layout) for objective in single
    )
    return tuple(chain.from_iterable(plain))


def _of_rubric(objective: Objective) -> list[Objective]:
    """Return an objective for each function of a rubric, weighted as there; any other objective as it is."""
    if not isinstance(objective.reward, Rubric):
        return [objective]
    return [
        replace(objective, reward=function, name=function.__name__, weight=objective.weight * weight)
        for function, weight in rubric_functions(objective.reward)
    ]


def _with_blocks(objective: Objective, layout: Layout) -> Objective:
    """Return the objective with the names of its paid blocks in place of patterns."""
    matched = [(name,) if name in layout.names or "*" not in name else layout.matching(name) for name in objective.pays]
    return replace(objective, pays=tuple(dict.fromkeys(name for names in matched for name in names)))


def _each(objective: Objective, layout: Layout) -> list[Objective]:
    """Build an objective for every block that `each` matches."""
    pays = _with_blocks(objective, layout).pays
    objectives: list[Objective] = []
    for block in layout.matching(objective.each or ""):
        # The nearest outcome comes first: backing off drops the last one first, which matters least.
        earlier = tuple(other.name for other in reversed(objectives))
        given = tuple(name for entry in objective.given for name in (earlier if entry == EARLIER else (entry,)))
        alone = not given and objective.baseline in ("outcome", "blended")  # the first block has nothing before it
        changes: dict[str, Any] = {"baseline": "group", "back_off": None} if alone else {}
        changes["pays"] = tuple(dict.fromkeys(block if name == OWN else name for name in pays)) or (block,)
        changes["options"] = {**_reading(objective, block, layout), **objective.options}
        objectives.append(replace(objective, each=None, name=f"{objective.name}.{block}", given=given, **changes))
    return objectives


def _reading(objective: Objective, block: str, layout: Layout) -> dict[str, Any]:
    """Return the option by which a reward names the part it reads, or a function the block."""
    entry = built_in(objective)
    if entry is None:
        if item_convention(objective) is not None and objective.options.get("sees") == "part":
            return {"block": block}
        if "block" not in objective.options and not takes(objective, "block"):
            raise RecipeError(
                f"Objective '{objective.name}' is for each block, but its reward function is not told which: all would "
                f"get the same number. Give it a parameter 'block', the name of the block: def f(blocks, block)."
            )
        return {"block": block}
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


def _check_order(objectives: Sequence[Objective]) -> None:
    if not objectives:
        raise RecipeError("There is no objective; add at least one, for example {reward: correct, pays: [solution]}.")
    names = [objective.name for objective in objectives]
    for position, objective in enumerate(objectives):
        if objective.name in names[:position]:
            raise RecipeError(f"Two objectives are called '{objective.name}'; give one of them another 'name'.")
        _check_given(objective, names[:position])
        if objective.only is not None and objective.only not in names[:position]:
            raise RecipeError(
                f"Objective '{objective.name}' has only: {objective.only}, which is not an objective before it; those are: "
                f"{', '.join(names[:position]) or 'none'}."
            )
        both = next((name for name in objective.outcomes if name in names and name in OUTCOMES), None)
        if both is not None:
            raise RecipeError(f"'{both}' is an objective and a registered outcome too; give the objective another 'name'.")


def _check_given(objective: Objective, earlier: Collection[str]) -> None:
    for entry, name in zip(objective.given, objective.outcomes, strict=True):
        if name not in earlier:
            if isinstance(entry, str) and ":" not in entry and not is_registered(entry, kind="outcome"):
                _check_earlier(objective, entry, earlier)
            find_outcome(entry)


def _check_earlier(objective: Objective, name: str, earlier: Collection[str]) -> None:
    if name not in earlier:
        raise RecipeError(
            f"Objective '{objective.name}' is given '{name}', which is not an objective before it; "
            f"those are: {', '.join(earlier) or 'none'}. Put '{name}' first, or correct the name; outcomes that are no objectives: "
            f"{', '.join(sorted(OUTCOMES))}, or 'module:function'."
        )


def _check_pays(objective: Objective, blocks: Collection[str]) -> None:
    for block in objective.pays:
        if block not in blocks:
            raise RecipeError(f"Objective '{objective.name}' pays '{block}'. {unknown('block', block, blocks)}")


def _check_options(objective: Objective, entry: BuiltIn) -> None:
    for option in objective.options:
        check_known(f"option of reward '{objective.reward}' called", option, entry.options)
    if entry.check is not None:
        entry.check({**entry.options, **objective.options})


def _check_reading(objective: Objective, entry: BuiltIn, layout: Layout) -> None:
    """Refuse a built-in reward that reads blocks and tags which the layout lacks, or which another segmenter finds."""
    tags, options = layout.keys, {**entry.options, **objective.options}
    for name in entry.blocks:
        if options[name] not in tags:
            raise RecipeError(
                f"Objective '{objective.name}' reads block '{options[name]}'. {unknown('block', options[name], tags)}"
            )
    # A reward of two blocks reads its tag in each of them; any other reward in the first paid block that has it.
    read = [(objective.pays[0],), *((options[name],) for name in entry.blocks)] if entry.blocks else [objective.pays]
    for tag, blocks in product((options[name] for name in entry.tags), read):
        keys = [key for block in blocks for key in tags[block]]
        if tag and tag not in keys:
            raise RecipeError(
                f"Objective '{objective.name}' reads the tag '{tag}' in {' or '.join(blocks)}, which "
                f"{'has ' + ', '.join(keys) if keys else 'has no tags'}; add it to the layout or set 'tag'."
            )
    paid = [part for part in layout.parts if layout.names[part.block] in objective.pays]
    other = next((part for part in paid if entry.segmenters and part.segmenter not in entry.segmenters), None)
    if other is not None:
        raise RecipeError(
            f"Objective '{objective.name}': the reward '{objective.reward}' judges what {' and '.join(entry.segmenters)} find, and "
            f"block '{layout.names[other.block]}' is found by {other.segmenter}. Use a reward of its content, such as json_schema, "
            f"or a function of your own."
        )
