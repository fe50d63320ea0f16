"""A page as text: aligned columns, colour where the stream wants it, readable from 40 columns up.

If a table doesn't fit, less important columns are dropped first (`Column.drop`), with a note below the table; then long
names get a line of their own, with the numbers aligned below. In a pipe nothing is cut: no width, no colour. The
renderer needs no library, so that `ckpt inspect` starts fast.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TextIO

from ckpt_tool.report import palette
from ckpt_tool.report.page import (
    Block,
    Cell,
    Column,
    Facts,
    Lines,
    Page,
    PageTable,
    Ranks,
    Style,
    Verdict,
    style_of,
    text_of,
)
from ckpt_tool.report.text import cells, show_text

_CODES: dict[Style, str] = {"strong": "1", "dim": "2", "good": "32", "warn": "33", "bad": "1;31", "name": "36"}
GUTTER = 2
LEAST_NAME = 16  # minimal width of the first column of a narrow table, unless each name has a line of its own
HANG = 4  # indentation of the numbers below a name that has a line of its own
LEAST_WIDTH = 30
LEAST_TEXT = 12  # minimal width of wrapped text, however long the text before it is


class Look(NamedTuple):
    """The capabilities of the stream to which a page is written."""

    colour: bool = False
    width: int | None = None  # columns of the window; None for a pipe, where nothing is cut
    terminal: bool = False

    def paint(self, text: str, style: Style) -> str:
        """The text with the escape codes of a style, or unchanged without colour."""
        return f"\x1b[{_CODES[style]}m{text}\x1b[0m" if self.colour and style in _CODES and text else text

    def paint_state(self, text: str) -> str:
        """The name of a state in the colour of this state."""
        return f"\x1b[{palette.terminal_code(text)}m{text}\x1b[0m" if self.colour and text else text


def look_of(stream: TextIO | None, color: str = "auto") -> Look:
    """The look of a stream: `color` is `auto`, `always` or `never`; `auto` honours NO_COLOR, FORCE_COLOR and TERM."""
    tty = is_terminal(stream)
    if color == "auto":
        dumb = os.environ.get("TERM", "") in ("", "dumb")
        colour = bool(os.environ.get("FORCE_COLOR")) or (tty and not dumb)
        colour = colour and not os.environ.get("NO_COLOR")
    else:
        colour = color == "always"
    return Look(colour, _width(stream, tty=tty), tty)


def is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # closed
        return False


def _width(stream: TextIO | None, *, tty: bool) -> int | None:
    stated = os.environ.get("COLUMNS", "")
    if stated.isdecimal() and 0 < int(stated) < 100_000:
        return max(int(stated), LEAST_WIDTH)
    if not tty or stream is None:
        return None
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return 80
    return max(columns, LEAST_WIDTH) if columns else 80


def render(page: Page, look: Look) -> str:
    """The page as text that ends with a newline; "" for a page without blocks."""
    parts = ["\n".join(_block(block, look)) for block in page.blocks]
    parts = [part for part in parts if part]
    return "\n\n".join(parts) + "\n" if parts else ""


def write(stream: TextIO | None, text: str) -> None:
    """Write and flush. A stream that is not there takes everything."""
    if stream is not None and text:
        stream.write(text)
        stream.flush()


def _block(block: Block, look: Look) -> Iterator[str]:
    if isinstance(block, Facts):
        yield from _facts(block, look)
    elif isinstance(block, PageTable):
        yield from _table(block, look)
    elif isinstance(block, Lines):
        yield from _title(block.title, look)
        for line in filter(text_of, block.lines):
            yield from wrap_line(show_text(text_of(line), 2000), look, style_of(line), first="  ", rest="    ")
    elif isinstance(block, Ranks) and look.terminal:
        yield from _ranks(block, look)
    elif isinstance(block, Verdict):  # Curves and Tiles are for HTML only: tables contain the same data
        style: Style = "plain"
        if block.ok is not None:
            style = "good" if block.ok else "bad"
        for line in wrap_line(show_text(block.text, 2000), look, style):
            yield line


def _title(title: str, look: Look) -> Iterator[str]:
    if title:
        yield from wrap_line(show_text(title), look, "strong")


def wrap_line(text: str, look: Look, style: Style, *, first: str = "", rest: str = "  ") -> Iterator[str]:
    """Lines of at most the window's width, broken as `_break` chooses."""
    start = first
    while True:
        limit = max(look_width(look) - cells(start), LEAST_TEXT)
        if cells(text) <= limit:
            break
        cut = _break(text, limit)
        yield start + look.paint(text[:cut].rstrip(), style)
        text = text[cut:].lstrip()
        start = rest
    yield start + look.paint(text, style)


