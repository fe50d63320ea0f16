"""Reads and writes DCP's `.metadata`: which box of which tensor is stored in which bytes of which file.

The one idea: the rest of the program sees only plain integers and names (`DcpPiece`, `ObjectEntry`), never the pickle.
Reading parses the pickle as data, without unpickling, and checks every number before it is used: a box is inside its
tensor, every box has an item, file names stay in the folder. Writing emits opcodes (`pickled`): no object is created
for any of a save's 100,000 boxes; each text and name is written once and fetched from the memo afterwards, and the
bytes of each torch.Size are cached. Equal entries give equal bytes: `save_id` and `checkpoint_id` are None.

    Metadata.state_dict_metadata  {"model.w": TensorStorageMetadata(size (4, 2), chunks [(0, 0) (2, 2), (2, 0) (2, 2)])}
    Metadata.storage_data         {MetadataIndex("model.w", (0, 0)): _StorageInfo("__0_0.distcp", 0, 1577), ...}
    Metadata.planner_data         {"model.w": ("model", "w")}
    -> DcpTensorEntry("model.w", ("model", "w"), F32, (4, 2), [DcpPiece((0, 0), (2, 2), "__0_0.distcp", 0, 1577), ...])

Facts (torch 2.13 `distributed/checkpoint/metadata.py`, `filesystem.py`, `default_planner.py`): a pickle of protocol 4
of `Metadata`, fields in the order in which `pickled` writes them; `properties` is pickled as the tuple (dtype, layout,
requires_grad, memory format, pin_memory); MetadataIndex compares by fqn and offset (None for objects); `planner_data`
is the only loss-free inverse of the flattening, its integers are list positions; non-default planners leave it None;
`version` is "1.0.0" from 2.7 on; `transform_descriptors` names stream extensions (zstd). With `use_collectives=False`
each rank writes `__{rank}.metadata` of its own items, which have to be merged: replicated boxes then appear once per
rank.

Cost: about 20 us and 1.5 KB of temporary memory per chunk to read, mostly for the pickle; 1.3 us and 200 bytes if rows
are read as columns (`dcp_columns`); 1 us a box to write. What it does not do: open the `.distcp` files.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from operator import gt, sub
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from ckpt_tool.core.box import Box, whole
from ckpt_tool.core.dtype import DType, from_torch
from ckpt_tool.core.extras import Opaque, Symbol
from ckpt_tool.core.faults import read_by_file
from ckpt_tool.core.missing import report_missing
from ckpt_tool.core.tensor import Chunk, Path, StoredArray
from ckpt_tool.errors import CkptError, CorruptFile, Incomplete, InconsistentCheckpoint, InputError
from ckpt_tool.formats.dcp_container.dcp_pieces import RANK_LIMIT, DcpPiece
from ckpt_tool.storage.pickles import pickle_reader as pickles
from ckpt_tool.storage.pickles.pickle_rows import Rows, rows_of
from ckpt_tool.storage.pickles.pickle_values import Irregular, Pickled, PickledRecord, RowRun
from ckpt_tool.storage.source import Tree, safe_relative

if TYPE_CHECKING:
    from ckpt_tool.formats.dcp_container.dcp_columns import PieceLocations, Pieces

SIZE_LIMIT = 4 << 30  # bytes of one .metadata; 100,000 chunks take 20 MB
SHOWN = 100  # faults that one message lists

METADATA = ".metadata"
UNFINISHED = "E0385"
# Keys of objects that only Megatron's torch_dist has.
MEGATRON_OBJECTS = (b"common_state/shard_0_1", b"._extra_state/shard_0", b"rng_state/shard_0")
# Prefixes of keys that only Megatron-FSDP writes: the hyperparameters of its parameters; states, which are inside at
# least two wrappers (`module.`); a model, which is inside at least one.
FSDP_OWN = ("optimizer.param_to_group_meta.", "optimizer.state.module.module.")
FSDP_GROUPS = FSDP_OWN[0]
FSDP_MODEL = r"model\d{0,4}\.module\."
INCOMPLETE = "E0309"
CONTRADICTION = "E0389"
FOREIGN = "E1333"
COMPRESSED = "E0395"
PLANNER = "E0396"
_META = "torch.distributed.checkpoint.metadata"
_STORE = "torch.distributed.checkpoint.filesystem"
_METADATA = f"{_META}.Metadata"
_TENSOR = f"{_META}.TensorStorageMetadata"
_BYTES = f"{_META}.BytesStorageMetadata"
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata"  # core 0.15's subclass of Metadata


# The records that a pickle repeats thousands of times and that can be read as columns: a box in a tensor's list of
# chunks; the key and the value of an item in storage_data.
_ROWS = (
    ((frozenset((f"{_META}.ChunkStorageMetadata",)), {"offsets": ("size", "offset"), "sizes": ("size", "extent")}),),
    (
        (
            frozenset((f"{_META}.MetadataIndex",)),
            {"fqn": ("text", "fqn"), "offset": ("size", "corner"), "index": ("skip", "")},
        ),
        (
            frozenset((f"{_STORE}._StorageInfo", "olmo_core.distributed.checkpoint.filesystem._StorageInfo")),
            {"relative_path": ("text", "file"), "offset": ("int", "at"), "length": ("int", "length")},
        ),
    ),
)
_INTEGERS = frozenset({int})
_Offset = tuple[int, ...] | None  # of a box in its tensor, in elements; None for an object
_Where = tuple[str, int, int]  # file, byte, length in bytes


class ObjectEntry(NamedTuple):
    """Where the item of a pickled object is stored."""

    fqn: str
    path: Path
    file: str
    at: int  # the byte of `file` at which it begins
    length: int  # bytes


@dataclass(slots=True)
class DcpTensorEntry:
    """A tensor as the metadata describes it."""

    fqn: str
    path: Path  # from planner_data, `(fqn,)` if there is none
    dtype: DType
    shape: tuple[int, ...]
    pieces: list[DcpPiece] | Pieces

    def chunks(self, arrays: Sequence[StoredArray]) -> Sequence[Chunk]:
        """The chunks of the tensor: each piece with its stored array. Columns if pieces and arrays both are columns.

        arrays: one for each piece, in the same order.
        """
        if not isinstance(self.pieces, list) and not isinstance(arrays, list):
            from ckpt_tool.formats.dcp_container.dcp_columns import Arrays, DcpColumns

            return DcpColumns(self.pieces, cast(Arrays, arrays))
        pieces = list(self.pieces)
        within = {shape: whole(shape) for shape in {piece.shape for piece in pieces}}
        return [
            Chunk(Box(piece.offset, piece.shape), array, within[piece.shape])
            for piece, array in zip(pieces, arrays, strict=True)
        ]

    def written(self) -> WrittenTensor:
        """The tensor in the form that `pickled` writes: all pieces as one band."""
        pieces = list(self.pieces)
        tails = tuple([Tail(piece.offset, piece.shape, piece.length) for piece in pieces])
        band = PieceBand((), tails, tuple([piece.file for piece in pieces]), [piece.at for piece in pieces])
        return WrittenTensor(self.fqn, self.path, self.dtype, self.shape, [band])


@dataclass(slots=True)
class DcpListing:
    """The content of one DCP folder, according to its metadata."""

    folder: str
    tensors: dict[str, DcpTensorEntry] = field(default_factory=dict)
    objects: dict[str, ObjectEntry] = field(default_factory=dict)
    files: dict[str, None] = field(default_factory=dict)  # relative to the tree's root
    planner: bool = True  # does planner_data say how the keys nest?
    # unsafe, globals: of the pickles (see `core.catalog`)
    unsafe: list[str] = field(default_factory=list)
    globals: dict[str, None] = field(default_factory=dict)
    # further entries of objects that several ranks saved; only the first rank's is read
    differing: list[ObjectEntry] = field(default_factory=list)
    # the true shapes of tensors that Megatron stored flattened (`systems.megatron.torch_dist.read`)
    reformed: dict[str, tuple[int, ...]] = field(default_factory=dict)


def read_listing(tree: Tree, folder: str, metadata_files: Iterable[str]) -> DcpListing:
    """The listing of `folder` ("" or "name/"), merged from its metadata files (one, or one a rank).

    Raises InputError E0309 (items missing), E0389, E2603 (form), E1333 (not torch's metadata), E0395 (compressed
    items), E0396 (planner_data); UnsafeInput E0410 for a file name that leaves the folder, E0420 for a pickle that is
    nothing but a call.
    """
    names = [*metadata_files]
    if len(names) == 1:
        with suppress(CkptError, Irregular):  # on any fault, the slower path below reads it again and reports the fault
            rows = rows_of(tree.size_within(folder + names[0], limit=SIZE_LIMIT), _ROWS)
            if rows is not None:
                return _listing(tree, folder, names, rows)
    return _listing(tree, folder, names, None)


def _listing(tree: Tree, folder: str, names: Sequence[str], rows: Rows | None) -> DcpListing:
    """The listing. rows: read the rows of the only file as columns; raises Irregular if it has another structure."""
    listing = DcpListing(folder)

    def load(name: str) -> Pickled:
        size = tree.size_within(folder + name, limit=SIZE_LIMIT)
        tree.expect([(folder + name, 0, size)])
        return pickles.load_file(tree, folder + name, span_from=0, opcodes=pickles.METADATA_OPCODES, rows=rows)

    for name, pickled in read_by_file(names, load).items():
        shown = tree.display(folder + name)
        value = pickled.value
        if isinstance(value, Opaque) and value.name == _MEGATRON and isinstance(value.state, dict):
            value = PickledRecord(_METADATA, state=value.state)
        if not isinstance(value, PickledRecord) or value.name != _METADATA:
            pickles.refuse_unsafe(pickled, shown)
            raise InputError(
                f"the metadata is {_what(value)}, want torch's Metadata",
                code=FOREIGN,
                path=shown,
                hint="another system's checkpoint (ByteCheckpoint, a custom planner): convert it to DCP "
                "with that system",
            )
        listing.unsafe += [f"{use} at {shown}, opcode {use.position}" for use in pickled.unsafe]
        listing.globals.update(dict.fromkeys(map(str, pickled.globals)))
        try:
            reading = _DcpMetadataReading(listing, shown, rows)
            reading.metadata(value)
            if rows is not None and reading.met != rows.taken:
                raise Irregular  # some rows were parsed in a place where this reader never looks
        except CkptError as e:
            pickles.refuse_unsafe(pickled, shown)  # a name that would execute code may be the cause: report that first
            e.path = e.path or shown
            raise
    for entry in listing.differing:
        tree.met.zip(entry.file, entry.at, entry.length)
    return listing


class _DcpMetadataReading:
    """Checks the content of one metadata file and adds it to the listing. rows: columns of repeated rows, or None."""

    def __init__(self, listing: DcpListing, shown: str, rows: Rows | None) -> None:
        self.listing = listing
        self.shown = shown
        self.safe: dict[str, str] = {}
        self.faults: list[str] = []
        self.places = None if rows is None else _places(rows)
        self.met = 0  # rows of the RowRuns that were used so far

    def metadata(self, value: PickledRecord) -> None:
        """Check a whole Metadata record and add its tensors and objects to the listing."""
        states = value.get("state_dict_metadata", dict)
        items = self.items(value.get("storage_data", dict))
        paths = self.paths(value.state.get("planner_data") if value.state else None, states)
        self.reformed(value.state.get("mcore_data") if value.state else None)
        missing: list[str] = []

        for fqn in self.order(states, paths):
            entry = states[fqn]
            path = paths.get(fqn, (fqn,))
            if isinstance(entry, PickledRecord) and entry.name == _TENSOR:
                self.tensor(fqn, path, entry, items.pop(fqn, {}), missing)
            elif isinstance(entry, PickledRecord) and entry.name == _BYTES:
                where = items.get(fqn, {}).get(None)
                if where is None:
                    missing.append(fqn)
                    continue
                self.object(ObjectEntry(fqn, path, *where))
            else:
                raise CorruptFile(
                    f"an entry is {_what(entry)}, want tensor or bytes metadata",
                    code="E2603",
                    key=fqn,
                    hint="the metadata is damaged: get the checkpoint again",
                )

        if self.faults:
            raise InconsistentCheckpoint(
                self.faults[0],
                code=CONTRADICTION,
                path=self.shown,
                faults=self.faults[1:SHOWN],
                hint="the metadata contradicts itself: this save can't be trusted",
            )

        if missing:
            fault = Incomplete(
                f"{len(missing)} boxes have no item in any file; the first: {missing[0]}",
                code=INCOMPLETE,
                path=self.shown,
                faults=missing[1:SHOWN],
                hint="the save was cut short or edited: nothing says where these bytes are stored",
            )
            report_missing(fault)

    def reformed(self, mcore: Any) -> None:
        """Megatron's own attribute `mcore_data` (core 0.8 to 0.15): fqn -> {`nd_reformulated_orig_global_shape`:
        shape}."""
        for fqn, stated in mcore.items() if isinstance(mcore, dict) else ():
            if isinstance(stated, dict) and "nd_reformulated_orig_global_shape" in stated:
                shape = stated["nd_reformulated_orig_global_shape"]
                self.listing.reformed[fqn] = _size(tuple(shape) if isinstance(shape, list) else shape, str(fqn)[:200])

    @staticmethod
    def order(states: dict[Any, Any], paths: dict[str, Path]) -> list[str]:
        """The names in the order of planner_data, which is that of the training state; names that it lacks follow in
        the order of state_dict_metadata, which is that of the ranks' plans."""
        first = [fqn for fqn in paths if fqn in states]
        known = set(first)
        return first + [fqn for fqn in states if fqn not in known]

    def items(self, storage: dict[Any, Any]) -> dict[str, dict[_Offset, _Where]]:
        """The location of each item: fqn -> offset -> (file, byte, length).

        Empties `storage`, which takes more memory than anything else here.
        """
        out: defaultdict[str, dict[_Offset, _Where]] = defaultdict(dict)
        for index, info in storage.items():
            if isinstance(index, RowRun):
                self.run_of_items(index, info, out)
                continue
            if (
                not isinstance(index, PickledRecord)
                or not isinstance(info, PickledRecord)
                or index.state is None
                or info.state is None
            ):
                raise CorruptFile(
                    f"storage_data maps {_what(index)} to {_what(info)}, want MetadataIndex and _StorageInfo",
                    code="E2603",
                    hint="the metadata is damaged, or of a storage that is not a file system",
                )
            fqn = _text(index, "fqn")
            offset = index.state.get("offset")
            file = _text(info, "relative_path")
            at = info.get("offset")
            length = info.get("length")
            if info.state.get("transform_descriptors"):
                raise InputError(
                    f"the item is stored through {list(info.state['transform_descriptors'])}: such streams "
                    "are not read",
                    code=COMPRESSED,
                    key=fqn,
                    hint="load it with torch.distributed.checkpoint and save it again without extensions",
                )
            if type(at) is not int or type(length) is not int or at < 0 or length < 0:
                self.faults.append(f"{fqn}: an item of {length!r} bytes at byte {at!r} of {file}")
                continue
            safe = self.safe.get(file) or self.file(file, fqn)
            corner = tuple(offset) if isinstance(offset, list) else offset
            if corner is not None and self.places is not None:
                self.places.row(fqn, _size(corner, fqn), file, (safe, at, length))
            else:
                out[fqn][None if corner is None else _size(corner, fqn)] = (safe, at, length)

        storage.clear()
        if self.places is not None:
            self.places.finished()
        return out

    def run_of_items(self, run: RowRun, info: Any, out: dict[str, dict[_Offset, _Where]]) -> None:
        """Add the items of rows that were read as columns. Their numbers and sizes were checked while parsing."""
        if info is not run or self.places is None:
            raise Irregular
        self.met += run.taken.rows
        if (objects := self.places.objects(run)) is not None:
            for fqn, file, at, length in objects:
                out[fqn][None] = (self.safe.get(file) or self.file(file, fqn), at, length)
            return
        for number, whose in self.places.run(run):
            self.places.paths[number] = self.file(run.texts[number], run.texts[whose])

    def file(self, file: str, fqn: str) -> str:
        """Check a file name of an item, record it in the listing, and return its path in the tree. fqn: for errors."""
        safe = safe_relative(file, named_in=self.shown, place=f"storage_data of {fqn}"[:300])
        self.safe[file] = self.listing.folder + safe
        self.listing.files[self.safe[file]] = None
        return self.safe[file]

    def paths(self, planner: Any, states: dict[Any, Any]) -> dict[str, Path]:
        if planner is None:
            self.listing.planner = False
            return {}

        if not isinstance(planner, dict):
            raise CorruptFile(
                f"planner_data is {_what(planner)}, want a dict of paths",
                code=PLANNER,
                hint="written by another planner than torch's: convert it with the software that wrote it",
            )

        out: dict[str, Path] = {}
        for fqn, path in planner.items():
            if fqn not in states:
                continue
            if (
                not isinstance(path, tuple | list)
                or not path
                or not all(type(step) is str or (type(step) is int and 0 <= step < 1_000_000) for step in path)
            ):
                raise CorruptFile(
                    f"planner_data of {str(fqn)[:200]!r} is {_what(path)}, want a path of keys and positions",
                    code=PLANNER,
                    hint="the metadata is damaged: get the checkpoint again",
                )
            out[fqn] = tuple(path)

        return out

    def object(self, entry: ObjectEntry) -> None:
        """Add an object; the entries of further ranks for the same object go into `differing`."""
        known = self.listing.objects.setdefault(entry.fqn, entry)
        if known is not entry:
            self.listing.differing.append(entry)

    def tensor(
        self, fqn: str, path: Path, entry: PickledRecord, items: dict[_Offset, _Where], missing: list[str]
    ) -> None:
        shape = _size(entry.get("size"), fqn)
        dtype = self.dtype(entry.get("properties", PickledRecord), fqn)
        chunks = entry.get("chunks", list)

        if self.places is not None:
            columns = self.places.pieces(fqn, shape, self.columns(chunks, fqn, len(shape)))
            if columns is not None:
                self.merge(fqn, path, dtype, shape, columns)
                return
            items = self.places.of(fqn)  # an item of a tensor has an offset, so all are there

        pieces: dict[tuple[Any, Any], DcpPiece] = {}
        numel = prod(shape)
        dims = len(shape)
        known: tuple[int, ...] | None = None

        # Most boxes of a tensor have the same extent, so the number of its elements and the largest offset at which
        # such a box still fits into the tensor are computed only when the extent changes.
        count = 0
        room = shape

        for offset, extent in self.boxes(chunks, fqn):
            if extent != known:
                known = extent
                count = prod(extent)
                room = tuple(map(sub, shape, extent))
            if not len(offset) == len(extent) == dims or any(map(gt, offset, room)):
                self.faults.append(
                    f"{fqn}: a box at {list(offset)} of shape {list(extent)} leaves the tensor of shape {list(shape)}"
                )
                continue
            if (numel and not count) or (offset, extent) in pieces:
                continue  # a rank whose shard is empty; a box listed twice for one item
            where = items.get(offset)
            if where is None:
                missing.append(f"{fqn} at {list(offset)}")
                continue
            pieces[offset, known] = DcpPiece(offset, known, *where)

        self.merge(fqn, path, dtype, shape, list(pieces.values()))

    def columns(self, chunks: Iterable[Any], fqn: str, dims: int) -> Any:
        """The boxes of a tensor's list in the form that `PieceLocations.pieces` expects."""
        from ckpt_tool.formats.dcp_container.dcp_columns import boxes_of

        boxes, rows = boxes_of(chunks, dims, lambda chunk: self.box(chunk, fqn))
        self.met += rows
        return boxes

    def boxes(self, chunks: Iterable[Any], fqn: str) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """(offset, shape) of each box of a tensor's list."""
        for chunk in chunks:
            if isinstance(chunk, RowRun):
                from ckpt_tool.formats.dcp_container.dcp_columns import sizes_of

                yield from sizes_of(chunk)
            else:
                yield self.box(chunk, fqn)

    def box(self, chunk: Any, fqn: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(offset, shape) of one box that was read as a record, not as a column."""
        if not isinstance(chunk, PickledRecord):
            raise CorruptFile(f"a chunk is {_what(chunk)}", code="E2603", key=fqn, hint="the metadata is damaged")
        return _size(chunk.get("offsets"), fqn), _size(chunk.get("sizes"), fqn)

    def merge(
        self, fqn: str, path: Path, dtype: DType, shape: tuple[int, ...], pieces: list[DcpPiece] | Pieces
    ) -> None:
        known = self.listing.tensors.get(fqn)
        if known is None:
            self.listing.tensors[fqn] = DcpTensorEntry(fqn, path, dtype, shape, pieces)
        elif known.shape != shape or known.dtype != dtype:
            self.faults.append(
                f"{fqn}: {dtype.name} {list(shape)} here, {known.dtype.name} {list(known.shape)} in another "
                "rank's metadata"
            )
        else:
            cast(list[DcpPiece], known.pieces).extend(pieces)  # columns are only used if there is one metadata file

    def dtype(self, properties: PickledRecord, fqn: str) -> DType:
        name = properties.get("dtype")
        found = from_torch(name.name) if isinstance(name, Symbol) else None
        if found is None:
            raise InputError(
                f"dtype {name.name if isinstance(name, Symbol) else _what(name)} has no counterpart here",
                code="E1334",
                key=fqn,
                hint="cast the tensor before saving, or leave it out",
            )
        return found


def _places(rows: Rows) -> PieceLocations:
    from ckpt_tool.formats.dcp_container.dcp_columns import PieceLocations

    return PieceLocations(rows.intern_text)


def _size(value: Any, fqn: str) -> tuple[int, ...]:
    """Check that a value read as a torch.Size has at most 64 integers >= 0, and return it."""
    if type(value) is tuple and len(value) <= RANK_LIMIT and _INTEGERS.issuperset(map(type, value)):
        if not value or (min(value) >= 0 and max(value) < 1 << 63):
            return value
    raise CorruptFile(
        f"a size or an offset is {str(value)[:100]}, want whole numbers >= 0",
        code="E2603",
        key=fqn,
        hint="the metadata is damaged: get the checkpoint again",
    )


def _text(record: PickledRecord, field_: str) -> str:
    """The value of a field that must be a text."""
    value = record.state and record.state.get(field_)
    return value if type(value) is str else record.get(field_, str)


def _what(value: Any) -> str:
    """The type of a value, for error messages."""
    name = getattr(value, "name", None)
    return pickles.shown(str(name)) if isinstance(name, str) else type(value).__name__


def check_files(tree: Tree, listings: Sequence[DcpListing], metadata: str) -> None:
    """Raise Incomplete (E0301) if files that the metadata names are missing; the error lists them.

    metadata: the first metadata file.
    """
    have = tree.listing()
    named = [file for listing in listings for file in listing.files]
    missing = [file for file in named if file not in have]
    if missing:
        fault = Incomplete(
            f"{len(missing)} of {len(named)} files are missing: {', '.join(missing[:20])}",
            code="E0301",
            path=tree.display(metadata),
            faults=missing[20:SHOWN],
            hint="copy the missing files from where the job wrote them: __R_S.distcp is rank R's",
        )
        counts = dict.fromkeys(missing, 0)
        sizes = dict.fromkeys(missing, 0)
        for listing in listings:
            _leave_out(listing, counts, sizes)
        report_missing(fault, files=counts, file_bytes=sizes)


def _leave_out(listing: DcpListing, counts: dict[str, int], sizes: dict[str, int]) -> None:
    """Remove the items of missing files from a listing, and count the items and their bytes by file.

    Args:
        counts, sizes: items and bytes of each missing file; this function adds to them.
    """
    for tensor in listing.tensors.values():
        pieces = list(tensor.pieces)
        for piece in pieces:
            if piece.file in counts:
                counts[piece.file] += 1
                sizes[piece.file] += piece.length
        tensor.pieces = [piece for piece in pieces if piece.file not in counts]
    for fqn, entry in list(listing.objects.items()):
        if entry.file in counts:
            counts[entry.file] += 1
            sizes[entry.file] += entry.length
            del listing.objects[fqn]
    for file in counts:
        listing.files.pop(file, None)


# -- writing -----------------------------------------------------------------------------------------------------------

VERSION = "1.0.0"
# Opcodes: EMPTY_TUPLE NEWOBJ; EMPTY_DICT MARK (opens a dict); SETITEMS BUILD (closes it and makes it the state)
_NEW = b")\x81"
_EMPTY = b"}("
_BUILD = b"ub"


class Tail(NamedTuple):
    """The part of a piece's description that recurs at the same position of many bands."""

    offset: tuple[int, ...]  # the dims that follow the band's lead
    shape: tuple[int, ...]
    length: int  # bytes


class PieceBand(NamedTuple):
    """Consecutive pieces of a tensor whose offsets share their first dims.

    Bands that differ only in `lead` and `at` share the other objects, so that the writer can cache bytes by identity.
    """

    lead: tuple[int, ...]  # the offset in the first dims, common to all pieces
    tails: tuple[Tail, ...]  # the rest of each piece's offset, its shape and length
    files: tuple[str, ...]  # the file of each piece
    at: Sequence[int]  # the byte of its file at which each piece begins


class WrittenTensor(NamedTuple):
    """A tensor to be written into the metadata: a `DcpTensorEntry` whose pieces are grouped into bands."""

    fqn: str
    path: Path
    dtype: DType
    shape: tuple[int, ...]
    bands: Sequence[PieceBand]


def pickled(
    entries: Iterable[WrittenTensor | DcpTensorEntry | ObjectEntry], folder: str = "", *, nested: bool = True
) -> bytes:
    """The bytes of the `.metadata` that lists `entries`, in this order.

    Args:
        folder: the folder of the checkpoint, "" or with a trailing slash; file names are written relative to it.
        nested: write the entries' paths as planner_data. False for a state whose keys are flat.
    """
    memo = _Memo()
    text = memo.text
    name = memo.name
    every = [entry.written() if isinstance(entry, DcpTensorEntry) else entry for entry in entries]
    out = [b"\x80\x04" + name(_META, "Metadata") + _NEW + _EMPTY + text("state_dict_metadata") + _EMPTY]

    for entry in every:
        out.append(text(entry.fqn))
        if isinstance(entry, WrittenTensor):
            memo.tensor(entry, out)
        else:
            out.append(name(_META, "BytesStorageMetadata") + _NEW)

    out.append(b"u" + text("planner_data") + (_EMPTY if nested else b"N"))
    for entry in every if nested else ():
        steps = (text(step) if isinstance(step, str) else _integer(step) for step in entry.path)
        out.append(text(entry.fqn) + b"(" + b"".join(steps) + b"t")

    out.append((b"u" if nested else b"") + text("storage_data") + _EMPTY)
    for entry in every:
        if isinstance(entry, ObjectEntry):
            memo.whole(entry, folder, out)
        else:
            memo.items(entry, folder, out)

    out.append(b"u" + text("storage_meta") + name(_META, "StorageMeta") + _NEW + _EMPTY)
    out += [text(field_) + b"N" for field_ in ("checkpoint_id", "save_id", "load_id")]
    out.append(text("modules") + b"]" + _BUILD + text("version") + text(VERSION) + _BUILD + b".")
    return b"".join(out)


class _Memo:
    """Emits opcodes with a memo: a text or name is written in full at first and fetched from the memo afterwards.

    Bytes that bands with the same tails have in common are cached, but only once they consist of memo fetches: bytes
    that contain a text in full must not be written twice, because that would put it into the memo twice.
    """

    def __init__(self) -> None:
        self._fetched: dict[object, bytes] = {}
        # Ends of chunk records, by id of the tails and number of dims.
        self._ends: dict[tuple[int, int], tuple[bytes, ...]] = {}
        # Parts of rows of storage_data, by ids of tails and files and number of dims.
        self._places: dict[tuple[int, int, int], list[tuple[bytes, bytes]]] = {}
        self._numbers: list[bytes] = []  # the opcodes of 0, 1, 2, ...
        self._leads: dict[tuple[int, ...], bytes] = {}
        # Parts of rows of storage_data for objects, by file and length.
        self._objects: dict[tuple[str, int], tuple[bytes, bytes, bytes]] = {}

    def tensor(self, entry: WrittenTensor, out: list[bytes]) -> None:
        """Append a tensor's entry of state_dict_metadata to `out`."""
        dims = len(entry.shape)
        out += (self.name(_META, "TensorStorageMetadata") + _NEW + _EMPTY, self.text("properties"))
        out += (self.name(_META, "TensorProperties") + _NEW + b"(", self.name("torch", entry.dtype.torch or ""))
        out += (self.name("torch.serialization", "_get_layout"), self.text("torch.strided"), b"\x85R\x89")
        out += (self.name(_META, "_MEM_FORMAT_ENCODING"), b"K\0\x85R\x89tb", self.text("size"), self.size(entry.shape))
        out.append(self.text("chunks") + b"](")
        front = self._chunk() + self._opened(dims)
        for lead, tails, _, _ in entry.bands:
            skipped = not self._ends
            if skipped:  # the first chunk of all has its names and texts in full; later ones fetch them from the memo
                out.append(front + _codes(lead) + self._chunk_end(tails[0], dims))
                front = self._chunk() + self._opened(dims)
            ends = self._ends.get((id(tails), dims))
            if ends is None:
                ends = self._ends[id(tails), dims] = (b"", *[self._chunk_end(tail, dims) for tail in tails])
            out.append((front + self._lead(lead)).join((b"", *ends[2:]) if skipped else ends))
        out.append(b"e" + _BUILD)

    def _chunk(self) -> bytes:
        return self.name(_META, "ChunkStorageMetadata") + _NEW + _EMPTY + self.text("offsets")

    def _lead(self, lead: tuple[int, ...]) -> bytes:
        found = self._leads.get(lead)
        if found is None:
            found = self._leads[lead] = _codes(lead)
        return found

    def _chunk_end(self, tail: Tail, dims: int) -> bytes:
        return _codes(tail.offset) + _closed(dims) + self.text("sizes") + self.size(tail.shape) + _BUILD

    def items(self, entry: WrittenTensor, folder: str, out: list[bytes]) -> None:
        """Append the rows of storage_data for a tensor's pieces to `out`."""
        dims = len(entry.shape)
        number = 0
        numbers = self._numbers
        numbers += [_integer(n) for n in range(len(numbers), sum(len(band.at) for band in entry.bands))]
        front = self._index(entry.fqn)
        opened = self.text("offset") + self._opened(dims)
        for lead, tails, files, at in entry.bands:
            known = (id(tails), id(files), dims)
            start = opened + self._lead(lead)
            ends = self._places.get(known)
            if ends is None:
                met = len(self._fetched)
                ends = [self._place(tail, file[len(folder) :], dims) for tail, file in zip(tails, files, strict=True)]
                if len(self._fetched) == met:  # else these bytes contain texts in full and must not be reused
                    self._places[known] = ends
            for (middle, end), byte in zip(ends, at, strict=True):
                # The range of most offsets, inlined because this loop runs for each of a save's boxes.
                place = b"J" + _I32(byte) if 65536 <= byte < 1 << 31 else _integer(byte)
                out += (front, numbers[number], start, middle, place, end)
                if not number:  # the first row has the names in full; the next ones fetch them from the memo
                    front = self._index(entry.fqn)
                    opened = self.text("offset") + self._opened(dims)
                    start = opened + self._lead(lead)
                number += 1

    def _place(self, tail: Tail, file: str, dims: int) -> tuple[bytes, bytes]:
        """The bytes of a row between the lead and the item's byte offset, and the bytes after that."""
        middle = _codes(tail.offset) + _closed(dims) + self._info() + self.text(file) + self.text("offset")
        return middle, self.text("length") + _integer(tail.length) + _BUILD

    def _index(self, fqn: str) -> bytes:
        index = self.name(_META, "MetadataIndex") + _NEW + _EMPTY + self.text("fqn") + self.text(fqn)
        return index + self.text("index")

    def _info(self) -> bytes:
        return _BUILD + self.name(_STORE, "_StorageInfo") + _NEW + _EMPTY + self.text("relative_path")

    def whole(self, at: ObjectEntry, folder: str, out: list[bytes]) -> None:
        """Append an object's row of storage_data to `out`."""
        found = self._objects.get((at.file, at.length))
        if found is None:
            met = len(self._fetched)
            index = self.name(_META, "MetadataIndex") + _NEW + _EMPTY + self.text("fqn")
            middle = self.text("index") + b"N" + self.text("offset") + b"N" + self._info()
            middle += self.text(at.file[len(folder) :]) + self.text("offset")
            found = index, middle, self.text("length") + _integer(at.length) + _BUILD
            if len(self._fetched) == met:
                self._objects[at.file, at.length] = found
        index, middle, end = found
        out += (index, self.text(at.fqn), middle, _integer(at.at), end)

    def _once(self, key: object, code: bytes) -> bytes:
        number = len(self._fetched)
        self._fetched[key] = b"h%c" % number if number < 256 else b"j" + struct.pack("<I", number)
        return code + b"\x94"

    def text(self, text: str) -> bytes:
        """The opcodes that push a text."""
        known = self._fetched.get(text)
        if known is not None:
            return known
        raw = text.encode("utf-8", "surrogatepass")
        head = b"\x8c%c" % len(raw) if len(raw) < 256 else b"X" + struct.pack("<I", len(raw))
        return self._once(text, head + raw)

    def name(self, module: str, name: str) -> bytes:
        """The opcodes that push a global, `module.name`."""
        known = self._fetched.get((module, name))
        if known is not None:
            return known
        return self._once((module, name), self.text(module) + self.text(name) + b"\x93")

    def size(self, size: tuple[int, ...]) -> bytes:
        """The opcodes that push a torch.Size, which is pickled as a call of the class with a tuple."""
        return self._opened(len(size)) + _codes(size) + _closed(len(size))

    def _opened(self, dims: int) -> bytes:
        """The opcodes of a torch.Size with `dims` numbers, up to the first number."""
        return self.name("torch", "Size") + (b"(" if dims > 3 else b"")


def _codes(numbers: Iterable[int]) -> bytes:
    return b"".join([_integer(n) for n in numbers])


def _closed(dims: int) -> bytes:
    """The opcodes of a torch.Size with `dims` numbers, after the last number."""
    return (b")", b"\x85", b"\x86", b"\x87", b"t")[min(dims, 4)] + b"\x85R"


_SMALL = [b"K%c" % value for value in range(256)]
_U16, _I32 = struct.Struct("<H").pack, struct.Struct("<i").pack


def _integer(value: int) -> bytes:
    if 0 <= value < 256:
        return _SMALL[value]
    if 0 <= value < 65536:
        return b"M" + _U16(value)
    if value < 1 << 31:
        return b"J" + _I32(value)
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a%c" % len(raw) + raw
