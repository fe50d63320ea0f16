"""What a frame holds, tile by tile: the bytes that change a tensor, compressed, and the digest of what comes out.

    xor         new ^ old, as long as the tensor. Applied twice it undoes itself
    overwrite   u32 count, `count` u32 byte positions, ascending; then `count` bytes: the new ones. Little-endian

Both work on bytes, for any dtype. A frame is one zstd frame of level 1 that states its content's size (SGLang
decodes `overwrite` by it). Tensors of 4 GiB have no positions, so they are `xor`. Source: see `folder`.

Memory, whatever the tensor's size: a compressor has 1 MiB and a tile; a reader of a frame 1.3 MiB (its window is 512
KiB at level 1; more than `zstd_frames.WINDOW` is refused) and what it reads at a time. `overwrite` needs two readers:
one for the positions, one for the values, which are stored after all positions. Reading goes forward; going back starts
from the beginning.

Figures (256 MiB of bf16 in tiles that fit the cache, 2 % of the elements changed, one core of an EPYC, GB of tensor a
second): XOR 5.8, counting bytes that differ 22, XXH3 24, zstd of what XOR leaves 1.3; positions of bytes that differ
2.6, zstd of `overwrite` 15 (it finds nothing in positions); decompressing XOR 2.8. zstd's fast levels (-1 to -5) are no
faster and larger by 1.2 to 2.4 times.
"""

from __future__ import annotations

import threading
import zlib
from contextlib import suppress
from tempfile import TemporaryFile
from typing import IO, TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from ckpt_tool.errors import CorruptFile, InternalError, UsageError, wrap_os_error
from ckpt_tool.storage.arrays.zstd_frames import LIBRARY, Compressed, Frame, zstandard
from ckpt_tool.storage.descriptors import naming

if TYPE_CHECKING:
    from zstandard import ZstdCompressionObj

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

LEVEL = 1
MOST_POSITIONS = 1 << 32  # bytes of a tensor
FRAME = "E2611"
TOO_LARGE = "E2613"
_STEP = 64 << 10  # bytes of positions that are read at a time


class Hasher(Protocol):
    """The part of hashlib's interface that is used here."""

    def update(self, data: Any, /) -> object: ...
    def hexdigest(self) -> str: ...


class _Adler32:
    def __init__(self) -> None:
        self._value = 1

    def update(self, data: Any) -> None:
        """Add bytes to the checksum."""
        self._value = zlib.adler32(data, self._value)

    def hexdigest(self) -> str:
        """The checksum of all bytes so far, in eight hexadecimal digits."""
        return f"{self._value:08x}"


def digest_of(name: str) -> Hasher:
    """A new digest of the kind `name`, one of `folder.CHECKSUMS`. Raises UsageError E2612 if its library is not
    installed."""
    if name == "adler32":
        return _Adler32()
    if name == "xxh3-128":
        import xxhash

        return xxhash.xxh3_128()
    try:
        from blake3 import blake3
    except ImportError as e:
        raise UsageError(
            "BLAKE3 needs the blake3 package", code=LIBRARY, hint="pip install blake3, or another --checksum"
        ) from e
    hasher: Hasher = blake3()
    return hasher


# -- encoding ---------------------------------------------------------------------------------------------------------


class EncodedFrame(NamedTuple):
    """The changes of a tensor, as they were written into a spool."""

    frame: tuple[int, int] | None  # (offset, bytes) in the spool; None if nothing changed
    digest: str  # of the new bytes
    changed: int  # number of bytes that differ


