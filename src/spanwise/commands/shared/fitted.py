"""Tables that fit the terminal: at any width no heading and no number is cut."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text, TextType


def say(console: Console, *parts: RenderableType, keep: int = 1) -> None:
    """Print sentences as they are written, and tables cut to the terminal's width."""
    for part in parts:
        if isinstance(part, str):
            console.print(part, highlight=False, soft_wrap=True, markup=False)
        else:
            console.print(*(fitted(part, console, keep) if isinstance(part, Table) else (part,)))


def plain_table(
    *headings: str | Column, rows: Iterable[Iterable[RenderableType]], right: Iterable[int] = (), **options: Any
) -> Table:
    """Build a table with a line under its headings; the columns `right` are aligned for numbers."""
    table = Table(*headings, box=box.SIMPLE_HEAD, **options)
    for column in right:
        table.columns[column].justify = "right"
    for row in rows:
        table.add_row(*row)
    return table


def fitted(table: Table, console: Console, keep: int = 1) -> Iterator[Table | Text]:
    """Cut a table into parts that are no wider than the terminal; the first `keep` columns stand in each part."""
    width, keep = console.width, min(keep, max(len(table.columns) - 1, 0))
    minimum, wanted = list[int](), list[int]()
    for column in table.columns:
        sizes = [Measurement.get(console, console.options.update(max_width=_ANY), c) for c in (column.header, *column.cells)]
        lines = [column.no_wrap, *[column.no_wrap or column.justify == "right"] * (len(sizes) - 1)]
        minimum.append(max(size.maximum if line else size.minimum for size, line in zip(sizes, lines, strict=True)))
        wanted.append(max(size.maximum for size in sizes))
    parts: list[list[int]] = [list(range(keep))]
    for c in range(keep, len(table.columns)):
        if len(parts[-1]) > keep and sum(minimum[i] for i in (*parts[-1], c)) + _between(table, len(parts[-1]) + 1) > width:
            parts.append(list(range(keep)))
        parts[-1].append(c)
    if table.title:
        yield _line(table.title, "table.title", console)
    for columns in parts:
        widths = [wanted[c] for c in columns]
        yield _part(table, columns, _shrunk(widths, [minimum[c] for c in columns], width - _between(table, len(columns))))
    if table.caption:
        yield _line(table.caption, "table.caption", console)


#: A width that no text of a table reaches.
_ANY = 2**31


def _shrunk(widths: list[int], least: Sequence[int], total: int) -> list[int]:
    """Shrink widths until they fit: the widest column gives way first, down to its minimum."""
    for _ in range(sum(widths) - total):
        columns = [n for n, wide in enumerate(widths) if wide > least[n]]
        columns = columns or [n for n, wide in enumerate(widths) if wide > 1]  # a word wider than the console is folded
        if columns:
            widths[max(columns, key=lambda n: widths[n])] -= 1
    return widths


def _part(table: Table, shown: Sequence[int], widths: Sequence[int]) -> Table:
    """Build a table of some columns."""
    columns = [
        replace(table.columns[c], width=wide, no_wrap=False, overflow="fold") for c, wide in zip(shown, widths, strict=True)
    ]
    part = Table(*columns, box=table.box, padding=table.padding, show_header=table.show_header)
    part.rows = table.rows
    return part


def _between(table: Table, count: int) -> int:
    """Count the characters between and around `columns` columns."""
    return count * (table.padding[3] + table.padding[1]) + (count + 1 if table.box else 0)


def _line(words: TextType, style: str, console: Console) -> Text:
    """Build a title or a caption over the whole width."""
    return Text("", style=style).append_text(console.render_str(words) if isinstance(words, str) else words)
