"""Check objectives before a run, and score every completion by every objective."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, product
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from spanwise.errors import RecipeError, RewardError, check_known, refuse, unknown
from spanwise.layout import Layout, any_index
from spanwise.objective import EARLIER, HIDDEN, OWN, Objective, Rubric, hidden_names, is_async, rubric_functions
from spanwise.registry import is_registered
from spanwise.score.criteria import with_criteria
from spanwise.score.custom import (
    called,
    checked_reward,
    label_of_function,
    named_errors,
    restore_process,
    reward_call,
    takes,
    with_own_copies,
)
from spanwise.score.event_loop import run
from spanwise.score.items import as_reward, await_items, call_items, calling_convention, check_call, item_calls, together
from spanwise.score.outcomes import OUTCOMES, find_outcome, judge_of, read_outcomes
from spanwise.score.reward import NAN, REWARDS, BuiltIn, Columns, Reward, Scored, Texts, built_in, remove_rewards
from spanwise.types import Scores, Status, present

#: The largest allowed reward: sums and squares of allowed rewards do not overflow.
LARGEST = 1e30
#: The advice in messages about a reward that raised an error.
_ADVICE = "Check the options of the reward and the columns that it reads."


def score_all(
    objectives: Sequence[Objective],
    text: Texts,
    *,
    columns: Columns,
    recorded: Scored | None = None,
    settle: Callable[[Objective, Reward], tuple[Reward, Reward]] | None = None,
) -> Scores:
    """Score every completion by every objective.

    Args:
        objectives: in order; an objective sees the ones before it (`given`).
        text: the blocks of each completion, as `find_blocks` reads them.
        columns: the dataset's columns, one row per completion.
        recorded: rewards that are known already, by objective; the outcomes and statuses that the text shows are added.
        settle: if rows are turns, returns an objective's rewards as rollouts count them, and the verdict that each row goes by.

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
    unscored_objectives = [objective for objective in objectives if objective.name not in (recorded or {})]
    known_rewards = {**(recorded or {}), **_await_early(unscored_objectives, text, columns)}
    rewards: dict[str, Reward] = {}
    verdicts: dict[str, Reward] = {}
    call_results: dict[Any, Any] = {}
    for objective in objectives:
        if objective.name in known_rewards:
            reward = _complete_known(objective, known_rewards[objective.name], text, columns=columns, scored=verdicts)
        else:
            reward = _call(objective, text, columns, verdicts, call_results)
        reward = _only_paid(objective, reward, text)
        if objective.only is not None:  # score only completions whose reward from another objective (`only`) is 1
            reward = remove_rewards(reward, verdicts[objective.only].value_n != 1.0, Status.UNSCORED)
        rewards[objective.name], verdicts[objective.name] = (reward, reward) if settle is None else settle(objective, reward)
    all_scores = as_scores(rewards, *read_outcomes(objectives, text, columns=columns))
    if not (measure_names := measures_of(objectives)):
        return all_scores
    costs = [reward.measured_nc for reward in rewards.values() if reward.measured_nc is not None]
    return replace(all_scores, measured_nc=torch.cat(costs, dim=1), measures=measure_names)


def measures_of(objectives: Sequence[Objective]) -> tuple[str, ...]:
    """Return the names of the costs that reward functions report, such as the number of a judge's requests."""
    names_and_entries = [(objective.name, built_in(objective)) for objective in objectives]
    return tuple(f"{name}/{measure}" for name, entry in names_and_entries if entry is not None for measure in entry.measures)


