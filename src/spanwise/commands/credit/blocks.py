"""Choose the blocks and the groups of a file's completions."""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from spanwise.credit import group_index, method
from spanwise.credit.registry import preset_objectives
from spanwise.errors import RecipeError, unknown
from spanwise.layout import Layout
from spanwise.objective import Objective
from spanwise.recipe import Recipe, recorded_elsewhere
from spanwise.rollouts import RolloutTable
from spanwise.rollouts.table import COMPARED
from spanwise.score import Reward
from spanwise.score.score import written_out
from spanwise.segment import census
from spanwise.segment.json_fields import paths

#: The recipe fields that decide how completions are cut into blocks.
_BLOCK_FIELDS = {"layout", "objectives", "prefilled", "segmenter", "task"}
_TAG = re.compile(r"<(/?)([^\W\d][\w.-]*)>")
#: The largest number of tags or JSON fields that become blocks.
_MOST_TAGS = 32


@dataclass(frozen=True)
class Blocks:
    """The blocks of a file's completions, and the objectives that reward the blocks."""

    layout: Layout
    longest: int  # The largest possible number of tokens of a completion.
    objectives: tuple[Objective, ...] | None = None  # The objectives that reward the blocks; None: the recipe's objectives.
    note: str = ""  # A note for the user on how the blocks were chosen.
    no_verdict: str = ""  # The error message if nothing tells right from wrong completions.


def choose_blocks(
    usual: Blocks, recipe: Recipe, table: RolloutTable, texts: Sequence[str], *, asked: bool = False
) -> Blocks:
    """Return the recipe's blocks (`usual`), or blocks that are found in the completions."""
    if table.folder is not None or _BLOCK_FIELDS & recipe.model_fields_set:
        return usual
    common_tags, majority_count = usual_tags(texts)
    if common_tags:
        file_blocks = _blocks_by_tag(common_tags, recipe, usual)
    else:
        # An agent's completions hold JSON in tool calls, so do not take its fields as blocks.
        json_fields = usual_fields(texts) if table.trainable.all() else ()
        file_blocks = _blocks_by_field(json_fields, table, usual)
    tag_census = census(texts, usual.layout.tags)
    has_tag_by_block = [any(tag_census.wanted[tag] for tag in block_tags) for _, block_tags in usual.layout.blocks]
    usual_layout_fits = all(has_tag_by_block) if common_tags else any(has_tag_by_block)
    has_verdict = asked or table.verdict is not None or "correct" in table.rewards
    lacks_verdict = bool(table.rewards) and not has_verdict
    if file_blocks is None and not usual_layout_fits and lacks_verdict:
        return _pay_every_reward(usual, table, Layout({"completion": []}))
    # Keep the recipe's blocks if the completions show no others, or if the recipe's blocks fit and have all common tags.
    if file_blocks is None or (usual_layout_fits and set(common_tags) <= set(usual.layout.tags)):
        return usual
    if not common_tags:
        return file_blocks
    layout_note = f"You gave no layout, and the default layout does not fit the file. {tag_census.sentence}".strip()
    tags_text = " ".join(f"<{tag}>" for tag in common_tags)
    majority_text = f"{majority_count} of {len(texts)} completions consist of {tags_text}, in this order."
    if lacks_verdict and set(common_tags).isdisjoint(usual.layout.tags):
        file_blocks = _pay_every_reward(usual, table, file_blocks.layout)
        return replace(file_blocks, note=f"{layout_note} {majority_text} The blocks are {tags_text}. {file_blocks.note}")
    no_verdict_reason = census(texts, ["answer"]).sentence
    if no_verdict_reason:
        no_verdict_reason = f"Nothing says which completions of '{table.path}' are right: {no_verdict_reason}"
    return replace(file_blocks, note=f"{layout_note} {majority_text} {file_blocks.note}", no_verdict=no_verdict_reason)


def parse_pay(block_reward_pairs: Sequence[tuple[str, str]], recipe: Recipe, table: RolloutTable) -> dict[str, Any]:
    """Return the recipe fields that `--pay` sets."""
    blocks_by_reward: dict[str, list[str]] = {}
    for block, reward in block_reward_pairs:
        blocks_by_reward.setdefault(reward, []).append(block)
    objective_fields = [{"reward": name, "pays": blocks} for name, blocks in blocks_by_reward.items()]
    recipe_fields: dict[str, Any] = {"objectives": objective_fields}
    if recipe.layout is not None:
        return recipe_fields
    paid_blocks = list(dict.fromkeys(block for block, _ in block_reward_pairs))
    common_tags, _ = usual_tags(SampledTexts(table))
    # Keep the name that `--pay` gives to a single block, because `layout_of` would rename the block to `completion`.
    if len(paid_blocks) == 1 and list(common_tags) in ([], paid_blocks):
        return {**recipe_fields, "layout": {paid_blocks[0]: list(common_tags)}}
    layout = layout_of(common_tags) if common_tags else None
    for block in paid_blocks:
        if layout is None:
            raise RecipeError(
                f"--pay {block}=... pays a block, but most completions have no tags. Give the blocks with --set layout=..."
            )
        if block not in layout.names:
            raise RecipeError(f"--pay {block}=...: {unknown('block', block, layout.names)}")
    return {**recipe_fields, "layout": {name: list(marks) for name, marks in layout.blocks}} if layout else recipe_fields


