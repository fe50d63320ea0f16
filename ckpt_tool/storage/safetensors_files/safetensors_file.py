"""The safetensors file: its header as columns, and the head of a new file, byte for byte as the library writes it.

The one idea: the header says everything. `u64 little-endian N`, N bytes of JSON, then the tensors end to end:

    40 00 00 00 00 00 00 00 {"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}}           01 02 03
    N = 64                  8 + 64 = 72 is `data_start`; tensor `a` is bytes [72, 75) of the file

`read_header` reads the 8 bytes and the N bytes, and no tensor. `build_header` orders tensors as the library does:
wide dtypes first (so that most are aligned), then by name.

Rules checked (those of entries are in `safetensors_entries`): N between 2 and 100,000,000 and inside the file; the
header begins with `{` at byte 8 and is padded with white space; the data ends where the file ends.
Source: safetensors 0.8, `safetensors/src/tensor.rs`: `SafeTensors::read_metadata`, `Metadata::validate`, `prepare`;
the order of dtypes is the order of its enum, also seen in files that it wrote.

Cost: one open, two preads (the second finds its pages read ahead) and 0.5 us a tensor. Does not map files.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import compress
from math import prod

from ckpt_tool.core.dtype import SAFETENSORS_NAMES, DType
from ckpt_tool.core.gc_pause import gc_paused
from ckpt_tool.core.tensor import StoredArray
from ckpt_tool.errors import CorruptFile, UnsafeInput, UsageError
from ckpt_tool.storage.magic import TAIL_LIMIT, advice, ends_as_zip, what_is
from ckpt_tool.storage.safetensors_files import safetensors_entries as entries
from ckpt_tool.storage.safetensors_files.name_column import NameColumn
from ckpt_tool.storage.safetensors_files.safetensors_entries import METADATA, NAME_LIMIT, TENSOR_LIMIT, EntryKind
from ckpt_tool.storage.source import Tree

HEADER_LIMIT = 100_000_000  # bytes; tensor.rs MAX_HEADER_SIZE
ALIGNMENT = 8  # bytes: N is a multiple of it in files that the library writes

SHORT = "E0315"
LENGTH_LIMIT = "E0316"
LENGTH_EOF = "E0317"
EMPTY = "E0318"
BEGIN = "E0325"
PADDING = "E0326"
CUT = "E0334"
FOREIGN = "E0335"
POLYGLOT = "E0415"

# tensor.rs: enum Dtype, in this order; the writer puts the last first.
_DTYPE_ORDER = (
    "BOOL",
    "F4",
    "F6_E2M3",
    "F6_E3M2",
    "U8",
    "I8",
    "F8_E5M2",
    "F8_E4M3",
    "F8_E8M0",
    "F8_E4M3FNUZ",
    "F8_E5M2FNUZ",
    "I16",
    "U16",
    "F16",
    "BF16",
    "I32",
    "U32",
    "F32",
    "C64",
    "F64",
    "I64",
    "U64",
)
_RANK = {name: -i for i, name in enumerate(_DTYPE_ORDER)}


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """One file's header. Rows are in header order."""

    path: str  # relative to the tree
    size: int  # of the file, bytes
    data_start: int  # bytes from the start of the file to the data
    names: NameColumn
    kinds: list[EntryKind]
    begin: array[int]  # bytes from `data_start` to each tensor
    metadata: Mapping[str, str]
    warnings: tuple[str, ...] = ()  # what was accepted but is not right, in words

    def __len__(self) -> int:
        return len(self.kinds)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self.size - self.data_start

    @property
    def dtype(self) -> list[DType]:
        """The dtype of each tensor."""
        return [kind.dtype for kind in self.kinds]

    @property
    def shape(self) -> list[tuple[int, ...]]:
        """The shape of each tensor."""
        return [kind.shape for kind in self.kinds]

    @property
    def end(self) -> list[int]:
        """Bytes from `data_start` to the end of each tensor."""
        return [begin + kind.nbytes for begin, kind in zip(self.begin, self.kinds, strict=True)]

    def stored(self, row: int) -> StoredArray:
        """The place of the tensor of `row` in the file."""
        kind = self.kinds[row]
        return StoredArray(self.path, self.data_start + self.begin[row], kind.dtype, kind.shape)

    def keep(self, rows: Iterable[bool]) -> SafetensorsHeader:
        """The header with only those rows that are True. The file is not changed."""
        chosen = list(rows)
        return replace(
            self,
            names=NameColumn.of(list(compress(self.names.encoded(), chosen))),
            kinds=list(compress(self.kinds, chosen)),
            begin=array("Q", compress(self.begin, chosen)),
        )


