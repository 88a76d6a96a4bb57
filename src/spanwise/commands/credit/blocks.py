"""Choose the blocks that a file is read by, and the groups in which its completions are compared."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from spanwise.commands.shared.options import key_value
from spanwise.credit import group_index, method, preset_objectives
from spanwise.errors import RecipeError, unknown
from spanwise.layout import Layout
from spanwise.objective import Objective
from spanwise.recipe import Recipe, recorded_elsewhere
from spanwise.rollouts import RolloutTable
from spanwise.score import written_out
from spanwise.segment import census
from spanwise.segment.json_fields import paths

#: Fields of a recipe that name the blocks.
_NAMING = {"layout", "objectives", "prefilled", "segmenter", "task"}
_SIGN = re.compile(r"<(/?)([^\W\d][\w.-]*)>")
#: A text with more tags than this is not taken for a layout.
_MOST_TAGS = 32


@dataclass(frozen=True)
class Blocks:
    """The blocks that a file is read by."""

    layout: Layout
    longest: int  # the largest possible number of tokens of a completion
    objectives: tuple[Objective, ...] | None = None  # those of blocks that the file shows; None: the recipe's
    note: str = ""  # a sentence for the user
    lack: str = ""  # why the text does not tell right from wrong; empty if it does


def blocks_of(usual: Blocks, recipe: Recipe, table: RolloutTable, texts: Sequence[str], *, asked: bool = False) -> Blocks:
    """Return the `usual` blocks if the recipe names them or the file is of a spanwise run; else the blocks that the file shows.

    If nothing says what is right, and no reward was `asked` for, every recorded reward pays the completion.
    """
    if table.folder is not None or _NAMING & recipe.model_fields_set:
        return usual
    tags, count = usual_tags(texts)
    # The JSON of an agent's tool calls is no answer.
    fields = usual_fields(texts) if table.trainable.all() else ()
    blocks = _tagged(tags, recipe, usual.longest) if tags else _fields(fields, table, usual.longest)
    tag_census = census(texts, usual.layout.tags)
    condition = any if not tags else all
    shows_usual = condition(any(tag_census.wanted[tag] for tag in block_tags) for _, block_tags in usual.layout.blocks)
    unjudged = bool(table.rewards) and not (asked or table.verdict is not None or "correct" in table.rewards)
    if blocks is None and not shows_usual and unjudged:
        return _recorded(usual, table, Layout({"completion": []}))
    # The usual blocks also stay if the file shows none: `choose_arms` then says which methods they allow.
    if blocks is None or (shows_usual and set(tags) <= set(usual.layout.tags)):
        return usual
    if not tags:
        return blocks
    reason = f"You gave no layout, and the usual layout does not fit the file. {tag_census.sentence}".strip()
    majority = f"{count} of {len(texts)} completions consist of {' '.join(f'<{tag}>' for tag in tags)}, in this order, so"
    if unjudged and set(tags).isdisjoint(usual.layout.tags):
        blocks = _recorded(usual, table, blocks.layout)
        return replace(blocks, note=f"{reason} {majority} the blocks are its tags. {blocks.note}")
    answer = census(texts, ["answer"]).sentence
    no_verdict = f"Nothing says which completions of '{table.path}' are right: {answer}" if answer else ""
    return replace(blocks, note=f"{reason} {majority} {blocks.note}", lack=no_verdict)


def paid_blocks(pay: Sequence[str], recipe: Recipe, table: RolloutTable) -> dict[str, Any]:
    """Return the objectives of `--pay`, and the layout of the file's tags if the recipe names none."""
    blocks_by_reward: dict[str, list[str]] = {}
    pairs = [key_value(entry, "--pay", "block=reward, such as draft=passed") for entry in pay]
    for block, reward in pairs:
        blocks_by_reward.setdefault(reward, []).append(block)
    fields: dict[str, Any] = {"objectives": [{"reward": name, "pays": pays} for name, pays in blocks_by_reward.items()]}
    if recipe.layout is not None:
        return fields
    asked = list(dict.fromkeys(block for block, _ in pairs))
    tags, _ = usual_tags(SampledTexts(table))
    if len(asked) == 1 and list(tags) in ([], asked):  # a layout of one tag alone calls its block `completion`
        return {**fields, "layout": {asked[0]: list(tags)}}
    layout = layout_of(tags) if tags else None
    for block in asked:
        if layout is None:
            raise RecipeError(f"--pay {block}=...: Most completions have no tags; give --set layout=...")
        if block not in layout.names:
            raise RecipeError(f"--pay {block}=...: {unknown('block', block, layout.names)}")
    return {**fields, "layout": {name: list(marks) for name, marks in layout.blocks}} if layout else fields


