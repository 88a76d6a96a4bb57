"""`census` counts how many completions hold the tags, fields or channels of a layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from spanwise.layout import Layout, any_index
from spanwise.segment.claims import SEGMENTERS


@dataclass(frozen=True)
class Census:
    """How many completions hold each tag, JSON field or channel."""

    size: int  # The number of completions.
    wanted: Mapping[str, int]  # Maps the layout's marks (such as tags) to how many completions hold each.
    others: Mapping[str, int]  # Maps marks (such as tags) that the layout lacks to counts of completions, highest first.
    segmenter: str = "tags"  # The name of the segmenter that finds the tags, fields or channels.

    @property
    def lacking(self) -> tuple[str, ...]:
        """Return the layout's marks, such as tags, that fewer than 1 % of the completions hold."""
        return tuple(tag for tag, count in self.wanted.items() if count * 100 < self.size)

    def count(self, mark: str) -> int | None:
        """Return how many completions hold one of the layout's marks, such as a tag. Return None for any other mark."""
        return self.wanted.get(any_index(mark) if self.segmenter == "json" else mark)

    @property
    def lacking_text(self) -> str:
        """Return the marks in `lacking` as text for users, such as `<answer> and <think>`."""
        return " and ".join(map(self._show, self.lacking))

    @property
    def sentence(self) -> str:
        """Say which of the layout's marks (such as tags) completions lack, and which they hold instead. "" if none."""
        if not self.lacking:
            return ""
        lacking_marks_text = " and ".join(f"{self._show(mark)} is in {self.wanted[mark]}" for mark in self.lacking)
        present_mark_counts = {mark: count for mark, count in self.wanted.items() if mark not in self.lacking}
        count_of_mark = {**present_mark_counts, **self.others}
        counted_marks = [f"{self._show(mark)} (in {count})" for mark, count in count_of_mark.items()]
        ellipsis_text = ", ..." if len(counted_marks) > 6 else ""
        if counted_marks:
            return (
                f"{lacking_marks_text} of {self.size} completions. Instead, the completions contain "
                f"{', '.join(counted_marks[:6])}{ellipsis_text}."
            )
        finding = "No completion has tags" if self.segmenter == "tags" else f"The segmenter {self.segmenter} finds nothing"
        return f"{lacking_marks_text} of {self.size} completions. {finding}."

    def _show(self, mark: str) -> str:
        return f"<{mark:.40}>" if self.segmenter == "tags" else f"'{mark:.60}'"


def census(texts: Iterable[str], marks: Collection[str], *, segmenter: str = "tags", prefilled: str | None = None) -> Census:
    """Count completions by the marks (such as tags) that they hold: marks of a layout, and other marks.

    Args:
        texts: what was sampled.
        marks: the marks of a layout. An index in a JSON path stands for any index.
        segmenter: whose marks they are; where it cannot tell what a text holds, nothing is wanted.
        prefilled: the mark that prompts opened already: every completion has it.

    Raises:
        RecipeError: there is no such segmenter.

    Example:
        >>> tag_census = census(["<answer>4</answer>", "<plan>add<answer>5"], ["answer", "confidence"])
        >>> dict(tag_census.wanted), dict(tag_census.others), tag_census.lacking
        ({'answer': 2, 'confidence': 0}, {'plan': 1}, ('confidence',))
        >>> census(['{"cost": 3}'] * 8, ["price"], segmenter="json").sentence
        "'price' is in 0 of 8 completions. Instead, the completions contain 'cost' (in 8)."
    """
    segmenter_entry = SEGMENTERS.find(segmenter)
    list_marks = segmenter_entry.says
    mark_test = segmenter_entry.holds
    layout_marks = dict.fromkeys(map(any_index, marks) if segmenter == "json" else marks)
    completion_count = 0
    count_of_mark = Counter[str]()
    for completion in texts:
        completion_count += 1
        marks_of_text = set() if list_marks is None else set(list_marks(completion))
        if mark_test is not None:
            marks_of_text.difference_update(layout_marks)
            marks_of_text.update(mark for mark in layout_marks if mark_test(completion, mark))
        count_of_mark.update(marks_of_text)
    if prefilled is not None:
        count_of_mark[prefilled] = completion_count
    layout_mark_counts = {mark: count_of_mark[mark] for mark in layout_marks} if list_marks or mark_test else {}
    other_mark_counts = [(mark, count) for mark, count in count_of_mark.items() if mark not in layout_mark_counts]
    sorted_mark_counts = sorted(other_mark_counts, key=lambda entry: (-entry[1], entry[0]))
    return Census(completion_count, layout_mark_counts, dict(sorted_mark_counts), segmenter)


def census_of(layout: Layout, texts: Sequence[str]) -> list[Census]:
    """For each segmenter of a layout, count the completions that hold each of its marks, such as tags."""
    marks_of_segmenter = {name: [part.mark for part in layout.parts_of(name)] for name in layout.segmenters}
    return [
        census(texts, marks, segmenter=name, prefilled=layout.prefilled if layout.prefilled in marks else None)
        for name, marks in marks_of_segmenter.items()
    ]
