"""Views of files: bytes that must be decoded before they can be read, under a path that begins with the file's path.

    x.pdparams//arrays                          the arrays of a pickle that are text (`inline_arrays`)
    x.pt//pickle@704+1200                       the arrays of the pickle that is 1200 bytes at 704
    d/3f2a//zstd@4096+1200=4194304              the 4 MiB that the 1200 bytes at 4096 decompress to
    d/3f2a//zstd@0+900=5000//zstd@120+80=256    of 80 bytes in the 5000 bytes that 900 decompress to
    _METADATA//fill@0000803f                    four bytes that are in no file: the fill value of chunks not stored

The path of a view contains everything that is needed to read it, so a plan can name one. No real file can have such a
path: `safe_relative` refuses `//`, and no listing contains it. `Tree` reads files and views alike; the identity of a
view is that of its file.

Compressed bytes can't be read from the middle: they are decompressed completely, once, by the first thread that needs a
byte of them, in pieces of 1 MiB. Results of at most `SMALL` bytes are kept in memory, `KEPT` bytes in total; larger
ones are written to an unnamed file in the folder for temporary files (`TMPDIR`), which takes at most half of the free
space there. When it is full the older half is dropped, and decompressed again on demand. Memory: `KEPT`, plus a window
and a piece per thread.
"""

from __future__ import annotations

import errno
import os
import re
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable
from shutil import disk_usage
from tempfile import TemporaryFile, gettempdir
from typing import IO, TYPE_CHECKING, NamedTuple, Protocol

from ckpt_tool.core.inner_path import VIEW, base_of, is_view
from ckpt_tool.errors import CorruptFile, InternalError, wrap_os_error
from ckpt_tool.storage.pickles.inline_arrays import INLINE, read_view

if TYPE_CHECKING:
    from ckpt_tool.storage.source import Tree

PIECE = 1 << 20  # bytes that are decompressed at a time
SMALL = PIECE  # bytes: results up to this size are kept in memory
KEPT = 32 << 20  # bytes of all results in memory
LARGEST_WINDOW = 128 << 20  # bytes: the largest window that zstd accepts by default
# Bytes that one compressed byte can expand to: a zstd block of one value is 128 KiB in 4 bytes; gzip reaches 1032.
LARGEST_RATIO = 1 << 15
DAMAGED = "E2750"
CODECS = ("zstd", "gzip")
_FRAME = re.compile(r"(?P<codec>zstd|gzip)@(?P<at>\d{1,18})\+(?P<nbytes>\d{1,18})=(?P<size>\d{1,18})", re.ASCII)
_FILL = re.compile(r"fill@(?P<value>(?:[0-9a-f]{2}){1,16})", re.ASCII)


def memory_of(paths: Iterable[str], threads: int) -> int:
    """Bytes of memory, in addition to buffers, that reading these files and views takes at most, with zstd windows of
    the size that RFC 8878 recommends to support."""
    if all(compressed_of(path) is None for path in paths):
        return 0
    from ckpt_tool.storage.arrays.zstd_frames import WINDOW

    return KEPT + threads * (PIECE + WINDOW)


class Compressed(NamedTuple):
    """Bytes [at, at + nbytes) of `path`, a file or a view, which decompress to `size` bytes."""

    path: str
    at: int
    nbytes: int
    size: int
    codec: str = "zstd"

    @property
    def view(self) -> str:
        """The path of the view of the decompressed bytes."""
        return f"{self.path}{VIEW}{self.codec}@{self.at}+{self.nbytes}={self.size}"


def fill_view(path: str, value: bytes) -> str:
    """The path of the view of a fill value, used for chunks that are not stored according to file `path`."""
    return f"{path}{VIEW}fill@{value.hex()}"


def compressed_of(path: str) -> Compressed | None:
    """The compressed range that a view's path names; None for other views and for files."""
    inner, _, last = path.rpartition(VIEW)
    found = _FRAME.fullmatch(last)
    return found and Compressed(inner, int(found["at"]), int(found["nbytes"]), int(found["size"]), found["codec"])


