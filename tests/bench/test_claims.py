"""The simulation of claims: every share is done, one worker commits, and little time is lost."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

import claims


@pytest.mark.parametrize("die", [0, 3])
def test_workers_that_are_simulated_do_it_all(die: int) -> None:
    found = claims.simulate([1_000_000_000] * 60, 30, speed=100e6, latency=0.03, die=die, late=3)
    assert found["undone"] == 0 and found["committing"] == 1 and found["lost"] < 0.03
    assert found["done_twice"] == 0 or die
    assert bool(found["taken_over"]) == bool(die)
