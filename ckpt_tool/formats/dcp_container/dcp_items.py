"""Reads the items of `.distcp` files, to which `.metadata` refers. `dcp_container.dcp_item_files` writes them.

Each item is one complete `torch.save` zip at [offset, offset + length) of its file: a tensor item holds one bare
tensor, an object item any Python object. Or, with `serialization_format=SAFETENSORS`, the file is one safetensors file
and every item's offset is 0; its entry is found by the item's name. The file's first bytes decide, never its name.

The one idea: thousands of items differ only in their values, so their pickles and the zips around them repeat. A pickle
is parsed once and recognised by its bytes afterwards; a zip is recognised by comparison with the first of its kind
(`Twin`). The storage itself is never read.

    item at 1577 of __0_0.distcp, 2217 bytes  <->  StoredArray("__0_0.distcp", 1577 + 704, F32, (17, 10), crc=(...))

A twin's zip equals the first one's byte by byte, except for the storage's CRC-32 (after the storage and in the
directory), torch's serialization id, and the id's CRC-32. A comparison accepts nothing that a full parse would reject.

    head  [local headers, data.pkl ... data/0's header]    equal
    end   [crc][version][id 40 digits][crc][directory: ... crc ... crc ...][end records]    equal outside the brackets

Source: torch 2.13 `distributed/checkpoint/filesystem.py` (`_write_item`, `_write_files_from_queue`), `hf_utils`
constants of `DCP_SHARDING_INFO`. Cost: one pread of about 1.3 KB and 60 us an item, 10 us for a twin, 2 where
all twins of a file are compared by compiled code (`dcp_compared`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from ckpt_tool import compiled
from ckpt_tool.core.dtype import DType
from ckpt_tool.core.faults import read_each
from ckpt_tool.core.missing import is_collecting, report_missing
from ckpt_tool.core.tensor import StoredArray
from ckpt_tool.errors import CkptError, CorruptFile, InconsistentCheckpoint, InputError, UnsafeInput
from ckpt_tool.formats.dcp_container.dcp_metadata import DcpTensorEntry, ObjectEntry
from ckpt_tool.formats.dcp_container.dcp_pieces import DcpItem, DcpPiece
from ckpt_tool.storage.pickles import pickle_reader as pickles
from ckpt_tool.storage.pickles.coded_states import CODES, coded
from ckpt_tool.storage.pickles.pickle_values import Pickled, TensorRef
from ckpt_tool.storage.source import Tree
from ckpt_tool.storage.torch_files.torchzip import TorchZip, ZipRecord

if TYPE_CHECKING:
    from ckpt_tool.compiled.twins import Compare, TwinKind
    from ckpt_tool.storage.safetensors_files.safetensors_file import SafetensorsHeader

MISMATCH = "E0394"
CRC_DIFFERS = "E0347"
_OBJECTS = ("E0420", "E0421")  # a name that only an unpickler would run; a tensor that is held by an object
DATA = re.compile(r"__(\d{1,9})_(\d{1,9})\.distcp")  # rank, number of the rank's file
SHARDING_INFO = "DCP_SHARDING_INFO"
_ID = ".data/serialization_id"
_DESCRIPTOR = b"PK\x07\x08"
_CENTRAL = b"PK\x01\x02"
# Sizes and offsets in bytes of a zip's central directory header (APPNOTE 4.3.12).
_CENTRAL_SIZE = 46
_CRC_IN_CENTRAL = 16
# Sizes in bytes of a data descriptor (APPNOTE 4.3.9) and of a local file header (4.3.7).
_DESCRIPTOR_SIZE = 16
_LOCAL_SIZE = 30


MANY = 10_000  # items from which loading the compiled comparison pays off


def rank_of(path: str) -> dict[str, int] | None:
    """The rank that wrote a `.distcp` file, from its name; None for other names."""
    found = DATA.fullmatch(path.rpartition("/")[2])
    return {"rank": int(found[1])} if found else None


class ReadObject(NamedTuple):
    """An object item: its value, parsed without unpickling, and the zip that contains the tensors inside it."""

    entry: ObjectEntry
    value: Any
    zip: TorchZip


class _Window:
    """A tree optimised for reading consecutive items of a file.

    No byte is read twice, one pread gets an item's end together with the next item's head, and a file's size is
    requested once (reads are checked against the size at that time). All other methods are the tree's.
    """

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self.met = tree.met
        self._pieces: list[tuple[str, int, bytes]] = []  # the last three: (file, offset, bytes)
        self._file = ""
        self._heads = dict[int, int]()
        self._head = 0  # bytes of the last head that was read
        self._end = (0, 0, b"")  # of the previous item: the offset and size of its end, the bytes read from there
        self._size: tuple[str, int] = ("", 0)  # the last file's

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tree, name)

    def expect(self, file: str, heads: dict[int, int]) -> None:
        """Announce that items of `file` are read next. heads: offset of each item -> its length in bytes."""
        self._file = file
        self._heads = heads
        self._end = (0, 0, b"")

    def size(self, path: str) -> int:
        """As `Tree.size`."""
        if self._size[0] != path:
            self._size = path, self._tree.size(path)
        return self._size[1]

    def head(self, path: str, nbytes: int = 64) -> bytes:
        """As `Tree.head`."""
        return self.read(path, 0, min(nbytes, self.size(path)))

    def read(self, path: str, offset: int, nbytes: int) -> bytes:
        """As `Tree.read`."""
        if self._end[2]:  # this item is no twin, but its first bytes may have been read with the previous item's end
            self._pieces = [(self._file, self._end[0], self._end[2]), *self._pieces[:2]]
            self._end = (0, 0, b"")
        end = offset + nbytes
        heads = self._heads if path == self._file else {}
        if offset in heads:
            self._head = nbytes
        for file, start, piece in self._pieces:
            if file == path and start <= offset and end <= start + len(piece):
                return piece[offset - start : end - start]
        ahead = min(self._head, heads.get(end, 0))
        for number, (file, start, piece) in enumerate(self._pieces):
            stop = start + len(piece)
            if file == path and start <= offset < stop:  # a piece has the beginning of the range: read the rest
                found = piece[offset - start :] + self._tree.read(path, stop, end - stop + ahead)
            elif file == path and offset < start < end <= stop:  # a piece has the end of the range: read what precedes
                found = self._tree.read(path, offset, start - offset) + piece
            else:
                continue
            self._pieces[number] = (path, offset, found)
            return found[:nbytes]
        found = self._tree.read(path, offset, nbytes + ahead)
        self._pieces = [(path, offset, found), *self._pieces[:2]]
        return found[:nbytes]

    def around(self, at: int, head: int, start: int, nbytes: int) -> tuple[bytes, bytes]:
        """(the first `head` bytes of the item at byte `at` of the expected file, the `nbytes` bytes from `start`, which
        are its end)."""
        before, size, known = self._end
        if before + size == at and len(known) >= size + head:
            first = known[size : size + head]
        else:
            first = self.read(self._file, at, head)
        stop = start + nbytes
        more = min(head, self._heads.get(stop, 0), self.size(self._file) - stop)  # most often the next head is as long
        end = self._tree.read(self._file, start, nbytes + more)
        self._end = start, nbytes, end
        return first, end[:nbytes]


def _comparing(tree: Tree, items: int) -> Compare | None:
    """The compiled function that compares all items of a file in one call. None for few items, for files that are not
    local, or without a compiler."""
    if not tree.local or not compiled.worth_a_look(items, MANY):
        return None
    from ckpt_tool.compiled.twins import ready

    return ready(items)


class DcpItems:
    """Reads the items of one checkpoint.

    Items that are no plain tensors are refused, unless `every` is set; then they are collected in `coded` and `odd`.

    coded: parts of quantised states (`pickles.coded_states`), fqn -> index of the piece -> part -> array. `arrays`
        includes the codes of such states.
    odd: all other items that are no plain tensors, by fqn: (class of the object that holds the tensor, the line that
        explains why it cannot be read, the fault of a tensor that torch stores in a form of its own). `arrays` leaves
        them out.
    unsafe, globals: of the pickles parsed so far (see `core.catalog`).
    """

    def __init__(self, tree: Tree, *, every: bool = False) -> None:
        self._window = _Window(tree)
        self.tree = cast(Tree, self._window)
        self._every = every
        self.coded: dict[str, dict[int, dict[str, StoredArray]]] = {}
        self.odd: dict[str, tuple[str, str, InputError | None]] = {}
        self.unsafe: list[str] = []
        self.globals: dict[str, None] = {}
        self._known: dict[bytes, Pickled] = {}
        self._twins: dict[tuple[str, tuple[int, ...], int], Twin | None] = {}
        self._seen: dict[tuple[str, tuple[int, ...], int], int] = {}
        self._tails: dict[int, int] = {}
        self._headers: dict[str, tuple[SafetensorsHeader, dict[str, int], dict[str, list[int]]] | None] = {}

    def arrays(self, tensors: Iterable[DcpTensorEntry]) -> Mapping[str, Sequence[StoredArray]]:
        """The stored arrays of each tensor's pieces, in the pieces' order; by fqn.

        Items are read in the order of their offsets. Raises CorruptFile and UnsafeInput of the containers;
        InconsistentCheckpoint (E0394) if an item differs from what the metadata states.
        """
        every = list(tensors)
        compare = _comparing(self.tree, sum(len(tensor.pieces) for tensor in every))
        if compare is not None and every:
            from ckpt_tool.formats.dcp_container.dcp_compared import compared

            return compared(self, every, compare)
        files: defaultdict[str, list[DcpItem]] = defaultdict(list)
        for tensor in every:
            tensor.pieces = list(tensor.pieces)  # columns would create a new object at each of several accesses
            for number, piece in enumerate(tensor.pieces):
                files[piece.file].append(DcpItem(piece.at, tensor.fqn, number, tensor, piece.length))
        found: defaultdict[str, dict[int, StoredArray]] = defaultdict(dict)

        def read(file: str) -> None:
            for item, array in self.in_file(file, sorted(files.pop(file), key=itemgetter(0, 1, 2))):
                found[item.fqn][item.number] = array

        read_each(sorted(files), read)
        return {
            fqn: [arrays[number] for number in range(len(arrays))]
            for fqn, arrays in found.items()
            if fqn not in self.odd
        }

    def in_file(self, file: str, items: Sequence[DcpItem]) -> Iterator[tuple[DcpItem, StoredArray]]:
        """(item, array) for a file's items, which must be sorted by offset. Items that go into `odd` are left out."""
        self._window.expect(file, {item.at: item.length for item in items})
        read = self._in_safetensors if self.in_safetensors(file) else self._in_zip
        for item in items:
            try:
                array = read(item.tensor, item.number)
            except (UnsafeInput, CorruptFile, InconsistentCheckpoint) as e:
                # While faults are collected, a damaged item must not hide those of the file's other items.
                if self._every and is_collecting() and e.code not in _OBJECTS:
                    report_missing(e)
                    self.odd.setdefault(item.fqn, ("", "", cast(InputError, e)))
                    continue
                if not self._every or e.code not in _OBJECTS:
                    raise
                self.odd.setdefault(item.fqn, ("", f"{e.message} (item {item.fqn} of {e.path})", None))
                continue
            except InputError as e:
                if not self._every or e.code != pickles.OTHER_FORM:
                    raise
                self.odd.setdefault(item.fqn, ("", "", e))
                continue
            if array is not None:
                yield item, array

    def twin(self, dtype: DType, shape: tuple[int, ...], length: int) -> Twin | None:
        """The item with which others of the same kind are compared; None until two of the kind were parsed in full."""
        return self._twins.get((dtype.name, shape, length))

    def objects(self, entries: Sequence[ObjectEntry]) -> list[ReadObject]:
        """Read the object items, in the order of their files and offsets. Raises as `arrays`."""

        def read(entry: ObjectEntry) -> ReadObject | None:
            try:
                zip_, pickled = self._open(entry.file, entry.at, entry.length, entry.fqn)
            except (UnsafeInput, CorruptFile) as e:
                if not self._every or not is_collecting() or e.code in _OBJECTS:
                    raise
                report_missing(e)
                return None
            return ReadObject(entry, pickled.value, zip_)

        in_order = sorted(entries, key=lambda e: (e.file, e.at))
        found = read_each(in_order, read, file=lambda entry: entry.file)
        return [each for each in found if each is not None]

    # -- zips -------------------------------------------------------------------------------------------------------

    def _open(self, file: str, at: int, length: int, fqn: str) -> tuple[TorchZip, Pickled]:
        try:
            zip_ = TorchZip.open(self.tree, file, at, length, tail=self._tails.get(0, 0))
            self._tails[0] = zip_.tail
            data = zip_.read("data.pkl")
            pickled = self._known.get(data)
            if pickled is None:
                pickled = self._known[data] = zip_.pickled()
                self.globals.update(dict.fromkeys(map(str, pickled.globals)))
        except CkptError as e:
            e.key = e.key or fqn
            if (
                e.code != CRC_DIFFERS
            ):  # a failed checksum means that a zip was found here, so the offset is right and the hint would mislead
                whose = f".metadata says that {length} bytes here are an item: is it another rank's or save's file?"
                e.hint = f"{e.hint}; {whose}" if e.hint else whose
            raise
        if pickled.unsafe:
            shown = self.tree.display(file)
            self.unsafe += [f"{use} at {shown}, item {fqn}, opcode {use.position}" for use in pickled.unsafe]
        return zip_, pickled

    def _in_zip(self, tensor: DcpTensorEntry, number: int) -> StoredArray | None:
        piece = tensor.pieces[number]
        kind = (tensor.dtype.name, piece.shape, piece.length)
        twin = self._twins.get(kind)
        if twin is not None and piece.at + piece.length <= self._window.size(piece.file):
            found = twin.of(self._window, piece.file, piece.at)
            if found is not None:
                self._window.met.zip(piece.file, piece.at, piece.length)
                return found

        zip_, pickled = self._open(piece.file, piece.at, piece.length, tensor.fqn)
        ref = pickled.value
        parts = coded(ref) if self._every else None
        if parts is not None:
            if ref.args[0].args[2] != piece.shape:
                raise self._mismatch(tensor, piece, f"the item holds {ref.name} {list(ref.args[0].args[2])}")
            arrays = {name: zip_.array(part) for name, part in parts.items()}
            self.coded.setdefault(tensor.fqn, {})[number] = arrays
            return arrays[CODES]

        if not isinstance(ref, TensorRef):
            if self._every and pickles.foreign(ref):
                line = f"{pickles.held_by(ref.name)} (item {tensor.fqn} of {self.tree.display(piece.file)})"
                self.odd.setdefault(tensor.fqn, (ref.name, line, None))
                return None
            pickles.refuse_unsafe(pickled, self.tree.display(piece.file))
            pickles.refuse_weight_bearing(ref, self.tree.display(piece.file))
            raise self._mismatch(tensor, piece, f"the item holds {type(ref).__name__}, want a plain tensor")

        if ref.shape != piece.shape or ref.dtype != tensor.dtype:
            raise self._mismatch(tensor, piece, f"the item holds {ref.dtype.name} {list(ref.shape)}")

        try:
            array = zip_.array(ref)
        except CkptError as e:
            e.key = e.key or tensor.fqn
            raise

        if twin is None and not pickled.unsafe:
            self._seen[kind] = self._seen.get(kind, 0) + 1
            if self._seen[kind] == 2:
                self._twins[kind] = twin_of(zip_, array)

        return array

    def _mismatch(self, tensor: DcpTensorEntry, piece: DcpPiece, found: str) -> InconsistentCheckpoint:
        return InconsistentCheckpoint(
            f"{found}; the metadata says {tensor.dtype.name} {list(piece.shape)} at {list(piece.offset)}",
            code=MISMATCH,
            path=self.tree.display(piece.file),
            offset=piece.at,
            key=tensor.fqn,
            hint="the file and the metadata come from two saves: get both from one save",
            bytes_differ=True,
        )

    # -- safetensors inside -----------------------------------------------------------------------------------------

    def in_safetensors(self, file: str) -> bool:
        """Is the file one safetensors file?"""
        if file not in self._headers:
            has_json = self.tree.head(file, 9)[8:] == b"{"  # a safetensors file has 8 bytes of length before its JSON
            self._headers[file] = self._header(file) if has_json else None
        return self._headers[file] is not None

    def _header(self, file: str) -> tuple[SafetensorsHeader, dict[str, int], dict[str, list[int]]] | None:
        from ckpt_tool.storage.safetensors_files.safetensors_file import looks_like_header, read_header
        from ckpt_tool.storage.texts import strict_json

        if not looks_like_header(self.tree.head(file, 9), self.tree.size(file)):
            return None
        header = read_header(self.tree, file)
        offsets: dict[str, list[int]] = {}
        text = (header.metadata or {}).get(SHARDING_INFO)
        shown = self.tree.display(file)
        if text is not None:
            info = strict_json.parse(text.encode(), path=shown, place=f"/__metadata__/{SHARDING_INFO}")
            if not isinstance(info, dict) or not all(
                isinstance(each, dict) and isinstance(each.get("saved_offsets"), list) for each in info.values()
            ):
                raise CorruptFile(
                    f"{SHARDING_INFO} is no table of saved_offsets",
                    code="E0339",
                    path=shown,
                    place=f"/__metadata__/{SHARDING_INFO}",
                    hint="the header was edited or damaged",
                )
            offsets = {name: each["saved_offsets"] for name, each in info.items()}
        return header, {name: row for row, name in enumerate(header.names)}, offsets

    def _in_safetensors(self, tensor: DcpTensorEntry, number: int) -> StoredArray:
        piece = tensor.pieces[number]
        found = self._headers[piece.file]
        if found is None or tensor.fqn not in found[1]:
            raise self._mismatch(tensor, piece, "the safetensors file does not hold it")
        header, rows, offsets = found
        array = header.stored(rows[tensor.fqn])
        stated = offsets.get(tensor.fqn, list(piece.offset))
        if array.shape != piece.shape or array.dtype != tensor.dtype or stated != list(piece.offset):
            raise self._mismatch(tensor, piece, f"the header says {array.dtype.name} {list(array.shape)} at {stated}")
        return array