def behind(path: str, at: int, nbytes: int) -> tuple[str, int, int]:
    """Returns (file, first byte, bytes) that are read for a range of a view or a file.

    The first bytes of a view need all of the compressed bytes; later ones need nothing more.
    """
    # A view may be compressed inside another view.
    while (frame := compressed_of(path)) is not None:
        path = frame.path
        nbytes = frame.nbytes if at == 0 else 0
        at = frame.at
    return base_of(path), at, 0 if is_view(path) else nbytes


class _Decoder(Protocol):
    """Decompresses one stream, from start to end."""

    def take(self, into: memoryview) -> None:
        """Fill all of `into` with the next bytes."""
        ...

    def end(self) -> None:
        """Raise unless the stream ends here."""
        ...


class _Gzip:
    """Decompresses a gzip or zlib stream; has the methods of `zstd_frames.Frame`."""

    def __init__(self, read: Callable[[int, int], bytes], size: int, fault: Callable[[str], CorruptFile]) -> None:
        self._read = read
        self._size = size
        self._fault = fault
        self._at = 0
        self._stream = zlib.decompressobj(wbits=47)  # 32 + 15: detects zlib or gzip headers, largest window
        self._left = b""

    def _some(self, most: int) -> bytes:
        """The next bytes, at most `most`; empty at the end of the stream."""
        while not self._stream.eof:
            if not self._left and self._at < self._size:
                end = min(self._at + (64 << 10), self._size)
                self._left = self._read(self._at, end)
                self._at = end
            try:
                data = self._stream.decompress(self._left, most)
            except zlib.error as e:
                raise self._fault(str(e)) from e
            nothing = not self._left
            self._left = self._stream.unconsumed_tail
            if data or nothing:
                return data
        return b""

    def take(self, into: memoryview) -> None:
        """Fill all of `into` with the next bytes. Raises if there are not so many."""
        done = 0
        while done < len(into):
            data = self._some(len(into) - done)
            if not data:
                raise self._fault(f"it ends {len(into) - done} bytes early")
            into[done : done + len(data)] = data
            done += len(data)

    def end(self) -> None:
        """Raise unless the stream and the compressed bytes end here."""
        if self._some(1) or self._left or self._stream.unused_data or self._at < self._size:
            raise self._fault("it holds more than is wanted")


class _Held:
    """The decompressed bytes of one view: in `data`, or in `file` from byte `at` on.

    lock: held by the thread that decompresses the view. ready: False until that is done.
    """

    def __init__(self, file: IO[bytes] | None = None, at: int = 0) -> None:
        self.lock = threading.Lock()
        self.ready = False
        self.data = b""
        self.file = file
        self.at = at


