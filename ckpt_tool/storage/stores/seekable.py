"""Bytes of a known size as a file that others seek and read in."""

from __future__ import annotations

import io


class Seekable(io.RawIOBase):
    """A place in `size` bytes, `_at`. Who derives from it reads there."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at