def _break(text: str, columns: int) -> int:
    """The position at which to break a text that is wider than `columns`: at a space, else after a component of a name
    or path, else anywhere."""
    fit = _fit(text, columns)
    least = columns // 3  # an earlier break would leave most of the line empty
    space = text.rfind(" ", 1, fit + 1)
    if space > least:
        return space
    for marks in ("./", "_-,"):
        place = 1 + max(text.rfind(mark, 0, fit) for mark in marks)
        if place > least:
            return place
    return fit


def look_width(look: Look) -> int:
    """The width in columns, practically infinite for a pipe."""
    return look.width if look.width is not None else sys.maxsize


def _fit(text: str, columns: int) -> int:
    """How many characters of `text` fit in `columns`, at least one."""
    used = 0
    for index, char in enumerate(text):
        used += cells(char)
        if used > columns:
            return max(index, 1)
    return len(text)


def _facts(facts: Facts, look: Look) -> Iterator[str]:
    yield from _title(facts.title, look)
    indent = "  " if facts.title else ""
    labels = [show_text(label, 60) for label, _ in facts.rows]
    pad = min(max(map(cells, labels), default=0), max(look_width(look) // 3, LEAST_TEXT))
    hang = " " * (len(indent) + pad + GUTTER)
    for label, (_, value) in zip(labels, facts.rows, strict=True):
        lines = list(wrap_line(show_text(text_of(value), 1000), look, style_of(value), first=hang, rest=hang))
        if cells(label) <= pad:
            space = " " * (pad - cells(label) + GUTTER)
            yield indent + look.paint(label, "dim") + space + lines.pop(0)[len(hang) :]
        else:  # a label as long as a sentence gets lines of its own above the value
            yield from wrap_line(label, look, "dim", first=indent, rest=indent)
        yield from lines


def _ranks(block: Ranks, look: Look) -> Iterator[str]:
    """The grid of ranks with as many columns side by side as fit in the window, the others below them."""
    texts = [text for _, row in block.rows for lines in row for text in lines or ()]
    cell = max(map(len, (*block.across, *texts)))
    side = max((len(text) for label, _ in block.rows for text in label), default=0)
    label = side + GUTTER if side else 0
    fit = max(1, (look_width(look) - label - 1) // (cell + 3))
    yield from wrap_line(show_text(block.title), look, "strong")
    for start in range(0, len(block.across), fit):
        heads = (head.center(cell) for head in block.across[start : start + fit])
        yield " " * label + "".join(f"  {look.paint(head, 'dim')} " for head in heads).rstrip()
        rule = " " * label + f"+{'-' * (cell + 2)}" * len(block.across[start : start + fit]) + "+"
        yield rule
        for names, row in block.rows:
            yield from _rank_lines(names, row[start : start + fit], (label, cell), look)
            yield rule


def _rank_lines(
    names: Sequence[str], row: Sequence[tuple[str, ...] | None], widths: tuple[int, int], look: Look
) -> Iterator[str]:
    """The lines of one row of ranks. widths: of the label, of a cell."""
    label, cell = widths
    for i in range(max(len(names), *(len(lines or ()) for lines in row))):
        name = names[i] if i < len(names) else ""
        texts = (lines[i] if lines and i < len(lines) else "" for lines in row)
        yield look.paint(name, "dim") + " " * (label - len(name)) + "".join(f"| {t:>{cell}} " for t in texts) + "|"


class _Grid(NamedTuple):
    """The texts of a table with their styles, before column widths are chosen."""

    columns: tuple[Column, ...]
    texts: list[list[str]]
    styles: list[list[Style]]
    indents: list[int]  # terminal columns

    def widths(self) -> list[int]:
        """The width that each column needs, in terminal columns."""
        first_column = [cells(row[0]) + indent for row, indent in zip(self.texts, self.indents, strict=True)]
        others = []
        for i, column in enumerate(self.columns[1:], 1):
            others.append(max([cells(column.title), *(cells(row[i]) for row in self.texts)]))
        return [max([cells(self.columns[0].title), *first_column]), *others]

    def without(self, index: int) -> _Grid:
        """The grid without one column."""
        return _Grid(
            self.columns[:index] + self.columns[index + 1 :],
            [row[:index] + row[index + 1 :] for row in self.texts],
            [row[:index] + row[index + 1 :] for row in self.styles],
            self.indents,
        )


def _shown_text(cell: Cell) -> str:
    return show_text(text_of(cell))


def _table(table: PageTable, look: Look) -> Iterator[str]:
    yield from _title(table.title, look)
    base = 2 if table.title else 0
    indents = table.indents or (0,) * len(table.rows)
    grid = _Grid(
        table.columns,
        [list(map(_shown_text, row)) for row in table.rows],
        [list(map(style_of, row)) for row in table.rows],
        [min(level, 12) * 2 for level in indents],
    )
    room = look_width(look) - base
    fitting = _without_missable(grid, room) if table.one_line else None
    grid, widths = fitting or _narrow_grid(grid, room)

    frame = _Frame(grid.columns, widths, base, look)
    if any(column.title for column in grid.columns):
        yield from _titles(frame)
    for texts, styles, indent in zip(grid.texts, grid.styles, grid.indents, strict=True):
        yield from _lines_of_row(texts, styles, indent, frame)
    if table.more:
        yield from wrap_line(show_text(table.more), look, "dim", first=" " * base, rest=" " * base)
    dropped = [column.title for column in table.columns if column not in grid.columns]
    if dropped:
        line = f"no room here for: {', '.join(dropped)}"
        yield from wrap_line(show_text(line), look, "dim", first=" " * base, rest=" " * base)


class _Frame(NamedTuple):
    """Where the rows of a table are drawn."""

    columns: tuple[Column, ...]
    widths: list[int]
    base: int  # columns before each of its lines
    look: Look

    @property
    def holds_columns(self) -> bool:
        """Do the cells behind the first fit side by side?"""
        width = self.base + sum(self.widths) + GUTTER * (len(self.widths) - 1)
        return width <= look_width(self.look)


def _titles(frame: _Frame) -> Iterator[str]:
    """The row of titles; without those that each number has before it (`_lines_of_row`)."""
    shown_here = [frame.holds_columns or not column.right for column in frame.columns]
    titles = [column.title if keep else "" for column, keep in zip(frame.columns, shown_here, strict=True)]
    no_states = tuple(column._replace(states=False) for column in frame.columns)
    yield from _lines_of_row(titles, ["dim"] * len(titles), 0, frame._replace(columns=no_states))


def _lines_of_row(texts: Sequence[str], styles: Sequence[Style], indent: int, frame: _Frame) -> Iterator[str]:
    """The lines of one row: one, or the name on its own and the other cells below it."""
    base = frame.base
    look = frame.look
    if len(texts) == 1 or cells(texts[0]) + indent <= frame.widths[0]:
        yield " " * base + _row(texts, styles, indent, frame)
        return

    yield from wrap_line(texts[0], look, styles[0], first=" " * (base + indent), rest=" " * (base + indent + 2))
    others = ["", *texts[1:]]
    if not any(others):
        return
    if frame.holds_columns:
        yield " " * base + _row(others, styles, 0, frame)
        return

    # Not even the other cells fit side by side: they follow each other, each number behind its title.
    labelled = [
        f"{column.title} {text}".strip() if column.right and text else text
        for column, text in zip(frame.columns[1:], texts[1:], strict=True)
    ]
    hang = " " * (base + HANG)
    style: Style = "dim" if styles[0] == "dim" else "plain"
    yield from wrap_line((" " * GUTTER).join(filter(None, labelled)), look, style, first=hang, rest=hang + "  ")


def _without_missable(grid: _Grid, room: int) -> tuple[_Grid, list[int]] | None:
    """The grid with as few columns dropped as lets every row fit on one line; None where none does."""
    while True:
        widths = grid.widths()
        if sum(widths) + GUTTER * (len(widths) - 1) <= room:
            return grid, widths
        droppable = [(column.drop, i) for i, column in enumerate(grid.columns) if i and column.drop]
        if not droppable:
            return None
        grid = grid.without(max(droppable)[1])


def _narrow_grid(grid: _Grid, room: int) -> tuple[_Grid, list[int]]:
    """The grid with as few columns dropped, and the first column as little squeezed, as fits in `room`.

    If the other columns leave no room for names, every name gets a line of its own, with its numbers below.
    """
    while True:
        widths = grid.widths()
        others = sum(widths[1:]) + GUTTER * (len(widths) - 1)
        if widths[0] + others <= room:
            return grid, widths
        squeezed = room - others
        least = min(widths[0], LEAST_NAME)
        droppable = [(column.drop, i) for i, column in enumerate(grid.columns) if i and column.drop]
        if squeezed >= max(least, min(widths[0], room // 2)):
            return grid, [squeezed, *widths[1:]]
        if not droppable:
            return grid, [squeezed if squeezed >= least else HANG - GUTTER, *widths[1:]]
        grid = grid.without(max(droppable)[1])


def _row(texts: Sequence[str], styles: Sequence[Style], indent: int, frame: _Frame) -> str:
    """One line of a table, its cells padded to their columns."""
    parts = []
    for i, (text, style, column, width) in enumerate(zip(texts, styles, frame.columns, frame.widths, strict=True)):
        lead = " " * indent if i == 0 else ""
        space = " " * max(width - cells(text) - len(lead), 0)
        is_state = column.states and style == "plain"
        painted = frame.look.paint_state(text) if is_state else frame.look.paint(text, style)
        parts.append(lead + (space + painted if column.right else painted + space))
    return (" " * GUTTER).join(parts).rstrip()
