"""`Layout`: the blocks of a completion and the tags each is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spanwise.errors import LayoutError
from spanwise.registry import check_registered


@dataclass(frozen=True, init=False)
class Layout:
    """The blocks of a completion, in order, each made of tags, in order.

    A tag `answer` opens with `<answer>` and closes with `</answer>`. Block k starts at its first opening tag and ends where
    the next block starts, so every trainable token belongs to exactly one block; text before the first tag belongs to the
    first block. A layout with one block and no tags is the whole completion.

    Args:
        blocks: block name -> tag names; one string is one tag. The same tag may serve in several blocks (two attempts).
        prefilled: the tag that the prompt already opened, so that the completion starts inside it.
        segmenter: what finds the blocks, by name; see `spanwise.segment.SEGMENTERS`.

    Raises:
        RecipeError: an unknown segmenter.
        LayoutError: no mapping of blocks to tags, no block, a block without a name or called `stop`, a block after the first
            that no tag opens, a tag name with brackets or spaces, a prefilled tag that is not the first tag of the first block.

    Example:
        >>> layout = Layout({"solution": ["reasoning", "answer"], "confidence": ["analysis", "confidence"]})
        >>> layout.names
        ('solution', 'confidence')
        >>> layout.tags
        ('reasoning', 'answer', 'analysis', 'confidence')
    """

    blocks: tuple[tuple[str, tuple[str, ...]], ...]
    prefilled: str | None
    segmenter: str

    def __init__(
        self, blocks: Mapping[str, Sequence[str]], *, prefilled: str | None = None, segmenter: str = "tags"
    ) -> None:
        if not isinstance(blocks, Mapping):
            raise LayoutError(
                f"A layout is a mapping of blocks to tags, such as {{'solution': ['answer']}}; got {blocks!r}."
            )
        pairs = tuple((str(name), _tags(str(name), tags)) for name, tags in blocks.items())
        object.__setattr__(self, "blocks", pairs)
        object.__setattr__(self, "prefilled", prefilled)
        object.__setattr__(self, "segmenter", segmenter)
        self._check()

    @property
    def names(self) -> tuple[str, ...]:
        """The block names, in order."""
        return tuple(name for name, _ in self.blocks)

    @property
    def tags(self) -> tuple[str, ...]:
        """All tags in the order a well-formed completion has them; a tag used by two blocks appears twice."""
        return tuple(tag for _, tags in self.blocks for tag in tags)

    def _check(self) -> None:
        if not self.blocks:
            raise LayoutError("A layout needs at least one block, for example {'completion': []}.")
        check_registered(self.segmenter, kind="segmenter")
        for position, (name, tags) in enumerate(self.blocks):
            if not name.strip():
                raise LayoutError(
                    f"A block of the tags {', '.join(tags) or 'none'} has no name; write {{'solution': ['answer']}}."
                )
            if name == "stop":
                raise LayoutError(
                    "No block can be called 'stop': metrics and files keep the decision to stop under that name."
                )
            if position > 0 and not tags:
                raise LayoutError(
                    f"No tag opens block '{name}': every block after the first needs at least one tag, "
                    f"for example {name}: [{name}]."
                )
            for tag in tags:
                if not tag or any(sign in tag for sign in "<>/ \t\n"):
                    raise LayoutError(f"Tag '{tag}' of block '{name}' must be a bare name, without brackets or spaces.")
            if len(set(tags)) != len(tags):
                raise LayoutError(f"Block '{name}' names a tag twice: {', '.join(tags)}. Give each attempt its own block.")
        if self.prefilled is not None and self.tags[:1] != (self.prefilled,):
            first = self.tags[0] if self.tags else "none"
            raise LayoutError(
                f"The prefilled tag '{self.prefilled}' must be the first tag of the first block, which is '{first}'."
            )


def _tags(block: str, tags: Any) -> tuple[str, ...]:
    if isinstance(tags, str):
        return (tags,)
    if not isinstance(tags, Sequence) or not all(isinstance(tag, str) for tag in tags):
        raise LayoutError(f"Block '{block}' is made of a list of tag names, such as [answer]; got {tags!r}.")
    return tuple(tags)
