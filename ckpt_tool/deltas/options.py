"""The options of `ckpt delta`."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt_tool.deltas.folder import CHECKSUMS, ENCODINGS
from ckpt_tool.options.statement import OPTIONS, PLAN, RUN
from ckpt_tool.options.values import count, size
from ckpt_tool.options.writing import DEFAULT_SHARD_SIZE


@dataclass(frozen=True)
class Making:
    """As given. weight_version: None for what the names of the folders say."""

    encoding: str = OPTIONS.choice(
        "xor: smallest; overwrite: may be applied twice. Default xor.", ENCODINGS, default=ENCODINGS[0]
    )
    checksum: str = OPTIONS.choice(
        "Digest of each tensor. Default xxh3-128.", tuple(CHECKSUMS), default=next(iter(CHECKSUMS))
    )
    weight_version: int | None = OPTIONS.option(
        "The version that NEW is, on the one before. Default: as the folders are called (weight_v000002), or 1.",
        count,
        "N",
    )
    dedup: bool = OPTIONS.flag(
        "Keep every file of NEW, a step of BASE's run, byte for byte: optimizer, extras and all."
    )
    force: bool = RUN.flag("Replace an existing output, whole and in one step.")
    fsync: bool = RUN.switch("Wait for the disk before the commit (the default).", default=True)
    dry_run: bool = RUN.flag("Show what would be compared; write nothing.")
    threads: int | None = RUN.option("Threads that compare and compress.", count, "N")
    max_shard_size: int = PLAN.option("Bytes a file. Default 5GB.", size, "SIZE", default=DEFAULT_SHARD_SIZE)
