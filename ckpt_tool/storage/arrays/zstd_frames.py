"""Reads what a zstd frame decompresses to, forward, in pieces of a size that the caller says.

    frame = Frame(lambda a, b: tree.read("weights.zst", a, b - a), 1200, fault=place.fault)
    frame.take(room)        # the next len(room) bytes
    frame.end()             # and no more

Memory is that of the frame's window and of one piece of it, whatever it decompresses to, so no frame can ask for more
than its reader has room for. Cost: loading zstandard takes 7 ms. What it does not do: dictionaries, random access.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ckpt_tool.errors import CorruptFile, UsageError

if TYPE_CHECKING:
    from zstandard import ZstdDecompressionReader

Compressed = Callable[[int, int], bytes]  # bytes [a, b) of a frame
LIBRARY = "E2612"
WINDOW = 8 << 20  # bytes that a decoder must be able to take by RFC 8878; level 1 uses 512 KiB
_STEP = 64 << 10  # bytes of a frame that are read at a time


def zstandard(what: str) -> Any:
    """The `zstandard` module. Raises UsageError E2612 if it is not installed. what: the first words of that message."""
    try:
        import zstandard as library
    except ImportError as e:
        raise UsageError(f"{what} the zstandard package", code=LIBRARY, hint="pip install zstandard") from e
    return library


class _Source(io.RawIOBase):
    """The compressed bytes of a frame as a file, read forwards. A class of its own: a frame that were its own source
    would refer to itself, and stay in memory until Python collects cycles."""

    def __init__(self, compressed: Compressed, size: int) -> None:
        super().__init__()
        self._compressed = compressed
        self._size = size
        self.at = 0

    def readable(self) -> bool:
        """True."""
        return True

    def read(self, size: int = -1) -> bytes:
        """The next compressed bytes, as zstandard asks for them."""
        end = min(self.at + max(0, size), self._size)
        data = self._compressed(self.at, end) if end > self.at else b""
        self.at = end
        return data


class Frame:
    """Decompresses a zstd frame of `size` compressed bytes.

    Args:
        compressed: returns bytes [a, b) of the frame.
        fault: makes the error for a message.
        window: the largest window in bytes that is accepted, since the decoder allocates it.
    """

    def __init__(
        self, compressed: Compressed, size: int, fault: Callable[[str], CorruptFile], *, window: int = WINDOW
    ) -> None:
        self._fault = fault
        self._nbytes = size
        self._source = _Source(compressed, size)
        library = zstandard("zstd frames are read by")
        head = compressed(0, min(size, 18))
        self._errors = library.ZstdError
        try:
            found = library.get_frame_parameters(head)
        except self._errors as e:
            raise fault(f"no zstd frame ({e})") from e
        if found.dict_id:
            raise fault(f"it was compressed with dictionary {found.dict_id}")
        if found.window_size > window:
            raise fault(f"a window of {found.window_size} bytes, want at most {window}")
        known = found.content_size not in (library.CONTENTSIZE_UNKNOWN, library.CONTENTSIZE_ERROR)
        self.size: int | None = found.content_size if known else None  # None: not stated
        self._reader: ZstdDecompressionReader = library.ZstdDecompressor(max_window_size=window).stream_reader(
            self._source, read_size=_STEP, read_across_frames=True, closefd=False
        )

    def some(self, into: memoryview) -> int:
        """Fill the front of `into` with the next bytes. Returns how many, 0 at the end."""
        try:
            return int(self._reader.readinto(into))
        except self._errors as e:
            raise self._fault(str(e)) from e

    def take(self, into: memoryview) -> None:
        """Fill `into` with the next decompressed bytes. Raises if there are not so many."""
        done = 0
        while done < len(into):
            got = self.some(into[done:])
            if not got:
                raise self._fault(f"it ends {len(into) - done} bytes early")
            done += got

    def skip(self, nbytes: int) -> None:
        """Decompress the next `nbytes` bytes and drop them."""
        room = memoryview(bytearray(min(nbytes, 256 << 10)))
        while nbytes:
            step = min(nbytes, len(room))
            self.take(room[:step])
            nbytes -= step

    def end(self) -> None:
        """Raise unless the frame and the compressed bytes end here."""
        try:
            more = self._reader.read(1)
        except self._errors as e:
            raise self._fault(f"after the last byte: {e}") from e
        if more or self._source.at < self._nbytes:
            raise self._fault("it holds more than the tensor takes")
