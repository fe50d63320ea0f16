"""Which folders of a tree are flex checkpoints, and whether their saves were finished: by file names alone.

    model_state/ optimizer_state/ master_weight/ [ema_state/]     the Trainer's folders, each a save of its own
    0.metadata, 0_0.distcp, 1_0.distcp                            a plain paddle.distributed.save_state_dict
    0.metadata, 0_0.safetensors, ...                              the same with safetensors=True

`R_N.distcp` is rank R's file of save N, `N.metadata` says what is where. Rules (PaddlePaddle 3.3.1 `flex_checkpoint/dcp/
{save,load}_state_dict.py`, `utils.py`): N is 0, or the highest N that lies there (the documentation says one more); a folder
with several saves is one that was written into again: the highest N is the newest, and what `load_merged_state_dict` takes.
`N.metadata.lock` lies there while the metadata is being written. `flex-ckpt.auto_generated.metadata` in a Hugging Face folder
is a cache that Paddle makes when it opens one: no save. Reads nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence, Set
from typing import NamedTuple

from ckpt_tool.core.catalog import Note
from ckpt_tool.errors import Incomplete, InconsistentCheckpoint, InputError

MODEL_FOLDER, OPTIMIZER_FOLDER, MASTER_FOLDER, EMA_FOLDER = (
    "model_state",
    "optimizer_state",
    "master_weight",
    "ema_state",
)
FOLDERS = (MODEL_FOLDER, OPTIMIZER_FOLDER, MASTER_FOLDER, EMA_FOLDER)
UNFINISHED, MIXED, OTHER_SAVE = "E1330", "E1331", "E1632"
METADATA = re.compile(r"(\d{1,9})\.metadata")
DATA = re.compile(r"(\d{1,9})_(\d{1,9})\.(distcp|safetensors)")
_LOCK = re.compile(r"(\d{1,9})\.metadata\.lock")


class Save(NamedTuple):
    """One save. folder: "" for the root, else with a slash at its end. unique: N. metadata: its file's name, None where there
    is none. data: the names of its data files, by rank. lock: a lock that lies beside it. older: other N with files."""

    folder: str
    unique: int
    metadata: str | None
    data: tuple[str, ...]
    lock: str | None = None
    older: tuple[int, ...] = ()

    @property
    def kind(self) -> str:
        """`model_state`, ..., or "" for a plain save at the root."""
        return self.folder.rstrip("/")


def find(listing: Iterable[str]) -> list[Save]:
    """The saves of a tree: the Trainer's folders in their order, or the plain save at the root; [] when there is neither."""
    names: dict[str, list[str]] = {}
    for path in listing:
        folder, slash, name = path.rpartition("/")
        if folder in FOLDERS or not folder:
            names.setdefault(folder + slash, []).append(name)
    trainer = [save for kind in FOLDERS if (save := _save(f"{kind}/", names.get(f"{kind}/", ())))]
    if trainer:
        return trainer
    plain = _save("", names.get("", ()))
    return [plain] if plain else []


def _save(folder: str, names: Sequence[str]) -> Save | None:
    """The newest save of a folder, None where nothing looks like one."""
    metadata = {int(found[1]): name for name in names if (found := METADATA.fullmatch(name))}
    locks = {int(found[1]): name for name in names if (found := _LOCK.fullmatch(name))}
    data: dict[int, list[tuple[int, str]]] = {}
    for name in names:
        found = DATA.fullmatch(name)
        if found and (found[3] == "distcp" or metadata or locks or _nothing_else(names)):
            data.setdefault(int(found[2]), []).append((int(found[1]), name))
    if not metadata and not locks and not data:
        return None
    unique = max({*metadata, *locks, *data})
    files = tuple(name for _, name in sorted(data.get(unique, [])))
    older = tuple(sorted({*metadata, *locks, *data} - {unique}))
    return Save(folder, unique, metadata.get(unique), files, locks.get(unique), older)


def _nothing_else(names: Sequence[str]) -> bool:
    """Are all safetensors files there a rank's? (A model of another system may have a file that is called so.)"""
    return all(DATA.fullmatch(name) for name in names if name.endswith((".safetensors", ".index.json")))


