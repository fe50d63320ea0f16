"""`sharded`: one plain safetensors file a state and rank, and an index. The tool's own format, made to be read by
others.

The idea: any training checkpoint laid open. Each rank's file of a state holds the boxes that the rank holds, under the
plain logical names; its header says whose they are and where they belong; `ckpt.index.json`, written last, says what
the whole is. A 4 x 6 tensor `w` on tp 2, cut along dim 0, with its moment:

    model.tp00.safetensors      w: rows 0-1      __metadata__: rank {"tp":0}, boxes {"w":{"offset":[0,0],"shape":[4,6]}}
    model.tp01.safetensors      w: rows 2-3                    rank {"tp":1}, boxes {"w":{"offset":[2,0],"shape":[4,6]}}
    exp_avg.tp00.safetensors    w: rows 0-1 of the moment, named `w` like its parameter
    exp_avg.tp01.safetensors
    ckpt.index.json

Specification, version 1 (ours; the container is safetensors as of `safetensors` 0.8):

* File names are `STATE.LABEL.safetensors`; LABEL is the rank's coordinates in the order tp cp pp ep etp dp, two digits
  at least, only mesh dims larger than 1 (`tp01_dp00`); without any, `STATE.safetensors`. STATE is the state's name with
  every UTF-8 byte outside `A-Z a-z 0-9 _ -` as `%XX`, so no state can leave the folder or pose as a label.
* A rank that holds nothing of a state has no file of it. Every rank keeps its own copy of what is replicated. A box
  without elements of a tensor that has some is not written.
* `__metadata__` (strings): `format` "pt" (torch tools look for it), `ckpt_format` "sharded", `ckpt_version` "1",
  `state`, `save` (the save's id, the same in every file and the index), and as compact JSON `mesh` {dim: size}, `rank`
  {dim: coordinate} and `boxes` {name: {"offset": [...], "shape": [...], "box": [...]}}: where the array's first element
  lies in the logical tensor, and the logical tensor's shape, in elements. `box` is there only when the array is padded:
  the extents, from the array's first element, that hold values; the rest is zeros.
* `ckpt.index.json`: `mesh`; `files` with path, size in bytes, state, rank and a hash of the boxes; `tensors` by state
  and name with dtype, shape, digest, the number of their placement, and `path` where the source nested them;
  `placements`: `shard` [[tensor dim, [mesh dims, major first]], ...], `at` {mesh dim: coordinate}, `padded` and
  `uneven` tensor dims with their `granules` [[tensor dim, elements], ...]; `fallbacks` {requested, used, reason,
  better, tensors}; `extras` and `source.hints` in the JSON form of `core.extras`; `source.format`; `sidefiles`; `save`;
  `schema_version`.
* Hashes are the 32 hex digits of BLAKE2b-128 over UTF-8 text. Canonical JSON has sorted keys, no spaces, ASCII. A
  file's `boxes` in the index: of the metadata's `boxes`, followed by the canonical JSON of the sorted [[name, dtype,
  shape], ...] of its arrays. `save`: of the canonical JSON of [mesh, extras, {path: boxes}].
* A digest of 32 zeros or 32 `-` means that it was not computed.

Reading costs the index and every header, and holds each against the other: a file that is missing, of another size, of
another save or with other boxes than the index says is named, all such files at once. Values are not read here.

What it does not do: C128 has no name in safetensors and is refused; nothing is compressed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ckpt_tool.core.catalog import Catalog
from ckpt_tool.core.mesh import DIMS
from ckpt_tool.formats.base import AS_IS, PLACED, Evidence, Holds, ReadOptions, Specificity
from ckpt_tool.storage.source import Tree
from ckpt_tool.systems.ckpt.sharded.index import INDEX
from ckpt_tool.systems.ckpt.sharded.read import read_catalog

if TYPE_CHECKING:  # reading needs none of these
    from ckpt_tool.core.layout import Layout
    from ckpt_tool.core.target import Target, Wanted

_DIM = f"(?:{'|'.join(DIMS)})[0-9]{{2,}}"
_COORDINATE = re.compile(rf"[._]({'|'.join(DIMS)})([0-9]{{2,}})")
_RANK_FILE = re.compile(rf"[A-Za-z0-9_%-]+\.{_DIM}(?:_{_DIM})*\.safetensors")
_FILE = re.compile(r"[A-Za-z0-9_%-]+\.safetensors")  # of a save on one rank
_INDEX_START = re.compile(rb'\s*\{\s*"ckpt_format"\s*:\s*"sharded"')
_HEADER_STARTS = (b'{"__metadata__":{"boxes":"{', b'{"__metadata__":{"ckpt_format":"sharded"')


class Sharded:
    """The format object; see the module's docstring."""

    name = "sharded"
    holds = Holds(
        mesh=("tp", "pp", "ep", "dp", "cp"),
        replicas=True,
        zero=3,
        dialect="keep",
        uses_options=PLACED,
        dtypes=frozenset({"C128"}),
        safetensors=True,
        lone_shards=True,
    )

    def detect(self, tree: Tree) -> Evidence | None:
        """By what the index says; without one that does, by the header of a rank's file."""
        names = tree.names()
        stated = INDEX in names and _INDEX_START.match(_head(tree, INDEX)) is not None
        ranked = [name for name in names if _RANK_FILE.fullmatch(name)]
        files = ranked or [name for name in names if _FILE.fullmatch(name)] if INDEX in names else ranked
        if stated:
            return Evidence(f"{INDEX} says so", Specificity.SIGNED, frozenset((INDEX, *files)))
        if not files or not _head(tree, files[0])[8:].startswith(_HEADER_STARTS):
            return None
        why = f"{files[0]} is one rank's file, though {INDEX} is {'damaged' if INDEX in names else 'missing'}"
        return Evidence(why, Specificity.SIGNED, frozenset(files))

    def read(self, tree: Tree, options: ReadOptions = AS_IS) -> Catalog:
        """The catalog. Raises what `ckpt.sharded.read.read_catalog` raises."""
        return read_catalog(tree, lenient=options.lenient)

    def rank_of(self, path: str, mesh: Mapping[str, int]) -> Mapping[str, int] | None:
        """The coordinates of the name."""
        return {dim: int(at) for dim, at in _COORDINATE.findall(path)} if _RANK_FILE.fullmatch(path) else None

    def target(self, wanted: Wanted, layout: Layout) -> Target:
        """Raises UsageError: E0245 for what safetensors or JSON can't hold, E0246 for names that collide or are too
        long."""
        from ckpt_tool.systems.ckpt.sharded.target import sharded_target

        return sharded_target(wanted, layout)


FORMAT = Sharded()


def _head(tree: Tree, path: str) -> bytes:
    """The first bytes, none where the name is no regular file."""
    return tree.head(path, 64) if tree.listing()[path] > 0 else b""
