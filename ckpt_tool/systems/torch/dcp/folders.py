"""Which folders below a root are DCP saves, whether they are complete, and which of them are another system's.

    .metadata, __0_0.distcp, __1_0.distcp          one save
    __0.metadata, __1.metadata, __0_0.distcp ...   one save without collectives: a metadata file a rank
    pytorch_model_fsdp_0/, optimizer_0/            accelerate: model and optimizer, each a save of its own
    __0_0.distcp without any metadata              a save that was not finished: `.metadata` is written last

File names show that a folder is a DCP save; its keys show which system wrote it. Of other systems' keys these are
known:

    common_state/shard_0_1, rng_state/shard_0_2, ..._extra_state/shard_0_1   Megatron's torch_dist (core 0.12 and later)
    optimizer.param_to_group_meta.<name>.lr                                  Megatron-FSDP, `--ckpt-format fsdp_dtensor`
    args, checkpoint_version, model.module.<name>                            the same without its optimizer

Megatron-FSDP stores plain boxes of nested dicts, but splits a gated `linear_fc1.weight` into two tensors, `weight_w`
(gate) and `weight_v` (up), and its fp32 weights are the master weights: read as plain DCP it is a model with tensors
that no loader knows.

Sources: torch 2.13 `distributed/checkpoint/filesystem.py` (`_metadata_fn`, `DEFAULT_SUFFIX`, `_StoragePrefix`:
`__{rank}_`), accelerate 1.15 `utils/fsdp_utils.py`; NVIDIA/Megatron-LM core 0.19.1 `training/checkpointing.py`
(`preprocess_fsdp_dtensor_state_dict`), `core/transformer/fsdp_dtensor_checkpoint.py`,
`core/dist_checkpointing/mapping.py` (torch_dist's objects). Reads nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import ClassVar, NamedTuple

from ckpt_tool.core.hints import NamesHint
from ckpt_tool.core.missing import report_missing
from ckpt_tool.errors import Incomplete, UnknownFormat
from ckpt_tool.formats.dcp_container.dcp_items import DATA
from ckpt_tool.formats.dcp_container.dcp_metadata import (
    FSDP_MODEL,
    FSDP_OWN,
    MEGATRON_OBJECTS,
    METADATA,
    UNFINISHED,
)

SEVERAL = "E0392"
NOT_READ = "E1640"
DEEPER = "E1644"
_RANK_METADATA = re.compile(r"__(\d{1,9})\.metadata")
_MODEL = re.compile(r"(?:pytorch_)?model(?:_fsdp)?(?:_\d+)?|app")
_OPTIMIZER = re.compile(r"optim(?:izer)?(?:_\d+)?")
_JOB = {"args", "checkpoint_version"}
_MODULE = re.compile(FSDP_MODEL)
MARKER = "meta.pt"  # Lightning stores everything but the states in it, next to its FSDP saves


class DcpSave(NamedTuple):
    """One DCP save."""

    folder: str  # "" for the root, else with a slash at its end
    metadata: tuple[str, ...]  # its metadata files, none if it was not finished
    tmp: str | None = None  # a metadata file that was not yet renamed


class Folders(NamesHint):
    """The folders of the saves of a source that has several."""

    __slots__ = ()
    KEY: ClassVar[str] = "folders"


def find(listing: Iterable[str]) -> list[DcpSave]:
    """The DCP saves of a tree: the one at the root, or else those at the smallest depth below it; [] if none."""
    folders: dict[str, list[str]] = {}
    for path in listing:
        folder, slash, name = path.rpartition("/")
        folders.setdefault(folder + slash, []).append(name)
    found_saves = (_save(folder, names) for folder, names in folders.items())
    saves = [save for save in found_saves if save]
    if not saves:
        return []

    # accelerate's model and optimizer folders are at one depth; saves further below are not part of the checkpoint.
    nearest = min(save.folder.count("/") for save in saves)
    return sorted((save for save in saves if save.folder.count("/") == nearest), key=lambda save: save.folder)


def _save(folder: str, names: list[str]) -> DcpSave | None:
    have = set(names)
    ranks = sorted((int(match[1]), match[0]) for match in map(_RANK_METADATA.fullmatch, names) if match)
    tmp = next((name for name in sorted(names) if name.endswith(METADATA + ".tmp") and name[:1] in "._"), None)
    if METADATA in have:
        return DcpSave(folder, (METADATA,), tmp)
    if ranks:
        return DcpSave(folder, tuple(name for _, name in ranks), tmp)
    # Data without metadata is a save that was interrupted; `check` reports it.
    if tmp or any(DATA.fullmatch(name) for name in names):
        return DcpSave(folder, (), tmp)
    return None


def files(saves: Iterable[DcpSave], listing: Iterable[str]) -> frozenset[str]:
    """The files of the saves: their metadata, and every file in their folders that has the name of a data file."""
    folders = {save.folder for save in saves}
    named = {save.folder + name for save in saves for name in (*save.metadata, *filter(None, (save.tmp,)))}
    for path in listing:
        folder, slash, name = path.rpartition("/")
        if folder + slash in folders and DATA.fullmatch(name):
            named.add(path)
    return frozenset(named)


def why(saves: list[DcpSave]) -> str:
    """The reason for the detection, as text for `ckpt inspect` and messages."""
    if len(saves) > 1:
        return f"{len(saves)} DCP folders: {', '.join(save.folder.rstrip('/') for save in saves[:6])}"
    save = saves[0]
    what = " and ".join(save.metadata[:2]) or (save.tmp or "__*_*.distcp files without .metadata")
    return f"{what} in {save.folder.rstrip('/')}/" if save.folder else what


def check(saves: list[DcpSave], shown: str) -> None:
    """Raise Incomplete (E0385) for a save that was not finished, UnknownFormat (E0392) for folders that are not one
    checkpoint. shown: the root, for messages."""
    for save in saves:
        where = f"{shown.rstrip('/')}/{save.folder}".rstrip("/") if save.folder else shown
        if save.tmp or not save.metadata:
            found = f"{save.tmp} is there" if save.tmp else "there is no .metadata"
            raise Incomplete(
                f"the save was not finished: {found}, and .metadata is written last",
                code=UNFINISHED,
                path=where,
                hint="take the last checkpoint that was finished, or wait until this one is",
            )
    names = [save.folder.rstrip("/").rpartition("/")[2] for save in saves]
    if len(saves) > 1 and not is_pair(names):
        whole = [save.folder.rstrip("/") for save in saves]
        raise UnknownFormat(
            f"the folder holds {len(saves)} DCP checkpoints: {', '.join(whole[:6])}",
            code=SEVERAL,
            path=shown,
            hint=f"pass one of them, such as {shown.rstrip('/')}/{whole[-1]}",
        )


def is_pair(names: Sequence[str]) -> bool:
    """Whether the folder names are those of one model and one optimizer, at most one each (accelerate's layout)."""
    models = [name for name in names if _MODEL.fullmatch(name)]
    optimizers = [name for name in names if _OPTIMIZER.fullmatch(name)]
    return len(names) == len(models) + len(optimizers) and len(models) <= 1 and len(optimizers) <= 1


def refuse(tensors: Iterable[str], objects: Iterable[str], shown: str, *, finished: bool) -> None:
    """Raise for a save whose keys have another system's meaning: Incomplete E0385 for Megatron's torch_dist that lacks
    its metadata.json (with it, another format claims the folder, but from there alone: UnknownFormat E1644),
    UnknownFormat E1640 for Megatron-FSDP.

    tensors, objects: the keys of one `.metadata`. shown: its folder. finished: has that folder a metadata.json?
    """
    objects = set(objects)

    # Megatron's torch_dist is DCP underneath; only its sharded objects' names differ from plain DCP.
    if any(word.decode() in key for key in objects for word in MEGATRON_OBJECTS):
        if finished:
            raise UnknownFormat(
                "the checkpoint, a torch_dist of Megatron, is in a folder below the one that was given",
                code=DEEPER,
                path=shown,
                hint=f"pass its own folder: {shown.rstrip('/')}",
            )
        fault = Incomplete(
            "a Megatron save that was not finished: there is no metadata.json, which is written last",
            code=UNFINISHED,
            path=shown,
            hint="take the last checkpoint that was finished, or copy the file from where the job wrote it",
        )
        report_missing(fault, files=["metadata.json"])
        return

    # A Megatron-FSDP save without its optimizer has only the job's objects and `model.module.` names to show it.
    has_own_keys = any(key.startswith(FSDP_OWN) for key in (*objects, *tensors))
    if has_own_keys or (objects >= _JOB and any(map(_MODULE.match, tensors))):
        raise UnknownFormat(
            "a Megatron-FSDP checkpoint (fsdp_dtensor), no plain DCP",
            code=NOT_READ,
            path=shown,
            hint="pass its own folder, or --from megatron-fsdp; --from dcp reads it as stored, a gated fc1 in halves",
        )
