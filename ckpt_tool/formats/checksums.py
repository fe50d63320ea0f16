"""Which tensors of a torch container have no CRC in their file: a note, or an error where checksums are required.

A torch zip has a CRC-32 per storage, valid unless the writer switched it off; a legacy stream and a safetensors file
inside a DCP folder have none. The CRC itself is checked where the bytes are read. Cost: a constant per array.
"""

from __future__ import annotations

from collections.abc import Iterable

from ckpt_tool.core.catalog import Note
from ckpt_tool.core.tensor import LogicalTensor, lacks_crc
from ckpt_tool.errors import CorruptFile
from ckpt_tool.storage.source import Tree

NO_CHECKSUM = "E0397"


def missing(tree: Tree, tensors: Iterable[LogicalTensor], *, required: bool) -> list[Note]:
    """A note about tensors without a CRC, if there are any. Raises CorruptFile (E0397) instead if `required`."""
    without = [t for t in tensors if t.numel and lacks_crc(t.chunks)]
    if not without:
        return []
    path = next(chunk.array.file for chunk in without[0].chunks if chunk.array.crc is None)
    message = f"{len(without)} tensors have no checksum in their file"
    if required:
        raise CorruptFile(
            message,
            code=NO_CHECKSUM,
            path=tree.display(path),
            key=str(without[0].key),
            hint="it was written without CRCs (or before torch 1.6): save it again, or drop --require-checksums",
        )
    return [Note("N-no-checksum", message, path)]