class Spool:
    """The frames of one thread, end to end in a file without a name, which disappears with the process.

    folder: the folder in which the file is created; StorageErrors name it, as the file has no name.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.file = _nameless(folder)
        self.size = 0
        self._positions: IO[bytes] | None = None
        self._values: IO[bytes] | None = None

    def put(self, data: bytes | memoryview) -> None:
        """Append bytes to the spool."""
        with naming(self.folder, "writing the changes"):
            self.file.write(data)
        self.size += len(data)

    def scratch(self) -> tuple[IO[bytes], IO[bytes]]:
        """Two empty files, for the positions and values that the encoder of one tensor collects."""
        if self._positions is None or self._values is None:
            self._positions = _nameless(self.folder)
            self._values = _nameless(self.folder)
        with naming(self.folder, "emptying a temporary file"):
            for file in (self._positions, self._values):
                file.seek(0)
                file.truncate()
        return self._positions, self._values

    def read(self, offset: int, nbytes: int) -> bytes:
        """`nbytes` bytes of the spool from `offset` on."""
        with naming(self.folder, "reading the changes"):
            self.file.seek(offset)
            return self.file.read(nbytes)

    def close(self) -> None:
        """Close the files, whose contents are not needed any more."""
        for file in (self.file, self._positions, self._values):
            if file is not None:
                with suppress(OSError):
                    file.close()


def _nameless(folder: str) -> IO[bytes]:
    try:
        return TemporaryFile(dir=folder, buffering=256 << 10)
    except OSError as e:
        raise wrap_os_error(e, folder, "making a temporary file") from e


class Encoder:
    """One tensor of `nbytes`, fed from its first byte to its last."""

    def __init__(
        self, encoding: str, checksum: str, nbytes: int, spool: Spool, name: str, *, always: bool = False
    ) -> None:
        """always: a frame, though nothing changes."""
        self._digest = digest_of(checksum)
        self._nbytes = nbytes
        self._spool = spool
        self._always = always
        self._at = self._changed = 0
        self._kind: _Xor | _Overwrite = (_Xor if encoding == "xor" else _Overwrite)(nbytes, spool)
        if encoding != "xor" and nbytes >= MOST_POSITIONS:
            raise UsageError(
                f"a tensor of {nbytes} bytes has no positions of 32 bits, which overwrite counts in",
                code=TOO_LARGE,
                key=name,
                hint="--encoding xor takes tensors of any size",
            )

    def feed(self, old: Bytes | None, new: Bytes) -> None:
        """The next bytes of both; None: of zeros. `old` is overwritten."""
        self._digest.update(new.data)
        self._changed += self._kind.add(self._at, old, new)
        self._at += len(new)

    def finish(self) -> EncodedFrame:
        """End the frame. Without changes there is no frame, unless one is always wanted."""
        if self._at != self._nbytes:
            raise InternalError(f"{self._at} of {self._nbytes} bytes were encoded")
        if not self._changed and not self._always:
            return EncodedFrame(None, self._digest.hexdigest(), 0)
        begin = self._kind.finish()
        return EncodedFrame((begin, self._spool.size - begin), self._digest.hexdigest(), self._changed)


class _Xor:
    """Compressed as it comes; nothing before the first change."""

    def __init__(self, nbytes: int, spool: Spool) -> None:
        self._nbytes = nbytes
        self._spool = spool
        self._begin = spool.size
        self._done = 0
        self._frame: ZstdCompressionObj | None = None

    def add(self, at: int, old: Bytes | None, new: Bytes) -> int:
        """Bytes from `at` on: how many are another."""
        if old is not None:
            size = len(new) // 8 * 8
            words = old[:size].view(np.uint64)
            np.bitwise_xor(words, new[:size].view(np.uint64), out=words)
            np.bitwise_xor(old[size:], new[size:], out=old[size:])
        difference = new if old is None else old
        if changed := int(np.count_nonzero(difference)):
            self._zeros(at)
            self._put(difference.data)
        return changed

    def finish(self) -> int:
        """End the frame and return its offset in the spool."""
        self._zeros(self._nbytes)
        if self._frame is not None:
            self._spool.put(self._frame.flush())
        return self._begin

    def _zeros(self, until: int) -> None:
        while self._done < until:
            self._put(memoryview(bytes(min(1 << 20, until - self._done))))

    def _put(self, data: memoryview) -> None:
        if self._frame is None:
            self._frame = compressor().compressobj(size=self._nbytes)
        self._spool.put(self._frame.compress(data))
        self._done += len(data)


class _Overwrite:
    """Gathered, and compressed at the end: a frame begins with what is known last."""

    def __init__(self, nbytes: int, spool: Spool) -> None:
        self._spool = spool
        self._count = 0
        self._files: tuple[IO[bytes], IO[bytes]] | None = None

    def add(self, at: int, old: Bytes | None, new: Bytes) -> int:
        """Bytes from `at` on: how many are another."""
        differs = new != 0 if old is None else np.not_equal(old, new, out=old.view(np.bool_))
        positions = np.flatnonzero(differs)  # of booleans: five times as fast as of bytes
        if not len(positions):
            return 0
        if self._files is None:
            self._files = self._spool.scratch()
        with naming(self._spool.folder, "writing the changes"):
            self._files[0].write((positions + at).astype("<u4").data)
            self._files[1].write(new[positions].data)
        self._count += len(positions)
        return len(positions)

    def finish(self) -> int:
        """Write the frame from the collected positions and values; returns its offset in the spool."""
        begin = self._spool.size
        frame = compressor().compressobj(size=4 + 5 * self._count)
        self._spool.put(frame.compress(self._count.to_bytes(4, "little")))
        for file in self._files or ():
            with naming(self._spool.folder, "reading the changes"):
                file.seek(0)
                while data := file.read(256 << 10):
                    self._spool.put(frame.compress(data))
        self._spool.put(frame.flush())
        return begin


def compressor() -> Any:
    """Of level 1. Raises UsageError E2612 without the library."""
    return zstandard("deltas need").ZstdCompressor(level=LEVEL)


# -- decoding ---------------------------------------------------------------------------------------------------------


class FramePlace(NamedTuple):
    """The place of a frame, for messages."""

    path: str
    offset: int
    size: int  # of the frame in bytes
    key: str

    def fault(self, message: str) -> CorruptFile:
        """The error for a change that can't be decoded, at this place."""
        return CorruptFile(
            f"the change can't be decoded: {message}",
            code=FRAME,
            path=self.path,
            offset=self.offset,
            key=self.key,
            hint="the delta is damaged: copy it again from where it was published",
        )


