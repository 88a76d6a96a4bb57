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
        least = [_least(column, console) for column in table.columns]
        parts: list[list[int]] = [[]]
        for c in range(keep, len(table.columns)):
            shown = [*range(keep), *parts[-1], c]
            if parts[-1] and sum(least[i] for i in shown) + _between(table, len(shown)) > room:
                parts.append([])
            parts[-1].append(c)
        if table.title:
            yield Text("", style="table.title").append_text(_text(table.title, console))
        for part in parts:
            yield _part(table, [*range(keep), *part], least, console, room)
        if table.caption:
            yield Text("", style="table.caption").append_text(_text(table.caption, console))


def _part(table: Table, shown: Sequence[int], least: Sequence[int], console: Console, width: int) -> Table:
    """Some columns of a table, as wide as there is room."""
    widths = [max(map(_width, _cells(table.columns[c], console)), default=0) for c in shown]
    for _ in range(sum(widths) + _between(table, len(shown)) - width):
        loose = [n for n, c in enumerate(shown) if widths[n] > least[c]]
        loose = loose or [n for n, wide in enumerate(widths) if wide > 1]  # one word is wider than the console
        if loose:
            widths[max(loose, key=lambda n: widths[n])] -= 1
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
    left, right = table.padding[3], table.padding[1]
    return count * (left + right) + (count + 1 if table.box else 0)


def _cells(column: Column, console: Console) -> list[Text]:
    return [_text(cell, console) for cell in (column.header, *column.cells)]


def _text(cell: RenderableType, console: Console) -> Text:
    return console.render_str(cell) if isinstance(cell, str) else cell if isinstance(cell, Text) else Text(str(cell))


def _width(cell: Text) -> int:
    return max(map(cell_len, cell.plain.splitlines()), default=0)


def _least(column: Column, console: Console) -> int:
    """What a column needs so that no word of it is cut, or no line, if it does not wrap."""
    heading, *cells = _cells(column, console)
    whole = column.no_wrap or column.justify == "right"
    least = _width(heading) if column.no_wrap else _longest(heading)
    return max(least, *(_width(cell) if whole else _longest(cell) for cell in cells), 0)


def _longest(cell: Text) -> int:
    return max(map(cell_len, cell.plain.split()), default=0)
