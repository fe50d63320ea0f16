"""`sharded`: one plain safetensors file a state and rank, and an index. The tool's own format, made to be read by others.

The idea: any training checkpoint laid open. Each rank's file of a state holds the boxes that the rank holds, under the
plain logical names; its header says whose they are and where they belong; `ckpt.index.json`, written last, says what
the whole is. A 4 x 6 tensor `w` on tp 2, cut along dim 0, with its moment:

    model.tp00.safetensors      w: rows 0-1       __metadata__: rank {"tp":0}, boxes {"w":{"offset":[0,0],"shape":[4,6]}}
    model.tp01.safetensors      w: rows 2-3                     rank {"tp":1}, boxes {"w":{"offset":[2,0],"shape":[4,6]}}
    exp_avg.tp00.safetensors    w: rows 0-1 of the moment, named `w` like its parameter
    exp_avg.tp01.safetensors
    ckpt.index.json

Specification, version 1 (ours; the container is safetensors as of `safetensors` 0.8):

* File names are `STATE.LABEL.safetensors`; LABEL is the rank's coordinates in the order tp cp pp ep etp dp, two digits
  at least, only mesh dims larger than 1 (`tp01_dp00`); without any, `STATE.safetensors`. STATE is the state's name with
  every UTF-8 byte outside `A-Z a-z 0-9 _ -` as `%XX`, so no state can leave the folder or pose as a label.
* A rank that holds nothing of a state has no file of it. Every rank keeps its own copy of what is replicated. A box
  without elements of a tensor that has some is not written.
* `__metadata__` (strings): `format` "pt" (torch tools look for it), `ckpt_format` "sharded", `ckpt_version` "1", `state`,
  `save` (the save's id, the same in every file and the index), and as compact JSON `mesh` {dim: size}, `rank` {dim:
  coordinate} and `boxes` {name: {"offset": [...], "shape": [...], "box": [...]}}: where the array's first element lies in
  the logical tensor, and the logical tensor's shape, in elements. `box` is there only when the array is padded: the
  extents, from the array's first element, that hold values; the rest is zeros.
* `ckpt.index.json`: `mesh`; `files` with path, size in bytes, state, rank and a hash of the boxes; `tensors` by state and
  name with dtype, shape, digest, the number of their placement, and `path` where the source nested them; `placements`:
  `shard` [[tensor dim, [mesh dims, major first]], ...], `at` {mesh dim: coordinate}, `padded` and `uneven` tensor dims
  with their `granules` [[tensor dim, elements], ...]; `fallbacks` {requested, used, reason, better, tensors}; `extras` and
  `source.hints` in the JSON form of `core.extras`; `source.format`; `sidefiles`; `save`; `schema_version`.
* Hashes are the 32 hex digits of BLAKE2b-128 over UTF-8 text. Canonical JSON has sorted keys, no spaces, ASCII. A file's
  `boxes` in the index: of the metadata's `boxes`, followed by the canonical JSON of the sorted [[name, dtype, shape], ...]
  of its arrays. `save`: of the canonical JSON of [mesh, extras, {path: boxes}].
* A digest of 32 zeros or 32 `-` means that it was not computed.

Reading costs the index and every header, and holds each against the other: a file that is missing, of another size, of
another save or with other boxes than the index says is named, all such files at once. Values are not read here.

What it does not do: C128 has no name in safetensors and is refused; nothing is compressed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from ckpt_tool.core.catalog import Catalog
from ckpt_tool.core.dtype import SAFETENSORS_NAMES, DType
from ckpt_tool.core.extras import to_json
from ckpt_tool.core.layout import Held, Layout, Placement, held
from ckpt_tool.core.mesh import DIMS
from ckpt_tool.core.target import Patch, Target, TargetArray, TargetFile, Wanted
from ckpt_tool.errors import UsageError
from ckpt_tool.formats.base import Evidence, Holds
from ckpt_tool.formats.sharded_index import (
    INDEX,
    ORIGIN,
    VERSION,
    FileEntry,
    Index,
    TensorEntry,
    boxes_hash,
    dumps,
    fallbacks_of,
    file_name,
    index_text,
    save_id,
)
from ckpt_tool.formats.sharded_read import read_catalog
from ckpt_tool.storage.safetensors_file import build_header
from ckpt_tool.storage.source import Tree

_DIM = f"(?:{'|'.join(DIMS)})[0-9]{{2,}}"
_RANK_FILE = re.compile(rf"[A-Za-z0-9_%-]+\.{_DIM}(?:_{_DIM})*\.safetensors")
_INDEX_START = re.compile(rb'\s*\{\s*"ckpt_format"\s*:\s*"sharded"')
_HEADER_STARTS = (b'{"__metadata__":{"boxes":"{', b'{"__metadata__":{"ckpt_format":"sharded"')


class _Part(NamedTuple):
    """What a rank's file holds of one tensor: number `tensor` of the wanted ones."""

    tensor: int
    held: Held


