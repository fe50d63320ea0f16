"""Writing a DCP folder: which rank's file each box goes to, and how a nested state becomes keys.

The one idea: keys are paths joined by dots, boxes are the layout's first replicas; files and `.metadata` are
`dcp_container.dcp_items` and `dcp_container.dcp_metadata`.

    model.w F32 (4, 2) on dp 2   ->  __0_0.distcp: [objects][zip of rows 0-1]   __1_0.distcp: [zip of rows 2-3]
    .metadata: model.w: chunks [(0, 0) (2, 2), (2, 0) (2, 2)], items (__0_0.distcp, ...), (__1_0.distcp, 0, 1577)

As torch 2.13 writes it (`filesystem.py`, `default_planner.py`, `_traverse.py`): objects before tensors, objects in rank
0's file; each box once, by the rank that holds its first replica; the number in a file's name is the rank's place in
the mesh (tp fastest); no file for a rank that has nothing; `planner_data` always. Empty dicts leave nothing, as
with torch itself.

A checkpoint of accelerate keeps its two folders, each with its own `.metadata`; one more at the root lists both, so
that torch loads everything by one call. Cost: a few us a box. What it does not do: padding, replicas, compression.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckpt_tool.core.box import Box, whole
from ckpt_tool.core.cuts import Cut, Cuts
from ckpt_tool.core.layout import Layout
from ckpt_tool.core.target import Target, TargetFile, Wanted, whole_file
from ckpt_tool.core.tensor import Path
from ckpt_tool.errors import UsageError
from ckpt_tool.formats.dcp_container.dcp_item_files import ItemFiles, StoredItem, TensorShare, torch_dtype
from ckpt_tool.formats.dcp_container.dcp_metadata import METADATA, pickled
from ckpt_tool.formats.dcp_container.dcp_state import NestingSlot, flatten, stays
from ckpt_tool.formats.state_dict.composer import StoragePart, TorchComposer
from ckpt_tool.formats.state_dict.nesting import nest
from ckpt_tool.formats.state_dict.tree import dotted
from ckpt_tool.systems.torch.dcp.folders import Folders, is_pair


def dcp_target(wanted: Wanted, layout: Layout) -> Target:
    """The plan of the output folder. Raises UsageError E0240 (two keys flatten to one), E0241, E0242 (a dtype torch
    lacks)."""
    nested = nest(wanted, [NestingSlot(i) for i in range(len(wanted.tensors))], whole_numbers=False)
    folders = _folders(wanted.hints.get(Folders))
    leaves: dict[str, tuple[Path, Any]] = {}

    for path, value in flatten(nested.tree):
        key = dotted(path)
        if key in leaves:
            raise UsageError(
                f"{leaves[key][0]} and {path} both flatten to {key!r}",
                code="E0240",
                key=key,
                hint="DCP joins keys by dots: rename one of them, or write another format",
            )
        leaves[key] = (path, value)

    writer = _DcpWriter(wanted, layout, folders)
    for key, (path, value) in leaves.items():  # objects first, as torch orders a file
        if not isinstance(value, NestingSlot):
            writer.object(key, path, value)

    for key, (path, value) in leaves.items():
        if isinstance(value, NestingSlot):
            writer.tensor(key, path, value.number)

    files = writer.finished(list(leaves))
    copies = wanted.side_file_copies()
    empty = list(_empty_dicts(nested.tree))
    lost = [f"empty dicts leave no trace in a DCP: {', '.join(empty[:20])}"] if empty else []
    files = [*files, *copies]
    notes = (*nested.notes, *lost)
    return Target("dcp", tuple(files), notes=notes, places=writer.files.places(files))


def _empty_dicts(value: Any, path: Path = ()) -> Iterator[str]:
    """Keys of the dicts that are lost because flattening yields nothing for them."""
    if isinstance(value, Mapping):
        if not value and path:
            yield dotted(path)
        for key, item in value.items():
            yield from _empty_dicts(item, (*path, str(key)))
    elif isinstance(value, list) and not stays(value):
        for i, item in enumerate(value):
            yield from _empty_dicts(item, (*path, i))


def _folders(hint: Folders | None) -> dict[str, str]:
    """accelerate's folders: first step of a path -> folder with a slash. {} for a plain checkpoint."""
    names = hint.names if hint else ()
    if len(names) != 2 or not is_pair(names) or any("/" in name for name in names):
        return {}
    optimizer = next(name for name in names if name.startswith("optim"))
    model = next(name for name in names if name != optimizer)
    return {"model": model + "/", "optimizer": optimizer + "/"}


