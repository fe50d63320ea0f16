"""The `N.metadata` of a flex checkpoint: which box, or which flat part of which box, of which tensor is stored in which
file.

The one idea: the pickle is converted at once to rows of plain integers (`Shard`), each checked against its tensor: a
box inside its shape, a range inside its box, a file name that does not leave the folder.

    state_dict_metadata  {"w": [LocalTensorMetadata((0, 0), (8, 4), "bfloat16", (16, 4), True, (0, 20)), ...]}
    storage_metadata     {LocalTensorIndex("w", (0, 0), True, (0, 20), None, (8, 4)): "0_0.distcp", ...}
      -> FlexEntry("w", ("w",), BF16, (16, 4), [Shard((0, 0), (8, 4), (0, 20), "0_0.distcp", 0), ...])

Facts (PaddlePaddle 3.3.1, `flex_checkpoint/dcp/metadata.py`; older versions call the module
`paddle.distributed.checkpoint.metadata` and lack `global_shape`, `is_flattened`, `flattened_range`, `replica_id`,
`local_shape`; newer ones add `model_type`, `checkpoint_version` and two commits): a pickle of protocol 4 of `Metadata`.
`flattened_range` counts elements of the local block's row-major line, not of the whole tensor, and its ends need not be
rows. A key's shards were deduplicated by box and
range: the file named holds it; with `save_replicas` every copy is listed and `replica_id` 0 is the one to load.
`flat_mapping` says how the keys nested.

Cost: about 15 us a shard. What it does not do: open the data files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from operator import add
from typing import Any, NamedTuple

from ckpt_tool.core.dtype import DTYPES, DType
from ckpt_tool.core.tensor import Path
from ckpt_tool.errors import CkptError, Incomplete, InconsistentCheckpoint, InputError
from ckpt_tool.storage.pickles import pickle_reader as pickles
from ckpt_tool.storage.pickles.pickle_values import PickledRecord
from ckpt_tool.storage.source import Tree, safe_relative
from ckpt_tool.systems.paddle.dtypes import DTYPE_NAMES

CONTRADICTION = "E1332"
FOREIGN = "E1333"
UNKNOWN_DTYPE = "E1334"
PLACELESS = "E1335"
RANK_LIMIT = 64
KEY_LIMIT = 4096  # characters: nested keys are joined
SHOWN = 100  # faults that one message lists
MODULE = "paddle.distributed.flex_checkpoint.dcp.metadata"
_MODULES = (MODULE, "paddle.distributed.checkpoint.metadata")


class Shard(NamedTuple):
    """A block of a tensor and where it is stored."""

    offset: tuple[int, ...]  # of the block in the tensor
    shape: tuple[int, ...]  # of the block
    # The range of its elements, in row-major order, that is stored; None for all of them in the block's shape.
    span: tuple[int, int] | None
    file: str  # relative to the root
    replica: int  # 0 is the one to load


@dataclass(slots=True)
class FlexEntry:
    """A key of the metadata."""

    key: str
    path: Path  # how it nested, `(key,)` where nothing says it
    dtype: DType
    shape: tuple[int, ...]
    shards: list[Shard]


@dataclass(slots=True)
class FlexListing:
    """The content of one save, as its metadata lists it."""

    folder: str
    entries: dict[str, FlexEntry] = field(default_factory=dict)  # by key, in the metadata's order
    files: dict[str, None] = field(default_factory=dict)  # relative to the root
    nested: bool = False  # some key was nested
    # unsafe, globals: of the pickle (see `core.catalog`)
    unsafe: list[str] = field(default_factory=list)
    globals: list[str] = field(default_factory=list)


def read_metadata(tree: Tree, folder: str, name: str) -> FlexListing:
    """The listing of `folder` ("" or "name/") from its metadata file.

    Raises InconsistentCheckpoint E1332 (contradictions), InputError E1333 (not Paddle's metadata), E1334 (a dtype that
    has no counterpart here), Incomplete E1335 (a key that no file holds), UnsafeInput E0410 (a file name that leaves
    the folder), E0420.
    """
    path = folder + name
    shown = tree.display(path)
    pickled = pickles.load_file(tree, path, opcodes=pickles.METADATA_OPCODES, span_from=0)
    value = pickled.value
    if not isinstance(value, PickledRecord) or value.name not in [f"{module}.Metadata" for module in _MODULES]:
        pickles.refuse_unsafe(pickled, shown)
        raise InputError(
            f"the metadata is {_what(value)}, want Paddle's Metadata",
            code=FOREIGN,
            path=shown,
            hint="the file is damaged, or of another system",
        )
    reading = _FlexMetadataReading(folder, shown)
    reading.listing.unsafe += [f"{use} at {shown}, opcode {use.position}" for use in pickled.unsafe]
    reading.listing.globals += map(str, pickled.globals)
    try:
        reading.metadata(value)
    except CkptError as e:
        pickles.refuse_unsafe(pickled, shown)  # what is wrong may be the doing of a name that asks for code
        e.path = e.path or shown
        raise
    return reading.listing


class _Stored(NamedTuple):
    """A row of storage_metadata."""

    offset: tuple[int, ...]
    shape: tuple[int, ...] | None
    span: tuple[int, int] | None
    replica: int
    file: str


class _Stated(NamedTuple):
    """A row of state_dict_metadata."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    span: tuple[int, int] | None
    dtype: str
    whole: tuple[int, ...] | None