class _RankFile(NamedTuple):
    """One file laid out, but for the save's id in its header."""

    state: str
    rank: dict[str, int]
    parts: list[_Part]


class Sharded:
    """The format object; see the module's docstring."""

    name = "sharded"
    holds = Holds(
        mesh=("tp", "pp", "ep", "etp", "dp", "cp"), replicas=True, zero=3, dialect="keep", dtypes=frozenset({"C128"})
    )

    def detect(self, tree: Tree) -> Evidence | None:
        names = tree.names()
        if INDEX in names:
            return Evidence(f"{INDEX} says so") if _INDEX_START.match(_head(tree, INDEX)) else None
        marked = next((name for name in names if _RANK_FILE.fullmatch(name)), None)
        if marked is not None and _head(tree, marked)[8:].startswith(_HEADER_STARTS):
            return Evidence(f"{marked} is one rank's file, though {INDEX} is missing")
        return None

    def read(self, tree: Tree, options: Mapping[str, object]) -> Catalog:
        """The catalog. Raises what `sharded_read.read_catalog` raises."""
        return read_catalog(tree, lenient=bool(options.get("lenient")))

    def target(self, wanted: Wanted, layout: Layout) -> Target:
        """Raises UsageError: E0245 for what safetensors or JSON can't hold, E0246 for names that collide or are too
        long."""
        _check_tensors(wanted)
        files = _lay_out(wanted, layout)
        _check_names(wanted, files)
        mesh, extras = layout.mesh, _plain(wanted.extras, "extras")
        boxes = {path: dumps(_boxes(wanted, file)) for path, file in files.items()}
        rows = {path: _rows(wanted, file) for path, file in files.items()}
        hashes = {path: boxes_hash(boxes[path], ((n, d.name, s) for n, d, s in rows[path])) for path in files}
        common = {
            "format": "pt", "ckpt_format": "sharded", "ckpt_version": str(VERSION), "mesh": dumps(mesh.to_json()),
            "save": save_id(mesh, extras, hashes),
        }  # fmt: skip
        out, entries = [], []
        for path, file in files.items():
            own = {"state": file.state, "rank": dumps(file.rank), "boxes": boxes[path]}
            head, offsets, size = build_header(rows[path], common | own)
            arrays = tuple(
                TargetArray(part.tensor, part.held.box, offset, _padded(part.held))
                for part, offset in zip(file.parts, offsets, strict=True)
            )
            out.append(TargetFile(path, size, ((0, head),), arrays))
            entries.append(FileEntry(path, size, file.state, file.rank, hashes[path]))
        out.extend(TargetFile(path, size, copy_of=path) for path, size in wanted.sidefiles)
        out.append(_index_file(wanted, layout, extras, entries))
        return Target(self.name, tuple(out))


FORMAT = Sharded()


def _head(tree: Tree, path: str) -> bytes:
    """The first bytes, none where the name is no regular file."""
    return tree.head(path, 64) if tree.listing()[path] > 0 else b""


def _lay_out(wanted: Wanted, layout: Layout) -> dict[str, _RankFile]:
    """The files by name, sorted."""
    mesh = layout.mesh
    seen: dict[tuple[Placement, tuple[int, ...]], tuple[Held, ...]] = {}  # layers repeat: decide once a case
    names: dict[tuple[str, str], str] = {}
    files: dict[str, _RankFile] = {}
    for number, (item, placement) in enumerate(zip(wanted.tensors, layout.placements, strict=True)):
        case = (placement, item.shape)
        if case not in seen:
            seen[case] = tuple(each for each in held(item.shape, placement, mesh) if _holds_something(each, item.shape))
        for each in seen[case]:
            label = (item.key.state, mesh.label(each.coords))
            if label not in names:
                names[label] = file_name(item.key.state, mesh, each.coords)
                files[names[label]] = _RankFile(item.key.state, each.coords, [])
            files[names[label]].parts.append(_Part(number, each))
    return dict(sorted(files.items()))


