"""A delta on disk: a folder as slime publishes it (`weight_v000002`) and SGLang's `/pull_weights` applies it.

Specification
-------------
`model-NNNNN-of-TTTTT.safetensors`, numbered from 00000, none where nothing changed, and `model.safetensors.index.json`:

    {"metadata": {"version": "000002", "base_version": "000001", "delta_encoding": "xor",
                  "compression_format": "zstd", "checksum_format": "xxh3-128"},
     "weight_map": {"model.norm.weight": "model-00000-of-00001.safetensors"}}

Each changed tensor is `U8 [n]` under its own name: one zstd frame (`encoding` says of what). Shape and dtype are the
base's. `__metadata__` of its file: name -> digest of the bytes of the whole new tensor, in hex. A version is applied to
its base version alone; version 0 is the model that a job began with.
Source: slime 624b824a8 `utils/disk_delta.py`, `update_weight_from_disk_delta.py`; its patch of SGLang,
`srt/weight_sync/local_checkpoint.py`, which reads every safetensors file of the folder, whatever the index says.

ckpt adds three keys, which those readers ignore: `unchanged`, next to `weight_map`: name -> digest of each tensor that
equals the base's, so that any tensor reveals a wrong base; `archive` (`Archive`), for a step's files; and `base`, the
path from the delta's folder to its base's, by which `ckpt prune` knows that the base is needed (`deltas.dependents`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ckpt_tool.core.bounds import numeral
from ckpt_tool.core.tensor import LogicalTensor, TensorKey, simple_tensor
from ckpt_tool.errors import CorruptFile, InconsistentCheckpoint, UsageError
from ckpt_tool.formats.hub_folder.index import DELTA, read_value
from ckpt_tool.formats.hub_folder.model_files import INDEX_SUFFIX, STEM, SUFFIX
from ckpt_tool.storage.safetensors_files.safetensors_file import read_header
from ckpt_tool.storage.source import Tree

INDEX = STEM + INDEX_SUFFIX
ENCODINGS = ("xor", "overwrite")
CHECKSUMS = {"xxh3-128": 32, "blake3": 64, "adler32": 8}  # name -> hex digits
COMPRESSION = "zstd"
INDEX_FAULT = "E2608"
CHAIN = "E2609"
NO_DELTA = "E2610"
_DIGITS = frozenset("0123456789abcdef")


class ArchivedRange(NamedTuple):
    """Bytes [offset, offset + nbytes) of a step's file are those of the entry `name` from byte `begin` on."""

    offset: int
    nbytes: int
    name: str
    begin: int


class Archive(NamedTuple):
    """How the files of a step are put together from entries, byte for byte. An entry is its pieces end to end."""

    format: str  # the checkpoint format of the step
    # path -> (size, its pieces in order, without gaps)
    files: Mapping[str, tuple[int, tuple[ArchivedRange, ...]]]
    whole: frozenset[str]  # entries without a counterpart in the base: their frames are changes to zeros

    def to_json(self) -> dict[str, Any]:
        """The archive as it is written into a delta's index."""
        files: dict[str, list[Any]] = {}
        for path, (size, pieces) in self.files.items():
            files[path] = [size, [[piece.nbytes, piece.name] for piece in pieces]]
        return {"format": self.format, "files": files, "whole": sorted(self.whole)}


@dataclass(frozen=True, slots=True)
class Delta:
    """A delta, as its index and headers describe it."""

    tree: Tree
    version: int
    base_version: int
    encoding: str
    checksum: str
    frames: Mapping[str, LogicalTensor]  # name -> the compressed bytes as a tensor U8 [n]
    digests: Mapping[str, str]  # of the complete new tensors, unchanged ones included
    archive: Archive | None = None

    @property
    def label(self) -> str:
        """The delta in words, for messages."""
        return f"version {self.version} on version {self.base_version}"

    def about(self) -> dict[str, Any]:
        """The delta's entry in a document."""
        return {
            "version": self.version,
            "base_version": self.base_version,
            "encoding": self.encoding,
            "compression": COMPRESSION,
            "checksum": self.checksum,
            "changed": len(self.frames),
            "unchanged": len(self.digests) - len(self.frames),
            **({"archive": self.archive.format} if self.archive else {}),
        }


# -- reading ----------------------------------------------------------------------------------------------------------


