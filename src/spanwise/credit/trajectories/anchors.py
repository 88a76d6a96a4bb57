"""Anchor states: which step rows of one prompt stand in the same state, exactly or by the similarity of their text."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from difflib import SequenceMatcher
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from spanwise.credit.strata import group_index
from spanwise.errors import AlignmentError, RecipeError

Anchors = Sequence[Hashable] | Int[Tensor, " s"]


def anchor_groups(group_s: Int[Tensor, " s"], anchor_s: Anchors, *, similarity: float | None = None) -> Int[Tensor, " s"]:
    """Put the rows of one prompt that stand in the same state into one stratum; -1 for a row whose state is not known.

    Args:
        group_s: prompt ids; states of different prompts are never the same.
        anchor_s: the state each step starts from: anything hashable (None: not known), or a tensor of integers, each a state.
        similarity: None compares states exactly. A number in (0, 1) compares texts: row by row, a state joins the first stratum
            whose first member it resembles, `difflib.SequenceMatcher(None, state, first).ratio() >= similarity`, or else opens a
            stratum of its own. This is the one place where the order of rows matters.

    Raises:
        AlignmentError: sizes differ.
        RecipeError: a state that cannot be compared, or a similarity outside (0, 1).

    Example:
        >>> anchor_groups(torch.tensor([0, 0, 0, 1]), ["door", "key", "door", "door"])
        tensor([0, 1, 0, 2])
        >>> anchor_groups(torch.tensor([0, 0, 0]), ["a red door", "a key", "a red door."], similarity=0.9)
        tensor([0, 1, 0])
    """
    if len(anchor_s) != len(group_s):
        raise AlignmentError(
            f"There are {len(anchor_s)} anchor states for {len(group_s)} prompt ids; give one of each to every row."
        )
    states: list[Any] = anchor_s.tolist() if isinstance(anchor_s, Tensor) else list(anchor_s)
    known = [state is not None for state in states]
    _check(states, known, similarity)
    prompts = group_s.tolist()
    names = states if similarity is None else _alike(prompts, states, known, similarity)
    stratum_s = group_index(list(zip(prompts, names, strict=True))).to(group_s.device)
    return torch.where(torch.tensor(known, dtype=torch.bool, device=group_s.device), stratum_s, -1)


def _check(states: list[Any], known: list[bool], similarity: float | None) -> None:
    if similarity is not None and not 0.0 < similarity < 1.0:
        raise RecipeError(f"similarity={similarity} must lie between 0 and 1; use None to compare states exactly.")
    wanted = Hashable if similarity is None else str
    for row, (state, is_known) in enumerate(zip(states, known, strict=True)):
        if is_known and not isinstance(state, wanted):
            kind = type(state).__name__
            advice = (
                "which cannot be compared by equality; turn it into a string or a tuple"
                if similarity is None
                else "and only texts have a similarity; use similarity=None"
            )
            raise RecipeError(f"The anchor state of row {row} is a {kind}, {advice}.")


def _alike(prompts: list[int], states: list[Any], known: list[bool], similarity: float) -> list[int]:
    """Number of the stratum of each text inside its prompt."""
    firsts: dict[int, list[SequenceMatcher]] = {}
    seen: dict[tuple[int, str], int] = {}
    numbers = []
    for prompt, state, is_known in zip(prompts, states, known, strict=True):
        if not is_known:
            numbers.append(-1)
            continue
        if (prompt, state) not in seen:  # a text met before goes where it went before
            seen[prompt, state] = _place(state, firsts.setdefault(prompt, []), similarity)
        numbers.append(seen[prompt, state])
    return numbers


def _place(state: str, firsts: list[SequenceMatcher], similarity: float) -> int:
    for number, matcher in enumerate(firsts):
        matcher.set_seq1(state)
        # Two cheap upper bounds of the ratio come first.
        if min(matcher.real_quick_ratio(), matcher.quick_ratio()) >= similarity and matcher.ratio() >= similarity:
            return number
    firsts.append(SequenceMatcher(None, "", state))
    return len(firsts) - 1