# -- twins -------------------------------------------------------------------------------------------------------------


class Twin(NamedTuple):
    """The bytes of an item around its storage, with which other items are compared.

    The end of an item is everything after its storage; offsets in it are relative to `data + nbytes`.
    """

    data: int  # bytes from the item's start to the storage
    nbytes: int  # size of the storage
    head: bytes  # the item's first bytes, up to the name in the storage's local header
    fixed: tuple[tuple[int, bytes], ...]  # (offset in the end, bytes) that must be equal
    end: int  # size of the end in bytes
    crc: tuple[int, int]  # offsets in the end at which the storage's CRC occurs
    id_crc: tuple[int, int]  # offsets in the end at which the serialization id's CRC occurs
    array: StoredArray

    def of(self, window: _Window, path: str, at: int) -> StoredArray | None:
        """The array of the item at byte `at` of `path` if its bytes are those of a twin, else None.

        path: the file that `window` expects.
        """
        head, end = window.around(at, len(self.head), at + self.data + self.nbytes, self.end)
        if head != self.head:
            return None
        for offset, piece in self.fixed:
            if not end.startswith(piece, offset):
                return None
        (a, b), (c, d) = self.crc, self.id_crc
        value = end[a : a + 4]
        if value != end[b : b + 4] or end[c : c + 4] != end[d : d + 4]:
            return None
        return self.at(path, at, int.from_bytes(value, "little"))

    def at(self, path: str, at: int, crc: int) -> StoredArray:
        """The array of the twin at byte `at` of `path`. crc: the CRC-32 of its storage."""
        start = at + self.data
        first = self.array
        return StoredArray(
            path, start, first.dtype, first.shape, first.strides, (start, self.nbytes, crc) if crc else None
        )

    @property
    def length(self) -> int:
        """The size of such an item in bytes."""
        return self.data + self.nbytes + self.end

    def kind(self) -> TwinKind:
        """The twin in the form that the compiled comparison expects."""
        from ckpt_tool.compiled.twins import TwinKind

        end = bytearray(self.end)
        fixed = bytearray(self.end)
        for offset, piece in self.fixed:
            end[offset : offset + len(piece)] = piece
            fixed[offset : offset + len(piece)] = b"\xff" * len(piece)
        return TwinKind(self.head, self.data + self.nbytes, bytes(end), bytes(fixed), self.crc, self.id_crc)


