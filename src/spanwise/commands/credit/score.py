"""Spans and rewards of a whole rollout file, worked out a part at a time: each layout once, each reward once."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from spanwise.commands.credit.arms import Arm, left_out, sources, taken_rewards
from spanwise.errors import AlignmentError, RecipeError, unknown
from spanwise.layout import Layout
from spanwise.objective import Objective
from spanwise.pipeline import Batch, Reading, read
from spanwise.rollouts import RolloutTable
from spanwise.score import REWARDS
from spanwise.segment import locate
from spanwise.types import BlockText, Spans

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
        readings: arm -> what the completions say and what that is worth.
        taken: objective -> the recorded reward it is taken from.
        tagged: layout -> whether it has no tags, or any completion has a block beyond the first or anything in a tag.
    """

    marked: Mapping[Layout, Marked]
    readings: Mapping[str, Reading]
    taken: Mapping[str, str]
    tagged: Mapping[Layout, bool]


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
    for arm in arms:
        sources(table, arm, taken)
    layouts = list(dict.fromkeys(arm.scheme.layout for arm in arms))
    parts: dict[Layout, list[Spans]] = {layout: [] for layout in layouts}
    flat: dict[Layout, list[np.ndarray]] = {layout: [] for layout in layouts}
    found: dict[str, list[Reading]] = {arm.name: [] for arm in arms}
    tagged = {layout: not layout.tags for layout in layouts}
    for first, last in table.tokens.chunks(AT_A_TIME):
        ids, filled = table.tokens.padded(first, last)
        mask = np.zeros(filled.shape, dtype=np.bool_)
        mask[filled] = table.tokens.with_values(table.trainable).slice(first, last)
        rows = slice(first, last)
        recorded = {name: table.rewards[column].take(rows) for name, column in taken.items()}
        columns = {name: values[rows] for name, values in table.columns.items()}
        ids_nt, mask_nt = torch.from_numpy(ids), torch.from_numpy(mask)
        batch = Batch(table.group_n[rows], ids_nt, mask_nt, columns=columns)
        for layout in layouts:
            located = locate(ids_nt, mask_nt, layout=layout, vocabulary=table.vocabulary)
            spans, text = located
            parts[layout].append(_small(spans))
            flat[layout].append(spans.block_nt.numpy()[filled])
            tagged[layout] = tagged[layout] or _any_tag(spans, text)
            for arm in arms:
                if arm.scheme.layout == layout:
                    asked = replace(batch, columns={**columns, **_asked(table, rows, text, arm)})
                    reading = read(asked, arm.scheme, table.vocabulary, recorded=recorded, located=located)
                    found[arm.name].append(reading.take(slice(None)))
    marked = {layout: _joined(parts[layout], flat[layout]) for layout in layouts}
    readings = {name: Reading.joined(parts) for name, parts in found.items()}
    for name, reading in readings.items():
        if len(reading) != len(table):
            raise AlignmentError(f"Method '{name}' has {len(reading)} rewards for {len(table)} completions.")
    return Scored(marked, readings, taken, tagged)


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


def _asked(table: RolloutTable, rows: slice, text: list[BlockText], arm: Arm) -> dict[str, Sequence[Any]]:
    """What a trainer would hand to reward functions beside the columns."""
    if not any(callable(objective.reward) for objective in arm.scheme.objectives):
        return {}
    return {
        "prompts": table.prompts[rows],
        "completions": ["".join(block[""] or "" for block in blocks.values() if block) for blocks in text],
        "completion_ids": [table.tokens.slice(n, n + 1).tolist() for n in range(rows.start, rows.stop)],
    }


def _taken(table: RolloutTable, arms: Sequence[Arm], rewards: Mapping[str, str]) -> dict[str, str]:
    """Objective -> the recorded reward it is taken from."""
    names = dict.fromkeys(objective.name for arm in arms for objective in arm.scheme.objectives)
    for objective in rewards:
        if objective not in names:
            raise RecipeError(unknown("objective", objective, names))
    return {name: column for name, column in taken_rewards(table, rewards).items() if name in names}


def _any_tag(spans: Spans, text: Sequence[BlockText]) -> bool:
    if bool((spans.end_nk[:, 1:] > 0).any()):
        return True
    return any(
        value is not None for blocks in text for block in blocks.values() if block for tag, value in block.items() if tag
    )


def fitting(table: RolloutTable, arms: Sequence[Arm], scored: Scored, *, asked: bool) -> tuple[list[Arm], list[str]]:
    """The arms that the file's tags are enough for.

    An arm needs its tags if it has several blocks, or a reward that is read in one of them; a recorded reward of the whole
    completion needs none.

    Args:
        table, arms, scored: as `score_file` has them.
        asked: the arms were asked for by name, so that each of them must fit.

    Returns:
        The arms, and a sentence on those left out.

    Raises:
        RecipeError: an arm that was asked for, or every arm, has tags none of which opens anywhere in the file.
    """
    lost = [arm for arm in arms if not scored.tagged[arm.scheme.layout] and _reads_tags(arm, scored.taken)]
    if not lost:
        return list(arms), []
    seen = _tags_in(table)
    wanted = list(dict.fromkeys(tag for arm in lost for tag in arm.scheme.layout.tags))
    if any(tag in seen for tag in wanted):
        return list(arms), []
    there = ", ".join(f"<{tag}>" for tag, _ in seen.most_common(6))
    lack = (
        f"The recipe's tags ({', '.join(f'<{tag}>' for tag in wanted)}) occur in none of the {len(table)} completions of "
        f"'{table.path}'; {f'these do: {there}' if there else 'there are no tags in it'}."
    )
    kept = [arm for arm in arms if arm not in lost]
    if asked or not kept:
        raise RecipeError(f"{lack} {_remedy(table)}")
    return kept, [left_out([arm.name for arm in lost], lack)]


def _reads_tags(arm: Arm, taken: Mapping[str, str]) -> bool:
    return len(arm.scheme.layout.names) > 1 or any(
        map(_reads_tag, (o for o in arm.scheme.objectives if o.name not in taken))
    )


def _reads_tag(objective: Objective) -> bool:
    if not isinstance(objective.reward, str):
        return False
    entry = REWARDS[objective.reward]
    return any({**entry.options, **objective.options}[name] for name in entry.tags)


def _tags_in(table: RolloutTable) -> Counter[str]:
    """The tags that open in the trainable text, and in how many completions."""
    seen: Counter[str] = Counter()
    for n in range(len(table)):
        ids = table.tokens.slice(n, n + 1).astype(np.int64)[table.tokens.with_values(table.trainable).slice(n, n + 1)]
        seen.update(set(_TAG.findall(table.vocabulary.join(ids)[0].decode(errors="replace"))))
    return seen


def _remedy(table: RolloutTable) -> str:
    """What to do where the tags are not there; it must run as it stands."""
    whole = "Give the layout it was sampled with (--recipe FILE), or credit whole completions with"
    if table.rewards:
        return f"{whole} --methods grpo --reward correct={next(iter(table.rewards))}"
    objective = '{reward: correct, pays: [completion], options: {tag: ""}}'
    return f"{whole} --methods recipe --set 'layout={{completion: []}}' --set 'objectives=[{objective}]'"
