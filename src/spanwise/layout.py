"""`Layout`: the blocks of a completion, and the marks (tags, JSON paths) that find them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from spanwise.errors import LayoutError, RecipeError, refuse, unknown
from spanwise.registry import is_registered, registered

EACH = "[*]"  # in a block's name, `[*]` stands for every index
_INDEX = re.compile(r"\[\d+\]")
_T = TypeVar("_T")


@dataclass(frozen=True, eq=False)
class Part:
    """The part of a block that one mark (a tag, a path, ...) finds. Two parts are never equal, even with the same mark."""

    block: int  # The number of the block in the layout.
    segmenter: str  # The name of the segmenter that finds the part, such as `tags`.
    mark: str  # The tag, path or pattern in the layout, without the name of a segmenter.
    key: str  # The key of the part's text in `BlockText`.
    index: int | None = None  # The number of the match of `mark`, counted from 0; None: every match.


@dataclass(frozen=True, init=False)
class Layout:
    """The blocks of a completion, in order, and the marks (tags, JSON paths) that find them.

    With the segmenter `tags`, a mark `answer` opens with `<answer>` and closes with `</answer>`. With `json` a mark is a path,
    with `channels` a channel; see `spanwise.segment.SEGMENTERS`. A mark may name its own segmenter, `json:price`. In a layout
    with another segmenter than `tags`, no space may follow the colon. Every trainable token belongs to exactly one block. A
    block runs on to the start of the next block. Text before the first block belongs to the first block. A part inside another
    part has only its own bytes.

    A block whose name holds `[*]` is repeated: each match, up to `most` matches, is a block, `item[0]`, `item[1]`, ... If such
    a block has several marks, each mark has its own text, `thought[0]` and `action[0]`. One block may have no marks; it is the
    rest. With tags, the rest is the text before the first tag. With other segmenters, the rest is all text that no block
    claims, and a block ends where its part ends. But a tag runs on to the next tag, also past its closing tag.

    Args:
        blocks: block name -> marks; one string is one mark. Or a list of blocks, each marked by its own name.
        prefilled: the mark that the prompt already opened, so that the completion starts inside it.
        segmenter: what finds the blocks whose marks do not say it themselves, by name.
        most: how many blocks a repeated one becomes.

    Raises:
        RecipeError: an unknown segmenter.
        LayoutError: no mapping of blocks to marks, no block, a block without a name or called `stop`, a second block without
            marks, two blocks that overlap, a mark that its segmenter does not understand, a segmenter without a mark, a prefilled
            mark that is not the first.

    Example:
        >>> layout = Layout({"solution": ["reasoning", "answer"], "confidence": ["analysis", "confidence"]})
        >>> layout.names
        ('solution', 'confidence')
        >>> layout.tags
        ('reasoning', 'answer', 'analysis', 'confidence')
        >>> Layout(["name", "items[*].price"], segmenter="json", most=2).names
        ('name', 'items[0].price', 'items[1].price')
    """

    blocks: tuple[tuple[str, tuple[str, ...]], ...]
    prefilled: str | None
    segmenter: str
    most: int

    def __init__(
        self,
        blocks: Mapping[str, Sequence[str]] | Sequence[str],
        *,
        prefilled: str | None = None,
        segmenter: str = "tags",
        most: int = 16,
    ) -> None:
        vars(self).update(blocks=_pairs(blocks), prefilled=prefilled, segmenter=segmenter, most=most)
        self._check()

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the blocks, in order. A repeated block has one name for each index."""
        return tuple(name for name, _, _ in self._single)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The parts of all blocks, such as tags or JSON fields, in the order of the layout."""
        parts: list[Part] = []
        for block_index, (name, marks, repeat_index) in enumerate(self._single):
            for written_mark in marks:  # a mark such as `json:price` begins with a segmenter's name
                segmenter, colon, mark = written_mark.partition(":")
                is_pattern = self.segmenter != "tags" and mark[:1] == " "  # `steps: 5`, with a space, is a pattern
                if not colon or is_pattern or not is_registered(segmenter, kind="segmenter"):
                    segmenter, mark = self.segmenter, written_mark
                part_key = mark or name
                if repeat_index is not None:
                    own_name = f"{mark}[{repeat_index}]" if mark and len(marks) > 1 else name
                    part_key = mark.replace(EACH, f"[{repeat_index}]", 1) if EACH in mark else own_name
                parts.append(Part(block_index, segmenter, mark, part_key, repeat_index))
        return tuple(parts)

    @cached_property
    def wanted(self) -> frozenset[Part]:
        """The parts (such as tags) that a well-formed completion contains. Of a repeated block only the first is required."""
        return frozenset(part for part in self.parts if part.index in (None, 0))

    @cached_property
    def keys(self) -> dict[str, tuple[str, ...]]:
        """Maps each block's name to the keys of its texts in `BlockText`, such as tags."""
        return {name: tuple(part.key for part in self.parts if part.block == index) for index, name in enumerate(self.names)}

    @cached_property
    def rest(self) -> int | None:
        """The index of the block that holds the rest of the text. It has no marks; None if there is none."""
        return next((block_index for block_index, (_, marks, _) in enumerate(self._single) if not marks), None)

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks (tags, JSON paths, ...) as the layout writes them, without repetition."""
        return tuple(dict.fromkeys(mark for _, marks in self.blocks for mark in marks))

    def parts_of(self, segmenter: str) -> list[Part]:
        """Return the parts that one segmenter finds, in the order of the layout."""
        return [part for part in self.parts if part.segmenter == segmenter]

    def matching(self, pattern: str) -> tuple[str, ...]:
        """Return the names of the blocks that match a pattern. `*` matches every block but the rest, and `[*]` any index.

        Raises:
            RecipeError: it matches no block.

        >>> Layout(["a", "b[*]"], segmenter="json", most=2).matching("b[*]")
        ('b[0]', 'b[1]')
        """
        if pattern == "*":
            return tuple(name for index, name in enumerate(self.names) if index != self.rest or len(self.names) == 1)
        name_pattern = re.compile(re.escape(pattern).replace(re.escape(EACH), _INDEX.pattern))
        matching_names = tuple(name for name in self.names if name_pattern.fullmatch(name))
        if not matching_names:
            raise RecipeError(unknown("block", pattern, self.names))
        return matching_names

    @property
    def tags(self) -> tuple[str, ...]:
        """All tags in the order of a well-formed completion. A tag that two blocks use appears twice."""
        return tuple(part.mark for part in self.parts_of("tags"))

    @cached_property
    def segmenters(self) -> tuple[str, ...]:
        """The segmenters that find the layout's blocks, in the order of the layout."""
        return tuple(dict.fromkeys(part.segmenter for part in self.parts)) or (self.segmenter,)

    @property
    def _single(self) -> list[tuple[str, tuple[str, ...], int | None]]:
        """The name and marks of each block, and its index among the copies of a repeated block, else None."""
        return [
            (name if repeat_index is None else name.replace(EACH, f"[{repeat_index}]", 1), marks, repeat_index)
            for name, marks in self.blocks
            for repeat_index in (range(self.most) if EACH in name else (None,))
        ]

    def _check(self) -> None:
        """Refuse a layout that no segmenter could find, or whose blocks are ambiguous."""
        if not self.blocks:
            raise LayoutError("A layout needs at least one block, for example {'completion': []}.")
        registered("segmenter").find(self.segmenter)
        if isinstance(self.most, bool) or not isinstance(self.most, int) or self.most < 1:
            raise LayoutError(
                f"most is {self.most!r}. It says how often a repeated block may occur, so it must be a whole number of 1 "
                "or more."
            )
        for block_name, marks in self.blocks:
            _check_block(block_name, marks)
        if self.segmenter != "tags" and not self.parts_of(self.segmenter):
            raise LayoutError(
                f"segmenter is '{self.segmenter}', but no block has a mark to find it by. Add one, or leave segmenter out."
            )
        unmarked_positions = [position for position, (_, marks) in enumerate(self.blocks) if not marks]
        uses_only_tags = self.segmenters == ("tags",)
        if unmarked_positions and (len(unmarked_positions) > 1 or (uses_only_tags and unmarked_positions != [0])):
            block_name = self.blocks[unmarked_positions[-1]][0]
            advice = "Give every block after the first a tag" if uses_only_tags else "Give all blocks but one a mark"
            raise LayoutError(f"No tag opens block '{block_name}'. {advice}, for example {block_name}: [{block_name}].")
        if len(set(self.names)) != len(self.names):
            doubled_name = next(block_name for block_name in self.names if self.names.count(block_name) > 1)
            raise LayoutError(f"Two blocks are called '{doubled_name}'; give each a name of its own.")
        first_block_tags = [part.mark for part in self.parts if part.block == 0]
        if self.prefilled is not None and first_block_tags[:1] != [self.prefilled]:
            raise LayoutError(
                f"The prefilled tag '{self.prefilled}' must be the first tag of the first block, which is "
                f"'{first_block_tags[0] if first_block_tags else 'none'}'."
            )
        if self.prefilled is not None and registered("segmenter").find(self.parts[0].segmenter).opens is None:
            raise LayoutError(
                f"prefilled is '{self.prefilled}', but a prompt cannot open a block of the segmenter "
                f"'{self.parts[0].segmenter}'. Leave prefilled out, or use the segmenter tags, delimiters or channels."
            )
        for segmenter in self.segmenters:
            # Building a segmenter raises an error for marks (tags, paths, ...) that cannot work.
            registered("segmenter").find(segmenter).function(self.parts_of(segmenter), layout=self)