def _pay_every_reward(usual: Blocks, table: RolloutTable, layout: Layout) -> Blocks:
    """Let every recorded reward give credit to all blocks."""
    total_names = [name for name in COMPARED if name in table.rewards]
    # Trainers may write the total reward twice under different names, as verl does in its validation.
    repeated_names = [name for name in total_names[1:] if _are_equal(table.rewards[name], table.rewards[total_names[0]])]
    reward_names = [name for name in table.rewards if name not in repeated_names]
    objectives = tuple(Objective(recorded_elsewhere, layout.names, name=name) for name in reward_names)
    blocks_note = (
        f"No column says which completions are right, so every recorded number is a reward: {', '.join(reward_names)}. "
        f"Choose one with --pay {layout.names[0]}={reward_names[0]}."
    )
    return Blocks(layout, usual.longest, objectives, blocks_note)


def _are_equal(reward: Reward, other: Reward) -> bool:
    return torch.allclose(reward.value_n, other.value_n, rtol=0.0, atol=0.0, equal_nan=True)


def _blocks_by_tag(tags: Sequence[str], recipe: Recipe, usual: Blocks) -> Blocks:
    """Build a block for each tag. `correct` pays all blocks except a last block named `confidence`."""
    tag_layout = layout_of(tags)
    block_names = tag_layout.names
    blocks_note = (
        f"The blocks are {', '.join(block_names)}. For other blocks, edit this option and add it to the command: "
        f"--set 'layout={_layout_json(tag_layout)}'."
    )
    correct_objective, calibration_objective = preset_objectives(
        method("bae_paper"), tag_layout, calibration=recipe.calibration or "brier"
    )
    objectives = (replace(correct_objective, pays=block_names),)
    if len(block_names) > 1 and block_names[-1] == "confidence":
        objectives = (replace(correct_objective, pays=block_names[:-1]), calibration_objective)
    return Blocks(tag_layout, usual.longest, objectives, blocks_note)


def _blocks_by_field(field_names: tuple[str, ...], table: RolloutTable, usual: Blocks) -> Blocks | None:
    """Build a block per JSON field. A block earns 1 if the field equals the field of the gold answer."""
    if not field_names:
        return None
    json_layout = Layout(field_names, segmenter="json")
    gold_answers = table.columns.get("answer", ())
    no_verdict_sentence = ""
    blocks_note = (
        f"You gave no layout, and most completions hold JSON, so the blocks are its fields {', '.join(field_names)}. For "
        f"other fields, add these options and edit the list: --set 'layout=[{', '.join(field_names)}]' --set segmenter=json."
    )
    if gold_answers and all(isinstance(gold, Mapping) or str(gold).lstrip().startswith("{") for gold in gold_answers):
        objective = Objective("equals", each="*", if_missing=0.0)
    else:
        objective = Objective("correct", pays="*", if_missing=0.0, options={"tag": ""})
        if table.verdict is None:
            no_verdict_sentence = (
                f"Nothing says which completions of '{table.path}' are right: no column 'answer' holds the right JSON "
                "objects."
            )
    return Blocks(json_layout, usual.longest, written_out([objective], json_layout), blocks_note, no_verdict_sentence)


def usual_fields(texts: Sequence[str]) -> tuple[str, ...]:
    """Return the JSON fields that most completions have. Too many count as none."""
    field_counts = Counter[str]()
    for completion_text in texts:
        field_counts.update(field_path for field_path in paths(completion_text) if not set(field_path) & set(".["))
    majority_fields = tuple(name for name in field_counts if 2 * field_counts[name] > len(texts))
    return majority_fields if len(majority_fields) <= _MOST_TAGS else ()


def usual_tags(texts: Sequence[str]) -> tuple[tuple[str, ...], int]:
    """Return the outermost tags that most completions share, and how many share them."""
    tag_counts = Counter(_outermost_tags(text) for text in texts)
    common_tags, majority_count = tag_counts.most_common(1)[0] if tag_counts else ((), 0)
    can_be_layout = 0 < len(common_tags) <= _MOST_TAGS and len(set(common_tags)) == len(common_tags)
    return (common_tags, majority_count) if can_be_layout and 2 * majority_count > len(texts) else ((), 0)


def _outermost_tags(text: str) -> tuple[str, ...]:
    """Return the tags of a text that are not inside another tag, in order. Tags that are never closed are left out."""
    tag_matches = list(_TAG.finditer(text))
    close_position_by_tag = {match[2]: match.start() for match in tag_matches if match[1]}
    outermost_tags: list[str] = []
    open_tag = None
    for match in tag_matches:
        if open_tag is None and not match[1] and close_position_by_tag.get(match[2], -1) > match.start():
            open_tag = match[2]
            outermost_tags.append(open_tag)
        elif match[1] and match[2] == open_tag:
            open_tag = None
    return tuple(outermost_tags)


