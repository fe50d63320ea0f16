"""A page as one self-contained HTML file (`--report FILE.html`): no script, no link, no request.

Every text goes through `report.text.shown` and `html.escape`; a Content-Security-Policy forbids whatever might slip
through. The file is written beside its name and renamed, and replaces nothing but an earlier report.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from ckpt_tool.report import files
from ckpt_tool.report.page import Block, Cell, Curves, Facts, Lines, Page, Table, Tiles, Verdict, style_of, text_of
from ckpt_tool.report.text import count, shown

MARK = "<!doctype html>\n<!-- a report of ckpt -->\n"
ROWS_SHOWN = 5000
_STYLE = """
:root { color-scheme: light dark; --line: #8884; --dim: #777; --good: #18794e; --warn: #9a5b00; --bad: #c0232c; }
@media (prefers-color-scheme: dark) { :root { --good: #4cc38a; --warn: #f0a83c; --bad: #ff6369; --dim: #999; } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 78rem; margin: 2rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.3rem; overflow-wrap: anywhere; } h2 { font-size: 1.05rem; margin: 1.6rem 0 .3rem; }
table { border-collapse: collapse; margin: .4rem 0; } .wide { overflow-x: auto; }
th { text-align: left; font-weight: 600; color: var(--dim); border-bottom: 1px solid var(--line); }
th, td { padding: .12rem 1.2rem .12rem 0; vertical-align: top; } tr:hover td { background: #8881; }
td, li, dd { font-family: ui-monospace, monospace; font-size: .9em; } td.right, th.right { text-align: right; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1.2rem; margin: .4rem 0; }
dt { color: var(--dim); } dd { margin: 0; overflow-wrap: anywhere; } ul { padding-left: 1.2rem; margin: .3rem 0; }
.strong { font-weight: 600; } .dim { color: var(--dim); } .good { color: var(--good); } .warn { color: var(--warn); }
.bad { color: var(--bad); font-weight: 600; }
svg { max-width: 100%; height: auto; } svg text { fill: currentColor; font: 11px ui-monospace, monospace; }
.verdict { padding: .5rem .9rem; border-left: 4px solid currentColor; font-weight: 600; margin-top: 1.6rem; }
"""


def check_target(path: str) -> None:
    """Refuse before any work what is no earlier report, as `report.files`."""
    files.check_target(path, "--report", lambda head: head.startswith(MARK.encode()))


def save(page: Page, path: str, *, title: str = "", facts: Iterable[tuple[str, str]] = ()) -> None:
    """Write the page to `path` in one step. facts: what to say above it (command, version). Raises StorageError."""
    text = document(page._replace(title=title or page.title), facts=facts)
    files.save(path, text.encode("utf-8", errors="backslashreplace"))


def document(page: Page, *, facts: Iterable[tuple[str, str]] = ()) -> str:
    """The whole HTML text."""
    title = escape(shown(page.title))
    head = Facts(tuple(facts))
    body = "\n".join(_block(block) for block in ((head, *page.blocks) if head.rows else page.blocks))
    return (
        f'{MARK}<html lang="en">\n<meta charset="utf-8">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n<h1>{title}</h1>\n{body}\n</html>\n"
    )


def _block(block: Block) -> str:
    if isinstance(block, Facts):
        rows = "\n".join(f"<dt>{escape(shown(label))}<dd{_class(value)}>{_text(value)}" for label, value in block.rows)
        return f"{_title(block.title)}<dl>\n{rows}\n</dl>"
    if isinstance(block, Table):
        return _title(block.title) + _table(block)
    if isinstance(block, Lines):
        items = "\n".join(f"<li{_class(line)}>{_text(line)}" for line in block.lines if text_of(line))
        return f"{_title(block.title)}<ul>\n{items}\n</ul>"
    if isinstance(block, Curves):
        return _title(block.title) + curves(block)
    if isinstance(block, Tiles):
        return _title(block.title) + tiles(block)
    return _verdict(block)


def _verdict(verdict: Verdict) -> str:
    style = "" if verdict.ok is None else " good" if verdict.ok else " bad"
    return f'<p class="verdict{style}">{escape(shown(verdict.text, 2000))}</p>'


def _title(title: str) -> str:
    return f"<h2>{escape(shown(title))}</h2>\n" if title else ""


def _table(table: Table) -> str:
    right = [' class="right"' if column.right else "" for column in table.columns]
    head = "".join(f"<th{r}>{escape(column.title)}" for column, r in zip(table.columns, right, strict=True))
    rows = []
    for number, row in enumerate(table.rows[:ROWS_SHOWN]):
        level = min(table.indents[number], 12) if table.indents else 0
        pad = f' style="padding-left: {level * 1.2:g}rem"' if level else ""
        cells = []
        for i, (cell, column) in enumerate(zip(row, table.columns, strict=True)):
            cells.append(f"<td{_class(cell, right=column.right)}{pad if i == 0 else ''}>{_text(cell)}")
        rows.append("<tr>" + "".join(cells))
    hidden = len(table.rows) - ROWS_SHOWN
    more = table.more or (f"... {count(hidden)} more rows; --json has all" if hidden > 0 else "")
    closing = f'<p class="dim">{escape(shown(more))}</p>' if more else ""
    return f'<div class="wide"><table>\n<tr>{head}\n' + "\n".join(rows) + f"\n</table></div>{closing}"


def _text(cell: Cell) -> str:
    return escape(shown(text_of(cell), 2000))


def _class(cell: Cell, *, right: bool = False) -> str:
    names = ["right"] * right + [style_of(cell)] * (style_of(cell) != "plain")
    return f' class="{" ".join(names)}"' if names else ""


# ----------------------------------------------------------------------------------------------------
# Curves and tiles as inline SVG: no script, no style sheet, numbers and escaped text only.


WIDE, HIGH = 720, 260  # of a chart, in pixels
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 14, 34  # its margins
HUES = (212, 28, 140, 340, 265, 90, 180, 50)  # distinct in light and dark
TILE_WIDE, LINE, GAP = 128, 15, 8
LEGEND = 190  # pixels a name takes


def curves(block: Curves) -> str:
    """One chart; a series that covers another is drawn thinner, so that both show where they are equal."""
    points = [value for _, values in block.series for value in values if value is not None]
    if not points or not block.xs:
        return ""
    low, high = min(points), max(points)
    pad = (high - low) * 0.05 or abs(high) * 0.01 or 1.0
    low, high = low - pad, high + pad
    first, last = min(block.xs), max(block.xs)

    def x(at: float) -> float:
        return LEFT + (at - first) / max(last - first, 1) * (WIDE - LEFT - RIGHT)

    def y(value: float) -> float:
        return TOP + (high - value) / (high - low) * (HIGH - TOP - BOTTOM)

    parts = [f'<svg viewBox="0 0 {WIDE} {HIGH}" width="{WIDE}" role="img" aria-label="{escape(shown(block.title))}">']
    for tick in range(5):
        value = low + (high - low) * tick / 4
        parts.append(f'<line x1="{LEFT}" x2="{WIDE - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="#8884"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.4g}</text>')
    step = max(1, len(block.xs) // 12)
    for at in block.xs[::step]:
        parts.append(f'<text x="{x(at):.1f}" y="{HIGH - BOTTOM + 15}" text-anchor="middle">{at}</text>')
    for at, label in block.marks:
        parts.append(
            f'<line x1="{x(at):.1f}" x2="{x(at):.1f}" y1="{TOP}" y2="{HIGH - BOTTOM}" stroke="#888" '
            'stroke-dasharray="3 3"/>'
        )
        parts.append(f'<text x="{x(at) + 4:.1f}" y="{TOP + 10}">{escape(shown(label))}</text>')
    for number, (name, values) in enumerate(block.series):
        colour, width = _colour(number), max(6 - 4 * number, 2)
        line = " ".join(f"{x(at):.1f},{y(v):.1f}" for at, v in zip(block.xs, values, strict=True) if v is not None)
        parts.append(
            f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="{width}" stroke-linejoin="round"/>'
        )
        left = LEFT + number * LEGEND
        parts.append(
            f'<line x1="{left}" x2="{left + 18}" y1="{HIGH - 8}" y2="{HIGH - 8}" stroke="{colour}" '
            f'stroke-width="{width}"/>'
        )
        parts.append(f'<text x="{left + 24}" y="{HIGH - 4}">{escape(shown(name))}</text>')
    return "".join([*parts, "</svg>"])


def tiles(block: Tiles) -> str:
    """Tiles in rows, coloured by group."""
    if not block.rows:
        return ""
    across = max(len(row) for row in block.rows)
    lines = max((len(tile[1]) for row in block.rows for tile in row), default=0)
    high = (lines + 1) * LINE + 12
    width, height = across * (TILE_WIDE + GAP), len(block.rows) * (high + GAP)
    parts = [
        f'<svg viewBox="0 0 {width} {height}" width="{width}" role="img" aria-label="{escape(shown(block.title))}">'
    ]
    for r, row in enumerate(block.rows):
        for c, (label, text, group) in enumerate(row):
            left, top, colour = c * (TILE_WIDE + GAP), r * (high + GAP), _colour(group)
            parts.append(
                f'<rect x="{left + 1}" y="{top + 1}" width="{TILE_WIDE - 2}" height="{high - 2}" rx="5" '
                f'fill="{colour}" fill-opacity="0.16" stroke="{colour}"/>'
            )
            for n, line in enumerate((label, *text)):
                weight = ' font-weight="600"' if n == 0 else ""
                parts.append(f'<text x="{left + 8}" y="{top + 17 + n * LINE}"{weight}>{escape(shown(line, 18))}</text>')
    return "".join([*parts, "</svg>"])


def _colour(number: int) -> str:
    return f"hsl({HUES[number % len(HUES)]},70%,50%)"