class Views:
    """The views of a tree's files. Thread-safe."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._lock = threading.Lock()
        self._arrays: tuple[str, bytes] | None = None  # only the last one: files are read one after the other
        self._small: OrderedDict[str, _Held] = OrderedDict()
        self._kept = 0  # bytes
        self._halves: list[tuple[IO[bytes], dict[str, _Held]]] = []  # at most two unnamed files, the newer one last
        self._end = self._most = 0  # of the newer one: bytes used, bytes that it may take

    def size(self, path: str) -> int:
        """The size of a view in bytes."""
        last = path.rpartition(VIEW)[2]
        if (frame := compressed_of(path)) is not None:
            return frame.size
        if (fill := _FILL.fullmatch(last)) is not None:
            return len(fill["value"]) // 2
        return len(self._array_bytes(path))

    def read(self, path: str, offset: int, nbytes: int) -> bytes:
        """Bytes of a view. Raises CorruptFile: E0311 if the view is shorter, E2750 if it can't be decompressed."""
        size = self.size(path)
        if offset < 0 or nbytes < 0 or offset + nbytes > size:
            what = "its arrays" if path.endswith(INLINE) else f"its view {path.rpartition(VIEW)[2]}"
            raise CorruptFile(
                f"want {nbytes} bytes at {offset} of {what}, but there are {size}",
                code="E0311",
                path=self._tree.display(path),
                hint="the file changed: run again",
            )
        frame = compressed_of(path)
        if frame is None:
            fill = _FILL.fullmatch(path.rpartition(VIEW)[2])
            whole = bytes.fromhex(fill["value"]) if fill else self._array_bytes(path)
            return whole[offset : offset + nbytes]
        # Other threads that need this view wait for its lock, so it is decompressed once.
        held = self._held(path, frame.size)
        with held.lock:
            if not held.ready:
                self._decompress(path, frame, held)
        if held.file is None:
            return held.data[offset : offset + nbytes]
        found = os.pread(held.file.fileno(), nbytes, held.at + offset)
        if len(found) != nbytes:
            raise InternalError(f"{path}: {len(found)} of {nbytes} bytes")
        return found

    def _array_bytes(self, path: str) -> bytes:
        with self._lock:
            known = self._arrays
        if known is None or known[0] != path:
            data = read_view(self._tree, path)
            if data is None:
                raise InternalError(f"{path} is no view")
            known = path, data
            with self._lock:
                self._arrays = known
        return known[1]

    def _held(self, path: str, size: int) -> _Held:
        with self._lock:
            if size <= SMALL:
                held = self._small.setdefault(path, _Held())
                self._small.move_to_end(path)
                return held
            return next((own[path] for _, own in reversed(self._halves) if path in own), None) or self._place(
                path, size
            )

    def _place(self, path: str, size: int) -> _Held:
        """Reserve room for a view in the newer file, or in a new file if that one is full."""
        try:
            free = disk_usage(gettempdir()).free
            if size > free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if not self._halves or (self._end and self._end + size > self._most):
                # threads that still read the older file keep it open
                self._halves = [*self._halves[-1:], (TemporaryFile(), {})]
                self._end = 0
                self._most = free // 4
        except OSError as e:
            raise wrap_os_error(e, gettempdir(), f"decompressing {size} bytes into") from e
        file, own = self._halves[-1]
        held = own[path] = _Held(file, self._end)
        self._end += size
        return held

    def _decompress(self, path: str, frame: Compressed, held: _Held) -> None:
        """Decompress a view. The caller holds its lock."""
        decoder = self._decoder(frame)
        room = memoryview(bytearray(min(PIECE, frame.size)))
        for done in range(0, frame.size, PIECE):
            part = room[: min(PIECE, frame.size - done)]
            decoder.take(part)
            if held.file is not None:
                self._store(held.file, part, held.at + done)
        decoder.end()
        held.ready = True
        if held.file is None:
            held.data = bytes(room)
            with self._lock:
                self._kept += frame.size if self._small.get(path) is held else 0  # 0 if it was evicted meanwhile
                while self._kept > KEPT:
                    self._kept -= len(self._small.popitem(last=False)[1].data)

    def _store(self, file: IO[bytes], data: memoryview, at: int) -> None:
        done = 0
        while done < len(data):
            try:
                done += os.pwrite(file.fileno(), data[done:], at + done)
            except OSError as e:
                raise wrap_os_error(e, gettempdir(), "writing what was decompressed") from e

    def _decoder(self, frame: Compressed) -> _Decoder:
        def read(start: int, stop: int) -> bytes:
            return self._tree.read(frame.path, frame.at + start, stop - start)

        def fault(message: str) -> CorruptFile:
            return self._fault(frame, message)

        if frame.codec == "gzip":
            return _Gzip(read, frame.nbytes, fault)

        from ckpt_tool.storage.arrays.zstd_frames import Frame

        found = Frame(read, frame.nbytes, fault, window=LARGEST_WINDOW)
        if found.size not in (None, frame.size):
            raise fault(f"it holds {found.size} bytes, want {frame.size}")
        return found

    def _fault(self, frame: Compressed, message: str) -> CorruptFile:
        return CorruptFile(
            f"{frame.nbytes} bytes do not decompress to {frame.size}: {message}",
            code=DAMAGED,
            path=self._tree.display(frame.path),
            offset=None if is_view(frame.path) else frame.at,
            hint="the file is damaged: fetch it again",
        )