# -- reading ----------------------------------------------------------------------------------------------------------


def looks_like_header(head: bytes, size: int) -> bool:
    """Could a file of `size` bytes that begins with `head` (9 bytes are enough) be a safetensors file?"""
    length = int.from_bytes(head[:8], "little")
    return len(head) >= 9 and 2 <= length <= min(HEADER_LIMIT, size - 8) and head[8:9] == b"{"


def read_header(tree: Tree, path: str, *, lenient: bool = False) -> SafetensorsHeader:
    """The header of one file.

    lenient: accept white space before the header's `{`, with a warning.
    Raises CorruptFile (E0315-E0335, and E0319-E0324 for its JSON) with offset, JSON pointer and tensor; UnsafeInput
    (E0415) for a file with a zip archive after its tensors.
    """
    shown = tree.display(path)
    size = tree.size(path)
    head = tree.head(path, 8)
    if not 2 <= int.from_bytes(head, "little") <= min(HEADER_LIMIT, size - 8):
        head = tree.head(path, 64)  # for the message: what is it instead?
    length = check_length(head, size, path=shown)
    try:
        return _from_text(tree.read(path, 8, length), size, path=path, shown=shown, lenient=lenient)
    except CorruptFile as fault:
        # A zip behind the tensors makes the file too long: say so, since it may be an attack.
        if fault.code == CUT:
            _refuse_zip(tree, path, size, min(size, TAIL_LIMIT), anchored=False)
        raise


def refuse_twin(tree: Tree, header: SafetensorsHeader) -> None:
    """Raise UnsafeInput (E0415) for a valid file whose last tensor was crafted to be the end of a zip, so that a zip
    reader opens the same file from its start. Reads the file's last 64 KiB: for `verify`, not for readers of
    headers."""
    _refuse_zip(tree, header.path, header.size, min(header.nbytes, TAIL_LIMIT), anchored=True)


def parse_header(raw: bytes, *, path: str, size: int, lenient: bool = False) -> SafetensorsHeader:
    """The header of a file of `size` bytes that begins with `raw`, which holds at least the whole header.

    Pure: no IO (and so no look at the file's end). Raises CorruptFile as `read_header` does.
    """
    length = check_length(raw, size, path=path)
    return _from_text(raw[8 : 8 + length], size, path=path, shown=path, lenient=lenient)


def check_length(head: bytes, size: int, *, path: str) -> int:
    """The header's length in bytes, from the first bytes of a file of `size` bytes. Raises CorruptFile."""

    def fault(code: str, message: str, hint: str) -> CorruptFile:
        kind = what_is(head[:64])
        if kind is not None:
            return CorruptFile(
                f"this is {kind}; want a safetensors file ({message})",
                code=FOREIGN,
                path=path,
                offset=0,
                hint=advice(head[:64]),
            )
        return CorruptFile(message, code=code, path=path, offset=0, hint=hint)

    again = "the file is damaged or cut short: compare its size with the source and get it again"
    if size == 0:
        raise fault(SHORT, "the file is empty, need 8 bytes at 0", "the save or the download never began: get it again")
    if size < 8 or len(head) < 8:
        raise fault(SHORT, f"truncated header length: the file has {size} bytes, need 8 at 0", again)
    length = int.from_bytes(head[:8], "little")
    if length > HEADER_LIMIT:
        beyond = f" and the file's {size} bytes" if length > size - 8 else ""
        message = f"the header length at byte 0 is {length}, which exceeds the limit of {HEADER_LIMIT}{beyond}"
        raise fault(LENGTH_LIMIT, message, again)
    if length < 2:
        raise fault(EMPTY, f"an empty header: its length is {length}, want at least 2", again)
    if length > size - 8:
        raise fault(LENGTH_EOF, f"the header ends at byte {8 + length}, but the file has {size} bytes", again)
    return length