def is_delta(tree: Tree) -> bool:
    """Does the folder have an index that declares a delta? False if the index can't be read."""
    if tree.single is not None or not tree.exists(INDEX):
        return False
    try:
        value = read_value(tree, INDEX)
    except CorruptFile:
        return False
    return isinstance(value.get("metadata"), Mapping) and DELTA in value["metadata"]


def read_delta(tree: Tree) -> Delta:
    """The delta in a folder, from its index and headers.

    Raises UsageError E2610 for a folder that is none, CorruptFile E2608 and what reading a header raises.
    """
    if not is_delta(tree):
        raise UsageError(
            "no delta: there is no index that names an encoding",
            code=NO_DELTA,
            path=tree.display(),
            hint="pass a folder that ckpt delta or slime wrote (weight_v000001); a whole version needs no patch",
        )
    value = read_value(tree, INDEX)
    metadata: Mapping[str, Any] = value["metadata"]
    encoding = _one_of(tree, metadata, DELTA, ENCODINGS)
    checksum = _one_of(tree, metadata, "checksum_format", tuple(CHECKSUMS))
    _one_of(tree, metadata, "compression_format", (COMPRESSION,))
    version, base = (_version(tree, metadata, key) for key in ("version", "base_version"))
    if base >= version:
        raise _fault(tree, f"version {version} builds on version {base}", "metadata", "base_version")
    frames, digests = _frames(tree, value["weight_map"], checksum)
    unchanged = value.get("unchanged", {})
    if type(unchanged) is not dict or any(name in frames for name in unchanged):
        raise _fault(tree, "unchanged is no object, or names a tensor that has changed", "unchanged")
    for name, text in unchanged.items():
        digests[name] = _digest(tree, text, checksum, "unchanged", name)
    archive = _archive(tree, value["archive"], digests) if "archive" in value else None
    return Delta(tree, version, base, encoding, checksum, frames, digests, archive)


def delta_files(tree: Tree) -> list[str] | None:
    """The files of the delta in a folder, None if the folder has no delta. Raises as `read_delta`."""
    if not is_delta(tree):
        return None
    frames = read_delta(tree).frames.values()
    return [INDEX, *dict.fromkeys(chunk.array.file for tensor in frames for chunk in tensor.chunks)]


def _frames(
    tree: Tree, weight_map: Mapping[str, str], checksum: str
) -> tuple[dict[str, LogicalTensor], dict[str, str]]:
    """The frames and the digests of changed tensors, from the headers of the files that the index names."""
    files = dict.fromkeys(weight_map.values())
    stray = [name for name in tree.listing() if name.endswith(SUFFIX) and "/" not in name and name not in files]
    if stray:
        raise _fault(tree, f"{stray[0]} is next to the files of the index, and SGLang would apply it too", "weight_map")
    frames = dict[str, LogicalTensor]()
    digests = dict[str, str]()
    for file in files:
        header = read_header(tree, file)
        for row, name in enumerate(header.names):
            array = header.stored(row)
            if weight_map.get(name) != file:
                raise _fault(tree, f"{file} holds {name[:200]}, which the index has elsewhere", "weight_map")
            if array.dtype.name != "U8" or len(array.shape) != 1 or not array.numel:
                raise _fault(
                    tree, f"{name[:200]} is {array.dtype.name} {list(array.shape)}, want bytes: U8 [n]", "weight_map"
                )
            frames[name] = simple_tensor(TensorKey(name), array)
            digests[name] = _digest(tree, header.metadata.get(name), checksum, "weight_map", name)
    absent = [name for name in weight_map if name not in frames]
    if absent:
        raise _fault(tree, f"{weight_map[absent[0]]} does not hold {absent[0][:200]}", "weight_map")
    return frames, digests


def _archive(tree: Tree, value: Any, digests: Mapping[str, str]) -> Archive:
    """The part of the index that says how a step's files are put together. It is untrusted, so it is checked for
    contradictions."""
    try:
        files: dict[str, tuple[int, list[tuple[int, str]]]] = {}
        for path, (size, pieces) in value["files"].items():
            files[path] = (int(size), [(int(nbytes), str(name)) for nbytes, name in pieces])
        kind = str(value["format"])
        whole_files = frozenset(map(str, value["whole"]))
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise _fault(tree, "it does not say how files are put together", "archive") from e

    placed = dict[str, tuple[int, tuple[ArchivedRange, ...]]]()
    sizes = dict[str, int]()
    for path, (size, pieces) in files.items():
        bad = ""
        position = 0
        laid = list[ArchivedRange]()
        for nbytes, name in pieces:
            if nbytes < 1 or name not in digests:
                bad = bad or f"piece {name[:200]} of {nbytes} bytes"
            laid.append(ArchivedRange(position, nbytes, name, sizes.get(name, 0)))
            sizes[name] = sizes.get(name, 0) + nbytes
            position += nbytes
        if bad or position != size:
            raise _fault(
                tree, f"{path[:200]} can't be put together: {bad or f'{position} of {size} bytes'}", "archive", "files"
            )
        placed[path] = (size, tuple(laid))

    if set(sizes) != set(digests) or not whole_files <= set(digests):
        raise _fault(tree, "its files and the index name other entries", "archive")
    return Archive(kind, placed, whole_files)


