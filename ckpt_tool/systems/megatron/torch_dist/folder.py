"""The files of a torch_dist checkpoint: finds its folder, checks that the save was finished and `integrity.json` holds.

    iter_0000002/.metadata       location of each box of each tensor (`dcp_container.dcp_metadata`)
                 __R_S.distcp    rank R's file number S
                 common.pt       values that are no tensors; from core 0.19 on an item `common_state/shard_0_1` instead
                 metadata.json   {"sharded_backend": "torch_dist", "sharded_backend_version": 1, ...}, written last
                 integrity.json  {"algorithm": "sha256", "files": {name: hex}}, optional, core >= 0.19, written after it

The names show a finished save from a broken one: without metadata.json it was not finished. NeMo keeps the same files
in `weights/`, NeMo 1 in `model_weights/`, verl in `dist_ckpt/`, without the job's arguments. Source: NVIDIA/Megatron-LM
main of August 2026, `dist_checkpointing/core.py` (`CheckpointingConfig`), `serialization.py` (order of writing),
`validation.py` (`save_integrity_manifest`: every file directly in the folder but itself, SHA-256 in lower-case hex);
verl 2025 `utils/checkpoint/megatron_checkpoint_manager.py`.

Hashes: reading headers must not read 100 GB, so files up to `HASHED` bytes (.metadata, common.pt, small shards) are
hashed when the folder is opened, the rest where all values are read anyway (`ckpt verify`): the note says how many are
left.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ckpt_tool.core.catalog import Note
from ckpt_tool.core.faults import together
from ckpt_tool.core.missing import report_missing
from ckpt_tool.errors import CkptError, CorruptFile, Incomplete, InputError
from ckpt_tool.formats.dcp_container.dcp_items import DATA
from ckpt_tool.formats.dcp_container.dcp_metadata import MEGATRON_OBJECTS, METADATA, UNFINISHED
from ckpt_tool.storage.source import Tree, safe_relative
from ckpt_tool.storage.texts import strict_json
from ckpt_tool.systems.megatron.pointer import pointed

CONFIG = "metadata.json"
COMMON = "common.pt"
INTEGRITY = "integrity.json"
BACKEND = "E0303"
DAMAGED = "E2005"
HASHED = 16 << 20  # bytes of a file that is hashed when the folder is opened
# bytes
_CONFIG_LIMIT = 4096
_LIST_LIMIT = 64 << 20
_BLOCK = 4 << 20  # bytes of a read while hashing
JOB = "dist_ckpt/"  # verl's folder, next to `huggingface/` with the model's config
_FOLDERS = ("", "weights/", "model_weights/", JOB)
_METADATA_HEAD = 24 << 10  # bytes of .metadata in which a key of Megatron's is looked for
_STEP = re.compile(r"iter_\d{7,}/")
_HEX = re.compile(r"[0-9a-fA-F]{64}")


def find(tree: Tree) -> tuple[str, str] | None:
    """Return (folder with its slash, reason) of the checkpoint in `tree`, None if there is none. Reads at most 32
    KiB."""
    if tree.single is not None:
        return None
    for folder in (*_FOLDERS, *pointed(tree)):
        why = claims(tree, folder)
        if why:
            return folder, why
    return None


def claims(tree: Tree, folder: str) -> str:
    """Why the files in `folder` ("" or with a slash at its end) are Megatron's, "" if they are not."""
    names = _names(tree, folder)
    items = METADATA in names or any(DATA.fullmatch(name) for name in names)
    if CONFIG in names and b'"sharded_backend"' in tree.head(folder + CONFIG, _CONFIG_LIMIT):
        return f"{folder}{CONFIG} names a sharded backend"
    if COMMON in names and items:
        return f"{folder}{COMMON} next to .distcp files"
    if METADATA in names and CONFIG in names:  # a metadata.json that is damaged
        head = tree.head(folder + METADATA, _METADATA_HEAD)
        if any(word in head for word in MEGATRON_OBJECTS):
            return f"{folder}{METADATA} names Megatron's objects"
    return ""


def files(tree: Tree, folder: str) -> frozenset[str]:
    """The files of the checkpoint in `folder`; of a run's step, those of its other steps too."""
    found = set()
    for path in tree.listing():
        other, slash, name = path.rpartition("/")
        same = other + slash == folder or (_STEP.fullmatch(folder) and _STEP.fullmatch(other + slash))
        if same and (name in (METADATA, COMMON, CONFIG, INTEGRITY) or DATA.fullmatch(name)):
            found.add(path)
    return frozenset(found)


def _names(tree: Tree, folder: str) -> set[str]:
    return {
        path[len(folder) :] for path in tree.listing() if path.startswith(folder) and "/" not in path[len(folder) :]
    }


