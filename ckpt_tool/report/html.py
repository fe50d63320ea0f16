"""A page as one self-contained HTML file (`--report FILE.html`): no link, no request, no server.

The verdict comes first, then the command, its date and the version, then the text. Figures, if the verb has data for
them (`report.picture`), are drawn by the scripts of `browser/`.

Names in a checkpoint are untrusted, so nothing of them may become markup or code: every text goes through
`report.text.show_text` and `html.escape`, the scripts create text nodes only, their data is JSON that is never
executed, and a Content-Security-Policy allows this style and these scripts by their hashes and nothing else. The file
is written under a temporary name and renamed, and only replaces an earlier report.
"""

from __future__ import annotations

import json
import re
import zlib
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from html import escape
from math import floor, log10
from pathlib import Path
from typing import Any

from ckpt_tool.report import files, palette
from ckpt_tool.report.page import (
    Block,
    Cell,
    Column,
    Curves,
    Facts,
    Lines,
    Page,
    PageTable,
    Ranks,
    Tiles,
    Verdict,
    style_of,
    text_of,
)
from ckpt_tool.report.text import count, show_text

OPTION = "--report"
MARK = "<!doctype html>\n<!-- a report of ckpt -->\n"
ROWS_SHOWN = 1000  # of a table, and lines of a list
_BROWSER = Path(__file__).parent / "browser"
_SCRIPTS = ("base", "data", "ranks", "cut", "flow", "treemap", "table", "heat", "findings", "main")  # in this order
_BREAKS = re.compile(r"(?<=\w|\*|\])([./])(?=[a-zA-Z_*\[])")  # between the parts of a name or a path
_OPTION = re.compile(r"(?<!\S)(--?[a-z][a-z0-9-]*)(?=[\s=,;:.)]|$)")  # of a command line
_SHORT = 20  # characters of a cell that stay on one line
_NARROW = 44  # characters of a row that a window of 400 pixels holds
_WRAPPED = 12  # characters to which the last cell of a row may be wrapped there
_LINES = 24  # of a list; a longer one scrolls in a box of its own
_PLAIN = 1 << 16  # characters of data that are kept as they are; more is deflated
_LEVELS = 8  # of a tree that are indented


def check_target(path: str) -> None:
    """Refuse before any work what is no earlier report, as `report.files`."""
    files.check_target(path, OPTION, _is_ours)


def _is_ours(head: bytes) -> bool:
    """Does a file begin as such a page?"""
    return head.startswith(MARK.encode())


def save(
    page: Page,
    path: str,
    *,
    title: str = "",
    facts: Iterable[tuple[str, str]] = (),
    data: Mapping[str, Any] | None = None,
) -> None:
    """Write the page to `path` in one step. facts: what to say above it (command, version). data: of its figures.
    Raises StorageError."""
    text = document(page._replace(title=title or page.title), facts=facts, data=data)
    files.save(path, text.encode("utf-8", errors="backslashreplace"), OPTION, _is_ours)


def document(page: Page, *, facts: Iterable[tuple[str, str]] = (), data: Mapping[str, Any] | None = None) -> str:
    """The whole HTML text. data: what `report.picture` gives; without any there is no script."""
    verdicts = [show_text(block.text, 300) for block in page.blocks if isinstance(block, Verdict)]
    title = escape(": ".join([show_text(page.title), *verdicts[:1]]))
    style = (_BROWSER / "report.css").read_text("utf-8") + palette.style_sheet()
    script = "\n".join((_BROWSER / f"{name}.js").read_text("utf-8") for name in _SCRIPTS) if data else ""
    policy = f"default-src 'none'; style-src {_source(style)}; base-uri 'none'; form-action 'none'"
    policy += f"; script-src {_source(script)}" if script else ""
    return (
        f'{MARK}<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        f"{_body(page, tuple(facts), bool(data))}"
        f"{_data(data) if data else ''}{f'<script>{script}</script>' if script else ''}\n</body>\n</html>\n"
    )


