"""`toy`: a made-up format of two ranks, each with half of the rows of every tensor. The template of a format.

To begin a system of your own: copy `tests/formats/template_system` to `ckpt_tool/systems/SYSTEM`, give the rows in its
`__init__.py` and the `FORMAT` here their names, and put checkpoints that the real system wrote under `fixtures/NAME`,
each CASE with its values beside it in `CASE.truth.safetensors` (keys `STATE/NAME`). A format of a system that exists is
one more folder and one more row. Nothing else names either. This docstring is the specification: what the files are,
and which release, file and function of the system says so.

    w = (3, 4), F32:   rank-0.toy  {"extras": {}, "tensors": [{"name": "w", "offset": [0, 0], "extent": [2, 4], ...}]}
                       rank-1.toy  {"extras": {}, "tensors": [{"name": "w", "offset": [2, 0], "extent": [1, 4], ...}]}

Specification, version 1.0 (ours):

* Files `rank-0.toy` and `rank-1.toy`: the head's length in bytes (8, little-endian), the head (JSON), the values.
* Head: `extras`, in the JSON form of `core.extras`, the same in both; `tensors`, a row for each that the rank holds.
* Row: `name`, `state`, `dtype` (as safetensors calls it), `shape` of the whole tensor, `offset` and `extent` of the
  rank's box of it, in elements, and `at`, where its values lie: row-major, in bytes from the end of the head.
* Rank 0 has the first half of the rows, one more where they are odd in number, and all of a tensor without dims.

Reading costs the two heads. What it does not do: dtypes of less than a byte, whose rows may end inside one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ckpt_tool.core.box import Box, whole
from ckpt_tool.core.catalog import Catalog
from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.core.extras import from_json, to_json
from ckpt_tool.core.layout import Layout, block
from ckpt_tool.core.mesh import Mesh
from ckpt_tool.core.target import Target, TargetArray, TargetFile, Wanted
from ckpt_tool.core.tensor import Chunk, LogicalTensor, TensorKey
from ckpt_tool.errors import CorruptFile, Incomplete, UnknownFormat
from ckpt_tool.formats.base import AS_IS, Evidence, Holds, ReadOptions, Specificity
from ckpt_tool.storage.records import plain_array
from ckpt_tool.storage.source import Tree
from ckpt_tool.storage.texts.strict_json import parse

FILES = ("rank-0.toy", "rank-1.toy")
HEAD_LIMIT = 100_000_000  # bytes: a number in a file is held against a bound before it is believed


class Toy:
    """The format object: see `formats.base.Format`, and `Holds` for all that a format can say of itself."""

    name = "toy"
    holds = Holds(dtypes=frozenset({"F4", "F6_E2M3", "F6_E3M2"}), uses_options=frozenset({"toy-comment"}))

    def detect(self, tree: Tree) -> Evidence | None:
        """By names that no other system gives."""
        files = [name for name in tree.names() if name in FILES]
        return Evidence(f"files of ranks, {files[0]}", Specificity.OWN, frozenset(files)) if files else None

    def read(self, tree: Tree, options: ReadOptions = AS_IS) -> Catalog:
        """The catalog, from the heads alone. Raises UnknownFormat E0393, Incomplete E0302 for a rank that is missing,
        CorruptFile E0378 for a head that is none, E0311 for values beyond the end of a file."""
        missing = [name for name in FILES if name not in tree.names()]
        if missing:
            kind, code = (Incomplete, "E0302") if len(missing) == 1 else (UnknownFormat, "E0393")
            hint = "fetch the file, or pass the folder that holds both"
            raise kind(f"{missing[0]} is missing", code=code, path=tree.display(), hint=hint)
        tensors: dict[TensorKey, LogicalTensor] = {}
        extras: Any = {}
        for file in FILES:
            head, values = _head(tree, file)
            try:
                extras = from_json(head["extras"])
                for row in head["tensors"]:
                    key = TensorKey(row["name"], row["state"])
                    shape = tuple(row["shape"])
                    dtype = DTYPES[row["dtype"]]
                    box = Box(tuple(row["offset"]), tuple(row["extent"]))
                    array = plain_array(tree, file, values + row["at"], dtype, box.shape)
                    known = tensors.get(key, LogicalTensor(key, shape, dtype, ()))
                    chunk = Chunk(box, array, whole(box.shape))
                    tensors[key] = LogicalTensor(key, shape, dtype, (*known.chunks, chunk))
            except (KeyError, TypeError, ValueError) as e:
                message = f"a row of the head is malformed: {type(e).__name__} {e}"
                raise CorruptFile(message, code="E0378", path=tree.display(file), hint="fetch the file again") from e
        return Catalog(self.name, tensors, extras, Mesh.of(tp=2), FILES)

    def target(self, wanted: Wanted, layout: Layout) -> Target:
        """Both files, and copies of the source's side files. Raises nothing: `holds` has said what has no place."""
        copies = [TargetFile(path, size, copy_of=path) for path, size in wanted.sidefiles]
        return Target(self.name, (*(_rank_file(wanted, rank) for rank in range(len(FILES))), *copies))


FORMAT = Toy()


def _head(tree: Tree, file: str) -> tuple[Mapping[str, Any], int]:
    """A file's head, and where its values begin, in bytes."""
    length = int.from_bytes(tree.read(file, 0, 8), "little")
    head = parse(tree.read(file, 8, min(length, HEAD_LIMIT)), path=tree.display(file), offset=8)
    if not isinstance(head, dict):
        raise CorruptFile("the head is no JSON object", code="E0378", path=tree.display(file), offset=8)
    return head, 8 + length


def _rank_file(wanted: Wanted, rank: int) -> TargetFile:
    """The file of one rank: its head, and where each of its boxes goes."""
    rows: list[dict[str, Any]] = []
    boxes: list[tuple[int, Box, int]] = []  # (number of the wanted tensor, its box, bytes from the end of the head)
    end = 0
    for number, tensor in enumerate(wanted.tensors):
        first, count = block(tensor.shape[0], len(FILES), rank) if tensor.shape else (0, 0)
        box = Box((first, *(0 for _ in tensor.shape[1:])), (count, *tensor.shape[1:])) if tensor.shape else whole(())
        if rank and not count:
            continue  # rank 0 has all of it
        row = {"name": tensor.key.name, "state": tensor.key.state, "dtype": tensor.dtype.name, "shape": tensor.shape}
        rows.append({**row, "offset": box.offset, "extent": box.shape, "at": end})
        boxes.append((number, box, end))
        end += tensor.dtype.nbytes(box.numel)
    text = json.dumps({"extras": to_json(wanted.extras), "tensors": rows}).encode()
    start = 8 + len(text)
    arrays = [TargetArray(number, box, start + at) for number, box, at in boxes]
    return TargetFile(FILES[rank], start + end, ((0, len(text).to_bytes(8, "little") + text),), arrays)
