"""Palettes: one for each thing that colour can mean, the same on every page and in the terminal.

    STATES     model, master, the optimizer's moments, ...: a colour of its own for each, wherever it appears
    ranks      a sequence, dark to light, so that neighbours look alike (`rank_colour`)
    MODULES    pale tints for parts of a model
    dtypes     greys, darker where an element has more bits (`dtype_fills`)
    CHANGES    how much values differ, a step for each power of ten (`report.picture`)
    RUNS       the two curves of `ckpt validate`

No colour is in two palettes. States have the hues that Okabe and Ito chose for all kinds of eyes
(https://jfly.uni-koeln.de/color/); ranks follow viridis (https://bids.github.io/colormap/), modules the pale scheme of
Paul Tol (https://personal.sron.nl/~pault/). If there are more things than colours, patterns distinguish them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ckpt_tool.core.tensor import EMA, EXTRAS, MASTER, MODEL, STEP


class Fill(NamedTuple):
    """How an area is painted."""

    colour: str
    pattern: int = 0  # 0 for the bare colour, else the number of a pattern over it


# What a state is, by its name; the names of optimizers' states are those of torch, Paddle and Megatron.
STATES = {
    MODEL: "#0072b2",
    MASTER: "#d55e00",
    "exp_avg": "#009e73",
    "momentum_buffer": "#009e73",
    "exp_avg_sq": "#56b4e9",
    EMA: "#cc79a7",
    STEP: "#4d4d4d",
    EXTRAS: "#4d4d4d",
}
OTHER_STATE = "#d4a900"  # states of other optimizers, distinguished by a pattern
MODULES = (
    "#77aadd",
    "#eedd88",
    "#44bb99",
    "#ffaabb",
    "#99ddff",
    "#bbcc33",
    "#ee8866",
    "#aaaa00",
)
REST = "#dddddd"  # what is too small to be drawn, put together
# For each power of ten from 1e-7 and less up to 1 and more.
CHANGES = ("#fffbe0", "#fff0b0", "#fedc84", "#fdbf5c", "#fb9c41", "#f4742f", "#dd4a1f", "#b42a12")
NO_NUMBER = "#c9b3e6"  # what has no relative change: another shape or dtype, one side alone, NaN
RUNS = ("#808890", "#c2185b")
_RANKS = ("#46337e", "#365c8d", "#277f8e", "#1fa187", "#4ac16d", "#9fda3a", "#fde725")  # viridis, but its darkest end
_GREYS = {64: "#6f6f6f", 32: "#909090", 16: "#b2b2b2", 8: "#d0d0d0"}
_FEWER_BITS = "#ececec"
_TEXT_LUMINANCE = 0.18  # where a colour has 4.5:1 against black and against white


def state_fills(states: Sequence[str]) -> list[Fill]:
    """The fill of each state; those that no table names share a colour and differ by pattern."""
    others = [state for state in states if state not in STATES]
    return [Fill(STATES[state]) if state in STATES else Fill(OTHER_STATE, 1 + others.index(state)) for state in states]


def dtype_fills(bits: Sequence[int]) -> list[Fill]:
    """The fill of each dtype of so many bits: a grey, and a pattern for the second and further of as many."""
    fills: list[Fill] = []
    for number in bits:
        grey = _GREYS.get(number, _FEWER_BITS)
        fills.append(Fill(grey, sum(fill.colour == grey for fill in fills)))
    return fills


def rank_colour(number: int, ranks: int) -> str:
    """The colour of one of so many ranks (or files): its place on the way from dark to light."""
    place = number / max(1, ranks - 1) * (len(_RANKS) - 1)
    below = min(int(place), len(_RANKS) - 2)
    share = place - below
    pairs = zip(_channels(_RANKS[below]), _channels(_RANKS[below + 1]), strict=True)
    return "#" + "".join(f"{round(low + (high - low) * share):02x}" for low, high in pairs)


def terminal_code(state: str) -> str:
    """The colour of a state's name in a terminal, as the parameter of an SGR sequence.

    It has the hue that pages show, as light as can be read on black and on white.
    """
    colour = STATES.get(state, OTHER_STATE)
    linear = [_linear(channel) for channel in _channels(colour)]
    scale = _TEXT_LUMINANCE / _luminance(linear)
    target_color = [_encode_gamma(min(1.0, value * scale)) for value in linear]
    red, green, blue = (min(range(6), key=lambda level: abs(_CUBE[level] - value)) for value in target_color)
    return f"38;5;{16 + 36 * red + 6 * green + blue}"


def contrast(one: str, other: str) -> float:
    """The contrast of two colours, 1 to 21 (https://www.w3.org/TR/WCAG21/#dfn-contrast-ratio)."""
    luminances = [_luminance(list(map(_linear, _channels(colour)))) for colour in (one, other)]
    return (max(luminances) + 0.05) / (min(luminances) + 0.05)


def style_sheet() -> str:
    """The rules of a page that come from here: swatches before states, steps of the heat map."""
    rules = [f'[data-state="{state}"]::before {{ background: {colour}; }}' for state, colour in STATES.items()]
    rules += [f".change{step} {{ background: {colour}; }}" for step, colour in enumerate(CHANGES)]
    rules.append(f"[data-state]::before {{ background: {OTHER_STATE}; }}")
    rules.append(f".no-number {{ background: {NO_NUMBER}; }}")
    return "\n".join(sorted(rules, key=lambda rule: rule.startswith("[data-state=")))


_CUBE = (0, 95, 135, 175, 215, 255)  # levels of a channel among the 216 colours of a terminal


def _channels(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def _linear(channel: float) -> float:
    """A channel of sRGB, 0 to 255, as an amount of light, 0 to 1."""
    share = channel / 255
    return share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4


def _encode_gamma(light: float) -> float:
    share = light * 12.92 if light <= 0.0031308 else 1.055 * light ** (1 / 2.4) - 0.055
    return share * 255


def _luminance(linear: Sequence[float]) -> float:
    red, green, blue = linear
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
