"""Mapped: what a mapping between two namings comes to for one checkpoint, tensor by tensor.

A family's equations and AOA statements end in the same values: each target tensor with the pieces that fill it,
wholly and once, and each source tensor that nothing is made of, by name.

    Made("qkv", (32, 64), pieces=(Piece(..., src=Side("q", ...), dst=Side("qkv", ...)), ...))

Names are those of parameters; the states of a parameter follow it (`plan.mapping`). Knows no files.
"""

from __future__ import annotations

from typing import NamedTuple

from ckpt_tool.algebra.piece import Piece
from ckpt_tool.core.dtype import DType


class Made(NamedTuple):
    """One target tensor. pieces: `src` a source tensor (or `piece.PAD`: zeros), `dst` this one; they tile it.

    dtype: what the mapping casts its model weights to, None where it says nothing. like: the source whose states and
    dtypes a tensor of zeros alone has.
    """

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    dtype: DType | None = None
    like: str = ""


class Mapped(NamedTuple):
    """made: in the order of the output. dropped: sources that the mapping leaves out in words. unfilled: targets that
    it says have no source (they are not written). aliases: {another name: the made tensor that it is}."""

    made: tuple[Made, ...]
    dropped: tuple[str, ...] = ()
    unfilled: tuple[str, ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()