def twin_of(opened: TorchZip, array: StoredArray) -> Twin | None:
    """The twin with which later items of the same dtype, shape and length are compared.

    None for an item whose zip has another structure than torch's; such items are all parsed in full.
    """
    records = opened.records
    storage = records.get("data/0")
    label = records.get(_ID)
    if storage is None or label is None or not storage.nbytes or array.offset != storage.offset:
        return None

    stop = storage.offset + storage.nbytes
    start = opened.start
    length = opened.length
    header = max(r.offset + r.nbytes for name, r in records.items() if name not in ("version", "data/0", _ID))
    end = opened.tree.read(opened.path, stop, start + length - stop)
    holes = _holes(opened.root, "data/0", storage, end, stop), _holes(opened.root, _ID, label, end, stop)
    if holes[0] is None or holes[1] is None or header > storage.offset:
        return None

    behind = _header_end(opened, header)
    if behind < 0:
        return None

    head = opened.tree.read(opened.path, start, behind - start)
    skipped = sorted([*((at, 4) for pair in holes if pair for at in pair), (label.offset - stop, label.nbytes)])
    fixed = []
    done = 0
    for at, nbytes in skipped:
        fixed.append((done, end[done:at]))
        done = at + nbytes

    fixed.append((done, end[done:]))
    if any(offset < 0 for offset, _ in skipped):
        return None
    return Twin(storage.offset - start, storage.nbytes, head, tuple(fixed), len(end), holes[0], holes[1], array)


