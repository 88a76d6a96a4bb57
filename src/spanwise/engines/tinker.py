"""Credit for the datums of Tinker and of servers with the same format; their losses take one advantage per token.

Nothing of tinker is imported: a datum is anything with `loss_fn_inputs`, as an object or as a dict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spanwise.credit import Trajectory, Turn
from spanwise.errors import AlignmentError, refuse
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
    """Set the advantages of datums to the credit of a scheme, token by token.

    Tinker's losses are plain sums over tokens, and so is the objective of what `pipeline.advantages` gives.

    Args:
        groups: for each prompt its rollouts; a rollout is a datum, or the list of datums that its turns became. Which tokens were
            sampled stands in a datum's `mask`, or in its `weights`; its `target_tokens` are the ids.
        scheme: the rule.
        vocabulary: the bytes of every id.
        rewards: objective -> reward of every rollout, nested as the groups are: a number, or the `Status` that says why there is
            none. Objectives that are not among them are computed from the text.
        columns: what rewards read, one value per group.

    Returns:
        New datums, group by group and rollout by rollout, in lists; all but their `advantages` is that of the given ones. They are
        float32, and 0 at tokens that no model sampled.

    Raises:
        AlignmentError: rewards or columns that are not nested as the groups are; a datum that does not say which tokens were
            sampled, or of how many.

    Example:
        >>> from spanwise import Layout
        >>> inputs = [{"target_tokens": [9, i], "mask": [0., 1.], "advantages": [0., 0.]} for i in (1, 2)]
        >>> group = [{"model_input": [3, 9], "loss_fn_inputs": one} for one in inputs]
        >>> scheme = Scheme.preset("rloo", Layout({"all": ["answer"]}), per="completion")
        >>> found = credit_datums([group], scheme, Vocabulary((b"x",) * 10), rewards={"correct": [[1., 0.]]})
        >>> [datum["loss_fn_inputs"]["advantages"] for rollout in found[0] for datum in rollout]
        [[0.0, 1.0], [0.0, -1.0]]
    """
    rollouts = [list(datums) if isinstance(datums, (list, tuple)) else [datums] for group in groups for datums in group]
    group_of_rollout = [g for g, group in enumerate(groups) for _ in group]
    sizes = [len(group) for group in groups]
    for name, values in (rewards or {}).items():
        if (counts := [len(group) for group in values]) != sizes:
            raise AlignmentError(
                f"Rewards '{name}' come in groups of {counts}, but the groups hold {sizes} rollouts; give each rollout one."
            )
    for name, values in (columns or {}).items():
        if len(values) != len(groups):
            raise AlignmentError(f"Column '{name}' has {len(values)} values for {len(groups)} groups; give each group one.")
    rollout_rewards = {name: [value for group in values for value in group] for name, values in (rewards or {}).items()}
    trajectories = [
        Trajectory(
            n,
            group_of_rollout[n],
            tuple(_turn(datum, n, i) for i, datum in enumerate(rollout)),
            {name: values[n] for name, values in rollout_rewards.items()},
        )
        for n, rollout in enumerate(rollouts)
    ]
    rollout_columns = {name: [values[g] for g in group_of_rollout] for name, values in (columns or {}).items()}
    batch, recorded = turn_batch(trajectories, columns=rollout_columns)
    if all(len(rollout) == 1 for rollout in rollouts):
        batch = replace(batch, steps=None)  # rows are whole rollouts, so methods over tokens can run
    reading = read(batch, scheme, vocabulary, recorded=recorded)
    advantage_rows = iter(advantages(credit_batch(reading, batch, scheme), reading.spans, scheme).tolist())
    new_datums = iter([_credited(datum, next(advantage_rows)) for datum in rollout] for rollout in rollouts)
    return [[next(new_datums) for _ in group] for group in groups]


def _turn(datum: Any, rollout: int, number: int) -> Turn:
    """Turn a datum into a `Turn`; refuse a datum without a mask of its sampled tokens."""
    inputs = _get(datum, "loss_fn_inputs")
    ids = [int(value) for value in _values(_get(inputs, "target_tokens"))]
    mask = _values(_get(inputs, "mask")) or _values(_get(inputs, "weights"))
    refuse(
        {
            f"Datum {number} of rollout {rollout} has neither 'mask' nor 'weights', so nothing says which of its {len(ids)} tokens "
            f"were sampled; add one of them to its loss_fn_inputs.": not mask,
            f"Datum {number} of rollout {rollout} has {len(ids)} target tokens and {len(mask)} mask values; give each token one.": (
                len(mask) != len(ids)
            ),
        },
        AlignmentError,
    )
    return Turn((), ids, [int(value != 0) for value in mask])


def _credited(datum: Any, advantage_t: Sequence[float]) -> Any:
    """Copy a datum with new advantages, in the number type of the old ones; `row` may be padded."""
    inputs = _get(datum, "loss_fn_inputs")
    tokens, old = _get(inputs, "target_tokens"), _get(inputs, "advantages")
    new = _like(tokens if old is None else old, advantage_t[: len(_values(tokens))])
    return _with(datum, "loss_fn_inputs", _with(inputs, "advantages", new))


def _get(record: Any, name: str) -> Any:
    return record.get(name) if isinstance(record, Mapping) else getattr(record, name, None)


def _with(record: Any, name: str, value: Any) -> Any:
    """Copy a dict, a pydantic model or a dataclass with one field changed."""
    if isinstance(record, Mapping):
        return {**record, name: value}
    return record.model_copy(update={name: value}) if hasattr(record, "model_copy") else replace(record, **{name: value})


def _values(numbers: Any) -> list[Any]:
    """Return the numbers of a list, tensor, array or object with `data` as a list; empty for None."""
    if isinstance(numbers, (Tensor, np.ndarray)):
        return numbers.tolist()
    data = _get(numbers, "data")
    return list(numbers or ()) if data is None else list(data)


def _like(numbers: Any, values: Sequence[float]) -> Any:
    """Convert numbers to float32 in the same container type."""
    array = np.array(values, dtype=np.float32)
    if isinstance(numbers, Tensor):
        return torch.from_numpy(array)
    if isinstance(numbers, np.ndarray):
        return array
    if isinstance(numbers, Mapping):
        return {**numbers, "data": array.tolist(), **({"dtype": "float32"} if "dtype" in numbers else {})}
    if hasattr(numbers, "from_numpy"):
        return type(numbers).from_numpy(array)
    return _with(numbers, "data", array.tolist()) if hasattr(numbers, "data") else array.tolist()