def as_scores(scored: Scored, outcome_names: Sequence[str] = (), outcome_no: Float[Tensor, "n o"] | None = None) -> Scores:
    """Join the rewards of all objectives in one `Scores`. Refuse a reward that would overflow."""

    def side_by_side(attribute: str) -> Tensor:
        columns_and_nans = [(getattr(reward, attribute), torch.full_like(reward.value_n, NAN)) for reward in scored.values()]
        return torch.stack([nan_n if column is None else column for column, nan_n in columns_and_nans], dim=1)

    reward_nm, status_nm = side_by_side("value_n"), side_by_side("status_n")
    reward_by_outcome_nmo = side_by_side("by_outcome_n2")
    stated_nm, unused_nm = side_by_side("stated_n"), side_by_side("unused_n")
    is_too_large_nm = reward_nm.abs() > LARGEST
    if is_too_large_nm.any():
        n, m = is_too_large_nm.nonzero()[0].tolist()
        raise RewardError(
            f"Objective '{tuple(scored)[m]}' gives completion {n} of {len(reward_nm)} the reward {float(reward_nm[n, m]):g}. "
            f"Beyond {LARGEST:g} credit overflows. Return a smaller number, or None for no reward."
        )
    empty_notes = np.full(len(reward_nm), None)
    note_columns = [empty_notes if reward.note_n is None else reward.note_n for reward in scored.values()]
    note_nm = np.stack(note_columns, axis=1) if any(column is not empty_notes for column in note_columns) else None
    outcome_fields = (tuple(outcome_names), outcome_no if outcome_names else None)
    return Scores(tuple(scored), reward_nm, status_nm, reward_by_outcome_nmo, *outcome_fields, stated_nm, unused_nm, note_nm)


def score_one(objective: Objective, text: Texts, *, columns: Columns, scored: Scored) -> Reward:
    """Score every completion by one objective. `scored` holds the rewards of the objectives before it."""
    _check_given(objective, scored)
    awaited_reward = _await_early([objective], text, columns).get(objective.name)
    return _only_paid(objective, awaited_reward or _call(objective, text, columns, scored, {}), text)


def _call(objective: Objective, text: Texts, columns: Columns, scored: Scored, call_results: dict[Any, Any]) -> Reward:
    """Score every completion with a reward function that is not async. Objectives share `call_results`."""
    convention = calling_convention(objective)
    if convention is None:
        batch_call, reward_label, advice = _batch_call(objective, text, columns, scored)
        return checked_reward(called(batch_call, subject=reward_label, text=text, advice=advice), objective, len(text))
    function_label = label_of_function(objective)
    if (call_key := _call_key(objective)) not in call_results:
        with restore_process(function_label, text), named_errors(function_label, len(text), _ADVICE):
            call_results[call_key] = call_items(item_calls(objective, convention, text, columns))
    return as_reward(objective, convention, call_results[call_key], len(text))


def _only_paid(objective: Objective, reward: Reward, text: Texts) -> Reward:
    """Remove rewards of completions without rewarded blocks (`pays`). Refuse a wrong number of rewards or measured costs."""
    size, value_count, measure_count = len(text), len(reward.value_n), len(measures_of([objective]))
    cost_nc = torch.zeros(size, measure_count).double() if reward.measured_nc is None else reward.measured_nc
    subject = f"The reward of objective '{objective.name}'"
    possible_faults = {
        f"{subject} returned {value_count} numbers for {size} completions. Return one number for each.": value_count != size,
        f"{subject} returned {cost_nc.shape[1]} measured costs for each completion, but names {measure_count} costs. Name each "
        "cost in register(..., measures=[NAME, ...]), or return no costs.": cost_nc.shape[1] != measure_count,
    }
    refuse(possible_faults, RewardError)
    is_paid_n = torch.tensor([bool(present(blocks, objective.pays)) for blocks in text], dtype=torch.bool)
    return replace(reward, measured_nc=cost_nc).only_where(is_paid_n)


def _batch_call(objective: Objective, text: Texts, columns: Columns, scored: Scored) -> tuple[partial[Any], str, str]:
    """Return a call that rewards the whole batch and, for error messages, a name and advice."""
    if not isinstance(objective.reward, str):
        advice = "Return None for a completion that has no reward."
        return reward_call(objective, text, columns), label_of_function(objective), advice
    built_in_reward = REWARDS.find(objective.reward)
    _check_options(objective, built_in_reward)
    judge_option = {} if built_in_reward.judged_by is None else {built_in_reward.judged_by: judge_of(objective)}
    call_options = {"columns": columns, "scored": scored, **objective.options, **judge_option}
    batch_call = partial(built_in_reward.function, text, pays=objective.pays, **call_options)
    return batch_call, f"Objective '{objective.name}': the reward '{objective.reward}'", _ADVICE


def _check_callable(objectives: Sequence[Objective], text: Texts) -> None:
    """Refuse an objective if a secret in its options was replaced by <hidden>, or if it rewards an unknown block."""
    for objective in objectives:
        if secret_keys := hidden_names(objective.options):
            raise RecipeError(
                f"Objective '{objective.name}' has the option '{secret_keys[0]}', which holds {HIDDEN} in place of a "
                f"secret. Set the secret again in the recipe. Otherwise the reward gets the word {HIDDEN}."
            )
        if text:
            _check_pays(objective, text[0])