def _body(page: Page, facts: tuple[tuple[str, str], ...], figures: bool) -> str:
    """The verdict and the facts on top, then the text, then the figures; last, folded, the text of what they show."""
    verdicts = [block for block in page.blocks if isinstance(block, Verdict)]
    other_blocks = [block for block in page.blocks if not isinstance(block, Verdict)]
    first_block = other_blocks[0] if other_blocks else None
    leads = isinstance(first_block, Facts) and not first_block.title
    rows = first_block.rows if isinstance(first_block, Facts) and leads else ()
    top: list[Block] = [*verdicts, Facts((*facts, *rows))] if facts or rows else [*verdicts]
    other_blocks = other_blocks[1:] if leads else other_blocks

    drawn = [block for block in other_blocks if figures and isinstance(block, PageTable | Lines) and block.drawn]
    written = [block for block in other_blocks if block not in drawn]
    parts = [f"<main>\n<h1>{escape(show_text(page.title))}</h1>", *map(_block, (*top, *written))]
    if figures:
        parts.append(
            '<div id="figures"><noscript><p>The figures need a browser that runs scripts; the text says what can be '
            "said without.</p></noscript></div>"
        )
    if drawn:
        text = "\n".join(map(_block, drawn))
        parts.append(f'<details id="text" open><summary>What the figures show, as text</summary>\n{text}\n</details>')
    return "\n".join([*parts, "</main>\n"])


def _data(data: Mapping[str, Any]) -> str:
    """The data as JSON that no parser of HTML can take for anything else, or deflated as base64."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)  # ASCII: U+2028 and its like are spelled out
    coding = ""
    if len(text) > _PLAIN:
        text = b64encode(zlib.compress(text.encode(), 9)).decode()
        coding = ' data-coding="deflate"'
    for char in "<>&":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return f'<script type="application/json" id="data"{coding}>{text}</script>\n'


def _source(text: str) -> str:
    """A text as the source that a policy allows: by its hash."""
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


def _block(block: Block) -> str:
    if isinstance(block, Facts):
        rows = "\n".join(
            f"<dt>{_label(label)}<dd{_classes(_style(value))}>{_text(value)}" for label, value in block.rows
        )
        return f"{_title(block.title)}<dl>\n{rows}\n</dl>"
    if isinstance(block, PageTable):
        return _title(block.title) + _table(block)
    if isinstance(block, Lines):
        lines = [line for line in block.lines if text_of(line)]
        items = "\n".join(f"<li{_classes(_style(line))}>{_text(line)}" for line in lines[:ROWS_SHOWN])
        if len(lines) > ROWS_SHOWN:
            items += f'\n<li class="dim">... {count(len(lines) - ROWS_SHOWN)} more lines; --json has all'
        items = f"<ul>\n{items}\n</ul>"
        return _title(block.title) + (_wrap_in_box(items, block.title or "lines") if len(lines) > _LINES else items)
    if isinstance(block, Curves):
        return _title(block.title) + curves(block)
    if isinstance(block, Ranks):  # a terminal's: here the table of files says it
        return ""
    if isinstance(block, Tiles):
        return _title(block.title) + tiles(block)
    return _verdict(block)


def _label(label: str) -> str:
    """A label, which may break behind an underscore."""
    return escape(show_text(label)).replace("_", "_<wbr>")


def _verdict(verdict: Verdict) -> str:
    style = ""
    if verdict.ok is not None:
        style = " good" if verdict.ok else " bad"
    return f'<p class="verdict{style}">{escape(show_text(verdict.text, 2000))}</p>'


def _title(title: str) -> str:
    return f"<h2>{escape(show_text(title))}</h2>\n" if title else ""


def _table(table: PageTable) -> str:
    """A table in a box of its own. Where the window is narrow, names have lines of their own (`stack` in the style);
    the roles keep it a table for those who hear it."""
    heads = "".join(
        f'<th role="columnheader"{_classes(["right"] * column.right)}>{escape(column.title)}'
        for column in table.columns
    )
    rows = []
    for number, row in enumerate(table.rows[:ROWS_SHOWN]):
        level = min(table.indents[number], _LEVELS) if table.indents else 0
        cells = [
            _cell(cell, column, level=0 if i else level)
            for i, (cell, column) in enumerate(zip(row, table.columns, strict=True))
        ]
        rows.append('<tr role="row">' + "".join(cells))

    body = (
        f'<table role="table"{_classes(_stacking(table))}>\n<tr role="row">{heads}\n' + "\n".join(rows) + "\n</table>"
    )
    hidden = len(table.rows) - ROWS_SHOWN
    footer = table.more or (f"... {count(hidden)} more rows; --json has all" if hidden > 0 else "")
    closing = f'<p class="dim">{escape(show_text(footer))}</p>' if footer else ""
    return _wrap_in_box(body, table.title or "table") + closing


def _stacking(table: PageTable) -> list[str]:
    """The CSS classes of a table whose names leave no room for numbers on the same line in a narrow window."""
    longest = [
        max((len(text_of(row[number])) for row in table.rows), default=0) for number in range(len(table.columns))
    ]
    widths = [max(width, len(column.title)) for width, column in zip(longest, table.columns, strict=True)]
    rest = sum(widths[1:-1]) + min(widths[-1], _WRAPPED)
    is_wide = longest[0] > _SHORT or (sum(widths) > _NARROW and rest <= _NARROW)
    stacks = is_wide and len(table.columns) > 2 and not table.indents
    return ["stack", f"n{len(table.columns) - 1}"] if stacks else []


def _cell(cell: Cell, column: Column, *, level: int) -> str:
    """A cell of a table: a name breaks between its parts, a short text nowhere; a state has its colour before it."""
    text = _text(cell)
    if not column.right:
        text = _BREAKS.sub(r"\1<wbr>", text)
    state = f' data-state="{escape(show_text(text_of(cell)))}"' if column.states and text else ""
    names = ["right"] * column.right
    names += ["short"] * (len(text_of(cell)) <= _SHORT and not column.right)
    names += [f"i{level}"] * (level > 0)
    return f'<td role="cell"{_classes([*names, *_style(cell)])}{state}>{text}'


def _text(cell: Cell) -> str:
    """The text of a cell; options of a command line do not break at their hyphens."""
    return _OPTION.sub(r'<span class="short">\1</span>', escape(show_text(text_of(cell), 2000)))


def _style(cell: Cell) -> list[str]:
    """The class of a cell's meaning, if it has one."""
    return [style_of(cell)] if style_of(cell) != "plain" else []


