"""The options of `ckpt delta`."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt_tool.deltas.folder import CHECKSUMS, ENCODINGS
from ckpt_tool.option_kinds.statement import OPTIONS, PLAN, RUN
from ckpt_tool.option_kinds.values import count, size
from ckpt_tool.options.writing import DEFAULT_SHARD_SIZE


@dataclass(frozen=True)
class Making:
    """As given."""

    encoding: str = OPTIONS.choice(
        "Encode changes as xor (smallest) or overwrite (may be applied twice). Default xor.",
        ENCODINGS,
        default=ENCODINGS[0],
    )
    checksum: str = OPTIONS.choice(
        "Store this digest of each tensor. Default xxh3-128.", tuple(CHECKSUMS), default=next(iter(CHECKSUMS))
    )
    # None for what the names of the folders say
    weight_version: int | None = OPTIONS.option(
        "Number the version that NEW is: --weight-version 2. Default: as the folders are called "
        "(weight_v000002), or 1.",
        count,
        "N",
    )
    dedup: bool = OPTIONS.flag(
        "Keep every file of NEW, a step of BASE's run, byte for byte, optimizer and extras included."
    )
    force: bool = RUN.flag("Replace an existing checkpoint at OUT in one step, and nothing else that is stored there.")
    fsync: bool = RUN.switch("Wait until the disk has all bytes before the output appears (the default).", default=True)
    dry_run: bool = RUN.flag("Show what would be compared, and write nothing.")
    threads: int | None = RUN.option("Use N threads to compare and compress: --threads 8.", count, "N")
    max_shard_size: int = PLAN.option(
        "Limit the size of each file: --max-shard-size 2GB. Default 5GB.", size, "SIZE", default=DEFAULT_SHARD_SIZE
    )
