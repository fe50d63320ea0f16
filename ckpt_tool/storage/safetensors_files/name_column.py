"""NameColumn: many names in one piece of memory.

A list of 92,000 names is 11 MB of string objects; joined by line feeds it is 5 MB, and gives the strings when asked.

    >>> list(NameColumn.of([b"a.weight", b"b.weight"]))
    ['a.weight', 'b.weight']

Names that hold a line feed (allowed in JSON, seen only in hostile files) are kept as a tuple instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence


class NameColumn:
    """An immutable column of UTF-8 names."""

    __slots__ = ("_count", "_joined", "_odd")

    def __init__(self, joined: bytes, count: int, odd: tuple[bytes, ...] = ()) -> None:
        """joined: the names, line feeds between them. odd: the names themselves where one holds a line feed."""
        self._joined = joined
        self._count = count
        self._odd = odd

    @staticmethod
    def of(names: Sequence[bytes]) -> NameColumn:
        joined = b"\n".join(names)
        if joined.count(b"\n") == max(len(names) - 1, 0):
            return NameColumn(joined, len(names))
        return NameColumn(b"", len(names), tuple(names))

    @staticmethod
    def of_text(names: Iterable[str]) -> NameColumn:
        return NameColumn.of([name.encode("utf-8") for name in names])

    def encoded(self) -> list[bytes]:
        """The names as UTF-8."""
        if self._odd or not self._count:
            return list(self._odd)
        return self._joined.split(b"\n")

    def first(self) -> str:
        """The first name; "" where there is none."""
        return (self._odd[0] if self._odd else self._joined.partition(b"\n")[0]).decode("utf-8")

    def same(self, names: Sequence[bytes]) -> bool:
        """Are these the column's names, in its order? No list is made of them."""
        return not self._odd and len(names) == self._count and b"\n".join(names) == self._joined

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[str]:
        if self._odd or not self._count:
            return iter([name.decode("utf-8") for name in self._odd])
        return iter(self._joined.decode("utf-8").split("\n"))
