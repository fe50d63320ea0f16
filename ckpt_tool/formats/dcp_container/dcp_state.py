"""Converts between a DCP's flat items and one nested state of tensors and plain values.

The one idea: a DCP flattens one nested dict. When reading, `State` gives each tensor its path in that dict and nests
the plain values again; when writing, `flatten` gives the leaves of a nested dict as torch does.

    {"model": {"w": T}, "groups": [{"lr": 0.1}]}  <->  model.w: tensor   groups.0.lr: object

Each format interprets the paths itself (`systems.torch.dcp`, `systems.megatron.fsdp_dtensor`). Source: torch 2.13
`distributed/checkpoint/_nested_dict.py`, `_traverse.py`. Cost: as `dcp_container.dcp_items`. What it does not do:
assign names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ckpt_tool.core.box import Box
from ckpt_tool.core.catalog import Note, mark_replicas
from ckpt_tool.core.dtype import DType
from ckpt_tool.core.faults import both, read_each
from ckpt_tool.core.tensor import ChunkColumns, LogicalTensor, Path, StoredArray, TensorKey, simple_tensor
from ckpt_tool.errors import InputError
from ckpt_tool.formats.dcp_container.dcp_items import DATA, DcpItems, ReadObject
from ckpt_tool.formats.dcp_container.dcp_metadata import DcpListing, DcpTensorEntry
from ckpt_tool.formats.state_dict.tree import SLOT, dotted, part, part_path
from ckpt_tool.formats.state_dict.unread import Hidden, hidden_in
from ckpt_tool.storage.pickles.pickle_values import WrapperRef
from ckpt_tool.storage.source import Tree

DTENSOR = "E2607"


class State:
    """The tensors and plain values of one checkpoint's listings.

    tensors: each with its path and an empty key. They include the parts of quantised states and tensors that cannot be
        read (`formats.state_dict.unread.set_apart`).
    extras: the plain values.
    coded: the dotted paths of quantised states (`pickles.coded_states`).
    unsafe: lines about object items and tensors that could only be read by executing code.
    """

    def __init__(self, tree: Tree, listings: Sequence[DcpListing]) -> None:
        self.tree = tree
        self.listings = listings
        self.items = DcpItems(tree, every=True)
        self.unsafe: list[str] = []
        self.coded: list[str] = []
        self.tensors: list[LogicalTensor] = []
        self.extras = NestedExtras()
        for listing, (arrays, objects) in zip(listings, read_each(listings, self._items, file=id), strict=True):
            for fqn, entry in listing.tensors.items():
                if fqn in self.items.odd:
                    kind, line, fault = self.items.odd[fqn]
                    self._hide(
                        Hidden(entry.path, entry.shape, entry.dtype.name, kind, line, fault), entry.pieces[0].file
                    )
                    self.unsafe += [line] if line else []
                elif fqn in self.items.coded:
                    self._coded(fqn, entry)
                else:
                    self._add(entry.path, _logical(entry, arrays.get(fqn, [])))
            for fqn in listing.objects:
                if fqn in objects:  # damaged objects are missing here if faults are collected instead of raised
                    self._object(objects[fqn])

    def _items(self, listing: DcpListing) -> tuple[Mapping[str, Sequence[StoredArray]], dict[str, ReadObject]]:
        """(the stored arrays of a listing's tensors, its objects), both by fqn. An error lists all unreadable files."""
        items, objects = self.items, list(listing.objects.values())
        return both(
            lambda: items.arrays(listing.tensors.values()),
            lambda: {read.entry.fqn: read for read in items.objects(objects)},
        )

    def _coded(self, fqn: str, entry: DcpTensorEntry) -> None:
        """Add the parts of a quantised state as tensors; a state whose pieces cannot be joined is unreadable."""
        boxes = [Box(piece.offset, piece.shape) for piece in entry.pieces]
        from ckpt_tool.formats.state_dict.coded import joined

        parts = [self.items.coded[fqn].get(number, {}) for number in range(len(boxes))]
        try:
            made = joined(list(zip(boxes, parts, strict=True)), entry.shape, fqn)
        except InputError as fault:
            fault.path = fault.path or self.tree.display(entry.pieces[0].file)
            self._hide(Hidden(entry.path, entry.shape, entry.dtype.name, fault=fault), entry.pieces[0].file)
            return
        for name, tensor in made.items():
            self._add(part_path(entry.path, name), tensor)
        self.coded.append(dotted(entry.path))

    def _add(self, path: Path, tensor: LogicalTensor) -> None:
        self.tensors.append(LogicalTensor(TensorKey(""), tensor.shape, tensor.dtype, tensor.chunks, path))
        self.extras.slot(path)

    def _hide(self, hidden: Hidden, file: str) -> None:
        self.tensors.append(simple_tensor(TensorKey(""), hidden.array(file), hidden.path))

    def _object(self, read: ReadObject) -> None:
        """Add an object item: its plain values to the extras, the tensors inside it to the tensors."""
        entry = read.entry
        value = read.value
        shown = self.tree.display(entry.file)
        parted = part(value, entry.path)
        lines, hidden = hidden_in(value, parted, shown, f"item {entry.fqn} of {shown}")
        self.unsafe += lines
        for one in hidden:
            self._hide(one, entry.file)
        self.unsafe += [f"{line} (item {entry.fqn} of {shown})" for line in parted.hanging]
        for path, ref in parted.leaves:
            if isinstance(ref, WrapperRef):
                raise InputError(
                    f"a {ref.name} was pickled whole into an object item",
                    code=DTENSOR,
                    path=shown,
                    offset=entry.at,
                    key=entry.fqn,
                    hint="save the state dict flattened (flatten_state_dict=True)",
                )
            self._add(path, simple_tensor(TensorKey(""), read.zip.array(ref)))
        if parted.extras is not SLOT and (parted.extras != {} or not parted.leaves):
            self.extras.put(entry.path, parted.extras)

    @property
    def files(self) -> list[str]:
        """The data files, in the listings' order."""
        return [file for listing in self.listings for file in listing.files]

    def all_unsafe(self) -> tuple[str, ...]:
        """All lines about pickles that would execute code, without duplicates."""
        lines = (*(line for each in self.listings for line in each.unsafe), *self.items.unsafe, *self.unsafe)
        return tuple(dict.fromkeys(lines))

    def notes(self) -> Iterator[Note]:
        """Notes on quantised states, `.distcp` files to which no item refers, and objects that several ranks saved."""
        if self.coded:
            from ckpt_tool.formats.state_dict.coded import coded_note

            yield coded_note(self.coded)
        used = set(self.files)
        folders = [listing.folder for listing in self.listings]
        stray = [
            path
            for path in self.tree.listing()
            if path not in used
            and DATA.fullmatch(path.rpartition("/")[2])
            and any(path.startswith(folder) for folder in folders)
        ]
        if stray:
            yield Note(
                "N-stray-files",
                f"{len(stray)} .distcp files belong to no item (left over from an older save): {', '.join(stray[:10])}",
            )
        for listing in self.listings:
            if listing.differing:
                yield Note(
                    "N-rank-objects",
                    f"{len(listing.differing)} objects were saved by every rank; rank 0's are taken, such as "
                    f"{listing.differing[0].fqn}",
                )


def _logical(entry: DcpTensorEntry, arrays: Sequence[StoredArray]) -> LogicalTensor:
    chunks = entry.chunks(arrays)
    if not isinstance(chunks, ChunkColumns):
        chunks = mark_replicas(chunks) if len(chunks) > 1 else tuple(chunks)
    return LogicalTensor(TensorKey(""), entry.shape, entry.dtype, chunks, entry.path)


class _List(dict[Any, Any]):
    """A list of the extras as a dict by position while it is filled in any order."""


class NestedExtras:
    """The nested extras, built from paths whose integers are list positions."""

    def __init__(self) -> None:
        self.root: dict[Any, Any] = {}

    def put(self, path: Path, value: Any) -> None:
        """Store a value at `path`; a dict is merged into a dict that is there already."""
        node = self._node(path[:-1], path[-1])
        known = node.get(path[-1])
        if isinstance(known, dict) and isinstance(value, dict):
            known.update(value)
        else:
            node[path[-1]] = value

    def slot(self, path: Path) -> None:
        """Reserve the list position of a tensor at `path`, so that the positions after it stay right."""
        last = max((i for i, step in enumerate(path) if type(step) is int), default=None)
        if last is not None:
            self._node(path[:last], path[last]).setdefault(path[last], SLOT)

    def _node(self, path: Path, step: str | int) -> dict[Any, Any]:
        node = self.root
        for here, below in zip(path, (*path[1:], step), strict=False):
            child = node.get(here)
            if not isinstance(child, dict):
                child = node[here] = _List() if type(below) is int else {}
            node = child
        return node

    def finished(self) -> dict[str, Any]:
        """The extras with lists in place of the dicts by position."""
        return {key: _finish(value) for key, value in self.root.items()}


def _finish(value: Any) -> Any:
    if type(value) is _List:
        positions = [step for step in value if type(step) is int]
        # Bounded: a damaged path with a huge position would create a list of that length; such a list stays a dict.
        if len(positions) == len(value) and max(positions) < 2 * len(positions) + 1000:
            return [_finish(value.get(i)) for i in range(max(positions) + 1)]
    if isinstance(value, dict):
        return {key: _finish(item) for key, item in value.items()}
    return value


# -- writing -----------------------------------------------------------------------------------------------------------


class NestingSlot(NamedTuple):
    """A placeholder for the wanted tensor with this index."""

    number: int


class Known(NamedTuple):
    """A tensor whose bytes (row-major, little-endian) are known when the output is planned."""

    shape: Sequence[int]
    dtype: DType
    data: bytes


def flatten(tree: Mapping[Any, Any], path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The leaves of a nested state by torch's rule: dicts are always flattened, lists if they contain a tensor, a dict
    or such a list, tuples never. Paths contain text for keys and integers for list positions."""
    for key, value in tree.items():
        yield from _flatten(value, (*path, str(key)))


def _flatten(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, Mapping):
        yield from flatten(value, path)
    elif isinstance(value, list) and not stays(value):
        for i, item in enumerate(value):
            yield from _flatten(item, (*path, i))
    else:
        yield path, value


def stays(value: list[Any]) -> bool:
    """Is the list saved as one object, because it contains no tensor, no dict and no list that is flattened?"""
    return not any(
        isinstance(item, NestingSlot | Known | Mapping) or (isinstance(item, list) and not stays(item))
        for item in value
    )