def _holes(root: str, name: str, record: ZipRecord, end: bytes, stop: int) -> tuple[int, int] | None:
    """The offsets in an item's end at which the record's CRC occurs: (in the descriptor, in the directory). None if it
    is not at the places where torch writes it."""
    descriptor = record.offset + record.nbytes - stop
    full = f"{root}/{name}".encode()
    central = end.rfind(full) - _CENTRAL_SIZE
    if descriptor < 0 or central < 0 or record.crc32 is None:
        return None
    crc = record.crc32.to_bytes(4, "little")
    spots = (descriptor + 4, central + _CRC_IN_CENTRAL)
    right = end[descriptor : descriptor + 4] == _DESCRIPTOR and end[central : central + 4] == _CENTRAL
    return spots if right and all(end[spot : spot + 4] == crc for spot in spots) else None


def _header_end(opened: TorchZip, before: int) -> int:
    """The offset after the fixed part and the name of data/0's local header. -1 unless that header follows the record
    that ends at `before` and its descriptor."""
    name = f"{opened.root}/data/0".encode()
    window = opened.tree.read(opened.path, before, _DESCRIPTOR_SIZE + _LOCAL_SIZE + len(name))
    fits = window[_DESCRIPTOR_SIZE:].startswith(b"PK\x03\x04") and window.endswith(name)
    return before + len(window) if fits else -1