def _holds_something(each: Held, shape: tuple[int, ...]) -> bool:
    """False for an empty box of a tensor that is not empty, unless padding fills it."""
    return 0 not in each.shape or 0 in shape


def _padded(each: Held) -> tuple[int, ...] | None:
    return each.shape if each.shape != each.box.shape else None


def _boxes(wanted: Wanted, file: _RankFile) -> dict[str, dict[str, list[int]]]:
    """`boxes` of the file's metadata."""
    out = {}
    for number, each in file.parts:
        item = wanted.tensors[number]
        box = {"offset": list(each.box.offset), "shape": list(item.shape)}
        if _padded(each):
            box["box"] = list(each.box.shape)
        out[item.key.name] = box
    return out


def _rows(wanted: Wanted, file: _RankFile) -> list[tuple[str, DType, tuple[int, ...]]]:
    """(name, dtype, stored shape) of the file's arrays."""
    tensors = wanted.tensors
    return [(tensors[number].key.name, tensors[number].dtype, each.shape) for number, each in file.parts]


def _index_file(wanted: Wanted, layout: Layout, extras: object, files: list[FileEntry]) -> TargetFile:
    """`ckpt.index.json` with its holes for the digests."""
    cuts = [replace(placement, choices=()) for placement in layout.placements]
    numbers = {cut: number for number, cut in enumerate(sorted(set(cuts), key=repr))}
    hints = {name: value for name, value in wanted.hints.items() if name != ORIGIN}
    index = Index(
        mesh=layout.mesh,
        files=tuple(files),
        tensors={
            item.key: TensorEntry(item.dtype, item.shape, numbers[cut], item.path)
            for item, cut in zip(wanted.tensors, cuts, strict=True)
        },
        placements=tuple(numbers),
        fallbacks=fallbacks_of([item.key for item in wanted.tensors], layout),
        extras=extras,
        source_format=str(wanted.hints.get(ORIGIN, wanted.source_format)),
        hints=_plain(hints, "hints"),
        sidefiles=tuple(path for path, _ in wanted.sidefiles),
    )
    text, holes = index_text(index)
    patches = tuple(Patch(holes[item.key], "digest", number) for number, item in enumerate(wanted.tensors))
    return TargetFile(INDEX, len(text), ((0, text),), patches=patches)


# -- what can't be held -------------------------------------------------------------------------------------------


def _plain(values: Mapping[str, Any], what: str) -> Any:
    """The JSON form. Raises UsageError E0245 where strict JSON can't hold it."""
    out = to_json(dict(values))
    try:
        json.dumps(out, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as e:
        raise UsageError(
            f"the {what} hold a string that is no Unicode text ({e.reason})", code="E0245",
            hint="leave the extras behind: --drop extras",
        ) from e  # fmt: skip
    return out


def _check_tensors(wanted: Wanted) -> None:
    """Every tensor that safetensors has no dtype for, at once."""
    faults = [
        (str(item.key), f"safetensors has no dtype {item.dtype.name}")
        for item in wanted.tensors
        if item.dtype.name not in SAFETENSORS_NAMES
    ]
    if faults:
        raise UsageError(
            faults[0][1], code="E0245", key=faults[0][0], faults=[f"{key}: {why}" for key, why in faults[1:]],
            hint="give another type with --dtype, drop the tensor with --remove-keys, or choose another format",
        )  # fmt: skip


def _check_names(wanted: Wanted, files: Mapping[str, _RankFile]) -> None:
    """Names must fit a file system and differ by more than case; side files may not bear one of ours."""
    taken = {INDEX.casefold(): INDEX}
    for path in (*files, *(path for path, _ in wanted.sidefiles)):
        if len(path.rsplit("/", 1)[-1].encode("utf-8", "surrogateescape")) > 255:
            raise UsageError(
                f"the file name {path[:60]!r}... has more than 255 bytes",
                code="E0246",
                hint="a state has a very long name",
            )
        if path.casefold() in taken:
            raise UsageError(
                f"two files of the output would be {taken[path.casefold()]!r} and {path!r}", code="E0246", path=path,
                hint="rename the side file, or leave the state behind with --state",
            )  # fmt: skip
        taken[path.casefold()] = path
