"""Tables that fit the terminal: no heading and no number is cut, at any width."""

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
    """Print sentences as they are written, and tables so that they fit; `keep`: see `fitted`."""
    for part in parts:
        if isinstance(part, str):
            console.print(part, highlight=False, soft_wrap=True, markup=False)
        else:
            console.print(*(fitted(part, console, keep) if isinstance(part, Table) else (part,)))


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


def fitted(table: Table, console: Console, keep: int = 1) -> Iterator[Table | Text]:
    """Cut a table into parts that are at most as wide as what they are printed to.

    Text wraps between words, and what is still too wide becomes several tables under each other. Title and caption stand above and
    below, over the whole width.

    Args:
        table: headings and cells are texts, or strings of markup. Heading and cells of a column with `no_wrap` stay in one line,
            and so do the cells of one that is set to the right, as numbers are.
        console: what the parts are printed to.
        keep: how many of the first columns stand in each part.

    Edge cases:
        A single word that is wider than the console goes on in the next line.

    Example:
        >>> import io
        >>> narrow = Console(width=20, file=io.StringIO())
        >>> table = Table("arm", "accuracy", "coverage", box=None)
        >>> table.add_row("bae", "0.812", "0.5")
        >>> narrow.print(*fitted(table, narrow))
        >>> [line.split() for line in narrow.file.getvalue().splitlines() if line.strip()]
        [['arm', 'accuracy'], ['bae', '0.812'], ['arm', 'coverage'], ['bae', '0.5']]
    """
    room, keep = console.width, min(keep, max(len(table.columns) - 1, 0))
    least, widest = list[int](), list[int]()
    for column in table.columns:
        sizes = [Measurement.get(console, console.options.update(max_width=_ANY), c) for c in (column.header, *column.cells)]
        lines = [column.no_wrap, *[column.no_wrap or column.justify == "right"] * (len(sizes) - 1)]
        least.append(max(size.maximum if line else size.minimum for size, line in zip(sizes, lines, strict=True)))
        widest.append(max(size.maximum for size in sizes))
    parts: list[list[int]] = [list(range(keep))]
    for c in range(keep, len(table.columns)):
        if len(parts[-1]) > keep and sum(least[i] for i in (*parts[-1], c)) + _between(table, len(parts[-1]) + 1) > room:
            parts.append(list(range(keep)))
        parts[-1].append(c)
    if table.title:
        yield _line(table.title, "table.title", console)
    for columns in parts:
        widths = [widest[c] for c in columns]
        yield _part(table, columns, _shrunk(widths, [least[c] for c in columns], room - _between(table, len(columns))))
    if table.caption:
        yield _line(table.caption, "table.caption", console)


#: No text of a table is wider.
_ANY = 2**31


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
        replace(table.columns[c], width=wide, no_wrap=False, overflow="fold") for c, wide in zip(shown, widths, strict=True)
    ]
    part = Table(*columns, box=table.box, padding=table.padding, show_header=table.show_header)
    part.rows = table.rows
    return part


def _between(table: Table, count: int) -> int:
    """Characters between and around so many columns."""
    return count * (table.padding[3] + table.padding[1]) + (count + 1 if table.box else 0)


def _line(words: TextType, style: str, console: Console) -> Text:
    """A title or a caption over the whole width."""
    return Text("", style=style).append_text(console.render_str(words) if isinstance(words, str) else words)
