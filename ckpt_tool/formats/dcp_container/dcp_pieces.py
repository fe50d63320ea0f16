"""A piece of a DCP tensor: what `.metadata` says of a box, as an object. `dcp_columns` has many of them as columns."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ckpt_tool.formats.dcp_container.dcp_metadata import DcpTensorEntry

RANK_LIMIT = 64


class DcpPiece(NamedTuple):
    """A box of a tensor and where its item lies."""

    # offset, shape: elements
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    # at, length: bytes in `file`
    at: int
    length: int


class DcpItem(NamedTuple):
    """A piece of a tensor, by where it lies."""

    # at, length: bytes in its file
    at: int
    fqn: str
    number: int  # of the piece
    tensor: DcpTensorEntry
    length: int
