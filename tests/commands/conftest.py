"""The path from which the tests of commands import `adapter_models.py`; a place of its own for the tests of `prune`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def tmp_path(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """The test's folder; for tests of `prune`, which looks for deltas next to a run, a folder below it."""
    if "prune" not in request.path.name and request.path.name != "test_python_results.py":
        return tmp_path
    alone = tmp_path / "run"
    alone.mkdir()
    return alone