def _recorded(usual: Blocks, table: RolloutTable, layout: Layout) -> Blocks:
    """Return blocks that every recorded reward pays, for a file in which nothing says what is right."""
    objectives = tuple(Objective(recorded_elsewhere, layout.names, name=name) for name in table.rewards)
    note = (
        f"No column says which completions are right, so every recorded number is a reward: {', '.join(table.rewards)}. "
        f"Choose with --pay {layout.names[0]}={next(iter(table.rewards))}."
    )
    return Blocks(layout, usual.longest, objectives, note)


def _tagged(tags: Sequence[str], recipe: Recipe, longest: int) -> Blocks:
    """Build a block per tag: correctness pays all, and a confidence at the end has its own calibration, as in `bae_paper`."""
    layout = layout_of(tags)
    names = layout.names
    note = f"the blocks are {', '.join(names)}; for other blocks, edit and give: --set 'layout={_spoken(layout)}'."
    correct, calibration = preset_objectives(method("bae_paper"), layout, calibration=recipe.calibration or "brier")
    has_confidence = len(names) > 1 and names[-1] == "confidence"
    objectives = (replace(correct, pays=names[:-1]), calibration) if has_confidence else (replace(correct, pays=names),)
    return Blocks(layout, longest, objectives, note)


def _fields(fields: tuple[str, ...], table: RolloutTable, longest: int) -> Blocks | None:
    """Build a block per field of the JSON that most completions hold, each paid for the dataset's value of that field."""
    if not fields:
        return None
    layout, golds, fault = Layout(fields, segmenter="json"), table.columns.get("answer", ()), ""
    note = (
        f"You gave no layout, and most completions hold JSON, so the blocks are its fields {', '.join(fields)}. For others, "
        f"edit and give: --set 'layout=[{', '.join(fields)}]' --set segmenter=json."
    )
    if golds and all(isinstance(gold, Mapping) or str(gold).lstrip().startswith("{") for gold in golds):
        objective = Objective("equals", each="*", if_missing=0.0)
    else:
        objective = Objective("correct", pays="*", if_missing=0.0, options={"tag": ""})
        if table.verdict is None:
            fault = f"Nothing says which completions of '{table.path}' are right: it has no column 'answer' of JSON objects."
    return Blocks(layout, longest, written_out([objective], layout), note, fault)


def usual_fields(texts: Sequence[str]) -> tuple[str, ...]:
    """Return the fields of the JSON objects that most completions hold, by first appearance; none without a majority."""
    counts = Counter[str]()
    for text in texts:
        counts.update(path for path in paths(text) if not set(path) & set(".["))
    fields = tuple(name for name in counts if 2 * counts[name] > len(texts))
    return fields if len(fields) <= _MOST_TAGS else ()


def usual_tags(texts: Sequence[str]) -> tuple[tuple[str, ...], int]:
    """Return the outermost tags of most completions, in order, and how many completions have them; none without a majority."""
    counts = Counter(_pairs(text) for text in texts)
    tags, count = counts.most_common(1)[0] if counts else ((), 0)
    is_layout = 0 < len(tags) <= _MOST_TAGS and len(set(tags)) == len(tags)
    return (tags, count) if is_layout and 2 * count > len(texts) else ((), 0)


def _pairs(text: str) -> tuple[str, ...]:
    """Yield the tags of the outermost pairs, in one pass; a tag that never closes is left out."""
    signs = list(_SIGN.finditer(text))
    closes_last = {sign[2]: sign.start() for sign in signs if sign[1]}
    pairs, open_tag = list[str](), None
    for sign in signs:
        if open_tag is None and not sign[1] and closes_last.get(sign[2], -1) > sign.start():
            open_tag = sign[2]
            pairs.append(open_tag)
        elif sign[1] and sign[2] == open_tag:
            open_tag = None
    return tuple(pairs)