class _FlexMetadataReading:
    """Checks one metadata file and converts it to a listing."""

    def __init__(self, folder: str, shown: str) -> None:
        self.listing = FlexListing(folder)
        self.shown = shown
        self.faults: list[str] = []

    def metadata(self, value: PickledRecord) -> None:
        """Read all of `Metadata`. Raises InconsistentCheckpoint E1332 with all contradictions at once."""
        states = _dict(value.get("state_dict_metadata") if "state_dict_metadata" in value else None)
        stored = self.storage(_dict(value.get("storage_metadata") if "storage_metadata" in value else None))
        nesting = value.get("flat_mapping") if "flat_mapping" in value else None
        paths = self.paths(_dict(nesting))
        for key, rows in states.items():
            if not isinstance(key, str) or not isinstance(rows, list | tuple):
                raise self.damaged(f"state_dict_metadata maps {_what(key)} to {_what(rows)}, want a key and a list")
            if len(key) > KEY_LIMIT:
                raise self.damaged(f"a key of {len(key)} characters, want at most {KEY_LIMIT}", key[:100])
            self.entry(key, [self.stated(row, key) for row in rows], stored.pop(key, []), paths.get(key, (key,)))
        if stored:
            key = next(iter(stored))
            self.faults.append(f"{key}: a file holds it, but nothing says its shape and dtype")
        if self.faults:
            raise InconsistentCheckpoint(
                self.faults[0],
                code=CONTRADICTION,
                path=self.shown,
                faults=self.faults[1:SHOWN],
                hint="the metadata contradicts itself: this save can't be trusted",
            )

    def damaged(self, what: str, key: str | None = None) -> InconsistentCheckpoint:
        """The error E1332 for a value of the wrong form."""
        return InconsistentCheckpoint(
            what, code=CONTRADICTION, path=self.shown, key=key, hint="the metadata is damaged: get the checkpoint again"
        )

    # -- rows ----------------------------------------------------------------------------------------------------------

    def storage(self, rows: Mapping[Any, Any]) -> dict[str, list[_Stored]]:
        """storage_metadata by key."""
        out: dict[str, list[_Stored]] = {}
        safe: dict[str, str] = {}
        for index, file in rows.items():
            if not isinstance(index, PickledRecord) or index.state is None or not isinstance(file, str):
                raise self.damaged(
                    f"storage_metadata maps {_what(index)} to {_what(file)}, want an index and a file name"
                )
            key = index.get("tensor_key", str)
            if file not in safe:
                safe[file] = self.listing.folder + safe_relative(
                    file, named_in=self.shown, place=f"storage_metadata of {key}"[:300]
                )
                self.listing.files[safe[file]] = None
            shape = index.state.get("local_shape")
            replica = index.state.get("replica_id") or 0
            if type(replica) is not int or replica < 0:
                raise self.damaged(f"replica {_what(replica)}", key)
            out.setdefault(key, []).append(
                _Stored(
                    self.sizes(index.get("global_offset"), key),
                    None if shape is None else self.sizes(shape, key),
                    self.span(index.state, key),
                    replica,
                    safe[file],
                )
            )

        return out

    def stated(self, row: Any, key: str) -> _Stated:
        """A checked row of state_dict_metadata."""
        if not isinstance(row, PickledRecord) or row.state is None:
            raise self.damaged(f"an entry is {_what(row)}, want LocalTensorMetadata", key)
        whole = row.state.get("global_shape")
        return _Stated(
            self.sizes(row.get("global_offset"), key),
            self.sizes(row.get("local_shape"), key),
            self.span(row.state, key),
            row.get("dtype", str),
            None if whole is None else self.sizes(whole, key),
        )

    def sizes(self, value: Any, key: str) -> tuple[int, ...]:
        """A checked tuple of sizes or offsets."""
        if isinstance(value, tuple | list) and len(value) <= RANK_LIMIT:
            if all(type(n) is int and 0 <= n < 1 << 63 for n in value):
                return tuple(value)
        raise self.damaged(f"a size or an offset is {str(value)[:100]}, want whole numbers >= 0", key)

    def span(self, state: Mapping[str, Any], key: str) -> tuple[int, int] | None:
        """The checked flattened range of a row, None for a block in its own shape."""
        value = state.get("flattened_range")
        if not state.get("is_flattened") or value is None:
            if value is not None or state.get("is_flattened"):
                raise self.damaged(
                    f"flattened is {state.get('is_flattened')!r}, but the range is {str(value)[:100]}", key
                )
            return None
        if hasattr(value, "args") and getattr(value, "name", "") == "builtins.slice":
            value = value.args[:2]
        numbers = self.sizes(value, key)
        if len(numbers) != 2 or numbers[0] > numbers[1]:
            raise self.damaged(f"a flattened range is {numbers}, want begin and end", key)
        return numbers[0], numbers[1]

    def paths(self, rows: Mapping[Any, Any]) -> dict[str, Path]:
        """flat_mapping, checked: key -> its path in the nested state."""
        out: dict[str, Path] = {}
        for key, path in rows.items():
            if (
                not isinstance(key, str)
                or not isinstance(path, tuple | list)
                or not path
                or not all(type(step) is str for step in path)
            ):
                raise self.damaged(f"flat_mapping of {str(key)[:200]!r} is {_what(path)}, want a path of keys")
            out[key] = tuple(path)
            self.listing.nested = self.listing.nested or len(path) > 1
        return out

    # -- one key -------------------------------------------------------------------------------------------------------

    def entry(self, key: str, stated: list[_Stated], stored: list[_Stored], path: Path) -> None:
        """Add one key to the listing, from its rows in both halves of the metadata."""
        if not stated:
            raise self.damaged("a key without any shard", key)

        names = {row.dtype for row in stated}
        if len(names) > 1:
            self.faults.append(f"{key}: its shards are {' and '.join(sorted(names))}")
            return

        dtype = DTYPE_NAMES.get(stated[0].dtype)
        if dtype is None:
            raise InputError(
                f"dtype {pickles.shown(stated[0].dtype)} has no counterpart here",
                code=UNKNOWN_DTYPE,
                path=self.shown,
                key=key,
                hint="cast the tensor before saving, or leave it out",
            )

        shape = self.whole(key, stated)
        if shape is None:
            return

        checked = (self.shard(key, row, stated, shape) for row in stored)
        shards = [shard for shard in checked if shard is not None]
        self.compare(key, stated, stored, shape)
        if not stored and 0 not in shape:
            raise Incomplete(
                "no file holds it: storage_metadata does not name the key",
                code=PLACELESS,
                path=self.shown,
                key=key,
                hint="the save was cut short or edited: nothing says where its bytes are stored",
            )

        self.listing.entries[key] = FlexEntry(key, path, DTYPES[dtype], shape, shards)

    def whole(self, key: str, stated: list[_Stated]) -> tuple[int, ...] | None:
        """The tensor's shape, None with a fault if its shards disagree.

        Old metadata does not state it: then the tensor ends where its last block ends.
        """
        given = {row.whole for row in stated if row.whole is not None}
        ranks = {len(row.offset) for row in stated} | {len(row.shape) for row in stated} | {len(s) for s in given}
        if len(given) > 1 or len(ranks) > 1:
            self.faults.append(
                f"{key}: its shards do not agree on its shape: {', '.join(map(str, sorted(stated)))[:200]}"
            )
            return None
        if given:
            return given.pop()
        offsets = zip(*(row.offset for row in stated), strict=True)
        sizes = zip(*(row.shape for row in stated), strict=True)
        return tuple(max(map(add, *axis)) for axis in zip(offsets, sizes, strict=True))

    def compare(self, key: str, stated: list[_Stated], stored: list[_Stored], whole: tuple[int, ...]) -> None:
        """Add a fault for each block that only one half of the metadata lists, or that leaves the tensor.

        Old metadata has no shapes in its second half.
        """
        shaped = all(row.shape is not None for row in stored)
        given = {(row.offset, row.shape if shaped else None, row.span): row for row in stated}
        have = {(row.offset, row.shape if shaped else None, row.span): row for row in stored}
        for where, row in given.items():
            if 0 in row.shape or _is_empty(row.span):
                continue
            if where not in have and stored:
                self.faults.append(f"{key}: {_block(row)} is in no file, though state_dict_metadata states it")
            if any(o + n > w for o, n, w in zip(row.offset, row.shape, whole, strict=True)):
                self.faults.append(f"{key}: {_block(row)} leaves the tensor of shape {list(whole)}")
        for where, held in have.items():
            has_elements = (held.shape is None or 0 not in held.shape) and not _is_empty(held.span)
            if where not in given and has_elements:
                self.faults.append(f"{key}: {held.file} holds {_block(held)}, which state_dict_metadata does not state")

    def shard(self, key: str, row: _Stored, stated: list[_Stated], whole: tuple[int, ...]) -> Shard | None:
        """A checked stored shard; None with a fault if it is wrong."""
        shape = row.shape
        if shape is None:
            shapes = {s.shape for s in stated if s.offset == row.offset and s.span == row.span}
            if len(shapes) != 1:
                self.faults.append(f"{key}: nothing says the shape of the block at {list(row.offset)}")
                return None
            (shape,) = shapes
        if not len(row.offset) == len(shape) == len(whole) or any(
            o + n > w for o, n, w in zip(row.offset, shape, whole, strict=True)
        ):
            self.faults.append(
                f"{key}: a block at {list(row.offset)} of shape {list(shape)} leaves the tensor of shape {list(whole)}"
            )
            return None
        if row.span is not None and row.span[1] > prod(shape):
            self.faults.append(
                f"{key}: elements {row.span[0]} to {row.span[1]} leave the block of shape {list(shape)} at "
                f"{list(row.offset)}"
            )
            return None
        return Shard(row.offset, shape, row.span, row.file, row.replica)


def _is_empty(span: tuple[int, int] | None) -> bool:
    return span is not None and span[0] == span[1]


def _block(row: _Stated | _Stored) -> str:
    shape = "" if row.shape is None else f" of shape {list(row.shape)}"
    span = "" if row.span is None else f", elements {row.span[0]} to {row.span[1]} of it"
    return f"the block at {list(row.offset)}{shape}{span}"


def _dict(value: Any) -> Mapping[Any, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InconsistentCheckpoint(
            f"a part of the metadata is {_what(value)}, want a dict",
            code=CONTRADICTION,
            hint="the metadata is damaged: get the checkpoint again",
        )
    return value


def _what(value: Any) -> str:
    """What a value is, in a message."""
    name = getattr(value, "name", None)
    return pickles.shown(str(name)) if isinstance(name, str) else type(value).__name__