def check(tree: Tree, folder: str) -> None:
    """Raise Incomplete (E0385) for a save that was not finished, InputError (E0303) for another backend."""
    names = _names(tree, folder)
    for name, what in ((METADATA, "the list of its tensors"), (CONFIG, "which is written last")):
        if name not in names:
            fault = Incomplete(
                f"the save was not finished: there is no {name}, {what}",
                code=UNFINISHED,
                path=tree.display(folder),
                hint="take the last checkpoint that was finished, or copy the missing file from where the job wrote it",
            )
            if name == METADATA:
                raise fault
            report_missing(fault, files=[folder + name])
            return
    shown = tree.display(folder + CONFIG)
    config = strict_json.parse(tree.read_whole(folder + CONFIG, limit=1 << 20), path=shown)
    backend = config.get("sharded_backend") if isinstance(config, dict) else None
    if backend != "torch_dist":
        raise InputError(
            f"the backend is {str(backend)[:100]!r}, want 'torch_dist'",
            code=BACKEND,
            path=shown,
            place="/sharded_backend",
            hint="zarr checkpoints (core 0.7 and before) are not read: load and save them with core 0.14",
        )


def check_integrity(tree: Tree, folder: str) -> list[Note]:
    """Hold the files against `integrity.json`, if there is one.

    Raises CorruptFile E2005 (form, a hash that differs), Incomplete E0301 (a file that is not there), UnsafeInput E0410
    (a name that leaves the folder); all faults at once. Returns a note when large files were left for `verify`.
    """
    path = folder + INTEGRITY
    if not tree.exists(path):
        return []
    hashes = _hashes(tree, path)
    late = [name for name in hashes if tree.exists(folder + name) and tree.size(folder + name) > HASHED]
    faults = list(_faults(tree, folder, {name: hashes[name] for name in hashes if name not in late}))
    if faults and all(isinstance(fault, Incomplete) for fault in faults):
        report_missing(together(faults), files=[folder + name for name in hashes if not tree.exists(folder + name)])
    elif faults:
        raise together(faults)
    if not late:
        return []
    return [Note("N-integrity", f"{len(late)} large files of {INTEGRITY} were not hashed: ckpt verify does", path)]


def _hashes(tree: Tree, path: str) -> dict[str, str]:
    """File name -> SHA-256 in hex, as the manifest says."""
    shown = tree.display(path)
    manifest: Any = strict_json.parse(tree.read_whole(path, limit=_LIST_LIMIT), path=shown)
    files = manifest.get("files") if isinstance(manifest, dict) else None
    algorithm = manifest.get("algorithm", "sha256") if isinstance(manifest, dict) else None
    if algorithm != "sha256" or not isinstance(files, dict):
        raise CorruptFile(
            f"the manifest has algorithm {str(algorithm)[:40]!r} and files {type(files).__name__}, want 'sha256' "
            "and an object",
            code=DAMAGED,
            path=shown,
            hint="written by another version, or edited: remove it to read without it",
        )

    out = {}
    for name, value in files.items():
        safe_relative(name, named_in=shown, place=strict_json.pointer("files", name))
        if not isinstance(value, str) or not _HEX.fullmatch(value):
            raise CorruptFile(
                "a hash is no SHA-256 in hex",
                code=DAMAGED,
                path=shown,
                place=strict_json.pointer("files", name),
                hint="the manifest was edited or damaged: remove it to read without it",
            )
        out[name] = value.lower()

    return out


def _faults(tree: Tree, folder: str, hashes: dict[str, str]) -> Iterator[CkptError]:
    for name, want in hashes.items():
        path = folder + name
        if not tree.exists(path):
            yield Incomplete(
                f"{INTEGRITY} lists {name}, which is not there",
                code="E0301",
                path=tree.display(path),
                hint="copy the missing file from where the job wrote it",
            )
            continue
        have = sha256(tree, path)
        if have != want:
            yield CorruptFile(
                f"its SHA-256 is {have[:16]}..., {INTEGRITY} says {want[:16]}...",
                code=DAMAGED,
                path=tree.display(path),
                hint="the file is damaged or was changed after the save: get it again",
            )


def sha256(tree: Tree, path: str) -> str:
    """The file's SHA-256 in lower-case hex. Reads it whole, 4 MiB at a time."""
    import hashlib  # OpenSSL behind it takes longer to load than most checkpoints to inspect

    digest = hashlib.sha256()
    size = tree.size(path)
    for offset in range(0, size, _BLOCK):
        digest.update(tree.read(path, offset, min(_BLOCK, size - offset)))
    return digest.hexdigest()


def hashed(tree: Tree) -> frozenset[str]:
    """The files whose hash `integrity.json` states; none where there is no such file."""
    found = find(tree)
    if found is None or not tree.exists(found[0] + INTEGRITY):
        return frozenset()
    return frozenset(found[0] + name for name in _hashes(tree, found[0] + INTEGRITY))


def late_faults(tree: Tree) -> Iterator[CkptError]:
    """Every file too large to be hashed when the folder is opened that differs from `integrity.json`: for a verb that
    reads everything anyway. Nothing for a tree without one."""
    found = find(tree)
    if found is None or not tree.exists(found[0] + INTEGRITY):
        return
    folder = found[0]
    hashes = _hashes(tree, folder + INTEGRITY)
    late = {n: h for n, h in hashes.items() if tree.exists(folder + n) and tree.size(folder + n) > HASHED}
    yield from _faults(tree, folder, late)