def made_of(texts: Sequence[str]) -> str:
    """Return the layout of most texts, as `--set layout=` takes it; empty without a majority."""
    tags, _ = usual_tags(texts)
    return _spoken(layout_of(tags)) if tags else ""


def layout_of(tags: Sequence[str]) -> Layout:
    """Build a block for each tag; a single tag is the whole completion, and the text before a lone confidence is its own block."""
    if list(tags) == ["confidence"]:
        return Layout({"text": [], "confidence": ["confidence"]})
    return Layout({tag: [tag] for tag in tags} if len(tags) > 1 else {"completion": list(tags)})


@dataclass(frozen=True)
class SampledTexts(Sequence[str]):
    """The text that the model wrote in each completion, decoded when asked for, as the memory may not hold all texts at once."""

    table: RolloutTable

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, row: Any) -> Any:
        tokens = self.table.tokens
        sampled = self.table.trainable[tokens.offsets[row] : tokens.offsets[row + 1]]
        ids = tokens.slice(row, row + 1)[sampled].astype(np.int64)
        return self.table.vocabulary.join(ids)[0].decode(errors="replace")

    def __iter__(self) -> Iterator[str]:
        return (self[row] for row in range(len(self)))


def _spoken(layout: Layout) -> str:
    return json.dumps({name: list(tags) for name, tags in layout.blocks})


def compared_groups(table: RolloutTable, recipe: Recipe, run: Recipe | None) -> tuple[Int[Tensor, " n"], list[str]]:
    """Return the groups that are compared, and a note on them for the user."""
    part_n = torch.arange(len(table)) if table.rollout_n is None else group_index(table.rollout_n)
    # A rollout of several rows is one member of its group.
    first_j = torch.from_numpy(np.unique(part_n.numpy(), return_index=True)[1])
    group_j, step_j = table.group_n[first_j], table.step_n[first_j]
    # Groups of a spanwise run are cut to its group size, groups of other files only to a size that recipe or user names.
    if run is None and "group_size" not in recipe.model_fields_set:
        return group_j[part_n], [] if table.keyed else _uneven(step_j, group_j)
    size, notes = (run or recipe).group_size, []
    group_j = split_groups(group_j, size)
    if small_groups := int((group_j.unique(return_counts=True)[1] < size).sum()):
        notes.append(f"{small_groups} groups have fewer than {size} completions, so their credit may differ from the run's.")
    sizes = step_j.unique(return_counts=True)[1]
    if run is not None and bool((sizes != run.prompts * size).any()):
        notes.append(
            f"Steps hold {int(sizes.min())} to {int(sizes.max())} completions and a batch of the run has {run.prompts * size}; "
            "credit that is compared with the whole batch may differ."
        )
    return group_j[part_n], notes


def split_groups(group_n: Int[Tensor, " n"], size: int) -> Int[Tensor, " n"]:
    """Cut groups that are larger than `size`, as a prompt drawn twice in one step makes them, in file order."""
    counts, keys = Counter[int](), []
    for group in group_n.tolist():
        keys.append((group, counts[group] // size))
        counts[group] += 1
    order = {key: index for index, key in enumerate(sorted(set(keys)))}
    return torch.tensor([order[key] for key in keys], dtype=torch.long)


def _uneven(step_n: Tensor, group_n: Tensor) -> list[str]:
    """Return the steps whose groups differ in size, so that a prompt may have been drawn twice."""
    sizes = Counter(zip(step_n.tolist(), group_n.tolist(), strict=True))
    if len({(step, size) for (step, _), size in sizes.items()}) == len(step_n.unique()):
        return []
    counts = Counter(sizes.values())
    usual_size = max(counts, key=lambda size: (counts[size], -size))
    return [
        f"Groups hold {min(counts)} to {max(counts)} completions. A prompt drawn twice in a step counts as one group; to "
        f"split it, give --set group_size={usual_size if usual_size > 1 else 'N'}."
    ]
