"""GGUF files of which one part was taken away, cut, doubled or exchanged: never accepted with other values.

    Parts(raw).encode(tensor_count=-1)    the same bytes, but the header counts one tensor less

Each case edits one part of a real file: a count, a pair or a row of its header, an offset, a type, a shape, the
alignment, padding, the values of a tensor, the end. `verify` reads the result. It must refuse it or find something,
or give exactly the tensors of the file before the edit. The layout is written down here a second time, by hand: a
mistake that a test shares with the reader would hide.

Left out is what nothing in a GGUF file tells: the values of two tensors of one size exchanged, two names exchanged, a
type or a shape of as many bytes. Only a model's config tells these (`ckpt audit`).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tool.commands.verify import verify
from ckpt_tool.core.progress import SILENT
from ckpt_tool.errors import CkptError
from ckpt_tool.options.reading import Reading

FIXTURES = Path(__file__).parents[2] / "fixtures"
FILES = {
    "llama3": FIXTURES / "gguf/llama3.gguf",
    "every_type": FIXTURES / "gguf-made/every_type.gguf",
    "quantised": FIXTURES / "gguf-made/quantised.gguf",
    "big_endian": FIXTURES / "gguf-made/big_endian.gguf",
}
SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
STRING = 8
ARRAY = 9


@dataclass
class Row:
    """A row of the table of tensors."""

    name: bytes
    dims: tuple[int, ...]
    kind: int
    offset: int


@dataclass
class Parts:
    """A file taken apart. pairs: key and value of each, as bytes. data: all behind the table's padding."""

    order: str
    version: bytes
    pairs: list[bytes]
    rows: list[Row]
    data: bytes
    alignment: int = 32
    tail: bytes = b""
    padding: bytes = b"\0"
    tensor_count: int = 0  # added to the true number
    pair_count: int = 0
    table_tail: bytes = field(default=b"")

    @classmethod
    def of(cls, raw: bytes) -> Parts:
        order = "<" if raw[4] else ">"

        def number(letter: str) -> int:
            nonlocal position
            (value,) = struct.unpack_from(order + letter, raw, position)
            position += struct.calcsize(order + letter)
            return int(value)

        def skip_value(kind: int) -> None:
            nonlocal position
            if kind == STRING:
                length = number("Q")
                position += length
            elif kind == ARRAY:
                inner = number("I")
                count = number("Q")
                for _ in range(count):
                    skip_value(inner)
            else:
                position += SIZES[kind]

        position = 8
        tensor_count = number("Q")
        pair_count = number("Q")
        pairs = []
        for _ in range(pair_count):
            start = position
            length = number("Q")
            position += length
            skip_value(number("I"))
            pairs.append(raw[start:position])

        rows = []
        for _ in range(tensor_count):
            length = number("Q")
            name = raw[position : position + length]
            position += length
            dims = tuple(number("Q") for _ in range(number("I")))
            rows.append(Row(name, dims, number("I"), number("Q")))

        start = position + -position % 32
        return cls(order, raw[4:8], pairs, rows, raw[start:])

    def encode(self) -> bytes:
        def pack(letters: str, *values: int) -> bytes:
            return struct.pack(self.order + letters, *values)

        raw = b"GGUF" + self.version
        raw += pack("QQ", len(self.rows) + self.tensor_count, len(self.pairs) + self.pair_count)
        raw += b"".join(self.pairs)
        for row in self.rows:
            raw += pack("Q", len(row.name)) + row.name + pack("I", len(row.dims))
            raw += pack(f"{len(row.dims)}Q", *row.dims) + pack("IQ", row.kind, row.offset % (1 << 64))
        raw += self.table_tail
        raw += self.padding * (-len(raw) % self.alignment)
        return raw + self.data + self.tail


def alignment_pair(order: str, value: int) -> bytes:
    key = b"general.alignment"
    return struct.pack(order + "Q", len(key)) + key + struct.pack(order + "II", 4, value)


def without(items: list, number: int) -> list:
    return items[:number] + items[number + 1 :]


