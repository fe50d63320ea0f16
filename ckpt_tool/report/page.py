"""Page: a result as a list of blocks, independent of whether it is shown on a terminal, in a pipe or in a browser.

Each verb has a function that makes a `Page` of its document (`report.inspection`, `report.writing`, ...); a page is
rendered as text (`report.plain`) or HTML (`report.html`). Blocks contain raw text, and both renderers escape it, so
that the code that builds a page can't forget to.

    Page("ckpt verify", (Facts((("path", "run/7"),)), Verdict(ok=True, text="complete and valid: no findings")))
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Style = Literal["plain", "strong", "dim", "good", "warn", "bad", "name"]


class Styled(NamedTuple):
    """Text with a style, which may be shown as colour. The text must be understandable without the colour."""

    text: str
    style: Style


Cell = str | Styled


def text_of(cell: Cell) -> str:
    """The text of a cell."""
    return cell.text if isinstance(cell, Styled) else cell


def style_of(cell: Cell) -> Style:
    """The style of a cell, "plain" for bare text."""
    return cell.style if isinstance(cell, Styled) else "plain"


class Column(NamedTuple):
    """A column of a table."""

    title: str
    right: bool = False  # aligned to the right, for numbers
    drop: int = 0  # in a narrow window, columns with the highest number are dropped first; 0: never
    states: bool = False  # its cells are names of states, each shown in its own colour


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
    more: str = ""  # a closing line, such as "... 340 more"
    drawn: bool = False  # a figure of the HTML report shows the same, so the table is collapsed there
    one_line: bool = False  # in a narrow window, drop columns rather than use two lines for a row


class Lines(NamedTuple):
    """A title and plain lines, each wrapped on its own."""

    title: str
    lines: tuple[Cell, ...]
    drawn: bool = False  # as of `PageTable`


class Verdict(NamedTuple):
    """The result in one line."""

    ok: bool | None  # success or failure; None for a neutral statement
    text: str


class Curves(NamedTuple):
    """Line charts over integers, shown only in HTML; a table of the page has the same data. None: no point there."""

    title: str
    xs: tuple[int, ...]
    series: tuple[tuple[str, tuple[float | None, ...]], ...]
    marks: tuple[tuple[int, str], ...] = ()  # (x, label), drawn as upright lines


class Tiles(NamedTuple):
    """A picture of which rank stores what, shown only in HTML: rows of tiles, each with a label, lines of text and the
    number of a colour group."""

    title: str
    rows: tuple[tuple[tuple[str, tuple[str, ...], int], ...], ...]


class Ranks(NamedTuple):
    """A grid of ranks, shown only on a terminal: a pipe gets the table of files, and HTML a picture."""

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
