"""Which folders of a tree are flex checkpoints, whether their saves were finished, and what their keys mean: by names
alone.

    model_state/ optimizer_state/ master_weight/ [ema_state/]     the Trainer's folders, each a save of its own
    0.metadata, 0_0.distcp, 1_0.distcp                            a plain paddle.distributed.save_state_dict
    0.metadata, 0_0.safetensors, ...                              the same with safetensors=True

`R_N.distcp` is rank R's file of save N, `N.metadata` says what is where. Rules (PaddlePaddle 3.3.1
`flex_checkpoint/dcp/ {save,load}_state_dict.py`, `utils.py`): N is 0, or the highest N that is there (the
documentation says one more); a folder with several saves is one that was written into again: the highest N is the
newest, and what `load_merged_state_dict` takes. `N.metadata.lock` is there while the metadata is being written.
`flex-ckpt.auto_generated.metadata` in a Hugging Face folder is a cache that Paddle makes when it opens one: no save.

    model_state/       model.norm.weight                   model.norm.weight, model
    master_weight/     model.norm.weight.w_0               model.norm.weight, master
    optimizer_state/   model.norm.weight.moment1_0         model.norm.weight, exp_avg
    optimizer_state/   model.norm.weight.beta1_pow_acc_0   model.norm.weight, beta1_pow_acc     (F32 [1])
    optimizer_state/   model.norm.weight.anything_0        model.norm.weight, anything
    ema_state/         model.norm.weight[.w_0]             model.norm.weight, ema

In a plain `save_state_dict` folder nothing but the keys shows what is what: the accumulators' suffixes count there,
`.w_0` too unless it ends a static name (`linear_0.w_0`), and of a nested dict the first level where it is called as a
model or an optimizer is. Source: PaddlePaddle 3.3.1 `optimizer/adamw.py` (`sharded_state_dict`), PaddleFormers 1.2.0
`trainer/trainer.py` (`_save_flex_optimizer_state`), `trainer/utils/zero_cost_checkpoint.py` (EMA). Reads nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import NamedTuple

from ckpt_tool.core.catalog import Note
from ckpt_tool.core.tensor import EMA, MASTER, MODEL, Path, TensorKey
from ckpt_tool.errors import Incomplete, InconsistentCheckpoint, InputError
from ckpt_tool.formats.state_dict.tree import dotted
from ckpt_tool.formats.state_dict.words import MASTER_ROOTS, MODEL_ROOTS, OPTIMIZER_ROOTS, is_average
from ckpt_tool.systems.paddle.stored_names import KINDS, kind_of

# -- saves -------------------------------------------------------------------------------------------------------------

MODEL_FOLDER = "model_state"
OPTIMIZER_FOLDER = "optimizer_state"
MASTER_FOLDER = "master_weight"
EMA_FOLDER = "ema_state"
FOLDERS = (MODEL_FOLDER, OPTIMIZER_FOLDER, MASTER_FOLDER, EMA_FOLDER)
UNFINISHED = "E1330"
MIXED = "E1331"
OTHER_SAVE = "E1632"
METADATA = re.compile(r"(\d{1,9})\.metadata")
DATA = re.compile(r"(\d{1,9})_(\d{1,9})\.(distcp|safetensors)")
_LOCK = re.compile(r"(\d{1,9})\.metadata\.lock")


class Save(NamedTuple):
    """One save."""

    folder: str  # "" for the root, else with a slash at its end
    unique: int  # N
    metadata: str | None  # its file's name, None where there is none
    data: tuple[str, ...]  # the names of its data files, by rank
    lock: str | None = None  # name of its lock file, if there is one
    older: tuple[int, ...] = ()  # other N with files

    @property
    def kind(self) -> str:
        """`model_state`, ..., or "" for a plain save at the root."""
        return self.folder.rstrip("/")


def find(listing: Iterable[str]) -> list[Save]:
    """The flex saves of a tree: the Trainer's folders in their order, or the plain save at the root; [] if neither."""
    names: dict[str, list[str]] = {}
    for path in listing:
        folder, slash, name = path.rpartition("/")
        if folder in FOLDERS or not folder:
            names.setdefault(folder + slash, []).append(name)

    trainer = [_find_newest(f"{kind}/", names.get(f"{kind}/", ())) for kind in FOLDERS]
    saves = [save for save in trainer if save is not None]
    if saves:
        return saves
    # A plain save counts only without the Trainer's folders; both together are refused by `check`.
    plain = _find_newest("", names.get("", ()))
    return [plain] if plain else []


