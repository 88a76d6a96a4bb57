"""Spans and rewards of a whole rollout file, worked out a part at a time: each layout once, each reward once."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from spanwise.engines.files import RolloutTable
from spanwise.errors import DataError, RecipeError, unknown
from spanwise.run.credit_arms import Arm
from spanwise.score import REWARDS, Objective, Reward, score_one
from spanwise.segment import Layout, segment
from spanwise.types import BlockText, Scores, Spans, Status

#: Places of a padded table that are worked on at a time.
AT_A_TIME = 1_000_000
_TAG = re.compile(r"<([A-Za-z_][\w.-]*)>")


@dataclass(frozen=True)
class Marked:
    """The spans of one layout over all completions; `block` lies flat, as the tokens of the table do."""

    names: tuple[str, ...]
    start_nk: Int[Tensor, "n k"]
    end_nk: Int[Tensor, "n k"]
    length_nk: Int[Tensor, "n k"]
    fault_n: Int[Tensor, " n"]
    block: Int[np.ndarray, " v"]

    def spans(self, table: RolloutTable, first: int, last: int) -> Spans:
        """The spans of the rows first..last - 1, padded; rows that were left out of the loss have none."""
        filled = table.tokens.filled(first, last)
        block_nt = np.full(filled.shape, -1, dtype=self.block.dtype)
        block_nt[filled] = table.tokens.with_values(self.block).slice(first, last)
        rows = slice(first, last)
        start_nk, end_nk, block = self.start_nk[rows], self.end_nk[rows], torch.from_numpy(block_nt)
        if table.learned_n is not None and not bool(table.learned_n[rows].all()):
            kept_n1 = table.learned_n[rows, None]
            start_nk, end_nk, block = start_nk * kept_n1, end_nk * kept_n1, block.masked_fill(~kept_n1, -1)
        return Spans(self.names, start_nk, end_nk, block, self.fault_n[rows])


@dataclass(frozen=True)
class Scored:
    """What the file says under every arm.

    Attributes:
        marked: layout -> its spans.
        scores: arm -> rewards of its objectives, in order.
        origin: objective -> where its reward comes from, in words.
        tagged: whether any completion has a block beyond the first, or anything in a tag.
    """

    marked: Mapping[Layout, Marked]
    scores: Mapping[str, Scores]
    origin: Mapping[str, str]
    tagged: bool


def score_file(table: RolloutTable, arms: Sequence[Arm], *, rewards: Mapping[str, str] | None = None) -> Scored:
    """Find the blocks and the rewards of every completion under every arm.

    A reward that the file records under the objective's name, or under the name that `rewards` gives, is taken from it; what
    it would be under the other outcome, and every other reward, is computed from the text.

    Args:
        table: N completions.
        arms: methods with their layouts and objectives.
        rewards: objective -> recorded reward; "text": compute it although there is one of its name.

    Raises:
        RecipeError: an unknown objective or recorded reward.
        DataError: a reward that needs a column which is not there.
    """
    taken = _taken(table, arms, rewards or {})
    origin = _check_sources(table, arms, taken)
    layouts = list(dict.fromkeys(arm.plan.layout for arm in arms))
    parts: dict[Layout, list[Spans]] = {layout: [] for layout in layouts}
    flat: dict[Layout, list[np.ndarray]] = {layout: [] for layout in layouts}
    found: dict[str, list[list[Reward]]] = {arm.name: [] for arm in arms}
    tagged = False
    for first, last in table.tokens.chunks(AT_A_TIME):
        ids, filled = table.tokens.padded(first, last)
        mask = np.zeros(filled.shape, dtype=np.bool_)
        mask[filled] = table.tokens.with_values(table.trainable).slice(first, last)
        known: dict[Any, Reward] = {}
        for layout in layouts:
            spans, text = segment(torch.from_numpy(ids), torch.from_numpy(mask), layout=layout, vocabulary=table.vocabulary)
            parts[layout].append(_small(spans))
            flat[layout].append(spans.block_nt.numpy()[filled])
            tagged = tagged or not layout.tags or _any_tag(spans, text)
            for arm in arms:
                if arm.plan.layout == layout:
                    found[arm.name].append(_rewards(table, slice(first, last), arm, text, taken, known))
    marked = {layout: _joined(parts[layout], flat[layout]) for layout in layouts}
    return Scored(marked, {arm.name: _scores(arm, found[arm.name]) for arm in arms}, origin, tagged)


def _small(spans: Spans) -> Spans:
    """The spans without their tokens, which are kept flat."""
    kept = Spans(spans.names, spans.start_nk, spans.end_nk, spans.block_nt[:, :0], spans.fault_n)
    vars(kept)["length_nk"] = spans.length_nk
    return kept


def _joined(parts: Sequence[Spans], flat: Sequence[np.ndarray]) -> Marked:
    return Marked(
        parts[0].names,
        torch.cat([part.start_nk for part in parts]),
        torch.cat([part.end_nk for part in parts]),
        torch.cat([part.length_nk for part in parts]),
        torch.cat([part.fault_n for part in parts]),
        np.concatenate(flat),
    )


def _scores(arm: Arm, parts: Sequence[Sequence[Reward]]) -> Scores:
    columns = list(zip(*parts, strict=True))
    return Scores(
        tuple(objective.name for objective in arm.plan.objectives),
        torch.stack([torch.cat([part.value_n for part in column]) for column in columns], dim=1),
        torch.stack([torch.cat([part.status_n for part in column]) for column in columns], dim=1),
        torch.stack([torch.cat([part.by_outcome_n2 for part in column]) for column in columns], dim=1),
    )


def _rewards(
    table: RolloutTable, rows: slice, arm: Arm, text: list[BlockText], taken: Mapping[str, str], known: dict[Any, Reward]
) -> list[Reward]:
    """The rewards of one part of the file under one arm; `known` holds those that another arm asked for already."""
    columns: dict[str, Sequence[Any]] | None = None
    scored: dict[str, Reward] = {}
    before: Any = ()  # a reward may read those before it, so it is known only together with them
    for objective in arm.plan.objectives:
        shape = repr((objective.reward, objective.pays, objective.given, sorted(objective.options.items())))
        key = (arm.plan.layout, objective.name, shape, before)
        before = key
        if key not in known:
            recorded = table.rewards[taken[objective.name]] if objective.name in taken else None
            if columns is None and (recorded is None or _is_judged(objective)):
                columns = _columns(table, rows, text, arm)
            known[key] = _reward(objective, text, recorded, rows, columns or {}, scored)
        scored[objective.name] = known[key]
    return list(scored.values())


def _reward(
    objective: Objective,
    text: list[BlockText],
    recorded: Reward | None,
    rows: slice,
    columns: Mapping[str, Sequence[Any]],
    scored: Mapping[str, Reward],
) -> Reward:
    if recorded is None:
        return score_one(objective, text, columns=columns, scored=scored)
    absent_n = torch.tensor([all(blocks.get(block) is None for block in objective.pays) for blocks in text])
    by_outcome_n2 = recorded.by_outcome_n2[rows]
    if _is_judged(objective):
        by_outcome_n2 = score_one(objective, text, columns=columns, scored=scored).by_outcome_n2
    return Reward(
        recorded.value_n[rows].masked_fill(absent_n, torch.nan),
        recorded.status_n[rows].masked_fill(absent_n, int(Status.ABSENT)),
        by_outcome_n2,
    )


def _is_judged(objective: Objective) -> bool:
    """Whether the reward is a known function of an outcome, which no file records."""
    return isinstance(objective.reward, str) and REWARDS[objective.reward].judged_by is not None


def _columns(table: RolloutTable, rows: slice, text: list[BlockText], arm: Arm) -> dict[str, Sequence[Any]]:
    columns = {name: values[rows] for name, values in table.columns.items()}
    if any(callable(objective.reward) for objective in arm.plan.objectives):
        columns["prompts"] = table.prompts[rows]
        columns["completions"] = ["".join(block[""] or "" for block in blocks.values() if block) for blocks in text]
        columns["completion_ids"] = [table.tokens.slice(n, n + 1).tolist() for n in range(rows.start, rows.stop)]
    return columns


def _taken(table: RolloutTable, arms: Sequence[Arm], rewards: Mapping[str, str]) -> dict[str, str]:
    """Objective -> the recorded reward it is taken from."""
    names = dict.fromkeys(objective.name for arm in arms for objective in arm.plan.objectives)
    for objective, column in rewards.items():
        if objective not in names:
            raise RecipeError(unknown("objective", objective, names))
        if column != "text" and column not in table.rewards:
            if not table.rewards:
                raise RecipeError(f"--reward {objective}={column}: '{table.path}' records no rewards at all.")
            raise RecipeError(unknown(f"reward in '{table.path}' called", column, table.rewards))
    chosen = {name: rewards.get(name, name) for name in names}
    return {name: column for name, column in chosen.items() if column != "text" and column in table.rewards}


def _check_sources(table: RolloutTable, arms: Sequence[Arm], taken: Mapping[str, str]) -> dict[str, str]:
    """Where each reward comes from; a DataError if one can come from nowhere."""
    origin: dict[str, str] = {}
    for objective in (objective for arm in arms for objective in arm.plan.objectives):
        name = objective.name
        if name in taken:
            origin[name] = "the file" if taken[name] == name else f"the file's '{taken[name]}'"
            continue
        origin[name] = "the text"
        options = {**REWARDS[objective.reward].options, **objective.options} if isinstance(objective.reward, str) else {}
        column = options.get("column")
        if column is not None and not any(value is not None for value in table.columns.get(column, ())):
            lack = f"needs the right answers, and '{table.path}' has none (no column '{column}')"
            taken_from = f"--reward {name}={next(iter(table.rewards), '')}"
            there = f"It records {', '.join(table.rewards)}: take one with {taken_from}, or add the column."
            raise DataError(f"Reward '{name}' {lack}. {there if table.rewards else 'Add the column.'}")
    return origin


def _any_tag(spans: Spans, text: Sequence[BlockText]) -> bool:
    if bool((spans.end_nk[:, 1:] > 0).any()):
        return True
    return any(
        value is not None for blocks in text for block in blocks.values() if block for tag, value in block.items() if tag
    )


def check_tags(table: RolloutTable, layouts: Sequence[Layout]) -> None:
    """Refuse layouts none of whose tags opens anywhere in the file.

    Raises:
        RecipeError: naming their tags and those that do occur.
    """
    wanted = list(dict.fromkeys(tag for layout in layouts for tag in layout.tags))
    seen: Counter[str] = Counter()
    for n in range(len(table)):
        ids = table.tokens.slice(n, n + 1).astype(np.int64)[table.tokens.with_values(table.trainable).slice(n, n + 1)]
        seen.update(set(_TAG.findall(table.vocabulary.join(ids)[0].decode(errors="replace"))))
    if not wanted or any(tag in seen for tag in wanted):
        return
    there = ", ".join(f"<{tag}>" for tag, _ in seen.most_common(6))
    raise RecipeError(
        f"The recipe's tags ({', '.join(f'<{tag}>' for tag in wanted)}) occur in none of the {len(table)} completions of "
        f"'{table.path}'; {f'these do: {there}' if there else 'there are no tags in it'}. Give the layout it was sampled with: "
        f"--recipe FILE, or --set 'layout={{solution: [answer]}}'."
    )
