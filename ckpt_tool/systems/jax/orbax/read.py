"""Reading an Orbax step: the leaves of its trees as one catalog. `systems.jax.orbax.format` is the specification."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from ckpt_tool.core.bounds import numeral
from ckpt_tool.core.catalog import Catalog, CatalogRow, Note, Unread
from ckpt_tool.core.faults import read_each
from ckpt_tool.core.hints import Hints
from ckpt_tool.core.missing import is_collecting, report_missing
from ckpt_tool.core.tensor import STEP, LogicalTensor, Path, TensorKey
from ckpt_tool.errors import Incomplete
from ckpt_tool.formats.hub_folder.model_files import side_files
from ckpt_tool.formats.state_dict.unread import notes_of
from ckpt_tool.storage.arrays.ocdbt import MANIFEST, read_keys
from ckpt_tool.storage.arrays.zarr import Array, ZarrFiles, ZarrStore, read_array
from ckpt_tool.storage.source import Tree, missing_file
from ckpt_tool.systems.jax.orbax import items as orbax_items
from ckpt_tool.systems.jax.orbax.accounts import check_chunks, check_leaves, report_chunks
from ckpt_tool.systems.jax.orbax.items import EMPTY, STRING, OrbaxItem, OrbaxLeaf, OrbaxStep
from ckpt_tool.systems.jax.orbax.names import COUNT, COUNTED, OPTAX, STATES, NamedLeaf, Trees, name_leaves

# Dtypes of scalars that can be plain values -> `struct`'s letter
PLAIN = {
    "BOOL": "?",
    "I8": "b",
    "U8": "B",
    "I16": "<h",
    "U16": "<H",
    "I32": "<i",
    "U32": "<I",
    "I64": "<q",
    "U64": "<Q",
}
PLAIN |= {"F16": "<e", "F32": "<f", "F64": "<d"}
_COUNTED_STATES = frozenset(STATES[word] for word in COUNTED)
_COUNTS = ("I32", "I64", "U32")
METRICS = "metrics"
CUSTOM = "custom_metadata"


class _StoredLeaf(NamedTuple):
    """A leaf that is an array."""

    path: Path  # with the name of its item, if the step has several
    array: Array


class _Tensors(Mapping[TensorKey, LogicalTensor]):
    """Tensors whose chunks are located when a tensor is used: each shard's index of zarr 3 costs a read."""

    def __init__(self, found: Mapping[TensorKey, _StoredLeaf]) -> None:
        self._found = found
        self._made: dict[TensorKey, LogicalTensor] = {}

    def rows(self) -> Iterator[CatalogRow]:
        """Every tensor as `ckpt inspect` lists it, without locating chunks."""
        for key, (_, array) in self._found.items():
            nbytes = array.dtype.nbytes(prod(array.shape))
            yield CatalogRow(key.name, key.state, array.dtype, array.shape, nbytes)

    def parted(self) -> Iterator[LogicalTensor]:
        """No tensors: chunks form a grid, and missing ones were found by their keys (`Array.missing`)."""
        return iter(())

    def __getitem__(self, key: TensorKey) -> LogicalTensor:
        made = self._made.get(key)
        if made is None:
            path, array = self._found[key]
            made = LogicalTensor(key, array.shape, array.dtype, tuple(array.chunks()), path)
            self._made[key] = made
        return made

    def __contains__(self, key: object) -> bool:
        return key in self._found

    def __iter__(self) -> Iterator[TensorKey]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