def _from_text(text: bytes, size: int, *, path: str, shown: str, lenient: bool) -> SafetensorsHeader:
    """The header `text`, read from byte 8 of a file of `size` bytes."""
    # Counted before parsing, so that a header with too many entries costs no memory.
    if len(text) > 40 * TENSOR_LIMIT and text.count(b'"data_offsets"') > TENSOR_LIMIT:  # an entry takes 45 bytes
        raise entries.too_many(shown)
    with gc_paused():
        columns = entries.quick(text, path=shown)
        if columns is None:
            body, skipped = _body(text, shown, lenient=lenient)
            columns = entries.strict(body, path=shown, offset=8 + skipped)
            if skipped:
                columns = columns._replace(warnings=("white space before the header", *columns.warnings))
    data_start = 8 + len(text)
    have = size - data_start
    if columns.filled != have:
        raise _uneven(columns, have, data_start, shown)
    return SafetensorsHeader(
        path, size, data_start, columns.names, columns.kinds, columns.begins, columns.metadata, columns.warnings
    )


def _body(text: bytes, path: str, *, lenient: bool) -> tuple[bytes, int]:
    """`text` without its padding, and how many bytes of white space preceded it (0 unless lenient)."""
    body = text.rstrip(b" \t\r\n")
    skipped = len(text) - len(text.lstrip(b" \t\r\n")) if lenient else 0
    if body[skipped : skipped + 1] != b"{":
        raise CorruptFile(
            f"the header must begin with '{{' at byte 8, found {text[:8]!r}",
            code=BEGIN,
            path=path,
            offset=8,
            hint="the header is one JSON object; a list, a string or white space before it is not allowed",
        )
    if body[-1:] == b"\0":
        at = 8 + len(body.rstrip(b"\0 "))
        raise CorruptFile(
            f"bad padding: zero bytes after the header's JSON, from byte {at}",
            code=PADDING,
            path=path,
            offset=at,
            hint="headers are padded with spaces: the file was made by a faulty writer",
        )
    return body[skipped:], skipped


def _uneven(columns: entries.Columns, have: int, data_start: int, path: str) -> CorruptFile:
    """The fault of a file whose data is shorter or longer than its header says. have: bytes of data."""
    if columns.filled < have:
        return CorruptFile(
            f"the tensors end at byte {data_start + columns.filled}, but the file has {data_start + have}:"
            f" a tail of {have - columns.filled} bytes is not covered by a tensor",
            code=CUT,
            path=path,
            offset=data_start + columns.filled,
            hint="something was appended to the file, or its header was replaced: get it again",
        )
    intact = sum(begin + kind.nbytes <= have for begin, kind in zip(columns.begins, columns.kinds, strict=True))
    return CorruptFile(
        f"the file is cut short: its last offset is {columns.filled}, so it should have"
        f" {data_start + columns.filled} bytes, but it has {data_start + have} ({have} of data);"
        f" {intact} of {len(columns.kinds)} tensors are intact",
        code=CUT,
        path=path,
        offset=data_start + have,
        hint="the download or the save did not finish: get the file again",
    )


