"""Page: a result as blocks, before anything is known of screen, pipe or browser.

Every verb's document becomes a `Page` (`report.inspection`, `report.writing`, ...), and a page becomes text
(`report.plain`) or HTML (`report.html`). Blocks hold raw text: both renderers escape, so a builder can't forget to.

    Page("ckpt verify", (Facts((("path", "run/7"),)), Verdict(ok=True, text="sound: 291 tensors")))
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Style = Literal["plain", "strong", "dim", "good", "warn", "bad", "name"]


class Styled(NamedTuple):
    """Text with a meaning that colour may show. Colour never carries the meaning alone."""

    text: str
    style: Style


Cell = str | Styled


def text_of(cell: Cell) -> str:
    return cell.text if isinstance(cell, Styled) else cell


def style_of(cell: Cell) -> Style:
    return cell.style if isinstance(cell, Styled) else "plain"


class Column(NamedTuple):
    """A column of a table."""

    title: str
    right: bool = False  # set to the right, as numbers are
    drop: int = 0  # which columns go first where the window is narrow (highest first; 0 stays)
    states: bool = False  # are its cells names of states, which have colours of their own?


STATE = Column("state", states=True)  # never dropped: without it Adam's `step` looks like a second parameter


class Facts(NamedTuple):
    """Labels and values, one a line."""

    rows: tuple[tuple[str, Cell], ...]
    title: str = ""


class PageTable(NamedTuple):
    """Rows under columns."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    indents: tuple[int, ...] = ()  # levels by row, for trees
    more: str = ""  # a closing line ("... 340 more").
    drawn: bool = False  # does a figure of a report show the same? There the table is folded away
    one_line: bool = False  # do columns that can be missed go before a row takes two lines?


class Lines(NamedTuple):
    """A title and plain lines, each wrapped on its own."""

    title: str
    lines: tuple[Cell, ...]
    drawn: bool = False  # as of `PageTable`


class Verdict(NamedTuple):
    """What it comes to, in one line."""

    ok: bool | None  # None for a mere statement
    text: str


class Curves(NamedTuple):
    """Lines over whole numbers, drawn by HTML alone: what they show stands in a table too. None: no point there."""

    title: str
    xs: tuple[int, ...]
    series: tuple[tuple[str, tuple[float | None, ...]], ...]
    marks: tuple[tuple[int, str], ...] = ()  # (x, label), drawn as upright lines


class Tiles(NamedTuple):
    """A picture of who holds what, drawn by HTML alone: rows of tiles, each a label, lines of text and a group (its
    colour)."""

    title: str
    rows: tuple[tuple[tuple[str, tuple[str, ...], int], ...], ...]


class Ranks(NamedTuple):
    """A grid of ranks, drawn on a terminal alone: a pipe has the table of files, HTML a picture."""

    title: str
    across: tuple[str, ...]  # the heads of the columns
    # (lines of the label, the lines of each cell, None where no rank is there)
    rows: tuple[tuple[tuple[str, ...], tuple[tuple[str, ...] | None, ...]], ...]


Block = Facts | PageTable | Lines | Curves | Tiles | Ranks | Verdict


class Page(NamedTuple):
    """A titled sequence of blocks. The title is for the HTML page; a terminal shows the blocks alone."""

    title: str
    blocks: tuple[Block, ...]

    def verdict(self) -> Page:
        """The page with its verdict alone, for `-q`."""
        return Page(self.title, tuple(block for block in self.blocks if isinstance(block, Verdict)))
