"""One piece of a DCP tensor as `.metadata` describes it. `dcp_columns` stores many pieces as columns instead."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ckpt_tool.formats.dcp_container.dcp_metadata import DcpTensorEntry

RANK_LIMIT = 64  # dims of a tensor at most


class DcpPiece(NamedTuple):
    """A box of a tensor and the location of its item."""

    # offset, shape: elements
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    # at, length: bytes in `file`
    at: int
    length: int


class DcpItem(NamedTuple):
    """A piece of a tensor, with its location first, so that items sort by their position in the file."""

    # at, length: bytes in its file
    at: int
    fqn: str
    number: int  # index of the piece in its tensor
    tensor: DcpTensorEntry
    length: int