def waits(objective: Objective) -> bool:
    """Return whether an objective's reward function is async."""
    if (built_in_reward := built_in(objective)) is not None:
        return is_async(built_in_reward.function)
    convention = calling_convention(objective)
    return is_async(objective.reward if convention is None else convention.prepare(objective.reward))


async def await_rewards(objectives: Sequence[Objective], text: Texts, columns: Columns) -> dict[str, Reward]:
    """Await the async rewards of all objectives at once, on the running event loop. `score_all` takes them as `recorded`."""
    _check_callable(objectives, text)
    future_by_call: dict[Any, asyncio.Future[Any]] = {}
    rewards = await together([_await_one(objective, text, columns, future_by_call) for objective in objectives])
    return {objective.name: reward for objective, reward in zip(objectives, rewards, strict=True)}


async def _await_one(objective: Objective, text: Texts, columns: Columns, futures: dict[Any, asyncio.Future[Any]]) -> Reward:
    """Score every completion with an async reward function. Several objectives share the calls in `futures`."""
    convention = calling_convention(objective)
    if convention is None:
        batch_call, reward_label, error_advice = _batch_call(objective, text, columns, {})
        with named_errors(reward_label, len(text), error_advice, batch_call):
            return checked_reward(await with_own_copies(batch_call)(), objective, len(text))
    if (call_key := _call_key(objective)) not in futures:
        item_call_by_index = item_calls(objective, convention, text, columns)
        futures[call_key] = asyncio.ensure_future(await_items(objective, item_call_by_index))
    return as_reward(objective, convention, await futures[call_key], len(text))


def _await_early(objectives: Sequence[Objective], text: Texts, columns: Columns) -> dict[str, Reward]:
    """Check all objectives, then await their async reward functions at once."""
    _check_callable(objectives, text)
    waiting_objectives = [objective for objective in objectives if waits(objective)]
    if not waiting_objectives:
        return {}
    objectives_text = ", ".join(f"'{objective.name}'" for objective in waiting_objectives)
    with restore_process(f"A reward function that is awaited ({objectives_text})", text):
        return run(await_rewards(waiting_objectives, text, columns))


def _call_key(objective: Objective) -> tuple[Any, ...]:
    """Return a key by which several objectives can share one call of their reward function."""
    options_text = json.dumps({**objective.options}, default=id, skipkeys=True)  # `repr` leaves out numbers of long arrays
    return id(objective.reward), repr(objective.options), options_text, objective.pays


def _complete_known(objective: Objective, recorded: Reward, text: Texts, *, columns: Columns, scored: Scored) -> Reward:
    """Add the outcomes and statuses that scoring the text again gives to an objective's recorded rewards."""
    if judge_of(objective) is None:
        return recorded
    new_reward = score_one(objective, text, columns=columns, scored=scored)
    # Recordings do not say why a reward is missing, but the text may show it: then take the status of `new_reward`.
    has_failed_n = (recorded.status_n == Status.ERROR) | (recorded.status_n == Status.UNSCORED)
    is_unstated_n = (new_reward.status_n == Status.ABSENT) | (new_reward.status_n == Status.UNPARSABLE)
    status_n = torch.where(has_failed_n & is_unstated_n, new_reward.status_n, recorded.status_n)
    return replace(recorded, status_n=status_n, by_outcome_n2=new_reward.by_outcome_n2, stated_n=new_reward.stated_n)


def check_objectives(objectives: Sequence[Objective], layout: Layout, *, recorded: Collection[str] = ()) -> None:
    """Refuse objectives that do not fit each other or the layout. Recorded rewards need no tags and blocks."""
    _check_order(objectives)
    judge_by_objective = {objective.name: judge_of(objective) for objective in objectives}
    for position, objective in enumerate(objectives):
        _check_pays(objective, layout.keys)
        for name in objective.outcomes:
            if judge_by_objective.get(name) is not None:
                raise RecipeError(
                    f"Objective '{objective.name}' has given: {name}, so only completions with the same reward '{name}' are "
                    f"compared. But hardly any two completions have the same '{name}'. Set given: {judge_by_objective[name]}, on "
                    f"which '{name}' depends. Or set baseline: group."
                )
        if (built_in_reward := built_in(objective)) is None:
            if objective.name not in recorded:  # a recorded reward's function may be impossible to import
                check_call(objective, calling_convention(objective), layout.keys)
            continue
        _check_options(objective, built_in_reward)
        if (judge_name := judge_by_objective[objective.name]) is not None:
            _check_earlier(objective, judge_name, [earlier_objective.name for earlier_objective in objectives[:position]])
        if objective.name not in recorded:
            _check_reading(objective, built_in_reward, layout)


