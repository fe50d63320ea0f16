"""A layout file (`--layout FILE.toml`): degrees and placement rules, read in bounded time whatever stands in it.

    [mesh]
    tp = 4
    [[rule]]
    match = "*.w1.weight"
    shard = { 0 = ["tp"] }

CPython's TOML parser is recursive and takes the square of a dotted key's parts, so size and dots of a line are bounded first.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from ckpt_tool.errors import UsageError, wrap_os_error
from ckpt_tool.plan.placing import Rule, rules_from

LIMIT = 256 << 10  # bytes; a rule takes some hundred
DOTS = 1000  # of a line


def read_layout(file: str) -> tuple[dict[str, int], tuple[Rule, ...]]:
    """(degrees, rules) of the file. Raises UsageError E0252 with what does not read, StorageError."""
    path = Path(file)
    try:
        with path.open("rb") as stream:
            raw = stream.read(LIMIT + 1)
    except OSError as e:
        raise wrap_os_error(e, path, "reading the layout file") from e
    return parse_layout(raw, file)


def parse_layout(raw: bytes, path: str) -> tuple[dict[str, int], tuple[Rule, ...]]:
    """(degrees, rules) of a layout file's bytes. path: the file, for messages. Raises UsageError E0252."""
    try:
        if len(raw) > LIMIT:
            raise ValueError(f"more than {LIMIT >> 10} KiB")
        if max(line.count(b".") for line in raw.split(b"\n")) > DOTS:
            raise ValueError(f"a line with more than {DOTS} dots")
        document = tomllib.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as e:
        what = "nested too deeply" if isinstance(e, RecursionError) else str(e).partition("; use sys.")[0]
        raise UsageError(
            f"the layout file is not TOML: {what}", code="E0252", path=path,
            hint='want [mesh] with degrees, and [[rule]] tables with match and shard',
        ) from e  # fmt: skip
    return rules_from(document, path)