def _find_newest(folder: str, names: Sequence[str]) -> Save | None:
    """The newest save of a folder, None if there is none."""
    metadata = _by_number(METADATA, names)
    locks = _by_number(_LOCK, names)

    data: dict[int, list[tuple[int, str]]] = {}  # by the save's number: rank and name of each file
    for name in names:
        match = DATA.fullmatch(name)
        if match and (match[3] == "distcp" or metadata or locks or _nothing_else(names)):
            data.setdefault(int(match[2]), []).append((int(match[1]), name))

    if not metadata and not locks and not data:
        return None
    unique = max({*metadata, *locks, *data})
    files = tuple(name for _, name in sorted(data.get(unique, [])))
    older = tuple(sorted({*metadata, *locks, *data} - {unique}))
    return Save(folder, unique, metadata.get(unique), files, locks.get(unique), older)


def _nothing_else(names: Sequence[str]) -> bool:
    """Whether all safetensors files have names of ranks' files (another system's model may have one such name)."""
    return all(DATA.fullmatch(name) for name in names if name.endswith((".safetensors", ".index.json")))


def files(saves: Sequence[Save], listing: Iterable[str]) -> frozenset[str]:
    """All files in the saves' folders that have names of flex files, those of older saves too."""
    folders = {save.folder for save in saves}
    found = set()
    for path in listing:
        folder, slash, name = path.rpartition("/")
        if folder + slash in folders and any(kind.fullmatch(name) for kind in (METADATA, DATA, _LOCK)):
            found.add(path)
    return frozenset(found)


def why(saves: Sequence[Save]) -> str:
    """The reason for the detection, as text for messages."""
    if saves[0].folder:
        return f"Paddle's folders {', '.join(save.folder for save in saves)}"
    return " and ".join(filter(None, (saves[0].metadata or saves[0].lock, *saves[0].data[:1])))


def check(saves: Sequence[Save], shown: str, root_names: Sequence[str], *, lenient: bool = False) -> list[Note]:
    """Check that every save is complete; returns notes on older saves in the same folders.

    Args:
        saves: What `find` returned.
        shown: The root, for messages.
        root_names: File names at the root.
        lenient: Accept a subset of the Trainer's folders.

    Raises:
        Incomplete: E1330, a save that was not finished or a missing folder. An EMA without metadata is accepted,
            because Paddle has written such.
        InputError: E1331, files of both kinds in one folder, or two checkpoints.
    """
    notes: list[Note] = []
    if not lenient:
        _refuse_lost_folder({save.kind for save in saves}, shown)

    if saves[0].folder and any(METADATA.fullmatch(name) for name in root_names):
        raise InputError(
            f"two checkpoints in one folder: {saves[0].folder} and a plain save next to it",
            code=MIXED,
            path=shown,
            hint="pass a folder that holds one of them alone",
        )

    for save in saves:
        where = f"{shown.rstrip('/')}/{save.folder}".rstrip("/") if save.folder else shown
        if save.lock:
            raise Incomplete(
                f"save {save.unique} was not finished: {save.lock} is there while the metadata is being written",
                code=UNFINISHED,
                path=f"{where}/{save.lock}",
                hint="wait until the job is done; if it died, take the checkpoint before",
            )
        if save.metadata is None and save.kind != EMA_FOLDER:
            raise Incomplete(
                f"save {save.unique} was not finished: {save.unique}.metadata is missing, which says where "
                "each tensor is stored",
                code=UNFINISHED,
                path=f"{where}/{save.unique}.metadata",
                hint="fetch it from where the job wrote it, or take the checkpoint before",
            )
        kinds = {name.rpartition(".")[2] for name in save.data}
        if len(kinds) > 1:
            raise InputError(
                "files of both kinds, .distcp and .safetensors, in one save",
                code=MIXED,
                path=where,
                hint="they come from two saves: remove those of the older one",
            )
        if save.older:
            notes.append(
                Note(
                    "N-several-saves",
                    f"{len(save.older) + 1} saves in {save.folder or 'the folder'}: number {save.unique} is "
                    f"the newest and is taken; {', '.join(map(str, save.older[:10]))} are next to it",
                    where,
                )
            )

    return notes


def _by_number(pattern: re.Pattern[str], names: Iterable[str]) -> dict[int, str]:
    """The names that match, by the number in the pattern's first group."""
    matches = (pattern.fullmatch(name) for name in names)
    return {int(match[1]): match[0] for match in matches if match}


def refuse_other_save(save: Save, files: Iterable[str], shown: str) -> None:
    """Raise InconsistentCheckpoint E1632 for metadata that names files of another save although its own are there.

    files: those that it names. shown: the metadata's path.
    """
    matches = (DATA.fullmatch(file.rpartition("/")[2]) for file in files)
    foreign = [match[0] for match in matches if match and int(match[2]) != save.unique]
    if foreign and save.data:
        raise InconsistentCheckpoint(
            f"the metadata of save {save.unique} names files of another save: {foreign[0]}",
            code=OTHER_SAVE,
            path=shown,
            faults=foreign[1:50],
            hint="it was copied over that of its own save: fetch it again",
        )


