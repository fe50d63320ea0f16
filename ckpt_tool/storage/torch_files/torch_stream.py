"""The torch file before version 1.6 (or `_use_new_zipfile_serialization=False`): pickles back to back, then storages.

    pickle 1   the magic number 0x1950a86a20f9469cfc6c
    pickle 2   the protocol, 1001
    pickle 3   {"protocol_version": 1001, "little_endian": True, "type_sizes": {...}}
    pickle 4   the object; storages by persistent id ("storage", class, key, location, numel, None)
    pickle 5   the list of storage keys
    then for each key in that order: int64 little-endian, the number of elements, and the raw bytes

Example: `TorchStream.open(tree, "old.pt").array(tensor)` is a `StoredArray`, as for a zip; there is no CRC.

Before torch 0.1.10 the file was a tar of `sys_info`, `pickle`, `storages`, `tensors`: refused with a message.
Source: torch 2.13 `serialization.py` `_legacy_save`, `_legacy_load`. Cost: the pickles, and 8 bytes a storage.
"""

from __future__ import annotations

from typing import NamedTuple

from ckpt_tool.core.tensor import StoredArray
from ckpt_tool.errors import CkptError, CorruptFile, Incomplete, UnsafeInput
from ckpt_tool.storage.pickles import pickle_reader as pickles
from ckpt_tool.storage.pickles.inline_arrays import array_in, place_arrays
from ckpt_tool.storage.pickles.pickle_values import ArrayRef, Pickled, TensorRef
from ckpt_tool.storage.source import Tree

MAGIC = bytes.fromhex("80028a0a6cfc9c46f9206aa85019")  # PROTO 2, LONG1 0x1950a86a20f9469cfc6c
NUMBER = 0x1950A86A20F9469CFC6C
VERSION = 1001
STORAGE_LIMIT = 1_000_000


def is_stream(head: bytes) -> bool:
    """Do these first bytes (16 are enough) begin a legacy stream?"""
    return head.startswith(MAGIC)


def is_tar(head: bytes) -> bool:
    """Do these first bytes (512 are enough) begin a tar archive?"""
    return head[257:262] == b"ustar" or head[:9] in (b"sys_info\0", b"storages\0")


def refuse_tar(path: str) -> None:
    """Raise for the oldest form. path: as messages show it."""
    raise CorruptFile(
        "a tar archive, as torch wrote before 0.1.10; it is not supported",
        code="E0377",
        path=path,
        offset=0,
        hint="load and save it again with torch between 1.0 and 2.5",
    )


class TorchStream(NamedTuple):
    """An opened legacy stream."""

    tree: Tree
    path: str
    pickled: Pickled  # the object, every storage it names present
    start: int  # bytes from the start of the file to that pickle
    storages: dict[str, tuple[int, int]]  # key -> (absolute offset, nbytes), both in bytes

    @staticmethod
    def open(tree: Tree, path: str, *, opcodes: int = pickles.OPCODE_LIMIT) -> TorchStream:
        """Read the five pickles and the storages' lengths. Raises CorruptFile E0376, E0377 (the tar form)."""
        head = tree.head(path, 512)
        if is_tar(head):
            refuse_tar(tree.display(path))
        if not is_stream(head):
            raise _fault(tree, path, "no magic number of a torch file", 0)
        first = pickles.load_many(tree, path, 3)
        whole = pickles.load_file(tree, path, start=first[2].end, multi=True, span_from=0, opcodes=opcodes)
        listed = pickles.load_file(tree, path, start=whole.end, multi=True, span_from=0)
        for extra in (*first, listed):
            if extra.globals:
                raise UnsafeInput(
                    f"a side pickle of the stream names {pickles.shown(str(extra.globals[0]))}",
                    code="E0422",
                    path=tree.display(path),
                    offset=extra.globals[0].offset,
                    hint="torch writes no such file",
                )
        if first[0].value != NUMBER or first[1].value != VERSION or not isinstance(first[2].value, dict):
            raise _fault(tree, path, f"magic number, protocol {VERSION} and system description are malformed", 0)
        if first[2].value.get("little_endian") is not True:
            raise _fault(tree, path, "the tensors are big-endian (or do not say), which is not supported", first[1].end)
        place_arrays(whole)
        return TorchStream(tree, path, whole, first[2].end, _storages(tree, path, whole, listed))

    def array(self, tensor: TensorRef | ArrayRef) -> StoredArray:
        """The place of the tensor's bytes in the file; strides None if contiguous. A tensor that was saved as a NumPy
        array is in a view of the pickle."""
        if isinstance(tensor, ArrayRef):
            return array_in(self.path, self.start, self.pickled.end - self.start, tensor)
        offset = self.storages[tensor.storage.key][0] + tensor.dtype.nbytes(tensor.offset)
        return StoredArray(self.path, offset, tensor.dtype, tensor.shape, None if tensor.contiguous else tensor.stride)


def _storages(tree: Tree, path: str, whole: Pickled, listed: Pickled) -> dict[str, tuple[int, int]]:
    """Returns storage key -> (offset, bytes). Raises unless the listed storages are exactly those that the object
    names, and the last one ends the file."""
    keys = listed.value
    if type(keys) is not list or len(keys) > STORAGE_LIMIT or any(type(key) is not str for key in keys):
        raise _fault(tree, path, "the list of storage keys is malformed", whole.end)

    refs = {ref.key: ref for ref in whole.storages}
    if len(set(keys)) != len(keys) or set(keys) - set(refs):
        raise _fault(
            tree, path, "the list of storage keys names a storage twice, or one that no tensor uses", whole.end
        )

    missing = sorted(set(refs) - set(keys))
    if missing:
        raise Incomplete(
            f"{len(missing)} storages are not in the file, the first is {missing[0]}",
            code="E0345",
            path=tree.display(path),
            offset=listed.end,
            hint="the file is damaged: save it again",
        )

    at = listed.end
    size = tree.size(path)
    found: dict[str, tuple[int, int]] = {}

    for key in keys:
        if at + 8 > size:
            raise _fault(tree, path, f"the file ends before storage {key}", size)
        numel = int.from_bytes(tree.read(path, at, 8), "little", signed=True)
        ref = refs[key]
        if numel != ref.numel:
            raise _fault(tree, path, f"storage {key} has {numel} elements, the pickle says {ref.numel}", at)
        if at + 8 + ref.nbytes > size:
            raise _fault(tree, path, f"storage {key} wants {ref.nbytes} bytes, {size - at - 8} are left", at)
        found[key] = (at + 8, ref.nbytes)
        at += 8 + ref.nbytes

    if at != size:
        raise UnsafeInput(
            f"{size - at} bytes follow the last storage",
            code="E0422",
            path=tree.display(path),
            offset=at,
            hint="torch writes no such file; save it again",
        )

    return found


def _fault(tree: Tree, path: str, message: str, offset: int) -> CkptError:
    return CorruptFile(
        message,
        code="E0376",
        path=tree.display(path),
        offset=offset,
        hint="the file is cut short or damaged: compare its size with the source",
    )