def files(saves: Sequence[Save], listing: Iterable[str]) -> frozenset[str]:
    """Everything in the saves' folders that is called as a file of theirs, older saves' too."""
    folders = {save.folder for save in saves}
    found = set()
    for path in listing:
        folder, slash, name = path.rpartition("/")
        if folder + slash in folders and any(kind.fullmatch(name) for kind in (METADATA, DATA, _LOCK)):
            found.add(path)
    return frozenset(found)


def why(saves: Sequence[Save]) -> str:
    """What was found, in words."""
    if saves[0].folder:
        return f"Paddle's folders {', '.join(save.folder for save in saves)}"
    return " and ".join(filter(None, (saves[0].metadata or saves[0].lock, *saves[0].data[:1])))


def check(saves: Sequence[Save], shown: str, root_names: Sequence[str], *, lenient: bool = False) -> list[Note]:
    """Raise Incomplete E1330 for a save that was not finished (an EMA without metadata aside: Paddle wrote such) or a folder
    that is not there, InputError E1331 for files of both kinds in a folder, or two checkpoints in one. shown: the root.
    lenient: take a Trainer's folders one by one."""
    notes: list[Note] = []
    if not lenient:
        _refuse_lost_folder({save.kind for save in saves}, shown)
    if saves[0].folder and any(METADATA.fullmatch(name) for name in root_names):
        raise InputError(
            f"two checkpoints in one folder: {saves[0].folder} and a plain save beside it", code=MIXED, path=shown,
            hint="pass a folder that holds one of them alone",
        )  # fmt: skip
    for save in saves:
        where = f"{shown.rstrip('/')}/{save.folder}".rstrip("/") if save.folder else shown
        if save.lock:
            raise Incomplete(
                f"save {save.unique} was not finished: {save.lock} lies there while the metadata is being written",
                code=UNFINISHED, path=f"{where}/{save.lock}",
                hint="wait until the job is done; if it died, take the checkpoint before",
            )  # fmt: skip
        if save.metadata is None and save.kind != EMA_FOLDER:
            raise Incomplete(
                f"save {save.unique} was not finished: {save.unique}.metadata is missing, which says where everything lies",
                code=UNFINISHED, path=f"{where}/{save.unique}.metadata",
                hint="fetch it from where the job wrote it, or take the checkpoint before",
            )  # fmt: skip
        kinds = {name.rpartition(".")[2] for name in save.data}
        if len(kinds) > 1:
            raise InputError(
                "files of both kinds, .distcp and .safetensors, in one save", code=MIXED, path=where,
                hint="they are of two saves: remove those of the older one",
            )  # fmt: skip
        if save.older:
            notes.append(Note(
                "N-several-saves", f"{len(save.older) + 1} saves in {save.folder or 'the folder'}: number {save.unique} is "
                f"the newest and is taken; {', '.join(map(str, save.older[:10]))} lie beside it", where,
            ))  # fmt: skip
    return notes


def refuse_other_save(save: Save, files: Iterable[str], shown: str) -> None:
    """Raise InconsistentCheckpoint E1632 for metadata that names data files of another save than its own number, though files
    of its own lie beside it. files: those that it names. shown: the metadata's path."""
    names = [name.rpartition("/")[2] for name in files]
    foreign = [name for name in names if (found := DATA.fullmatch(name)) and int(found[2]) != save.unique]
    if foreign and save.data:
        raise InconsistentCheckpoint(
            f"the metadata of save {save.unique} names files of another save: {foreign[0]}", code=OTHER_SAVE, path=shown,
            faults=foreign[1:50], hint="it was copied over that of its own save: fetch it again",
        )  # fmt: skip


def _refuse_lost_folder(kinds: Set[str], shown: str) -> None:
    """The Trainer writes a model alone, or with it both folders of the optimizer, however empty."""
    lost = [folder for folder in FOLDERS if folder != EMA_FOLDER and folder not in kinds]
    if lost and kinds - {"", FOLDERS[0]}:
        raise Incomplete(
            f"no save in {lost[0]}/, which the Trainer writes beside {', '.join(sorted(kinds))}", code=UNFINISHED,
            path=f"{shown.rstrip('/')}/{lost[0]}",
            hint="fetch the folder (a link in its place is followed with --follow-symlinks); --lenient takes those that are there",
        )  # fmt: skip