def common_layout(texts: Sequence[str]) -> str:
    """Return the tags that most texts share, as a value for `--set layout=`."""
    common_tags, _ = usual_tags(texts)
    return _layout_json(layout_of(common_tags)) if common_tags else ""


def layout_of(tags: Sequence[str]) -> Layout:
    """Build a layout with one block per tag. A single tag gives `completion`; `confidence` gives `text` and `confidence`."""
    if list(tags) == ["confidence"]:
        return Layout({"text": [], "confidence": ["confidence"]})
    return Layout({tag: [tag] for tag in tags} if len(tags) > 1 else {"completion": list(tags)})


@dataclass(frozen=True)
class SampledTexts(Sequence[str]):
    """The sampled text of each completion. It is decoded on demand, because all texts may not fit into memory."""

    table: RolloutTable

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, row: Any) -> Any:
        file_tokens = self.table.tokens
        is_sampled = self.table.trainable[file_tokens.offsets[row] : file_tokens.offsets[row + 1]]
        sampled_ids = file_tokens.slice(row, row + 1)[is_sampled].astype(np.int64)
        return self.table.vocabulary.join(sampled_ids)[0].decode(errors="replace")


def _layout_json(layout: Layout) -> str:
    return json.dumps({name: list(tags) for name, tags in layout.blocks})


def compared_groups(table: RolloutTable, recipe: Recipe, run: Recipe | None) -> tuple[Int[Tensor, " n"], list[str]]:
    """Return each completion's group number, and notes for the user on the groups."""
    rollout_n = torch.arange(len(table)) if table.rollout_n is None else group_index(table.rollout_n)
    # A rollout with several rows counts once in its group.
    _, first_rows = np.unique(rollout_n.numpy(), return_index=True)
    rollout_group_r = table.group_n[first_rows]
    rollout_step_r = table.step_n[first_rows]
    # The group size comes from the recipe of the run that wrote the file, or from the user.
    if run is None and "group_size" not in recipe.model_fields_set:
        return rollout_group_r[rollout_n], _note_group_sizes(rollout_step_r, rollout_group_r, table)
    group_size = (run or recipe).group_size
    group_notes = []
    rollout_group_r = split_groups(rollout_group_r, group_size)
    if small_group_count := int((rollout_group_r.unique(return_counts=True)[1] < group_size).sum()):
        group_notes.append(
            f"{small_group_count} groups have fewer than {group_size} completions; their credit may differ from that in training."
        )
    completions_per_step = rollout_step_r.unique(return_counts=True)[1]
    if run is not None and bool((completions_per_step != run.prompts * group_size).any()):
        group_notes.append(
            f"The file has {int(completions_per_step.min())} to {int(completions_per_step.max())} completions per step, "
            f"but the run trained on {run.prompts * group_size} per step. Methods that compare completions with a "
            "whole batch may give other credit than in training."
        )
    return rollout_group_r[rollout_n], group_notes


def split_groups(group_n: Int[Tensor, " n"], size: int) -> Int[Tensor, " n"]:
    """Split groups into groups of at most `size` completions. A prompt drawn twice makes larger groups."""
    seen_count_by_group = Counter[int]()
    group_keys = []
    for group in group_n.tolist():
        group_keys.append((group, seen_count_by_group[group] // size))
        seen_count_by_group[group] += 1
    index_of_key = {group_key: index for index, group_key in enumerate(sorted(set(group_keys)))}
    return torch.tensor([index_of_key[group_key] for group_key in group_keys], dtype=torch.long)


def _note_group_sizes(step_n: Tensor, group_n: Tensor, table: RolloutTable) -> list[str]:
    """Return a note if the sizes of the groups are unusual."""
    size_of_group = Counter(zip(step_n.tolist(), group_n.tolist(), strict=True))
    if len(size_of_group) == len(group_n) > 1:
        column_hint = " If several rows answer one prompt, name a column that they share: --columns group=NAME."
        return [
            f"Each of the {len(group_n)} groups holds one completion, so methods that compare the completions of a prompt credit "
            f"nothing.{'' if table.has_fixed_columns else column_hint}"
        ]
    if table.keyed or len({(step, size) for (step, _), size in size_of_group.items()}) == len(step_n.unique()):
        return []
    size_counts = Counter(size_of_group.values())
    usual_group_size = max(size_counts, key=lambda size: (size_counts[size], -size))
    return [
        f"Groups hold {min(size_counts)} to {max(size_counts)} completions. If a prompt was drawn twice in a step, its "
        "completions form one group. To split such groups, give --set "
        f"group_size={usual_group_size if usual_group_size > 1 else 'N'}."
    ]