def _refuse_lost_folder(kinds: Set[str], shown: str) -> None:
    """Raise Incomplete E1330 for a missing folder of the Trainer.

    It writes a model alone, or with it both folders of the optimizer, even if they are empty.
    """
    lost = [folder for folder in FOLDERS if folder != EMA_FOLDER and folder not in kinds]
    if lost and kinds - {"", FOLDERS[0]}:
        raise Incomplete(
            f"no save in {lost[0]}/, which the Trainer writes next to {', '.join(sorted(kinds))}",
            code=UNFINISHED,
            path=f"{shown.rstrip('/')}/{lost[0]}",
            hint="fetch the folder (a link in its place is followed with --follow-symlinks); --lenient takes those "
            "that are there",
        )


# -- keys --------------------------------------------------------------------------------------------------------------

MASTER_SUFFIX = ".w_0"
_STATIC = re.compile(r"(?:.*[./])?[A-Za-z]+(?:_[A-Za-z]+)*_\d+")  # linear_0, create_parameter_3, layer_norm_1


def trainer_key(kind: str, key: str) -> TensorKey:
    """The name and state of a key in the Trainer's folder `kind`."""
    if kind == MODEL_FOLDER:
        return TensorKey(key, MODEL)
    if kind in (MASTER_FOLDER, EMA_FOLDER):
        return TensorKey(key.removesuffix(MASTER_SUFFIX), MASTER if kind == MASTER_FOLDER else EMA)
    if key.endswith(MASTER_SUFFIX):
        return TensorKey(key.removesuffix(MASTER_SUFFIX), MASTER)
    name, dot, last = key.rpartition(".")
    if not dot or not name or not last:
        return TensorKey(key, MODEL)
    return TensorKey(name, KINDS.get(last, last.removesuffix("_0") or last))


class Plain(NamedTuple):
    """Keys of a plain folder."""

    keys: list[TensorKey]  # one for each (key, path) that was given
    roots: Mapping[str, str]  # role -> the first level of its path


def plain_keys(entries: Iterable[tuple[str, Path]]) -> Plain:
    """The names and states of a plain folder's keys. If two keys would get one name, all keep their own."""
    entries = list(entries)
    roots: dict[str, str] = {}
    keys = []
    for key, path in entries:
        role = _role(path)
        if role:
            roots.setdefault(role, path[0])  # type: ignore[arg-type]
            key = dotted(path[1:])
        keys.append(_plain_key(key, role))
    if len(set(keys)) != len(keys):
        return Plain([TensorKey(key) for key, _ in entries], {})
    return Plain(keys, roots)


def _role(path: Path) -> str:
    """The role of the first level of a nested path: `model`, `optimizer`, `master`, `ema`, or "" if it has none."""
    if len(path) < 2:
        return ""
    roles = ((MODEL, MODEL_ROOTS), ("optimizer", OPTIMIZER_ROOTS), (MASTER, MASTER_ROOTS))
    role = next((role for role, names in roles if path[0] in names), "")
    return role or (EMA if is_average(str(path[0])) else "")


def _plain_key(key: str, role: str) -> TensorKey:
    name, dot, last = key.rpartition(".")
    if role == EMA:
        return TensorKey(key.removesuffix(MASTER_SUFFIX), EMA)
    if role == MASTER:
        return TensorKey(key.removesuffix(MASTER_SUFFIX), MASTER)
    if dot and name and last in KINDS:
        return TensorKey(name, KINDS[last])
    if key.endswith(MASTER_SUFFIX) and not _STATIC.fullmatch(name):
        return TensorKey(name, MASTER)
    return TensorKey(key, MODEL)


def suffix_of(key: TensorKey) -> str:
    """The suffix of a tensor's key after its name: that of a master or accumulator, "" for the model.

    Raises UsageError E1271 for a state that would be read as another, E1606 for a state of a tensor without a name.
    """
    if key.state == MODEL:
        return ""
    if key.state == MASTER and key.name:
        return MASTER_SUFFIX
    return f".{kind_of(key, {}, '.', ('_0', 'w_0'))}"


def folder_of(key: TensorKey) -> str:
    """The Trainer's folder of a tensor."""
    return {MODEL: MODEL_FOLDER, MASTER: MASTER_FOLDER, EMA: EMA_FOLDER}.get(key.state, OPTIMIZER_FOLDER)