def _refuse_zip(tree: Tree, path: str, size: int, nbytes: int, *, anchored: bool) -> None:
    """Raise UnsafeInput E0415 if a zip archive ends in the last `nbytes` bytes of the file."""
    if nbytes < 22:
        return
    tail = tree.read(path, size - nbytes, nbytes)
    if not ends_as_zip(tree, path, size=size, tail=tail, anchored=anchored):
        return
    raise UnsafeInput(
        "a safetensors file that also parses as zip: two readers would see two files",
        code=POLYGLOT,
        path=tree.display(path),
        offset=size - nbytes,
        hint="such a file is made to get past a check; get the checkpoint from its author again",
    )


# -- writing ----------------------------------------------------------------------------------------------------------


def build_header(
    tensors: Iterable[tuple[str, DType, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, list[int], int]:
    """The head of a new file: its bytes, where each tensor goes, and the file's size.

    Args:
        tensors: (name, dtype, shape), in any order.
        metadata: strings; an empty one is left out, as the library does for None.
    Returns: the head (8 bytes of length, the JSON, spaces up to a multiple of 8); for each tensor, in the order
        given, bytes from the start of the file; the size of the file in bytes.
    Raises UsageError for what the format can't hold: C128, sub-byte tensors of no whole bytes, a name twice,
        `__metadata__`, a name over 4,096 bytes or with a lone surrogate, a header over 100 MB.
    """
    given = list(tensors)
    _check_writable(given, metadata)
    order = sorted(range(len(given)), key=lambda i: (dtype_rank(given[i][1]), given[i][0]))
    head: dict[str, object] = {METADATA: dict(sorted(metadata.items()))} if metadata else {}
    begins = [0] * len(given)
    at = 0
    for i in order:
        name, dtype, shape = given[i]
        end = at + dtype.nbytes(prod(shape))
        head[name] = {"dtype": dtype.name, "shape": shape, "data_offsets": (at, end)}
        begins[i], at = at, end
    text = json.dumps(head, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % ALIGNMENT)
    if len(text) > HEADER_LIMIT:
        raise UsageError(
            f"the header would take {len(text)} bytes, the limit is {HEADER_LIMIT}",
            code="E0200",
            hint="pass a smaller --max-shard-size, so that fewer tensors share a file",
        )
    start = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, [start + begin for begin in begins], start + at


def dtype_rank(dtype: DType) -> int:
    """What a header sorts by before the names: wide dtypes first. `dtype` must be one that the format holds."""
    return _RANK[dtype.name]


def _check_writable(tensors: list[tuple[str, DType, tuple[int, ...]]], metadata: Mapping[str, str]) -> None:
    seen: set[str] = set()
    for name, dtype, _ in tensors:
        if dtype.name not in SAFETENSORS_NAMES:
            raise UsageError(
                f"safetensors has no dtype {dtype.name}",
                code="E0258",
                key=name,
                hint="pass --dtype to cast, or --to another format",
            )
        if name == METADATA or name in seen:
            raise UsageError(
                f"safetensors can't hold a tensor named {name!r}" if name == METADATA else "two tensors have one name",
                code="E0200",
                key=name,
                hint="rename or remove it",
            )
        if not _is_unicode(name) or len(name.encode("utf-8")) > NAME_LIMIT:
            raise UsageError(
                f"a tensor name of {len(name)} characters is longer than {NAME_LIMIT} bytes or is not Unicode",
                code="E0200",
                key=name[:200],
                hint="rename or remove it",
            )
        seen.add(name)

    if len(tensors) > TENSOR_LIMIT:
        raise UsageError(
            f"{len(tensors)} tensors in a file, want at most {TENSOR_LIMIT}", code="E0200", hint="pass --max-shard-size"
        )

    for pair in metadata.items():
        if not all(isinstance(text, str) and _is_unicode(text) for text in pair):
            raise UsageError(
                f"safetensors metadata maps strings to strings, found {pair[0]!r}: {pair[1]!r}"[:300], code="E0200"
            )


def _is_unicode(text: str) -> bool:
    """False for lone surrogates, which no encoding can write."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