def any_index(name: str) -> str:
    """Replace every index in the name of a block, such as `[0]`, by `[*]`."""
    return _INDEX.sub(EACH, name)


def together(columns: Mapping[str, _T]) -> dict[str, list[_T]]:
    """Collect columns such as `item[0]` and `item[1]` in one list under the name `item[*]`."""
    columns_by_pattern: dict[str, list[_T]] = {}
    for name, column in columns.items():
        columns_by_pattern.setdefault(any_index(name), []).append(column)
    return columns_by_pattern


def _check_block(name: str, marks: tuple[str, ...]) -> None:
    """Refuse a block whose name or marks (such as tags) cannot work, for example an empty name or a repeated tag."""
    tags_text = ", ".join(marks)
    has_repeated_mark = len(set(marks)) < len(marks)
    possible_faults = {
        f"The block with the tags {tags_text or 'none'} has no name; write {{'solution': ['answer']}}.": not name.strip(),
        "No block can be called 'stop': metrics and files use this name for the decision to stop.": name == "stop",
        f"The block name '{name}' has [*] twice; replace one by a number, such as items[0].parts[*].": name.count(EACH) > 1,
        f"Block '{name}' names a tag twice: {tags_text}. Give each use of the tag its own block.": has_repeated_mark,
        f"The repeated block '{name}' has no mark (tag); give it one, such as {name}: [step].": EACH in name and not marks,
    }
    refuse(possible_faults, LayoutError)


def _pairs(blocks: Any) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Pair each block with its marks, such as tags; in a list of names, each name is also the block's mark."""
    if isinstance(blocks, Mapping):
        return tuple((str(name), _marks(str(name), marks)) for name, marks in blocks.items())
    if isinstance(blocks, Sequence) and not isinstance(blocks, str) and all(isinstance(name, str) for name in blocks):
        return tuple((name, (name,)) for name in blocks)
    raise LayoutError(f"A layout must be a mapping of blocks to tags, such as {{'solution': ['answer']}}; got {blocks!r}.")


def _marks(block: str, marks: Any) -> tuple[str, ...]:
    """Return a block's marks, such as its tags, as a tuple. A single mark may be given as a string."""
    if isinstance(marks, str):
        return (marks,)
    if not isinstance(marks, Sequence) or not all(isinstance(mark, str) for mark in marks):
        raise LayoutError(f"Block '{block}' needs a list of tag names, such as [answer]; got {marks!r}.")
    return tuple(marks)
