"""The blocks a file is read by, named, usual or those that it is made of; and the groups that its completions are compared in."""

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

from spanwise.credit import group_index, method, preset_objectives
from spanwise.layout import Layout
from spanwise.objective import Objective
from spanwise.recipe import Recipe
from spanwise.rollouts import RolloutTable
from spanwise.score import written_out
from spanwise.segment import census
from spanwise.segment.json_fields import paths

#: Fields of a recipe that say what the blocks are.
_NAMING = {"layout", "objectives", "prefilled", "segmenter", "task"}
_SIGN = re.compile(r"<(/?)([^\W\d][\w.-]*)>")
#: A text of more tags than this is no layout.
_MOST_TAGS = 32


@dataclass(frozen=True)
class Blocks:
    """What a file is read by.

    Attributes:
        layout: its blocks.
        longest: the tokens of the longest completion there may be.
        objectives: what is rewarded there, where the blocks were read from the file; None: the recipe says it.
        note: what the user should know about it; may be empty.
        lack: why the text does not say what is right; empty if it does.
    """

    layout: Layout
    longest: int
    objectives: tuple[Objective, ...] | None = None
    note: str = ""
    lack: str = ""


def blocks_of(usual: Blocks, recipe: Recipe, table: RolloutTable, texts: Sequence[str]) -> Blocks:
    """The `usual` blocks where the recipe names them, or the file is of a run of ours; else those that the file shows.

    Those of the task stay where each of them opens somewhere in the file and the completions are not made of other tags. A file
    that shows no blocks keeps them as well: `choose_arms` then says which methods they are enough for. `texts` is what the model
    wrote.
    """
    if table.folder is not None or _NAMING & recipe.model_fields_set:
        return usual
    tags, count = usual_tags(texts)
    blocks = _tagged(tags, recipe, usual.longest) if tags else _fields(usual_fields(texts), table, usual.longest)
    seen = census(texts, usual.layout.tags)
    fits = any if not tags else all
    opens = fits(any(seen.wanted[tag] for tag in own) for _, own in usual.layout.blocks)
    if blocks is None or (opens and set(tags) <= set(usual.layout.tags)):
        return usual
    if not tags:
        return blocks
    why = f"No layout is given, and the usual one is not that of the file. {seen.sentence}".strip()
    majority = f"{count} of {len(texts)} are made of {' '.join(f'<{tag}>' for tag in tags)}, in this order, so"
    answer = census(texts, ["answer"]).sentence
    lack = f"Nothing says which completions of '{table.path}' are right: {answer}" if answer else ""
    return replace(blocks, note=f"{why} {majority} {blocks.note}", lack=lack)


def _tagged(tags: Sequence[str], recipe: Recipe, longest: int) -> Blocks:
    """A block per tag: correctness pays all, a confidence at the end has its own calibration, as in the preset of `bae_paper`."""
    layout = layout_of(tags)
    names = layout.names
    note = f"the blocks are {', '.join(names)}; to have others, give --set 'layout={_spoken(layout)}' changed."
    correct, report = preset_objectives(method("bae_paper"), layout, calibration=recipe.calibration or "brier")
    apart = len(names) > 1 and names[-1] == "confidence"
    objectives = (replace(correct, pays=names[:-1]), report) if apart else (replace(correct, pays=names),)
    return Blocks(layout, longest, objectives, note)


def _fields(fields: tuple[str, ...], table: RolloutTable, longest: int) -> Blocks | None:
    """A block per field of the JSON that most completions hold, each paid for what the dataset says of it, if it does."""
    if not fields:
        return None
    layout, golds, lack = Layout(fields, segmenter="json"), table.columns.get("answer", ()), ""
    note = (
        f"No layout is given, and most completions hold JSON, so the blocks are its fields {', '.join(fields)}; to have others, "
        f"give --set 'layout=[{', '.join(fields)}]' --set segmenter=json changed."
    )
    if golds and all(isinstance(gold, Mapping) or str(gold).lstrip().startswith("{") for gold in golds):
        objective = Objective("equals", each="*", if_missing=0.0)
    else:
        objective = Objective("correct", pays="*", if_missing=0.0, options={"tag": ""})
        if table.verdict is None:
            lack = f"Nothing says which completions of '{table.path}' are right: it has no column 'answer' of JSON objects."
    return Blocks(layout, longest, written_out([objective], layout), note, lack)


def usual_fields(texts: Sequence[str]) -> tuple[str, ...]:
    """The fields of the JSON objects that most completions hold, in the order in which they come first; none without a majority.

    >>> usual_fields(['{"a": 1, "b": {"c": 2}}', 'So {"b": 3, "a": 1}', '{"a": '])
    ('a', 'b')
    """
    counts = Counter[str]()
    for text in texts:
        counts.update(path for path in paths(text) if not set(path) & set(".["))
    fields = tuple(name for name in counts if 2 * counts[name] > len(texts))
    return fields if len(fields) <= _MOST_TAGS else ()


