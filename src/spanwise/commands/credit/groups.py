"""Which completions of a rollout file are compared: the groups of the file, cut where a prompt was drawn twice in one step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from spanwise.credit import group_index
from spanwise.recipe import Recipe, load
from spanwise.rollouts import RolloutTable


def compared_groups(
    table: RolloutTable, recipe: Recipe, own: Path | None, overrides: Mapping[str, Any]
) -> tuple[Int[Tensor, " n"], list[str]]:
    """The groups as they are compared, and what the user should know about them.

    A run of ours is cut by its own group size, whatever recipe it is credited with; a file of another trainer by the group
    size that the recipe or the user names, if one does.
    """
    if table.rollout_n is None:
        return _compared(table.group_n, table.step_n, recipe, own, overrides, keyed=table.keyed)
    first_j = torch.from_numpy(
        np.unique(table.rollout_n.numpy(), return_index=True)[1]
    )  # a rollout of several rows is one member
    group_j, told = _compared(table.group_n[first_j], table.step_n[first_j], recipe, own, overrides, keyed=table.keyed)
    return group_j[group_index(table.rollout_n)], told


def _compared(
    group_n: Tensor, step_n: Tensor, recipe: Recipe, own: Path | None, overrides: Mapping[str, Any], *, keyed: bool
) -> tuple[Int[Tensor, " n"], list[str]]:
    if own is not None:
        sizes = {name: overrides[name] for name in ("group_size", "prompts") if name in overrides}
        run = load(own, sizes)
        group_n = split_groups(group_n, run.group_size)
        return group_n, [*_small(group_n, run.group_size), *_batches(step_n, run)]
    if "group_size" in recipe.model_fields_set:
        group_n = split_groups(group_n, recipe.group_size)
        return group_n, _small(group_n, recipe.group_size)
    return group_n, [] if keyed else _uneven(step_n, group_n)


def split_groups(group_n: Int[Tensor, " n"], size: int) -> Int[Tensor, " n"]:
    """Cut groups that are larger than the group size, as a prompt drawn twice in one step makes them, in file order.

    >>> split_groups(torch.tensor([0, 0, 1, 1, 0, 0]), 2)
    tensor([0, 0, 2, 2, 1, 1])
    """
    seen: dict[int, int] = {}
    keys = []
    for group in group_n.tolist():
        place = seen[group] = seen.get(group, -1) + 1
        keys.append((group, place // size))
    order = {key: index for index, key in enumerate(sorted(set(keys)))}
    return torch.tensor([order[key] for key in keys], dtype=torch.long)


def _small(group_n: Tensor, size: int) -> list[str]:
    small = int((torch.unique(group_n, return_counts=True)[1] < size).sum())
    return (
        [f"{small} groups have fewer than {size} completions, so their credit may differ from the run's."] if small else []
    )


def _batches(step_n: Tensor, run: Recipe) -> list[str]:
    """Where the steps of a run of ours are not whole."""
    batch = run.prompts * run.group_size
    sizes = torch.unique(step_n, return_counts=True)[1]
    if not bool((sizes != batch).any()):
        return []
    return [
        f"Steps hold {int(sizes.min())} to {int(sizes.max())} completions and a batch of the run has {batch}; what is compared "
        "with the whole batch may differ."
    ]


def _uneven(step_n: Tensor, group_n: Tensor) -> list[str]:
    """Where the groups of one step differ in size, so that a prompt may have been drawn twice."""
    sizes = Counter(zip(step_n.tolist(), group_n.tolist(), strict=True))
    by_step: dict[int, set[int]] = {}
    for (step, _), size in sizes.items():
        by_step.setdefault(step, set()).add(size)
    if all(len(found) == 1 for found in by_step.values()):
        return []
    counts = Counter(sizes.values())
    usual = max(counts, key=lambda size: (counts[size], -size))
    return [
        f"Groups hold {min(counts)} to {max(counts)} completions; a prompt drawn twice in a step is one group here: where that "
        f"is so, give --set group_size={usual if usual > 1 else 'N'}."
    ]
