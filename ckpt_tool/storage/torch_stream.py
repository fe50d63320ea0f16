"""The torch file before version 1.6: pickles back to back, then raw storages. (API first; the body follows.)"""

from __future__ import annotations

from dataclasses import dataclass

from ckpt_tool.core.tensor import StoredArray
from ckpt_tool.storage.pickle_values import Pickled, TensorRef
from ckpt_tool.storage.source import Tree

MAGIC = bytes.fromhex("80028a0a6cfc9c46f9206aa85019")  # PROTO 2, LONG1 0x1950a86a20f9469cfc6c


@dataclass(frozen=True, slots=True)
class TorchStream:
    """An opened legacy stream. pickled: the object, storages resolved. storages: key -> (absolute offset, nbytes)."""

    tree: Tree
    path: str
    pickled: Pickled
    storages: dict[str, tuple[int, int]]

    @staticmethod
    def open(tree: Tree, path: str) -> TorchStream:
        """Read the five pickles and the storages' lengths. Raises CorruptFile E0376, E0377 (the tar form)."""
        raise NotImplementedError

    def array(self, tensor: TensorRef) -> StoredArray:
        """Where the tensor's bytes lie in the file; strides None when contiguous."""
        raise NotImplementedError
