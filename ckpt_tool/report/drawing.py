"""Curves and tiles as inline SVG: no script, no style sheet, numbers and escaped text only."""

from __future__ import annotations

from html import escape

from ckpt_tool.report.page import Curves, Tiles
from ckpt_tool.report.text import shown

WIDE, HIGH = 720, 260  # of a chart, in pixels
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 14, 34  # its margins
HUES = (212, 28, 140, 340, 265, 90, 180, 50)  # told apart in light and dark
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
            f'<line x1="{x(at):.1f}" x2="{x(at):.1f}" y1="{TOP}" y2="{HIGH - BOTTOM}" stroke="#888" stroke-dasharray="3 3"/>'
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
            f'<line x1="{left}" x2="{left + 18}" y1="{HIGH - 8}" y2="{HIGH - 8}" stroke="{colour}" stroke-width="{width}"/>'
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
            for n, said in enumerate((label, *text)):
                weight = ' font-weight="600"' if n == 0 else ""
                parts.append(f'<text x="{left + 8}" y="{top + 17 + n * LINE}"{weight}>{escape(shown(said, 18))}</text>')
    return "".join([*parts, "</svg>"])


def _colour(number: int) -> str:
    return f"hsl({HUES[number % len(HUES)]},70%,50%)"
