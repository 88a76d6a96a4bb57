"""Write a scheme's credit into Tinker's training examples (datums), as one advantage per token.

The package tinker is not imported: a datum is any object or dict with `loss_fn_inputs`, also that of another server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spanwise.credit import Trajectory, Turn
from spanwise.errors import AlignmentError, check_known, refuse
from spanwise.pipeline import advantages, credit_batch, read
from spanwise.scheme import Scheme
from spanwise.segment import Vocabulary
from spanwise.trajectories import turn_batch
from spanwise.types import Status

__all__ = ["credit_datums"]


def credit_datums(
    groups: Sequence[Sequence[Any]],
    scheme: Scheme,
    vocabulary: Vocabulary,
    *,
    rewards: Mapping[str, Sequence[Sequence[float | Status]]] | None = None,
    columns: Mapping[str, Sequence[Any]] | None = None,
) -> list[list[list[Any]]]:
    """Copy datums of Tinker, with the credit of a scheme as the advantage of each token.

    Tinker's losses are plain sums over tokens, for which the numbers of `pipeline.advantages` are made.

    Args:
        groups: the rollouts of each prompt; a rollout is one datum, or a list with one datum per turn. A datum's `target_tokens`
            are its ids, and its `mask` or `weights` mark the sampled tokens.
        scheme: the rule of credit.
        vocabulary: the bytes of every token id.
        rewards: objective -> the reward of every rollout, nested like `groups`: a number, or the `Status` that says why there is
            none. The other objectives are computed from the text.
        columns: the columns that rewards read, one value per group.

    Returns:
        Copies of the datums with new `advantages`, nested as groups, rollouts and datums. The advantages are float32, and 0 at
        tokens that no model sampled.

    Raises:
        AlignmentError: rewards or columns are not nested like `groups`; a datum has no mask, or one of another length.
        RecipeError: rewards of an objective that the scheme does not have, or that pays single turns; a scheme with a mode.

    Example:
        >>> from spanwise import Layout
        >>> inputs = [{"target_tokens": [9, i], "mask": [0., 1.], "advantages": [0., 0.]} for i in (1, 2)]
        >>> group = [{"model_input": [3, 9], "loss_fn_inputs": datum_inputs} for datum_inputs in inputs]
        >>> scheme = Scheme.preset("rloo", Layout({"all": ["answer"]}), per="completion")
        >>> credited = credit_datums([group], scheme, Vocabulary((b"x",) * 10), rewards={"correct": [[1., 0.]]})
        >>> [datum["loss_fn_inputs"]["advantages"] for rollout in credited[0] for datum in rollout]
        [[0.0, 1.0], [0.0, -1.0]]
    """
    rewards, columns = rewards or {}, columns or {}
    all_rollouts = chain.from_iterable(groups)
    rollouts = [list(rollout) if isinstance(rollout, (list, tuple)) else [rollout] for rollout in all_rollouts]
    group_of_rollout = [g for g, group in enumerate(groups) for _ in group]
    group_sizes = [len(group) for group in groups]
    modes_text = ", ".join(mode.name for mode in scheme.modes)
    refuse(
        {
            f"The scheme sets {modes_text}, which does not work with Tinker's datums. Leave it out, or train with TRL, verl "
            "or SkyRL.": modes_text,
            **{
                f"Objective '{objective.name}' has scope: turn, but `rewards` holds one reward for all turns of a rollout. Remove "
                "the scope.": objective.scope == "turn" and objective.name in rewards
                for objective in scheme.objectives
            },
        }
    )
    for name, values in rewards.items():
        check_known("objective", name, scheme.names)
        if (reward_counts := [len(group) for group in values]) != group_sizes:
            raise AlignmentError(
                f"The groups hold {group_sizes} rollouts, but {reward_counts} rewards of '{name}'. Give one per rollout."
            )
    for name, values in columns.items():
        if len(values) != len(groups):
            raise AlignmentError(f"Column '{name}' has {len(values)} values for {len(groups)} groups. Give one per group.")
    rollout_rewards = {name: list(chain.from_iterable(values)) for name, values in rewards.items()}
    trajectories = []
    for n, (group, rollout) in enumerate(zip(group_of_rollout, rollouts, strict=True)):
        turns = tuple(_turn(datum, n, turn_number) for turn_number, datum in enumerate(rollout))
        trajectories.append(Trajectory(n, group, turns, {name: values[n] for name, values in rollout_rewards.items()}))
    # A pandas column looks up cells by label, but a list by position.
    cells_by_column = {name: list(values) for name, values in columns.items()}
    rollout_columns = {name: [cells[g] for g in group_of_rollout] for name, cells in cells_by_column.items()}
    batch, recorded_blocks = turn_batch(trajectories, columns=rollout_columns)
    if all(len(rollout) == 1 for rollout in rollouts):
        batch = replace(batch, steps=None)  # each row is a whole rollout, so rows need no step numbers
    reading = read(batch, scheme, vocabulary, recorded=recorded_blocks)
    advantage_rows = iter(advantages(credit_batch(reading, batch, scheme), reading.spans, scheme).tolist())
    credited_rollouts = ([_credited(datum, next(advantage_rows)) for datum in rollout] for rollout in rollouts)
    return [[next(credited_rollouts) for _ in group] for group in groups]


def _turn(datum: Any, rollout: int, number: int) -> Turn:
    """Build a `Turn` from a Tinker datum. Refuse a datum without a mask."""
    loss_inputs = _get(datum, "loss_fn_inputs")
    token_ids = [int(value) for value in _values(_get(loss_inputs, "target_tokens"))]
    mask = _values(_get(loss_inputs, "mask")) or _values(_get(loss_inputs, "weights"))
    refuse(
        {
            f"Datum {number} of rollout {rollout} has neither 'mask' nor 'weights', so spanwise cannot tell which of its "
            f"{len(token_ids)} tokens were sampled. Add a mask to its loss_fn_inputs.": not mask,
            f"Datum {number} of rollout {rollout} has {len(token_ids)} target tokens and {len(mask)} mask values; give one mask "
            "value per token.": len(mask) != len(token_ids),
        },
        AlignmentError,
    )
    return Turn((), token_ids, [int(value != 0) for value in mask])


def _credited(datum: Any, advantage_t: Sequence[float]) -> Any:
    """Copy a datum of Tinker with new advantages. `advantage_t` may end with padding."""
    loss_inputs = _get(datum, "loss_fn_inputs")
    target_tokens = _get(loss_inputs, "target_tokens")
    old_advantages = _get(loss_inputs, "advantages")
    container_template = target_tokens if old_advantages is None else old_advantages
    new_advantages = _like(container_template, advantage_t[: len(_values(target_tokens))])
    return _with(datum, "loss_fn_inputs", _with(loss_inputs, "advantages", new_advantages))


def _get(record: Any, name: str) -> Any:
    return record.get(name) if isinstance(record, Mapping) else getattr(record, name, None)


def _with(record: Any, name: str, value: Any) -> Any:
    """Copy a dict, a pydantic model or a dataclass with one field changed."""
    if isinstance(record, Mapping):
        return {**record, name: value}
    return record.model_copy(update={name: value}) if hasattr(record, "model_copy") else replace(record, **{name: value})


def _values(numbers: Any) -> list[Any]:
    """List the numbers of a list, tensor or other container."""
    if isinstance(numbers, (Tensor, np.ndarray)):
        return numbers.tolist()
    contained_numbers = _get(numbers, "data")
    return list(numbers or ()) if contained_numbers is None else list(contained_numbers)


def _like(numbers: Any, values: Sequence[float]) -> Any:
    """Convert values to float32, in a container of the same type as `numbers`."""
    float_array = np.array(values, dtype=np.float32)
    if isinstance(numbers, Tensor):
        return torch.from_numpy(float_array)
    if isinstance(numbers, np.ndarray):
        return float_array
    if isinstance(numbers, Mapping):
        return {**numbers, "data": float_array.tolist(), **({"dtype": "float32"} if "dtype" in numbers else {})}
    if hasattr(numbers, "from_numpy"):
        return type(numbers).from_numpy(float_array)
    return _with(numbers, "data", float_array.tolist()) if hasattr(numbers, "data") else float_array.tolist()