def written_out(objectives: Sequence[Objective], layout: Layout) -> tuple[Objective, ...]:
    """Make one objective for each criterion, and for each block that `each` matches. Replace block patterns by names."""
    return tuple(
        block_objective
        for objective in objectives
        for function_objective in _by_function(objective)
        for criterion_objective in with_criteria(function_objective, layout)
        for block_objective in _by_block(criterion_objective, layout)
    )


def _by_function(objective: Objective) -> list[Objective]:
    """Return an objective for each function of a verifiers rubric, with its weight. Other objectives do not change."""
    if not isinstance(objective.reward, Rubric):
        return [objective]
    prefix = "" if objective.name == "reward" else f"{objective.name}."  # leave out the default name "reward"
    return [
        replace(objective, reward=function, name=f"{prefix}{function.__name__}", weight=objective.weight * weight)
        for function, weight in rubric_functions(objective.reward)
    ]


def _by_block(objective: Objective, layout: Layout) -> list[Objective]:
    """Split an objective with the pattern `each` into one objective for each matching block."""
    if objective.reward == "format" and layout.tags:  # `format` must also know the tags of blocks that a completion lacks
        objective = replace(objective, options={"tags": list(dict.fromkeys(layout.tags)), **objective.options})
    paid_blocks: dict[str, None] = {}
    for name in objective.pays:
        paid_blocks |= dict.fromkeys(layout.matching(name) if "*" in name and name not in layout.names else (name,))
    if objective.each is None:
        return [replace(objective, pays=tuple(paid_blocks))]
    objectives: list[Objective] = []
    for block in layout.matching(objective.each):
        # List the nearest earlier block first, because `back_off` drops outcomes from the end of `given`.
        earlier_names = tuple(earlier_objective.name for earlier_objective in reversed(objectives))
        given_outcomes = tuple(chain(*(earlier_names if entry == EARLIER else (entry,) for entry in objective.given)))
        changed_fields: dict[str, Any] = {"name": f"{objective.name}.{block}", "given": given_outcomes}
        # Without outcomes, all completions of the group are compared.
        if not given_outcomes and objective.baseline in ("outcome", "blended"):
            changed_fields |= {"baseline": "group", "back_off": None}
        changed_fields["pays"] = tuple(dict.fromkeys(block if name == OWN else name for name in paid_blocks)) or (block,)
        changed_fields["options"] = {**_block_option(objective, block, layout), **objective.options}
        objectives.append(replace(objective, each=None, **changed_fields))
    return objectives


def _block_option(objective: Objective, block: str, layout: Layout) -> dict[str, Any]:
    """Return the option that tells an objective's reward function which block or tag to score."""
    built_in_reward = built_in(objective)
    if built_in_reward is None:
        sees_part = calling_convention(objective) is not None and objective.options.get("sees") == "part"
        if not sees_part and "block" not in objective.options and not takes(objective, "block"):
            raise RecipeError(
                f"Objective '{objective.name}' has 'each', but its reward function does not know which block it scores, "
                f"so all blocks would get the same number. Give the function a parameter 'block': def f(blocks, block)."
            )
    if built_in_reward is None or "block" in built_in_reward.options:
        return {"block": block}
    if not built_in_reward.tags or any(option in objective.options for option in built_in_reward.tags):
        return {}
    block_tags = layout.keys[block]
    tag_option = built_in_reward.tags[0]
    if len(block_tags) != 1:
        raise RecipeError(
            f"Objective '{objective.name}' needs one tag of each block, but block '{block}' has "
            f"{', '.join(block_tags) or 'no tags'}. Choose one with options: {{{tag_option}: {(block_tags or ['answer'])[0]}}}."
        )
    return {tag_option: block_tags[0]}