def _classes(names: Sequence[str]) -> str:
    return f' class="{" ".join(names)}"' if names else ""


# ----------------------------------------------------------------------------------------------------
# Curves and tiles as inline SVG: no script, no style sheet, numbers and escaped text only.


# of a chart, in pixels
WIDE = 720
HIGH = 260
# its margins
LEFT = 64
RIGHT = 16
TOP = 14
BOTTOM = 34
TILE_LEAST = 128
LETTER = 6.7
LINE = 15
GAP = 8
TILE_LETTERS = 40  # of a line of a tile; the rest is in its title
LEGEND = 190  # pixels a name takes


def curves(block: Curves) -> str:
    """One chart; a series that covers another is drawn thinner, so that both show where they are equal."""
    points = [value for _, values in block.series for value in values if value is not None]
    if not points or not block.xs:
        return ""
    low = min(points)
    high = max(points)
    pad = (high - low) * 0.05 or abs(high) * 0.01 or 1.0
    low = low - pad
    high = high + pad
    min_x = min(block.xs)
    max_x = max(block.xs)
    decimals = max(0, min(9, 2 - floor(log10(high - low))))  # of every number at the axis

    def x(at: float) -> float:
        return LEFT + (at - min_x) / max(max_x - min_x, 1) * (WIDE - LEFT - RIGHT)

    def y(value: float) -> float:
        return TOP + (high - value) / (high - low) * (HIGH - TOP - BOTTOM)

    parts = [_svg(WIDE, HIGH, block.title)]
    for tick in range(5):
        value = low + (high - low) * tick / 4
        parts.append(f'<line x1="{LEFT}" x2="{WIDE - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="#8884"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.{decimals}f}</text>')
    step = max(1, len(block.xs) // 12)
    for at in block.xs[::step]:
        parts.append(f'<text x="{x(at):.1f}" y="{HIGH - BOTTOM + 15}" text-anchor="middle">{at}</text>')
    for at, label in block.marks:
        parts.append(
            f'<line x1="{x(at):.1f}" x2="{x(at):.1f}" y1="{TOP}" y2="{HIGH - BOTTOM}" stroke="#888" '
            'stroke-dasharray="3 3"/>'
        )
        parts.append(f'<text x="{x(at) + 4:.1f}" y="{TOP + 10}">{escape(show_text(label))}</text>')
    for number, (name, values) in enumerate(block.series):
        colour = palette.RUNS[number % len(palette.RUNS)]
        width = max(6 - 4 * number, 2)
        line = " ".join(f"{x(at):.1f},{y(v):.1f}" for at, v in zip(block.xs, values, strict=True) if v is not None)
        parts.append(
            f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="{width}" stroke-linejoin="round"/>'
        )
        legend_left = LEFT + number * LEGEND
        parts.append(
            f'<line x1="{legend_left}" x2="{legend_left + 18}" y1="{HIGH - 8}" y2="{HIGH - 8}" stroke="{colour}" '
            f'stroke-width="{width}"/>'
        )
        parts.append(f'<text x="{legend_left + 24}" y="{HIGH - 4}">{escape(show_text(name))}</text>')
    return _wrap_in_box("".join([*parts, "</svg>"]), block.title)


def tiles(block: Tiles) -> str:
    """Tiles in rows, coloured by group."""
    if not block.rows:
        return ""
    all_tiles = [tile for row in block.rows for tile in row]
    groups = 1 + max(group for _, _, group in all_tiles)
    letters = min(TILE_LETTERS, max(len(line) for label, text, _ in all_tiles for line in (label, *text)))
    tile_width = max(TILE_LEAST, round(letters * LETTER) + 16)
    tile_height = (1 + max(len(text) for _, text, _ in all_tiles)) * LINE + 12
    across = max(len(row) for row in block.rows)

    parts = [_svg(across * (tile_width + GAP), len(block.rows) * (tile_height + GAP), block.title)]
    for r, row in enumerate(block.rows):
        for c, (label, text, group) in enumerate(row):
            tile_left = c * (tile_width + GAP)
            top = r * (tile_height + GAP)
            colour = palette.rank_colour(group, groups)
            full_text = escape("; ".join(show_text(line) for line in (label, *text)))
            parts.append(
                f'<g><title>{full_text}</title><rect x="{tile_left + 1}" y="{top + 1}" width="{tile_width - 2}" '
                f'height="{tile_height - 2}" rx="5" fill="{colour}" fill-opacity="0.16" stroke="{colour}"/>'
            )
            for n, line in enumerate((label, *text)):
                weight = ' font-weight="600"' if n == 0 else ""
                fitting = line if len(line) <= TILE_LETTERS else f"{line[: TILE_LETTERS - 1]}\u2026"
                parts.append(
                    f'<text x="{tile_left + 8}" y="{top + 17 + n * LINE}"{weight}>{escape(show_text(fitting))}</text>'
                )
            parts.append("</g>")
    return _wrap_in_box("".join([*parts, "</svg>"]), block.title)


def _svg(width: int, height: int, title: str) -> str:
    """The head of a picture that keeps its size."""
    label = escape(show_text(title))
    return (
        f'<svg class="whole" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'aria-label="{label}">'
    )


def _wrap_in_box(content: str, title: str) -> str:
    """What is wider or longer than there is room for, in a box of its own in which it scrolls."""
    return f'<div class="wide" tabindex="0" role="group" aria-label="{escape(show_text(title))}">{content}</div>'
