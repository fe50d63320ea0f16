"""`ckpt.open`: a checkpoint of any format as lazy tensors."""

from __future__ import annotations

from ckpt_tool.options.reading import Reading
from ckpt_tool.run.lazy import OpenCatalog
from ckpt_tool.sources.opening import open_source


def open_catalog(path: str, from_format: str | None = None) -> OpenCatalog:
    """The checkpoint at `path`, headers read, values not. Refuses pickles that ask for code (exit 4's error)."""
    opened = open_source(path, Reading(from_format=from_format)).refuse_unsafe()
    opened.catalog.check()
    return OpenCatalog(opened.tree, opened.catalog)