class _DcpWriter:
    """Assigns each item to the file of a rank."""

    def __init__(self, wanted: Wanted, layout: Layout, folders: Mapping[str, str]) -> None:
        self.wanted = wanted
        self.folders = folders
        self.files = ItemFiles(wanted.tensors)
        self._cuts = Cuts(layout)
        # By the id of a cut: tensors of one shape and placement share the object, so their items are built once.
        self._items: dict[int, tuple[StoredItem, ...]] = {}

    def _folder(self, path: Path) -> str:
        # What is neither model nor optimizer goes into the model's folder; "" for a plain checkpoint.
        return self.folders.get(str(path[0]), next(iter(self.folders.values()), ""))

    def object(self, key: str, path: Path, value: Any) -> None:
        """Add an object item; tensors inside it (in a tuple) are stored unsharded in the same zip."""
        composer = TorchComposer()
        self.files.object(key, path, composer.file("", self._filled(value, composer)), self._folder(path))

    def _filled(self, value: Any, composer: TorchComposer) -> Any:
        if isinstance(value, NestingSlot):
            tensor = self.wanted.tensors[value.number]
            part = StoragePart(value.number, whole(tensor.shape), 0)
            return composer.tensor(tensor.shape, torch_dtype(tensor), [part])
        if isinstance(value, tuple):
            return tuple(self._filled(item, composer) for item in value)
        if isinstance(value, list):
            return [self._filled(item, composer) for item in value]
        if isinstance(value, Mapping):
            return {key: self._filled(item, composer) for key, item in value.items()}
        return value

    def tensor(self, key: str, path: Path, index: int) -> None:
        """Add a tensor: one item for each box, in the file of the rank that holds its first replica.

        Empty boxes are left out, except that an empty tensor has one.
        """
        shape = self.wanted.tensors[index].shape
        cut, first = self._cuts.of(index, shape)
        items = self._items.get(id(cut))
        if items is None:
            items = self._items[id(cut)] = _items_of(cut)
        self.files.tensor(key, path, shape, [TensorShare(index, items, first=first)], self._folder(path))

    def finished(self, keys: Sequence[str]) -> list[TargetFile]:
        """The files and their `.metadata`. keys: in the order of the metadata."""
        entries = [self.files.entries[key] for key in keys]
        out = self.files.finished()
        for folder in self.folders.values():
            below = [entry for entry in entries if self._folder(entry.path) == folder]
            if below:
                out.append(whole_file(folder + METADATA, pickled(below, folder)))
        return [*out, whole_file(METADATA, pickled(entries))]


def _items_of(cut: Cut) -> tuple[StoredItem, ...]:
    """The items of a tensor that is cut this way, each with the rank that writes it."""
    is_empty = 0 in cut.shape
    ranks: dict[Box, int] = {}
    for part in cut.parts:
        if part.replica == 0 and (part.box.numel or is_empty):
            ranks.setdefault(part.box, part.rank)
    if is_empty:  # one item is enough: all boxes of an empty tensor are empty
        ranks = {whole(cut.shape): next(iter(ranks.values()), 0)}
    return tuple([StoredItem(box, box.offset, box.shape, rank) for box, rank in ranks.items()])
