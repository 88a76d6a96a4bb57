"""Tables that fit the terminal: no heading and no number is cut, at any width."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Column, Table
from rich.text import Text


def say(console: Console, *parts: RenderableType, keep: int = 1) -> None:
    """Print sentences as they are written, and tables so that they fit."""
    for part in parts:
        if isinstance(part, str):
            console.print(part, highlight=False, soft_wrap=True, markup=False)
        else:
            console.print(Fitted(part, keep) if isinstance(part, Table) else part)


def plain_table(
    *headings: str | Column, rows: Iterable[Iterable[RenderableType]], right: Iterable[int] = (), **options: Any
) -> Table:
    """A table with a line under its headings; the columns `right` are of numbers."""
    table = Table(*headings, box=box.SIMPLE_HEAD, **options)
    for c in right:
        table.columns[c].justify = "right"
    for row in rows:
        table.add_row(*row)
    return table


@dataclass(frozen=True)
class Fitted:
    """A table that is at most as wide as what it is printed to.

    Text wraps between words, and what is still too wide becomes several tables under each other. Title and caption stand above and
    below, over the whole width.

    Attributes:
        table: headings and cells are texts, or strings of markup. Heading and cells of a column with `no_wrap` stay in one line,
            and so do the cells of one that is set to the right, as numbers are.
        keep: how many of the first columns stand in each part.

    Edge cases:
        A single word that is wider than the console goes on in the next line.

    Example:
        >>> import io
        >>> narrow = Console(width=20, file=io.StringIO())
        >>> table = Table("arm", "accuracy", "coverage", box=None)
        >>> table.add_row("bae", "0.812", "0.5")
        >>> narrow.print(Fitted(table))
        >>> [line.split() for line in narrow.file.getvalue().splitlines() if line.strip()]
        [['arm', 'accuracy'], ['bae', '0.812'], ['arm', 'coverage'], ['bae', '0.5']]
    """

    table: Table
    keep: int = 1

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table | Text]:
        """The parts, for rich."""
        table, room = self.table, options.max_width
        keep = min(self.keep, max(len(table.columns) - 1, 0))
        cells = [[_text(cell, console) for cell in (column.header, *column.cells)] for column in table.columns]
        least = [_least(column, texts) for column, texts in zip(table.columns, cells, strict=True)]
        parts: list[list[int]] = [list(range(keep))]
        for c in range(keep, len(table.columns)):
            if len(parts[-1]) > keep and sum(least[i] for i in (*parts[-1], c)) + _between(table, len(parts[-1]) + 1) > room:
                parts.append(list(range(keep)))
            parts[-1].append(c)
        if table.title:
            yield Text("", style="table.title").append_text(_text(table.title, console))
        for shown in parts:
            widest = [max(map(_width, cells[c])) for c in shown]
            yield _part(table, shown, _shrunk(widest, [least[c] for c in shown], room - _between(table, len(shown))))
        if table.caption:
            yield Text("", style="table.caption").append_text(_text(table.caption, console))


def _shrunk(widths: list[int], least: Sequence[int], room: int) -> list[int]:
    """Widths whose sum fits: the widest gives way first, as far as each has more than its least."""
    for _ in range(sum(widths) - room):
        loose = [n for n, wide in enumerate(widths) if wide > least[n]]
        loose = loose or [n for n, wide in enumerate(widths) if wide > 1]  # one word is wider than the console
        if loose:
            widths[max(loose, key=lambda n: widths[n])] -= 1
    return widths


def _part(table: Table, shown: Sequence[int], widths: Sequence[int]) -> Table:
    """Some columns of a table."""
    columns = [
        replace(table.columns[c], width=wide, no_wrap=False, overflow="fold", _index=n, _cells=[])
        for n, (c, wide) in enumerate(zip(shown, widths, strict=True))
    ]
    part = Table(*columns, box=table.box, padding=table.padding, show_header=table.show_header)
    cells = zip_longest(*(list(table.columns[c].cells) for c in shown), fillvalue="")
    for row, how in zip(cells, table.rows, strict=True):
        part.add_row(*row, style=how.style, end_section=how.end_section)
    return part


def _between(table: Table, count: int) -> int:
    """Characters between and around so many columns."""
    return count * (table.padding[3] + table.padding[1]) + (count + 1 if table.box else 0)


def _text(cell: RenderableType, console: Console) -> Text:
    return console.render_str(cell) if isinstance(cell, str) else cell if isinstance(cell, Text) else Text(str(cell))


def _width(cell: Text, *, words: bool = False) -> int:
    return max(map(cell_len, cell.plain.split() if words else cell.plain.splitlines()), default=0)


def _least(column: Column, cells: Sequence[Text]) -> int:
    """What heading and cells need so that no word of them is cut, or no line, if they do not wrap."""
    wraps = not (column.no_wrap or column.justify == "right")
    return max(_width(cells[0], words=not column.no_wrap), *(_width(cell, words=wraps) for cell in cells[1:]), 0)
