"""One folder of compiled libraries for all processes of a run."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def compiled_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What CKPT_CACHE is to be; skips where nothing can be compiled."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    shared = tmp_path_factory.getbasetemp()
    return (shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared) / "compiled"
