"""One library of compiled loops for all processes of a run."""

from __future__ import annotations

import pytest
from loops import opened_loops

from ckpt_tool.compiled.loading import Opened


@pytest.fixture(scope="session")
def loops() -> Opened:
    """The library; skips where there is none and no compiler."""
    return opened_loops()
