"""Print tables that fit the terminal without cutting off headings or numbers."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text, TextType


def say(console: Console, *parts: RenderableType, keep: int = 1) -> None:
    """Print sentences without wrapping. Cut tables that are wider than the terminal into several."""
    for part in parts:
        if isinstance(part, str):
            console.print(part, highlight=False, soft_wrap=True, markup=False)
        else:
            console.print(*(fitted(part, console, keep) if isinstance(part, Table) else (part,)))


def plain_table(
    *headings: str | Column, rows: Iterable[Iterable[RenderableType]], right: Iterable[int] = (), **options: Any
) -> Table:
    """Build a table with a line under its headings. Columns in `right` are aligned to the right."""
    table = Table(*headings, box=box.SIMPLE_HEAD, **options)
    for column in right:
        table.columns[column].justify = "right"
    for row in rows:
        table.add_row(*row)
    return table


def fitted(table: Table, console: Console, keep: int = 1) -> Iterator[Table | Text]:
    """Cut a table into tables that fit the terminal. Each of them repeats the first `keep` columns."""
    keep = min(keep, max(len(table.columns) - 1, 0))
    min_width_c = list[int]()
    full_width_c = list[int]()
    for column in table.columns:
        unwrapped_options = console.options.update(max_width=2**31)
        cell_sizes = [Measurement.get(console, unwrapped_options, cell) for cell in (column.header, *column.cells)]
        cells_stay_whole = column.no_wrap or column.justify == "right"
        is_whole_cell = [column.no_wrap] + [cells_stay_whole] * (len(cell_sizes) - 1)
        min_widths = [size.maximum if whole else size.minimum for size, whole in zip(cell_sizes, is_whole_cell, strict=True)]
        min_width_c.append(max(min_widths))
        full_width_c.append(max(size.maximum for size in cell_sizes))
    column_groups: list[list[int]] = [list(range(keep))]
    for c in range(keep, len(table.columns)):
        wider_group = [*column_groups[-1], c]
        new_width = sum(min_width_c[i] for i in wider_group) + _padding_width(table, len(wider_group))
        if len(column_groups[-1]) > keep and new_width > console.width:
            column_groups.append(list(range(keep)))
        column_groups[-1].append(c)
    if table.title:
        yield _full_line(table.title, "table.title", console)
    for columns in column_groups:
        available_width = console.width - _padding_width(table, len(columns))
        widths = _shrink([full_width_c[c] for c in columns], [min_width_c[c] for c in columns], available_width)
        narrowed_columns = (
            replace(table.columns[c], width=width, no_wrap=False, overflow="fold")
            for c, width in zip(columns, widths, strict=True)
        )
        narrow_table = Table(*narrowed_columns, box=table.box, padding=table.padding)
        narrow_table.rows = table.rows
        yield narrow_table
    if table.caption:
        yield _full_line(table.caption, "table.caption", console)


def _shrink(widths: list[int], least: Sequence[int], total: int) -> list[int]:
    """Narrow the widest columns by one character at a time until all fit. Go below `least` only if needed."""
    for _ in range(sum(widths) - total):
        shrinkable_indices = [n for n, width in enumerate(widths) if width > least[n]]
        shrinkable_indices = shrinkable_indices or [n for n, width in enumerate(widths) if width > 1]
        if shrinkable_indices:
            widths[max(shrinkable_indices, key=lambda n: widths[n])] -= 1
    return widths


def _padding_width(table: Table, count: int) -> int:
    """Count the characters that the padding and the borders of `count` columns take."""
    return count * (table.padding[3] + table.padding[1]) + (count + 1 if table.box else 0)


def _full_line(words: TextType, style: str, console: Console) -> Text:
    """Turn a table's title or caption into a text that wraps at the terminal's width instead of the table's width."""
    return Text("", style=style).append_text(console.render_str(words) if isinstance(words, str) else words)