def read_tree(tree: Tree, *, lenient: bool = False) -> Catalog:
    """Read the only step of a tree into one catalog.

    lenient: chunks that are not stored are read as the fill value. Errors are those of `systems.jax.orbax.format`.
    """
    step = orbax_items.chosen_step(tree)
    orbax_items.check_items(tree, step)
    trees = [orbax_items.read_item(tree, step, name) for name in step.items]
    several = len(trees) > 1
    extras: dict[Any, Any] = {}
    stored: list[_StoredLeaf] = []
    filled: list[Note] = []

    for item in trees:
        prefix = (item.name,) if several else ()
        texts = orbax_items.strings(tree, item)
        arrays, notes_of_item = _arrays(tree, item, lenient=lenient)
        filled += notes_of_item
        stored += [_StoredLeaf((*prefix, *leaf.path), array) for leaf, array in arrays]
        for leaf in item.leaves:
            if leaf.kind == STRING:
                _put(extras, (*prefix, *leaf.path), texts[leaf.stored])

    # All items of a step are named together: an optimizer's states may be in another item than the parameters.
    named = name_leaves(
        [each.path for each in stored],
        [each.array.shape == () and each.array.dtype.name in PLAIN for each in stored],
    )
    tensors = {key: each for each, key in zip(stored, named.keys, strict=True) if key is not None}
    if is_collecting():
        rows = zip(stored, named.keys, strict=True)
        report_chunks(tree, [(key or TensorKey(each.array.name), each.array) for each, key in rows])
    unread: list[Unread] = []

    for refused, fault in named.faults.items():
        fault.path = fault.path or tree.display(step.folder)
        array = tensors.pop(refused).array
        unread.append(Unread(refused, f"{array.dtype.name} {list(array.shape)}", fault=fault))

    for each, key in zip(stored, named.keys, strict=True):
        if key is None:
            _put(extras, each.path, _value(tree, each.array))

    extras = _as_lists(extras)
    notes = [*named.notes, *filled, *notes_of(unread)]
    for item in trees:
        if keys := orbax_items.keys_of_prngs(tree, item):
            first = next(iter(keys))
            what = f"{len(keys)} arrays are keys of a PRNG, such as {first} ({keys[first]})"
            notes.append(Note("N-keys", f"{what}: they are read, and written, as integers: jax.random.wrap_key_data"))

    hint = _hint(tree, step, trees, named, extras, notes, {each.path: each.array.dtype.name for each in stored})
    count = _count(stored, named, tensors, notes)
    return Catalog(
        "orbax",
        tensors=_Tensors(tensors),
        extras=extras,
        files=orbax_items.own_files(tree, step),
        sidefiles=side_files(tree),
        notes=tuple(notes),
        hints=Hints.of(hint),
        count=count,
        unread=tuple(unread),
    )


def _count(
    stored: Sequence[_StoredLeaf], named: NamedLeaf, tensors: Mapping[TensorKey, _StoredLeaf], notes: list[Note]
) -> LogicalTensor | None:
    """The optimizer's count of steps, None if there is none or if several are next to moments."""
    parents_of_moments: set[Path] = set()
    for key, leaf in tensors.items():
        if key.state in _COUNTED_STATES:
            parents_of_moments |= {leaf.path[:at] for at, step in enumerate(leaf.path) if step in COUNTED}

    counts: list[_StoredLeaf] = []
    for leaf, tensor_key in zip(stored, named.keys, strict=True):
        if tensor_key is None and leaf.array.dtype.name in _COUNTS:
            *parent, last = named.named_by(leaf.path)
            if last == COUNT and tuple(parent) in parents_of_moments:
                counts.append(leaf)

    if len(counts) > 1:
        names = ", ".join(".".join(map(str, leaf.path)) for leaf in counts[:3])
        notes.append(Note("N-counts", f"{len(counts)} counts of steps, each of some parameters: {names}"))
    if len(counts) != 1:
        return None

    path, array = counts[0]
    chunks = tuple(array.chunks())
    return LogicalTensor(TensorKey(".".join(map(str, path)), STEP), (), array.dtype, chunks, path) if chunks else None


def _leaves_with_header(tree: Tree, store: ZarrStore, leaves: Sequence[OrbaxLeaf], version: int) -> list[OrbaxLeaf]:
    """The leaves whose arrays have a header; the others are reported as missing."""
    kept: list[OrbaxLeaf] = []
    for leaf in leaves:
        try:
            read_array(tree, store, leaf.stored, version=version, holes=True)
        except Incomplete as fault:
            report_missing(fault, tensors={TensorKey(leaf.stored): None})
        else:
            kept.append(leaf)
    return kept


