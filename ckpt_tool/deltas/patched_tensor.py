"""A tensor of the base with a chain of changes, as a recipe (`run.computed`): all of the chain in one pass.

Each range of the flattened tensor is read from the base and every frame is applied to it in turn, on tiles that fit the
cache; frames are read forward, and each thread has its own readers. The digest that the last delta states is computed
along the way. Ranges that came out of order (a tensor of more than one unit, a strided output, a resumed run) are
computed once more at the end, so nothing is committed unless the digests of all tensors are the stated ones.

Memory: 1.3 MiB a link and thread, 2.6 for `overwrite`, whatever the tensor.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np

from ckpt_tool.core.dtype import DType
from ckpt_tool.core.integers import ceil_div
from ckpt_tool.core.tensor import TensorKey
from ckpt_tool.deltas.encoding import (
    FRAME_MEMORY,
    READERS,
    Bytes,
    FramePlace,
    OverwriteReader,
    Passed,
    XorReader,
    digest_of,
)
from ckpt_tool.deltas.folder import Delta
from ckpt_tool.errors import CkptError, InconsistentCheckpoint, InternalError
from ckpt_tool.run.computed import ExactRecipe, Input, Read

OTHER_VALUES = "E2614"
_TILE = 1 << 20  # bytes


class Link(NamedTuple):
    """A step of a tensor's chain."""

    delta: Delta
    # The number of its frame among the recipe's inputs; None if this version does not change the tensor.
    input: int | None


class _OpenTensor(NamedTuple):
    read: Read
    readers: list[tuple[int, XorReader | OverwriteReader]]


class Cursors(threading.local):
    """The readers that a thread has open. They are for one tensor at a time, so memory does not grow with tensors."""

    now: _OpenTensor | None = None


@dataclass(frozen=True, eq=False)
class Patched(ExactRecipe):
    """A tensor after all deltas of a chain. Inputs: the base's tensor, then the frames. If it is `whole`, there is no
    base: the first frame changes zeros."""

    kind: DType
    links: tuple[Link, ...]
    whole: bool
    cursors: Cursors
    passed: Passed

    @classmethod
    def of(
        cls,
        key: TensorKey,
        shape: tuple[int, ...],
        kind: DType,
        base: Input | None,
        chain: Sequence[Delta],
        cursors: Cursors,
    ) -> Patched:
        """The tensor after the deltas of `chain` that name it. base: None if the first frame changes zeros."""
        inputs = [] if base is None else [base]
        links = []
        name = key.name
        for delta in chain:
            if name in delta.frames:
                links.append(Link(delta, len(inputs)))
                inputs.append(Input(delta.frames[name], delta.tree))
            elif name in delta.digests:
                links.append(Link(delta, None))
        nbytes = kind.nbytes(prod(shape))
        text = f"patched {[(link.delta.version, link.delta.encoding, link.delta.digests[name]) for link in links]}"
        passed = Passed(links[-1].delta.checksum, nbytes)
        return cls(key, shape, tuple(inputs), text, kind, tuple(links), base is None, cursors, passed)

    @property
    def dtype(self) -> DType:
        """The dtype of the base's tensor, which deltas keep."""
        return self.kind

    @property
    def memory(self) -> int:
        """Bytes that a thread's readers of all frames need."""
        return sum(FRAME_MEMORY[link.delta.encoding] for link in self.links if link.input is not None)

    def line(self, read: Read, offset: int, nbytes: int) -> memoryview:
        """As `ExactRecipe.line`; the bytes are also passed on to the digest of the tensor."""
        item = max(1, self.kind.bits // 8)
        start = offset // item * item
        stop = ceil_div(offset + nbytes, item) * item
        block = self._compute(read, start, stop)
        self.passed.feed(start, block)
        return block.data[offset - start : offset - start + nbytes]

    def late_faults(self, read: Read) -> Iterator[CkptError]:
        """The fault of a tensor whose digest is not that of the last delta. It names the first delta that is wrong."""
        for offset in range(self.passed.at, self.nbytes, _TILE):
            stop = min(offset + _TILE, self.nbytes)
            self.passed.feed(offset, self._compute(read, offset, stop))
        last_delta = self.links[-1].delta
        have = self.passed.hexdigest()
        want = last_delta.digests[self.key.name]
        if have != want:
            yield self._find_broken_link(read)

    def _base(self, read: Read, start: int, stop: int) -> Bytes:
        if self.whole:
            return np.zeros(stop - start, np.uint8)
        item = max(1, self.kind.bits // 8)
        block: Bytes = read(0, start // item, stop // item).view(np.uint8)
        return block

    def _compute(self, read: Read, start: int, stop: int) -> Bytes:
        """Bytes [start, stop) of the tensor after all deltas. The range has to consist of complete elements."""
        block = self._base(read, start, stop)
        for reader in self._readers(read, start):
            reader.apply(block, start)
        return block

    def _readers(self, read: Read, start: int) -> list[XorReader | OverwriteReader]:
        """A reader for each frame, opened again if one is beyond `start`: frames can only be read forward."""
        now = self.cursors.now
        if now is None or now.read != read:
            now = self.cursors.now = _OpenTensor(read, [])
        if not now.readers or any(reader.at > start for _, reader in now.readers):
            now.readers[:] = [(link.input, self._reader(read, link)) for link in self.links if link.input is not None]
        return [reader for _, reader in now.readers]

    def _reader(self, read: Read, link: Link) -> XorReader | OverwriteReader:
        number = link.input
        if number is None:
            raise InternalError(f"{self.key}: no frame")
        (chunk,) = self.inputs[number].tensor.chunks
        place = FramePlace(
            link.delta.tree.display(chunk.array.path), chunk.array.offset, chunk.array.numel, str(self.key)
        )

        def read_compressed(start: int, stop: int) -> bytes:
            return read(number, start, stop).tobytes()

        return READERS[link.delta.encoding](read_compressed, place, self.nbytes)

    def _find_broken_link(self, read: Read) -> CkptError:
        """The error that names the first delta whose digest does not match. Reads everything once more."""
        digests = [digest_of(link.delta.checksum) for link in self.links]
        readers = [None if link.input is None else self._reader(read, link) for link in self.links]
        for offset in range(0, self.nbytes, _TILE):
            block = self._base(read, offset, min(offset + _TILE, self.nbytes))
            for reader, digest in zip(readers, digests, strict=True):
                if reader is not None:
                    reader.apply(block, offset)
                digest.update(block.data)

        for number, (link, digest) in enumerate(zip(self.links, digests, strict=True)):
            want = link.delta.digests[self.key.name]
            have = digest.hexdigest()
            if have == want:
                continue
            path = link.delta.tree.display()
            if number:
                hint = f"the delta of version {link.delta.version} is damaged: copy it again"
            else:
                hint = (
                    f"is the base version {link.delta.base_version} of this very model? if it is, copy the delta again"
                )
            return InconsistentCheckpoint(
                f"after version {link.delta.version} the values have the digest {have}, and the delta states {want}",
                code=OTHER_VALUES,
                path=path,
                key=str(self.key),
                hint=hint,
            )

        raise InternalError(f"{self.key}: every delta of the chain is right, but the patched tensor has another digest")