def usual_tags(texts: Sequence[str]) -> tuple[tuple[str, ...], int]:
    """The tags that most completions are made of, in order, and how many are; none where there is no such majority.

    Only pairs count, and of nested ones the outermost.

    >>> usual_tags(["<plan>a</plan><code><b>c</b></code>", "hm <plan>a</plan> <code>c</code>", "<plan>a</plan>"])
    (('plan', 'code'), 2)
    """
    counts = Counter(_pairs(text) for text in texts)
    tags, count = counts.most_common(1)[0] if counts else ((), 0)
    fits = 0 < len(tags) <= _MOST_TAGS and len(set(tags)) == len(tags)
    return (tags, count) if fits and 2 * count > len(texts) else ((), 0)


def _pairs(text: str) -> tuple[str, ...]:
    """The tags of the outermost pairs, in one pass: a tag that never closes is none."""
    signs = list(_SIGN.finditer(text))
    closes_last = {sign[2]: sign.start() for sign in signs if sign[1]}
    pairs, inside = list[str](), None
    for sign in signs:
        if inside is None and not sign[1] and closes_last.get(sign[2], -1) > sign.start():
            inside = sign[2]
            pairs.append(inside)
        elif sign[1] and sign[2] == inside:
            inside = None
    return tuple(pairs)


def made_of(texts: Sequence[str]) -> str:
    """The layout that most texts have, as `--set layout=` takes it; empty without a majority."""
    tags, _ = usual_tags(texts)
    return _spoken(layout_of(tags)) if tags else ""


def layout_of(tags: Sequence[str]) -> Layout:
    """A block for each tag. One tag is the whole completion; what stands before a confidence alone is a block of its own.

    >>> layout_of(["plan", "code"]).names, layout_of(["think"]).names, layout_of(["confidence"]).names
    (('plan', 'code'), ('completion',), ('text', 'confidence'))
    """
    if list(tags) == ["confidence"]:
        return Layout({"text": [], "confidence": ["confidence"]})
    return Layout({tag: [tag] for tag in tags} if len(tags) > 1 else {"completion": list(tags)})


@dataclass(frozen=True)
class SampledTexts(Sequence[str]):
    """What the model wrote, of each completion, put together when it is asked for: the texts of all may be all that fits."""

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
    """The groups as they are compared, and what the user should know about them.

    A `run` of ours is cut by its own group size, whatever recipe it is credited with; a file of another trainer by the group
    size that the recipe or the user names, if one does.
    """
    part_n = torch.arange(len(table)) if table.rollout_n is None else group_index(table.rollout_n)
    first_j = torch.from_numpy(np.unique(part_n.numpy(), return_index=True)[1])  # a rollout of several rows is one member
    group_j, step_j = table.group_n[first_j], table.step_n[first_j]
    if run is None and "group_size" not in recipe.model_fields_set:
        return group_j[part_n], [] if table.keyed else _uneven(step_j, group_j)
    size, notes = (run or recipe).group_size, []
    group_j = split_groups(group_j, size)
    if small := int((group_j.unique(return_counts=True)[1] < size).sum()):
        notes.append(f"{small} groups have fewer than {size} completions, so their credit may differ from the run's.")
    sizes = step_j.unique(return_counts=True)[1]
    if run is not None and bool((sizes != run.prompts * size).any()):
        notes.append(
            f"Steps hold {int(sizes.min())} to {int(sizes.max())} completions and a batch of the run has {run.prompts * size}; "
            "what is compared with the whole batch may differ."
        )
    return group_j[part_n], notes


def split_groups(group_n: Int[Tensor, " n"], size: int) -> Int[Tensor, " n"]:
    """Cut groups that are larger than the group size, as a prompt drawn twice in one step makes them, in file order.

    >>> split_groups(torch.tensor([0, 0, 1, 1, 0, 0]), 2)
    tensor([0, 0, 2, 2, 1, 1])
    """
    seen, keys = Counter[int](), []
    for group in group_n.tolist():
        keys.append((group, seen[group] // size))
        seen[group] += 1
    order = {key: index for index, key in enumerate(sorted(set(keys)))}
    return torch.tensor([order[key] for key in keys], dtype=torch.long)


def _uneven(step_n: Tensor, group_n: Tensor) -> list[str]:
    """Where the groups of one step differ in size, so that a prompt may have been drawn twice."""
    sizes = Counter(zip(step_n.tolist(), group_n.tolist(), strict=True))
    if len({(step, size) for (step, _), size in sizes.items()}) == len(step_n.unique()):
        return []
    counts = Counter(sizes.values())
    usual = max(counts, key=lambda size: (counts[size], -size))
    return [
        f"Groups hold {min(counts)} to {max(counts)} completions; a prompt drawn twice in a step is one group here: where that "
        f"is so, give --set group_size={usual if usual > 1 else 'N'}."
    ]