def _arrays(tree: Tree, item: OrbaxItem, *, lenient: bool) -> tuple[list[tuple[OrbaxLeaf, Array]], list[Note]]:
    """The arrays of an item's leaves, and notes on chunks that are not stored."""
    if not item.ocdbt and any(path.startswith(f"{item.folder}ocdbt.process_") for path in tree.listing()):
        path = item.folder + MANIFEST
        report_missing(missing_file(path, tree.display(path)), files=[path])
    keys = read_keys(tree, item.folder) if item.ocdbt else None
    store: ZarrStore = ZarrFiles(tree, item.folder) if keys is None else keys
    leaves = [leaf for leaf in item.leaves if leaf.kind not in EMPTY and leaf.kind != STRING]
    version = 3 if item.zarr3 else 2
    # Without the flag only the user can know that the save is old and left chunks out.
    may_be_absent = item.sparse or (item.sparse is None and lenient)
    if is_collecting():
        leaves = _leaves_with_header(tree, store, leaves, version)
    arrays = read_each(
        leaves, lambda leaf: read_array(tree, store, leaf.stored, version=version, holes=not may_be_absent), file=id
    )
    notes = check_chunks(tree, item, arrays, lenient=lenient)
    rows = list(zip(leaves, arrays, strict=True))
    check_leaves(tree, item, keys, rows)
    return rows, notes


def _value(tree: Tree, array: Array) -> Any:
    """The value of a scalar, None if it is lost."""
    for chunk in array.chunks():
        at = chunk.array
        (value,) = struct.unpack(PLAIN[array.dtype.name], tree.read(at.path, at.offset, array.dtype.nbytes(1)))
        return value
    return None


def _put(extras: dict[Any, Any], path: Path, value: Any) -> None:
    """Store a value in nested dicts. No leaf is below another leaf (`items.read_item` has checked it)."""
    at = extras
    for step in path[:-1]:
        # A position in a sequence and a key that is spelled like it are the same step: 0 and "0".
        twin: str | int = step
        if isinstance(step, int):
            twin = str(step)
        elif numeral(step):
            twin = int(step)
        at = at.setdefault(twin if twin in at and step not in at else step, {})
    at[path[-1]] = value


def _as_lists(value: Any) -> Any:
    """The nested dicts with lists in place of sequences of which every position is a plain value.

    Sequences with gaps (a tensor is there) stay dicts, with their positions as text.
    """
    if not isinstance(value, dict):
        return value
    inner = {key: _as_lists(each) for key, each in value.items()}
    if inner and all(isinstance(key, int) for key in inner) and sorted(inner) == [*range(len(inner))]:
        return [inner[n] for n in range(len(inner))]
    return {str(key): each for key, each in inner.items()}


def _hint(
    tree: Tree,
    step: OrbaxStep,
    trees: list[OrbaxItem],
    named: NamedLeaf,
    extras: dict[str, Any],
    notes: list[Note],
    dtypes: Mapping[Path, str],
) -> Trees:
    """The hint for a writer of Orbax; also adds JSON items and users' metadata to `extras`.

    An item with the name of a leaf is left out, with a note.
    """
    several = len(trees) > 1
    leaves = set(extras)
    beside = dict(orbax_items.json_items(tree, step))
    said = orbax_items.step_metadata(tree, step)
    beside_or_said = beside | {name: said[name] for name in (METRICS, CUSTOM) if said.get(name) and name not in beside}
    for name, value in beside_or_said.items():
        if name in leaves:
            what = f"{name} is a leaf of the tree and an item next to it: the item is left out"
            notes.append(Note("N-same-name", what, tree.display(step.folder + name)))
            beside.pop(name, None)
        else:
            extras[name] = value
    paths = [((*((item.name,) if several else ()), *leaf.path), leaf.kind) for item in trees for leaf in item.leaves]
    rows = [[list(path), kind, dtypes.get(path, "")] for path, kind in paths]
    custom = {item.name: item.custom for item in trees if item.custom is not None}
    return Trees(
        tuple(rows),
        named.model,
        named.optimizer or OPTAX.optimizer,
        tuple(item.name for item in trees) if trees[0].name else (),
        tuple(beside),
        trees[0].zarr3,
        custom or None,
    )
