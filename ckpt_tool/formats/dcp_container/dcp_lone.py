"""Reads a `.distcp` file without its `.metadata`: how many items it holds, and their dtypes and shapes.

    read_items(tree, "__0_0.distcp").rows  ->  (CatalogRow("__0_0.item 0", "unknown", F32, (10, 4), 160), ...)

Names, states and the boxes in the tensors are only in `.metadata`, so an item is named by its number in the file. The
items are consecutive zips: the file is walked from its end to its beginning, from directory to directory. A file that
was cut short has no directory at its end; then the items are walked from the beginning, each by the pickle that comes
first in it, as far as the file goes.

Cost: two preads an item, of a cut file some more; no values are read.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from ckpt_tool.core.catalog import CatalogRow
from ckpt_tool.core.tensor import UNKNOWN
from ckpt_tool.errors import CkptError
from ckpt_tool.formats.base import FileContent
from ckpt_tool.storage.pickles import pickle_reader as pickles
from ckpt_tool.storage.pickles.pickle_values import Pickled, TensorRef
from ckpt_tool.storage.pickles.survey import find_zips
from ckpt_tool.storage.source import Tree
from ckpt_tool.storage.torch_files.torchzip import TorchZip
from ckpt_tool.storage.torch_files.zip_directory import END, LOCAL

_ITEM_END = 16 << 10  # bytes after an item's values at most: small records, the directory and its end record
_ITEM_HEAD = 4 << 10  # bytes between an item's pickle and its values at most
MOST_ITEMS = 1_000_000
_END_SIGNATURE = b"PK\x05\x06"


class _Item(NamedTuple):
    """An item's parsed pickle, and the offset of the first byte after the item."""

    pickled: Pickled
    end: int


def is_item_file(tree: Tree, path: str) -> bool:
    """Does a file begin with a zip item? (A DCP's safetensors file contains names, and is read as one.)"""
    return tree.head(path, 4) == b"PK\x03\x04"


def read_items(tree: Tree, path: str) -> FileContent:
    """The items of one file. Raises what their zips and pickles raise."""
    rows: list[CatalogRow] = []
    unsafe: list[str] = []
    objects = 0
    stem = path.removesuffix(".distcp")
    items, note = _items_of(tree, path)

    for number, item in enumerate(items):
        unsafe += [f"{use} at {tree.display(path)}, item {number}, opcode {use.position}" for use in item.unsafe]
        tensor = item.value
        if isinstance(tensor, TensorRef):
            nbytes = tensor.dtype.nbytes(prod(tensor.shape))
            rows.append(CatalogRow(f"{stem}.item {number}", UNKNOWN, tensor.dtype, tensor.shape, nbytes))
        else:
            objects += 1

    notes = [note] if note else []
    if objects:
        notes.append(f"{path} holds {objects} objects in addition to its tensors")
    return FileContent(path, tuple(rows), tuple(unsafe), tuple(notes))


def _items_of(tree: Tree, path: str) -> tuple[list[Pickled], str]:
    """(the parsed pickles of the complete items, a line about a truncated end or "")."""
    size = tree.size(path)
    begins = [*find_zips(tree, path), size]
    if begins[0] == 0 and size:
        spans = zip(begins, begins[1:], strict=False)
        return [TorchZip.open(tree, path, begin, end - begin).pickled() for begin, end in spans], ""

    items: list[Pickled] = []
    at = 0
    while at < size and len(items) < MOST_ITEMS:
        item = _item_at(tree, path, at)
        if item is None:
            break
        items.append(item.pickled)
        at = item.end
    return items, f"{path} was cut short: {len(items)} complete items, the next begins at byte {at} of {size}"


def _item_at(tree: Tree, path: str, begin: int) -> _Item | None:
    """The item that begins at a byte, None if the file ends before the item does."""
    size = tree.size(path)
    head = tree.read(path, begin, min(LOCAL.size, size - begin))
    if len(head) < LOCAL.size or head[:4] != b"PK\x03\x04":
        return None
    first = begin + LOCAL.size + sum(LOCAL.unpack(head)[-2:])
    try:
        pickled = pickles.load_file(tree, path, start=min(first, size), multi=True)
    except CkptError:
        return None

    # Small records and the header of the values follow the pickle; small records and the directory follow the values.
    after = pickled.end + sum(storage.nbytes for storage in pickled.storages)
    window = tree.read(path, min(after, size), min(_ITEM_HEAD + _ITEM_END, max(0, size - after)))
    found = window.find(_END_SIGNATURE)
    if found < 0 or found + END.size > len(window):
        return None
    end = after + found + END.size
    zip_ = TorchZip.open(tree, path, begin, end - begin)
    return _Item(zip_.pickled(), end)