def edits(parts: Parts):
    """(name, bytes) of every case."""
    rows = parts.rows
    pairs = parts.pairs
    data = parts.data

    def edit(**changes: object) -> bytes:
        return replace(parts, **changes).encode()

    def with_row(number: int, **changes: object) -> bytes:
        return edit(rows=[*rows[:number], replace(rows[number], **changes), *rows[number + 1 :]])

    for less in range(1, len(rows) + 1):
        yield f"count of tensors -{less}", edit(tensor_count=-less)
    yield "count of tensors +1", edit(tensor_count=1)
    for less in range(1, len(pairs) + 1):
        yield f"count of pairs -{less}", edit(pair_count=-less)
        yield f"count of pairs -{less}, of tensors +{less}", edit(pair_count=-less, tensor_count=less)
    yield "count of pairs +1", edit(pair_count=1)
    yield "count of pairs +1, of tensors -1", edit(pair_count=1, tensor_count=-1)

    for value in (1, 2, 4, 8, 16, 64, 128, 4096):
        pair = alignment_pair(parts.order, value)
        yield f"alignment {value} said", edit(pairs=[*pairs, pair])
        yield f"alignment {value} used", edit(alignment=value)
        yield f"alignment {value} said and used", edit(pairs=[*pairs, pair], alignment=value)

    for number in range(len(pairs)):
        yield f"pair {number} removed", edit(pairs=without(pairs, number))
        yield f"pair {number} removed, counted", edit(pairs=without(pairs, number), pair_count=1)
        yield f"pair {number} twice", edit(pairs=[*pairs, pairs[number]])
        yield f"pair {number} cut", edit(pairs=[*pairs[:number], pairs[number][:-1], *pairs[number + 1 :]])

    starts = [row.offset for row in rows] + [len(data)]
    for number, row in enumerate(rows):
        start = starts[number]
        stop = starts[number + 1]
        yield f"row {number} removed", edit(rows=without(rows, number))
        yield f"row {number} removed, counted", edit(rows=without(rows, number), tensor_count=1)
        yield f"row {number} twice", edit(rows=[*rows, row])
        yield f"row {number} twice under another name", edit(rows=[*rows, replace(row, name=b"another")])
        yield f"row {number} without values", edit(data=data[:start] + data[stop:])
        yield f"values of row {number} twice", edit(data=data[:stop] + data[start:stop] + data[stop:])
        yield f"values of row {number} begin late", edit(data=data[:start] + bytes(32) + data[start:])
        yield f"cut before row {number}", edit(data=data[:start])
        yield f"cut inside row {number}", edit(data=data[: start + 1])
        for step in (-64, -32, -1, 1, 32, 64):
            yield f"offset of row {number} {step:+}", with_row(number, offset=row.offset + step)
        for kind in (0, 1, 8, 12, 24, 27):
            if kind != row.kind:
                yield f"type {kind} of row {number}", with_row(number, kind=kind)
        for axis, extent in enumerate(row.dims):
            for other in (extent - 1, extent + 1, 2 * extent, extent // 2):
                dims = (*row.dims[:axis], other, *row.dims[axis + 1 :])
                yield f"dim {axis} of row {number} is {other}", with_row(number, dims=dims)
        if number and rows[number - 1].offset != row.offset:
            before = rows[number - 1]
            exchanged = [replace(before, offset=row.offset), replace(row, offset=before.offset)]
            yield (
                f"offsets of rows {number - 1} and {number} exchanged",
                edit(rows=[*rows[: number - 1], *exchanged, *rows[number + 1 :]]),
            )

    yield "padding of the table", edit(padding=b"\1")
    yield "a zero behind the table", edit(table_tail=bytes(33))
    for tail in (b"\0", b"\1", bytes(32), bytes(4096), data[:64]):
        yield f"{len(tail)} bytes {tail[:1].hex()} behind the end", edit(tail=tail)
    raw = parts.encode()
    for stop in range(0, len(raw), max(1, len(raw) // 64)):
        yield f"cut at {stop}", raw[:stop]


def read(path: Path) -> dict | None:
    """{tensor: digest}, None where it was refused or something was found."""
    try:
        document = verify(str(path), Reading(), progress=SILENT)
    except CkptError as error:
        assert error.exit_code in (1, 2, 3, 4), error
        return None
    return document["digests"]["model"] if document["ok"] else None


# A type or a shape of as many bytes: only a config tells.
SAME_BYTES = ("type", "dim")


def accepted_edits(name: str, tmp_path: Path, *, one_of: int) -> tuple[list[str], int]:
    """(edits that were accepted with other values, edits that were tried)."""
    raw = FILES[name].read_bytes()
    parts = Parts.of(raw)
    assert parts.encode() == raw, "the file is not put together again as it was"

    path = tmp_path / "model.gguf"
    path.write_bytes(raw)
    truth = read(path)
    assert truth

    wrong = []
    tried = 0
    for number, (case, edited) in enumerate(edits(parts)):
        if number % one_of:
            continue
        path.write_bytes(edited)
        found = read(path)
        tried += 1
        if found is None or found == truth:
            continue
        if case.startswith(SAME_BYTES) and len(found) == len(truth):
            continue
        wrong.append(case)
    return wrong, tried


def test_an_edited_part_is_never_accepted_with_other_values(tmp_path: Path) -> None:
    """One edit of nine of the smallest file; every one of all files: the next test."""
    wrong, tried = accepted_edits("big_endian", tmp_path, one_of=9)
    assert tried > 30 and not wrong


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", sorted(FILES))
def test_no_edited_part_is_accepted_with_other_values(name: str, tmp_path: Path) -> None:
    wrong, tried = accepted_edits(name, tmp_path, one_of=1)
    assert tried > 200 and not wrong


@pytest.mark.parametrize("less", [1, 2, 3])
def test_a_count_that_is_too_small_is_named(less: int, tmp_path: Path) -> None:
    parts = Parts.of(FILES["llama3"].read_bytes())
    path = tmp_path / "model.gguf"
    path.write_bytes(replace(parts, tensor_count=-less).encode())
    with pytest.raises(CkptError, match="more rows than are counted|after the last tensor|begins at byte") as caught:
        verify(str(path), Reading(), progress=SILENT)
    assert caught.value.code == "E2870"


@given(st.integers(0, 30), st.integers(1, 255))
def test_padding_that_is_not_zero_is_found(position: int, value: int) -> None:
    """Padding behind a tensor, which `verify` alone reads, and a tensor of 33 bytes."""
    import tempfile

    data = bytearray(bytes(range(33)) + bytes(31) + bytes(range(32)))
    data[33 + position] = value
    rows = [Row(b"a", (33,), 24, 0), Row(b"b", (32,), 24, 64)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.gguf")
        path.write_bytes(Parts("<", struct.pack("<I", 3), [], rows, bytes(data)).encode())
        document = verify(str(path), Reading(), progress=SILENT)
    assert [row["code"] for row in document["findings"]] == ["E2870"]
