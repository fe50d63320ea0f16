"""Mapped: the result of applying a mapping between two namings to one checkpoint, tensor by tensor.

A family's equations and AOA statements give the same kind of result: each target tensor with the pieces that fill it,
completely and once, and the name of each source tensor that no target uses.

    Made("qkv", (32, 64), pieces=(Piece(..., src=Side("q", ...), dst=Side("qkv", ...)), ...))

Names are those of parameters; the states of a parameter follow it (`plan.mapping`). Knows no files.
"""

from __future__ import annotations

from typing import NamedTuple

from ckpt_tool.algebra.piece import Piece
from ckpt_tool.core.dtype import DType


class Made(NamedTuple):
    """One target tensor."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]  # from source tensors (or `piece.PAD`: zeros) to this one; they tile it
    dtype: DType | None = None  # what the mapping casts its model weights to, None where it says nothing
    like: str = ""  # the source whose states and dtypes a tensor of zeros alone has


class Mapped(NamedTuple):
    """What a mapping makes of one checkpoint."""

    made: tuple[Made, ...]  # in the order of the output
    dropped: tuple[str, ...] = ()  # sources that the mapping names as left out
    unfilled: tuple[str, ...] = ()  # targets that it says have no source: they are not written
    aliases: tuple[tuple[str, str], ...] = ()  # (another name, the made tensor that it is)
