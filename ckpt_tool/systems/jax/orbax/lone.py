"""The arrays of an Orbax item without its `_METADATA`, its manifest or a node of its database, as far as their headers
are found.

    ocdbt.process_0/manifest.ocdbt  ->  keys such as params.layer_0.q.kernel/.zarray  ->  layer_0.q.kernel F32 (8, 16)

Three places are searched, and an array counts once: the item's own database, the databases that each process of the job
wrote before they were merged, and folders of zarr. The path of an array is its key, split at dots: only `_METADATA`
records whether a dot belongs to a name. Cost: the B-trees and the headers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from math import prod

from ckpt_tool.core.catalog import CatalogRow
from ckpt_tool.core.missing import collected_missing
from ckpt_tool.errors import CkptError
from ckpt_tool.formats.base import FileContent
from ckpt_tool.storage.arrays.ocdbt import MANIFEST, read_keys
from ckpt_tool.storage.arrays.zarr import HEADERS, Array, ZarrFiles, ZarrStore, read_array
from ckpt_tool.storage.source import Tree
from ckpt_tool.systems.jax.orbax.names import name_leaves

_PROCESS = re.compile(r"(.*?)ocdbt\.process_\d+/")
_IN_ITEM = ("d/", "ocdbt.process_")


def find_items(tree: Tree) -> Mapping[str, Callable[[], FileContent]]:
    """Readers of all items in a tree, by their folders ("" for the tree itself, else with a slash at the end)."""
    folders: dict[str, list[str]] = {}
    for path in tree.listing():
        folder, _, name = path.rpartition("/")
        if name == MANIFEST:
            database = f"{folder}/" if folder else ""
            process = _PROCESS.fullmatch(database)
            folders.setdefault(process[1] if process else database, []).append(database)
        elif name in HEADERS and folder:
            item = folder.rpartition("/")[0]
            folders.setdefault(f"{item}/" if item else "", [])
    return {item: partial(read_item, tree, item, databases) for item, databases in folders.items()}


def read_item(tree: Tree, item: str, databases: list[str]) -> FileContent:
    """The arrays of one item. databases: the folders of its databases."""
    notes: list[str] = []
    arrays: dict[str, Array] = {}
    for store, names in _stores(tree, item, sorted(databases), notes):
        for name, version in names:
            if name not in arrays:
                try:
                    arrays[name] = read_array(tree, store, name, version=version, holes=True)
                except CkptError as fault:
                    notes.append(f"the header of {name[:200]} can't be read: {fault.message}")

    paths = [tuple(re.split(r"[./]", name)) for name in arrays]
    keys = name_leaves(paths, [array.shape == () for array in arrays.values()]).keys if paths else []
    rows = [
        CatalogRow(key.name, key.state, array.dtype, array.shape, array.dtype.nbytes(prod(array.shape)))
        for key, array in zip(keys, arrays.values(), strict=True)
        if key is not None
    ]
    return FileContent(item or ".", tuple(rows), (), tuple(notes))


def _stores(
    tree: Tree, item: str, databases: list[str], notes: list[str]
) -> Iterator[tuple[ZarrStore, list[tuple[str, int]]]]:
    """The stores of an item, each with (name, version of zarr) of the arrays whose headers are in it.

    Databases that can't be read are added to `notes`.
    """
    for folder in databases:
        try:
            with collected_missing() as parts:
                keys = read_keys(tree, folder)
        except CkptError as fault:
            notes.append(f"{folder}{MANIFEST} can't be read: {fault.message}")
            continue
        notes += [f"{path} is missing" for path in parts.files]
        yield keys, list(_names_of(keys, nested=True))
    below = [path.removeprefix(item) for path in tree.listing() if path.startswith(item)]
    yield (
        ZarrFiles(tree, item),
        list(_names_of((path for path in below if not path.startswith(_IN_ITEM)), nested=False)),
    )


def _names_of(keys: Iterable[str], *, nested: bool) -> Iterator[tuple[str, int]]:
    """(name, version of zarr) of each array whose header is among the keys. nested: names may have slashes."""
    for key in keys:
        name, _, last = key.rpartition("/")
        if name and (nested or "/" not in name) and last in HEADERS:
            yield name, 2 + HEADERS.index(last)