class XorReader:
    """Applies a frame of `xor` to ranges of a tensor of `nbytes`, in order."""

    def __init__(self, compressed: Compressed, place: FramePlace, nbytes: int) -> None:
        self._frame = Frame(compressed, place.size, place.fault)
        self._nbytes = nbytes
        self.at = 0
        if self._frame.size not in (None, nbytes):
            raise place.fault(f"it holds {self._frame.size} bytes, the tensor {nbytes}: is it of another model?")
        self._room = np.empty(0, np.uint8)

    def apply(self, block: Bytes, offset: int) -> None:
        """Change bytes [offset, offset + len(block)); offset is not below `at`, where the last range ended."""
        self._frame.skip(offset - self.at)
        if len(self._room) < len(block):
            self._room = np.empty(len(block), np.uint8)
        room = self._room[: len(block)]
        self._frame.take(room.data)
        np.bitwise_xor(block, room, out=block)
        self.at = offset + len(block)
        if self.at == self._nbytes:
            self._frame.end()


class OverwriteReader:
    """Applies a frame of `overwrite` to ranges of a tensor of `nbytes`, in order."""

    def __init__(self, compressed: Compressed, place: FramePlace, nbytes: int) -> None:
        self._positions = Frame(compressed, place.size, place.fault)
        self._place = place
        self._nbytes = nbytes
        self.at = 0
        head = bytearray(4)
        self._positions.take(memoryview(head))
        self._left = self._count = int.from_bytes(head, "little")  # positions not read yet
        if self._count > nbytes:
            raise place.fault(f"{self._count} positions in a tensor of {nbytes} bytes")
        if self._positions.size not in (None, 4 + 5 * self._count):
            raise place.fault(f"{self._count} positions and values in {self._positions.size} bytes")
        self._values = Frame(compressed, place.size, place.fault)
        self._values.skip(4 + 4 * self._count)
        self._ahead: np.ndarray[Any, np.dtype[np.int64]] = np.empty(0, np.int64)  # read, and not applied
        self._last = -1

    def apply(self, block: Bytes, offset: int) -> None:
        """Change bytes [offset, offset + len(block)); offset is not below `at`, where the last range ended."""
        stop = offset + len(block)
        while True:
            cut = int(np.searchsorted(self._ahead, stop))
            if cut:
                positions = self._ahead[:cut]
                values = np.empty(cut, np.uint8)
                self._values.take(values.data)
                begin = int(np.searchsorted(positions, offset))  # before it: passed over
                block[positions[begin:] - offset] = values[begin:]
                self._ahead = self._ahead[cut:]
            if len(self._ahead) or not self._left:
                break
            self._read()
        self.at = stop
        if stop == self._nbytes:
            self._values.end()

    def _read(self) -> None:
        """The next positions, checked."""
        room = np.empty(min(self._left, _STEP // 4), "<u4")
        self._positions.take(room.view(np.uint8).data)
        positions = room.astype(np.int64)
        if positions[0] <= self._last or (np.diff(positions) <= 0).any():
            raise self._place.fault("its positions do not ascend")
        if positions[-1] >= self._nbytes:
            raise self._place.fault(f"position {int(positions[-1])} in a tensor of {self._nbytes} bytes")
        self._ahead = positions
        self._last = int(positions[-1])
        self._left -= len(positions)


FRAME_MEMORY = {"xor": 1_400_000, "overwrite": 2_800_000}  # bytes of a reader: window, tile, what is read at a time
READERS: dict[str, type[XorReader] | type[OverwriteReader]] = {"xor": XorReader, "overwrite": OverwriteReader}


class Passed:
    """The digest of a tensor of `nbytes` while its bytes pass by, in pieces that several threads bring in any order:
    what comes in order is hashed, what does not is left for the end (`at` says from where)."""

    def __init__(self, checksum: str, nbytes: int) -> None:
        self._digest = digest_of(checksum)
        self._nbytes = nbytes
        self.at = 0
        self._lock = threading.Lock()

    def feed(self, offset: int, data: Bytes) -> None:
        """Take bytes from `offset` on; a piece that is not the next one, or meets another thread, is passed over."""
        if offset > self.at or offset + len(data) <= self.at or not self._lock.acquire(blocking=False):
            return
        try:
            if offset <= self.at < offset + len(data):
                self._digest.update(data[self.at - offset :].data)
                self.at = offset + len(data)
        finally:
            self._lock.release()

    @property
    def whole(self) -> bool:
        """Have all bytes of the tensor been seen in order?"""
        return self.at == self._nbytes

    def hexdigest(self) -> str:
        """The digest of the bytes seen so far."""
        return self._digest.hexdigest()
