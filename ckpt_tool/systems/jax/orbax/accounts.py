"""Checks that a store has exactly the arrays and chunks that `_METADATA` and the headers describe.

    _METADATA: params.w    store: params.w/.zarray, params.w/0.0, params.b/.zarray, params.b/0
      -> E2871: params.b is stored, and no leaf of _METADATA names it

Since 0.10.0 (22 November 2024) Orbax stores every chunk and says so (`store_array_data_equal_to_fill_value: true`,
`_src/serialization/tensorstore_utils.py`). Before, it left chunks out that held nothing but the fill value, and stated
nothing: a save without the flag may be one of those, or may have lost both the flag and the chunks. So a missing chunk
is an error unless the flag is false or the user passes `--lenient` for an old save. In both cases a note names it.

Nodes of a database have a CRC-32C; headers in plain folders have none. So there a header is compared with the chunks
that are stored and with `write_shape`, which divides the shape of an array of JAX (its devices' parts are equal) and is
a multiple of the chunk's; of NumPy's arrays it is the shape. Cost: 1 us a key.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from math import prod

from ckpt_tool.core.catalog import Note
from ckpt_tool.core.faults import together
from ckpt_tool.core.missing import is_collecting, report_missing
from ckpt_tool.core.tensor import TensorKey
from ckpt_tool.errors import CkptError, CorruptFile, InconsistentCheckpoint
from ckpt_tool.storage.arrays.zarr import HEADERS, Array
from ckpt_tool.storage.source import Tree, missing_file
from ckpt_tool.systems.jax.orbax.items import DAMAGED, METADATA, OrbaxItem, OrbaxLeaf

NO_LEAF = "E2871"
_CHUNK = re.compile(r"c|(c/)?\d+([./]\d+)*")
_SHOWN = 50


def check_chunks(tree: Tree, item: OrbaxItem, arrays: Sequence[Array], *, lenient: bool) -> list[Note]:
    """Notes on missing chunks that are read as the fill value. Raises Incomplete E0309 for those that are lost."""
    faults = [fault for fault in (array.missing() for array in arrays) if fault is not None]
    if faults and item.sparse is None:
        faults[0].hint = (
            "fetch the missing files; Orbax before 0.10 left out chunks that hold nothing but the fill value: if it "
            "wrote this one, --lenient reads them so"
        )
    if faults and not is_collecting():
        raise together(faults)

    notes: list[Note] = []
    for array in arrays:
        absent = array.filled_keys()
        if absent:
            what = f"{array.name}: {len(absent)} chunks are not stored, and read as its fill value: {absent[0]}"
            notes.append(Note("N-fill", what, tree.display(array.header.path)))
    if len(notes) > _SHOWN:
        others = f"{len(notes) - _SHOWN} more arrays have chunks that are not stored, and read as their fill values"
        notes[_SHOWN:] = [Note("N-fill", others)]
    return notes


def report_chunks(tree: Tree, arrays: Iterable[tuple[TensorKey, Array]]) -> None:
    """Report each array that lacks chunks, with the number of bytes."""
    for key, array in arrays:
        stored = sum(chunk.box.numel for chunk in array.chunks())
        lost = max(0, prod(array.shape) - stored)
        if lost:
            fault = array.missing() or missing_file(array.name, tree.display(array.header.path))
            report_missing(fault, tensors={key: array.dtype.nbytes(lost)})


def check_leaves(
    tree: Tree, item: OrbaxItem, keys: Iterable[str] | None, rows: Sequence[tuple[OrbaxLeaf, Array]]
) -> None:
    """Raise InconsistentCheckpoint E2871 for stored arrays and chunks that no leaf or header accounts for.

    keys: those of the database, None if arrays are plain folders.
    """
    names = {array.name for _, array in rows}
    if keys is not None:
        strays = [name for name in _array_names(keys) if name not in names]
    else:
        strays = _find_strays(tree, item, [array for _, array in rows])
        _check_write_shapes(tree, item, rows)
    if not strays:
        return

    raise InconsistentCheckpoint(
        f"{strays[0][:200]} is stored, and {METADATA} names no such array"
        if strays[0] not in names
        else f"{strays[0][:200]} has more chunks than its header asks for",
        code=NO_LEAF,
        path=tree.display(item.folder + METADATA),
        key=strays[0][:200],
        faults=[f"stored, and named by nothing: {name[:200]}" for name in strays[1:_SHOWN]],
        hint="fetch the checkpoint again: its metadata was edited or is that of another save",
    )


def _array_names(keys: Iterable[str]) -> list[str]:
    """The names of the arrays whose headers are among the keys of a database."""
    names: list[str] = []
    for key in keys:
        name, _, last = key.rpartition("/")
        if last in HEADERS:
            names.append(name)
    return names


def _find_strays(tree: Tree, item: OrbaxItem, arrays: Sequence[Array]) -> list[str]:
    """The names of arrays in plain folders that no leaf names, or that have chunks outside of their header's grid."""
    expected = {f"{array.name}/{key}" for array in arrays for key in array.chunk_keys()}
    names = {array.name for array in arrays}

    strays: dict[str, None] = {}
    for path in tree.listing():
        if not path.startswith(item.folder) or path[len(item.folder) :] in expected:
            continue
        above, _, last = path[len(item.folder) :].rpartition("/")
        if last in HEADERS:
            if above and above not in names:
                strays[above] = None
            continue

        # A chunk's key may have slashes of its own, so its array is any of the folders above it.
        below = last
        while above and above not in names:
            above, _, folder = above.rpartition("/")
            below = f"{folder}/{below}"
        if above and _CHUNK.fullmatch(below):
            strays[above] = None
    return list(strays)


def _check_write_shapes(tree: Tree, item: OrbaxItem, rows: Sequence[tuple[OrbaxLeaf, Array]]) -> None:
    """Raise CorruptFile E2755 for headers that contradict the `write_shape` in `_METADATA`, each device's part."""
    faults: list[CkptError] = []
    for leaf, array in rows:
        # An array of NumPy is written as one part, and states no write_shape.
        part = array.shape if leaf.write_shape is None else leaf.write_shape
        chunk = array.layout.chunk
        fits = len(part) == len(array.shape) and all(
            _divides(of_part, whole) and _divides(of_chunk, of_part)
            for whole, of_part, of_chunk in zip(array.shape, part, chunk, strict=True)
        )
        if not fits:
            message = f"its header has shape {list(array.shape)} in chunks of {list(chunk)}, and it was written in "
            message += f"parts of {list(part)}"
            shown = tree.display(array.header.path)
            hint = "fetch the checkpoint again"
            faults.append(CorruptFile(message, code=DAMAGED, path=shown, key=array.name[:200], hint=hint))
    if faults:
        raise together(faults)


def _divides(part: int, whole: int) -> bool:
    return whole == 0 or (part > 0 and whole % part == 0)