def _one_of(tree: Tree, metadata: Mapping[str, Any], key: str, known: Sequence[str]) -> str:
    """The value of a key that has to be one of `known`. Raises CorruptFile E2608."""
    if metadata.get(key) not in known:
        raise _fault(tree, f"{key} is {str(metadata.get(key))[:100]!r}, want {' or '.join(known)}", "metadata", key)
    return str(metadata[key])


def _version(tree: Tree, metadata: Mapping[str, Any], key: str) -> int:
    """The number of a version, which the index has as text. Raises CorruptFile E2608."""
    text = metadata.get(key)
    if not isinstance(text, str) or not numeral(text):
        raise _fault(tree, f"{key} is {str(text)[:100]!r}, want a number of six digits, as text", "metadata", key)
    return int(text)


def _digest(tree: Tree, text: Any, checksum: str, *place: str) -> str:
    """The text, if it is a digest of this kind. Raises CorruptFile E2608."""
    if not isinstance(text, str) or len(text) != CHECKSUMS[checksum] or not set(text) <= _DIGITS:
        raise _fault(tree, f"{place[-1][:200]} has no {checksum} digest: {str(text)[:80]!r}", *place)
    return text


def _fault(tree: Tree, message: str, *place: str) -> CorruptFile:
    """The error E2608. place: the keys that lead to the fault in the index."""
    return CorruptFile(
        f"the delta can't be read: {message}",
        code=INDEX_FAULT,
        path=tree.display(INDEX),
        place="/" + "/".join(word[:200] for word in place),
        hint="copy the whole folder again from where it was published; it can't be mended",
    )


# -- chains -----------------------------------------------------------------------------------------------------------


def check_chain(deltas: Sequence[Delta]) -> None:
    """Raise InconsistentCheckpoint E2609 unless each delta builds on the one before it, and all have the same kind."""
    for before, after in zip(deltas, deltas[1:], strict=False):
        if after.base_version != before.version:
            raise InconsistentCheckpoint(
                f"{after.label} does not follow {before.label}",
                code=CHAIN,
                path=after.tree.display(),
                hint="give every delta from the base's version on, in their order: ckpt inspect says which each is",
            )
        if (after.archive is None) != (before.archive is None):
            raise InconsistentCheckpoint(
                "one is a delta of a model, the other one of a step's files",
                code=CHAIN,
                path=after.tree.display(),
                hint="a chain has one kind: all made with --dedup, or none",
            )


# -- writing ----------------------------------------------------------------------------------------------------------


def file_names(count: int) -> list[str]:
    """The names of `count` files, numbered from 0 as slime does."""
    return [f"{STEM}-{number:05d}-of-{count:05d}{SUFFIX}" for number in range(count)]


def index_of(
    about: tuple[int, int, str, str],
    weight_map: Mapping[str, str],
    unchanged: Mapping[str, str],
    archive: Archive | None = None,
    base_folder: str = "",
) -> bytes:
    """The text of the index. about: (version, base version, encoding, checksum). base_folder: the path from the delta's
    folder to its base's, "" if there is none."""
    version, base, encoding, checksum = about
    metadata = {
        "version": f"{version:06d}",
        "base_version": f"{base:06d}",
        DELTA: encoding,
        "compression_format": COMPRESSION,
        "checksum_format": checksum,
    }
    value: dict[str, Any] = {"metadata": metadata, "weight_map": dict(weight_map)}
    if base_folder:
        value["base"] = base_folder
    if unchanged:
        value["unchanged"] = dict(unchanged)
    if archive is not None:
        value["archive"] = archive.to_json()
    return json.dumps(value, separators=(",", ":")).encode("ascii")