def _check_order(objectives: Sequence[Objective]) -> None:
    if not objectives:
        raise RecipeError("There is no objective. Add at least one, for example {reward: correct, pays: [solution]}.")
    objective_names = [objective.name for objective in objectives]
    for position, objective in enumerate(objectives):
        if objective.name in objective_names[:position]:
            raise RecipeError(f"Two objectives are called '{objective.name}'. Give one of them another 'name'.")
        _check_given(objective, objective_names[:position])
        if objective.only is not None:
            _check_earlier(objective, objective.only, objective_names[:position], need="for its field 'only'")
        for name in objective.outcomes:
            if name in objective_names and name in OUTCOMES:
                raise RecipeError(f"'{name}' is both an objective and an outcome. Give the objective another 'name'.")


def _check_given(objective: Objective, earlier: Collection[str]) -> None:
    for entry, name in zip(objective.given, objective.outcomes, strict=True):
        if name not in earlier:
            if isinstance(entry, str) and ":" not in entry and not is_registered(entry, kind="outcome"):
                _check_earlier(objective, entry, earlier)
            find_outcome(entry)


def _check_earlier(objective: Objective, name: str, earlier: Collection[str], *, need: str | None = None) -> None:
    if name not in earlier:
        functions_text = "" if need else f" Outcome functions are {', '.join(sorted(OUTCOMES))} and 'module:function'."
        need = need or "as an outcome"
        raise RecipeError(
            f"Objective '{objective.name}' needs '{name}' {need}, but no earlier objective has this name. Earlier objectives: "
            f"{', '.join(earlier) or 'none'}. Move '{name}' before '{objective.name}', or correct the name.{functions_text}"
        )


def _check_pays(objective: Objective, blocks: Collection[str]) -> None:
    for block in objective.pays:
        if block not in blocks:
            raise RecipeError(f"Objective '{objective.name}' pays '{block}'. {unknown('block', block, blocks)}")


def _check_options(objective: Objective, entry: BuiltIn) -> None:
    for option in objective.options:
        check_known(f"option of reward '{objective.reward}' called", option, entry.options)
    entry.check({**entry.options, **objective.options})


def _check_reading(objective: Objective, entry: BuiltIn, layout: Layout) -> None:
    """Refuse a built-in reward that lacks its package or cannot read its block."""
    options = {**entry.options, **objective.options}
    entry.ready(options)
    option_blocks = [options[name] for name in entry.blocks]
    for block in (*option_blocks, objective.options.get("block")):
        if block is not None and block not in layout.keys:
            raise RecipeError(f"Objective '{objective.name}' reads block '{block}'. {unknown('block', block, layout.keys)}")
    # If options name blocks, each of them needs the tag, and so does `pays[0]`. Otherwise one rewarded block is enough.
    block_groups = [(block,) for block in (objective.pays[0], *option_blocks)] if option_blocks else [objective.pays]
    for tag, blocks in product((options[name] for name in entry.tags), block_groups):
        block_tags = [key for block in blocks for key in layout.keys[block]]
        if tag and tag not in block_tags:
            raise RecipeError(
                f"Objective '{objective.name}' finds no tag '{tag}' in {' or '.join(sorted({*map(any_index, blocks)}))}. The tags "
                f"there are: {', '.join(dict.fromkeys(map(any_index, block_tags))) or 'none'}. Add the tag '{tag}' to "
                "the layout, or set the option 'tag'."
            )
    for tag in (options["tags"] or ()) if objective.reward == "format" else ():
        check_known("tag of the layout", tag, layout.tags)
    for part in (part for part in layout.parts if layout.names[part.block] in objective.pays):
        reward_label = f"Objective '{objective.name}': the reward '{objective.reward}'"
        if entry.segmenters and part.segmenter not in entry.segmenters:
            raise RecipeError(
                f"{reward_label} can only read blocks from the segmenter {' or '.join(entry.segmenters)}, but block "
                f"'{layout.names[part.block]}' is from {part.segmenter}. Use a reward that reads any block's text, such as "
                f"json_schema, or a function of your own."
            )
        if objective.reward == "format" and part.index is not None:
            raise RecipeError(
                f"{reward_label} cannot read block '{layout.names[part.block]}', which may be repeated. Set 'pays' to "
                f"other blocks, or leave this reward out."
            )
