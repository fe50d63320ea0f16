"""A new torch file, composed of pieces: the mirror of `state_dict.content`.

    composer = TorchComposer()
    flat = composer.tensor((1904,), F32, [StoragePart(0, box, 0) for ...])   # a storage that several boxes fill, zeros
    between file = composer.file("mp_rank_00/distrib_optim.pt", {0: {"param": flat}})

Cost: as the pickle and the directory.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

from ckpt_tool.core.box import Box
from ckpt_tool.core.dtype import DType
from ckpt_tool.core.target import Patch, TargetArray, TargetFile
from ckpt_tool.errors import InternalError
from ckpt_tool.storage.pickles.pickle_values import TensorRef
from ckpt_tool.storage.pickles.pickle_writer import dumps, stored
from ckpt_tool.storage.torch_files.zip_plan import plan_zip

ROOT = "archive"  # the zip's top folder: one name for all, so that a file's bytes do not depend on what it is called


class StoragePart(NamedTuple):
    """A box of a tensor that is stored at one position of a storage."""

    tensor: int  # index of the wanted tensor
    box: Box
    start: int  # element of the storage
    # in elements, for columns of a wider matrix; None for row-major without gaps
    strides: tuple[int, ...] | None = None


class _Storage(NamedTuple):
    dtype: DType
    nbytes: int
    parts: Sequence[StoragePart]
    data: bytes | None  # the bytes, if they are known when the file is planned; None for tensors that are copied later


class TorchComposer:
    """A new torch zip, storage by storage. Equal input gives equal bytes; `torch.load(weights_only=True)` reads it."""

    def __init__(self) -> None:
        self._storages: list[_Storage] = []

    def tensor(self, shape: Sequence[int], dtype: DType, parts: Sequence[StoragePart]) -> TensorRef:
        """Add a tensor with its own storage, which `parts` fill; elements outside them are zero. Returns the reference
        to put into the skeleton (`file`)."""
        return self._add(shape, dtype, parts, None)

    def value(self, shape: Sequence[int], dtype: DType, data: bytes) -> TensorRef:
        """A tensor whose bytes (little-endian, row-major) are known already: a step counter, an RNG state."""
        if len(data) != dtype.nbytes(prod(shape)):
            raise InternalError(f"{len(data)} bytes for a {dtype.name} tensor of shape {tuple(shape)}")
        return self._add(shape, dtype, (), data)

    def _add(self, shape: Sequence[int], dtype: DType, parts: Sequence[StoragePart], data: bytes | None) -> TensorRef:
        ref = stored(str(len(self._storages)), shape, dtype)
        self._storages.append(_Storage(dtype, dtype.nbytes(prod(shape)), parts, data))
        return ref

    def view(self, base: TensorRef, shape: Sequence[int], offset: int, strides: Sequence[int]) -> TensorRef:
        """Another tensor over the storage of `base`. offset, strides: elements."""
        return base._replace(shape=tuple(shape), offset=offset, stride=tuple(strides))

    def file(self, path: str, skeleton: Any) -> TargetFile:
        """Plan the file: the pickle of `skeleton`, which contains the references made here, and their storages."""
        plan = plan_zip(ROOT, dumps(skeleton), [(str(i), one.nbytes) for i, one in enumerate(self._storages)])
        arrays: list[TargetArray] = []
        patches: list[Patch] = []
        known: dict[int, bytes] = {}  # hole -> CRC
        literals: list[tuple[int, bytes]] = []
        for one, offset, holes in zip(self._storages, plan.offsets, plan.crcs, strict=True):
            if not one.nbytes:
                continue
            if one.data is not None:
                literals.append((offset, one.data))
                known |= dict.fromkeys(holes, zlib.crc32(one.data).to_bytes(4, "little"))
                continue
            patches += [Patch(hole, "crc32", -1, (offset, one.nbytes)) for hole in holes]
            arrays += [
                TargetArray(part.tensor, part.box, offset + one.dtype.nbytes(part.start), strides=part.strides)
                for part in one.parts
                if part.box.numel
            ]
        filled = [(at, _filled(at, data, known)) for at, data in plan.literals]
        return TargetFile(path, plan.size, tuple(sorted([*filled, *literals])), tuple(arrays), tuple(patches))


def _filled(at: int, data: bytes, holes: dict[int, bytes]) -> bytes:
    """The literal bytes at offset `at`, with the CRCs of known storages filled in.

    holes: offset in the file -> CRC-32.
    """
    mine = {hole - at: crc for hole, crc in holes.items() if at <= hole < at + len(data)}
    if not mine:
        return data
    changed = bytearray(data)
    for hole, crc in mine.items():
        changed[hole : hole + 4] = crc
    return bytes(changed)
