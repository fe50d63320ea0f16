"""Views of files: bytes that do not lie plainly in a file, under a path of their own that begins with the file's.

    x.pdparams//arrays                          the arrays of a pickle that are text (`inline_arrays`)
    x.pt//pickle@704+1200                       the arrays of the pickle that is 1200 bytes at 704
    d/3f2a//zstd@4096+1200=4194304              the 4 MiB that the 1200 bytes at 4096 decompress to
    d/3f2a//zstd@0+900=5000//zstd@120+80=256    of 80 bytes in the 5000 bytes that 900 decompress to
    _METADATA//fill@0000803f                    four bytes that no file has: what stands for values that nobody stored

All that a view needs stands in its path, so a plan can name one. No real file can be called so: `safe_relative` refuses
`//`, and no listing has it. `Tree` reads files and views alike, and counts a view's identity as its file's own.

What is compressed has no middle: it is decompressed whole, once, by the first thread that wants a byte of it, in pieces
of 1 MiB. What comes to at most `SMALL` is kept in memory, `KEPT` of it at a time; the rest lies in a file without a
name in the folder for temporary files (`TMPDIR`), of which at most half of what is free there is taken; then the older
half is forgotten, and decompressed again when it is wanted. Memory: `KEPT`, and a window and a piece a thread.
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

PIECE = 1 << 20  # bytes
# bytes
SMALL = PIECE
KEPT = 32 << 20
LARGEST_WINDOW = 128 << 20  # bytes: zstd's own bound on what it reads unasked
LARGEST_RATIO = 1 << 15  # bytes that a byte comes to: zstd's blocks of one value, 128 KiB in 4 bytes; gzip has 1032
DAMAGED = "E2750"
CODECS = ("zstd", "gzip")
_FRAME = re.compile(r"(?P<codec>zstd|gzip)@(?P<at>\d{1,18})\+(?P<nbytes>\d{1,18})=(?P<size>\d{1,18})", re.ASCII)
_FILL = re.compile(r"fill@(?P<value>(?:[0-9a-f]{2}){1,16})", re.ASCII)


def memory_of(paths: Iterable[str], threads: int) -> int:
    """Bytes that reading these files and views takes beside buffers, at most, with windows as RFC 8878 has them."""
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
        """The path of what they decompress to."""
        return f"{self.path}{VIEW}{self.codec}@{self.at}+{self.nbytes}={self.size}"


def fill_view(path: str, value: bytes) -> str:
    """The path of a value that no file has, for which file `path` says that it is not stored."""
    return f"{path}{VIEW}fill@{value.hex()}"


def compressed_of(path: str) -> Compressed | None:
    """What a view's path says is compressed; None for views of another kind."""
    inner, _, last = path.rpartition(VIEW)
    found = _FRAME.fullmatch(last)
    return found and Compressed(inner, int(found["at"]), int(found["nbytes"]), int(found["size"]), found["codec"])


def behind(path: str, at: int, nbytes: int) -> tuple[str, int, int]:
    """The range of a file that is read for a range of a view, or of a file: all that is compressed, for its first
    bytes, and nothing for the others."""
    while (frame := compressed_of(path)) is not None:
        path = frame.path
        nbytes = frame.nbytes if at == 0 else 0
        at = frame.at
    return base_of(path), at, 0 if is_view(path) else nbytes


class _Decoder(Protocol):
    def take(self, into: memoryview) -> None: ...
    def end(self) -> None: ...


class _Gzip:
    """What a gzip or zlib stream decompresses to, as `zstd_frames.Frame` reads a frame."""

    def __init__(self, read: Callable[[int, int], bytes], size: int, fault: Callable[[str], CorruptFile]) -> None:
        self._read = read
        self._size = size
        self._fault = fault
        self._at = 0
        self._stream = zlib.decompressobj(wbits=47)
        self._left = b""

    def _some(self, most: int) -> bytes:
        """The next bytes, none at the end."""
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
        done = 0
        while done < len(into):
            data = self._some(len(into) - done)
            if not data:
                raise self._fault(f"it ends {len(into) - done} bytes early")
            into[done : done + len(data)] = data
            done += len(data)

    def end(self) -> None:
        if self._some(1) or self._left or self._stream.unused_data or self._at < self._size:
            raise self._fault("it holds more than is wanted")


class _Held:
    """What is known of one view. lock: held by who decompresses it. data: its bytes; or file, at: where they lie."""

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
        self._arrays: tuple[str, bytes] | None = None  # one at a time: files are read one behind the other
        self._small: OrderedDict[str, _Held] = OrderedDict()
        self._kept = 0  # bytes
        self._halves: list[tuple[IO[bytes], dict[str, _Held]]] = []  # the files without a name, the newer one last
        self._end = self._most = 0  # bytes of the newer one

    def size(self, path: str) -> int:
        """Size in bytes."""
        last = path.rpartition(VIEW)[2]
        if (frame := compressed_of(path)) is not None:
            return frame.size
        if (fill := _FILL.fullmatch(last)) is not None:
            return len(fill["value"]) // 2
        return len(self._array_bytes(path))

    def read(self, path: str, offset: int, nbytes: int) -> bytes:
        """Bytes of a view. Raises CorruptFile E0311 where it has not so many, E2750 for what does not decompress."""
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
        """Room for a view in the newer file, in a new one where that is full."""
        try:
            free = disk_usage(gettempdir()).free
            if size > free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if not self._halves or (self._end and self._end + size > self._most):
                self._halves = [*self._halves[-1:], (TemporaryFile(), {})]  # who still reads the older holds it open
                self._end = 0
                self._most = free // 4
        except OSError as e:
            raise wrap_os_error(e, gettempdir(), f"decompressing {size} bytes into") from e
        file, own = self._halves[-1]
        held = own[path] = _Held(file, self._end)
        self._end += size
        return held

    def _decompress(self, path: str, frame: Compressed, held: _Held) -> None:
        """Make a view ready. Its lock is held."""
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
                self._kept += frame.size if self._small.get(path) is held else 0  # others may have put it out
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
