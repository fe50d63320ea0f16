"""One palette for each meaning: no colour in two of them, states told apart by every kind of eyes, text readable."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest

from ckpt_tool.report import html, palette
from ckpt_tool.report.page import Page

# What is left of linear RGB for eyes without one kind of cones: Machado, Oliveira and Fernandes 2009, severity 1.
EYES = {
    "all cones": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
TOLD_APART = 0.07  # in Oklab; black and white are 1 apart
GROUNDS = ("#ffffff", "#14171b")


def oklab(colour: str, eyes: np.ndarray) -> np.ndarray:
    """https://bottosson.github.io/posts/oklab/"""
    srgb = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(eyes @ linear, 0, 1)
    to_cones = [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
    to_lab = [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
    return np.array(to_lab) @ np.cbrt(np.array(to_cones) @ seen)


def test_no_colour_is_in_two_palettes() -> None:
    palettes = {
        "states": {*palette.STATES.values(), palette.OTHER_STATE},
        "ranks": {palette.rank_colour(number, 128) for number in range(128)},
        "modules": {*palette.MODULES, palette.REST},
        "dtypes": {fill.colour for fill in palette.dtype_fills([64, 32, 16, 8, 4])},
        "changes": {*palette.CHANGES, palette.NO_NUMBER},
        "runs": {*palette.RUNS},
    }
    for (one, first), (other, second) in itertools.combinations(palettes.items(), 2):
        assert not first & second, (one, other)


@pytest.mark.parametrize("eyes", EYES)
def test_every_kind_of_eyes_tells_states_apart(eyes: str) -> None:
    colours = sorted({*palette.STATES.values(), palette.OTHER_STATE})
    places = {colour: oklab(colour, EYES[eyes]) for colour in colours}
    for one, other in itertools.combinations(colours, 2):
        assert np.linalg.norm(places[one] - places[other]) > TOLD_APART, (one, other)


@pytest.mark.parametrize("eyes", EYES)
def test_ranks_and_steps_of_change_go_one_way(eyes: str) -> None:
    """From dark to light, and from light to dark: what is larger is seen as larger."""
    ranks = [oklab(palette.rank_colour(number, 16), EYES[eyes])[0] for number in range(16)]
    changes = [oklab(colour, EYES[eyes])[0] for colour in palette.CHANGES]
    assert ranks == sorted(ranks) and changes == sorted(changes, reverse=True)


def test_states_of_one_page_have_fills_of_their_own() -> None:
    states = ["model", "master", "exp_avg", "exp_avg_sq", "ema", "GG", "Q", "step"]
    fills = palette.state_fills(states)
    assert len(set(fills)) == len(states)
    assert fills[0] == (palette.STATES["model"], 0) and palette.state_fills(["ema", "model"])[1] == fills[0]
    assert len(set(palette.dtype_fills([16, 16, 32, 8, 8, 4, 1]))) == 7


def test_states_can_be_read_in_any_terminal() -> None:
    cube = (0, 95, 135, 175, 215, 255)
    for state in (*palette.STATES, "of another optimizer"):
        code = int(palette.terminal_code(state).removeprefix("38;5;")) - 16
        colour = "#" + "".join(f"{cube[code // unit % 6]:02x}" for unit in (36, 6, 1))
        assert all(palette.contrast(colour, ground) >= 3 for ground in ("#000000", "#ffffff")), (state, colour)


def test_text_of_a_page_has_enough_contrast() -> None:
    source = html.document(Page("t", ()))
    for ground, scheme in zip(GROUNDS, re.findall(r":root \{(.*?)\}", source, re.DOTALL)[:2], strict=True):
        names = dict(re.findall(r"--(\w+): (#\w{6})", scheme))
        assert names["ground"] == ground
        for name in ("ink", "dim", "mark", "good", "warn", "bad"):
            for behind in (names["ground"], names["raised"]):
                assert palette.contrast(names[name], behind) >= 4.5, (name, behind)
    for colour in palette.CHANGES[:-1]:
        assert palette.contrast(colour, "#000000") >= 4.5
    assert palette.contrast(palette.CHANGES[-1], "#ffffff") >= 4.5


def test_colours_of_states_are_stated_once() -> None:
    source = html.document(Page("t", ()))
    for state, colour in palette.STATES.items():
        assert f'[data-state="{state}"]::before {{ background: {colour}; }}' in source
    scripts = [path.read_text("utf-8") for path in (html._BROWSER).glob("*.js")]
    assert not [word for text in scripts for word in re.findall(r"#[0-9a-f]{6}", text)]
