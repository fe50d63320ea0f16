"""Plan: everything that a run will do, as plain values: what is read, what is written, in which order.

A `Move` is one tensor: source regions that tile its canonical line, output regions that hold it, the dtypes on both
sides. `Unit`s are shares of about 64 MiB of the moves, cut where the set of output files changes, so that threads can
work on different files; they are derived from the moves alone, which is why a plan file needs none and `--part I/N`
means the same on every machine.

`Plan.to_json` and `plan.saved.read_plan` are exact inverses; a plan read from a file is data and is checked as such,
whole, before a byte moves.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ckpt_tool.core.dtype import DType
from ckpt_tool.core.target import TargetFile
from ckpt_tool.core.tensor import TensorKey
from ckpt_tool.plan.copy import Region, in_order

PLAN_VERSION = 2


class SourceFile(NamedTuple):
    """A source file as the plan saw it: root as the user gave it, path below the root, and identity."""

    root: str
    path: str
    identity: tuple[int, ...]  # (dev, ino, size, mtime_ns, ctime_ns)


class Record(NamedTuple):
    """A stored record with a checksum: bytes [offset, offset + nbytes) of source file `file` have CRC-32 `crc`."""

    file: int
    offset: int
    nbytes: int
    crc: int


class Extent(NamedTuple):
    """An array of an output file: bytes [offset, offset + nbytes), padding included."""

    offset: int
    nbytes: int
    move: int  # the number of the move that fills it, -1 where none does (all of it is padding)


class Move(NamedTuple):
    """One tensor on its way from the sources to the outputs. `numel` elements of `item` bytes are read."""

    key: TensorKey
    shape: tuple[int, ...]
    dtype: DType
    dtype_out: DType
    numel: int
    item: int
    item_out: int  # bytes of an element written
    sources: tuple[Region, ...]  # replica 0 tiles the line; higher replicas are read and compared
    outputs: tuple[Region, ...]
    # the tensor's dims in the order of the line, () for their own (`plan.copy.common_order`)
    order: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor as it is read."""
        return self.numel * self.item

    @property
    def line_shape(self) -> tuple[int, ...]:
        """The shape whose row-major order the line is; a digest over the line is a digest of that shape."""
        return in_order(self.shape, self.order)


class Moves(Sequence[Move]):
    """Moves that are made when looked at (`plan.moves`): their sums are known without that."""

    @property
    def bytes_read(self) -> int:
        """Source bytes that the moves read, replicas included."""
        raise NotImplementedError

    @property
    def copies(self) -> int:
        """See `plan.schedule.count_copies`."""
        raise NotImplementedError

    @property
    def states(self) -> Mapping[str, tuple[int, int]]:
        """State -> (tensors, bytes of their values as written)."""
        raise NotImplementedError

    @property
    def identity(self) -> str:
        """A hash of everything that the moves and the files they fill depend on, except the source files."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that a run will do."""

    sources: tuple[SourceFile, ...]
    records: tuple[Record, ...]
    outputs: tuple[TargetFile, ...]  # the target's files (their arrays already turned into the moves' output regions)
    arrays: Sequence[Sequence[Extent]]  # for each output file its arrays, in the order that `Patch.of` counts
    moves: Sequence[Move]
    format: str  # the output's format name, for the check after the run
    single: str | None  # the output is this one file
    destination: str
    options: dict[str, Any]
    report: dict[str, Any]

    @property
    def bytes_read(self) -> int:
        """Source bytes that the moves read, replicas included, and the side files."""
        if isinstance(self.moves, Moves):
            moved = self.moves.bytes_read
        else:
            moved = sum(region.numel * move.item for move in self.moves for region in move.sources)
        return moved + sum(file.size for file in self.outputs if file.copy_of is not None)

    @property
    def bytes_written(self) -> int:
        """Bytes of all output files."""
        return sum(file.size for file in self.outputs)

    def identifier(self) -> str:
        """A hash of everything that decides the output's bytes: the same command on the same sources gives it again."""
        import hashlib  # imported late: loading OpenSSL takes longer than planning

        # Moves that are made on access know their hash; listing them to compute it would take much longer.
        if isinstance(self.moves, Moves):
            rest = [self.sources, self.records, self.format, self.single, self.destination, self.options, self.report]
            document: Any = [PLAN_VERSION, self.moves.identity, *rest]
        else:
            document = self.to_json()
        text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON values, which `plan.saved.read_plan` reads back; moves made when looked at are listed."""
        from base64 import b64encode

        return {
            "plan_version": PLAN_VERSION,
            "format": self.format,
            "single": self.single,
            "destination": self.destination,
            "options": self.options,
            "report": self.report,
            "sources": [list(file) for file in self.sources],
            "records": [list(record) for record in self.records],
            "outputs": [
                {
                    "path": file.path,
                    "size": file.size,
                    "literals": [[at, b64encode(data).decode()] for at, data in file.literals],
                    "patches": [list(patch[:3] if patch.span is None else patch) for patch in file.patches],
                    "copy_of": file.copy_of,
                    "arrays": [list(array) for array in arrays],
                }
                for file, arrays in zip(self.outputs, self.arrays, strict=True)
            ],
            "moves": [
                [
                    [move.key.name, move.key.state],
                    list(move.shape),
                    move.dtype.name,
                    move.dtype_out.name,
                    move.numel,
                    move.item,
                    move.item_out,
                    [_flat(region) for region in move.sources],
                    [_flat(region) for region in move.outputs],
                    *([list(move.order)] if move.order else []),
                ]
                for move in self.moves
            ],
        }


def _flat(region: Region) -> list[Any]:
    return [region.file, region.offset, region.at, region.extents, region.strides, region.steps, region.replica]
