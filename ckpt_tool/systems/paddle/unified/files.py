"""The files of a Paddle unified checkpoint: which they are, what their indexes state, and whether they hold it.

    model-00001-of-00002.safetensors     model.safetensors.index.json             peft_model-... for LoRA
    master_weights-...                   master_weights.safetensors.index.json
    optimizer-...                        optimizer.safetensors.index.json
    optimizer.tp00_pp00_shard01.safetensors, optimizer.tp00.safetensors_shard_0001
          a rank's own (ignore_merge_optimizer)
    .model_weight.done.3                 rank 3 finished writing its model (async_save)

A folder is ours if it has Paddle's optimizer or master weights, a LoRA of Paddle's, or model files whose header says
`"format": "np"`: Paddle's layout (one `model.safetensors` needs no index). A model alone that says `"pt"`, or nothing,
is in the Hugging Face layout and is a Hugging Face model. What claims a folder here is more specific than a claim on
its safetensors files alone.

    {"metadata": {"total_size": 78680},
     "weight_map": {"lm_head.weight/moment1_0": "optimizer-00001-of-00001.safetensors", ...},
     "master_weights": true}

An index is the authority on names and files, and its members next to `weight_map` have a meaning: `type` ("lora"),
`master_weights`, `ckpt_quant_stage` ("O1", "O2"), `quant_ckpt_resume_times`, `optim_shard_num`. An optimizer index
without `weight_map` means that ranks wrote files of their own (`ignore_merge_optimizer`), as Paddle's loader takes it.
`total_size` may be a float in old files (a bool counted an eighth of a byte). An empty `weight_map` is no fault: the
dict of the states was empty. Every header that an index names is read, and what is missing, foreign or there twice is
named at once. Two things are no fault: the scales of a quantised optimizer, which no index names, and the first moments
of stage O2, which it names though they are packed into the second.

    file        key                                  name, state
    model       model.norm.weight                    model.norm.weight, model
    masters     model.norm.weight                    model.norm.weight, master
    optimizer   model.norm.weight/moment1_0          model.norm.weight, exp_avg
    optimizer   model.norm.weight/beta1_pow_acc_0    model.norm.weight, beta1_pow_acc      (F32 [1])
    optimizer   model.norm.weight/anything_0         model.norm.weight, anything

A key is split at its last `/` (Paddle's structured names have none). Quantised moments:
`weight_schemes.paddle_states`.

Source: PaddleFormers 1.2.0 `utils/env.py` (names), `trainer/training_args.py` (`optimizer_name_suffix`: parts of degree
1 are left out), `trainer/unified_checkpoint/{async_handler,unified_checkpoint,utils,load_save_single_card}.py`
(markers; indexes of indent 4 in the order of the state dict, made before `quant_unified_optimizer` changes the keys;
`generate_base_static_name`: `FP32_MASTER` is no part of a key). Cost: two preads a file, 2 us and 200 bytes a tensor;
detection reads 4 KiB of one file at most.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from ckpt_tool.core.catalog import Note
from ckpt_tool.core.dtype import DType
from ckpt_tool.core.faults import read_each
from ckpt_tool.core.missing import report_missing
from ckpt_tool.core.tensor import EMA, MASTER, MODEL, TensorKey
from ckpt_tool.errors import CorruptFile, Incomplete, InconsistentCheckpoint
from ckpt_tool.formats.hub_folder.index import read_value
from ckpt_tool.storage.safetensors_files.safetensors_entries import warning_code
from ckpt_tool.storage.safetensors_files.safetensors_file import SafetensorsHeader, read_header
from ckpt_tool.storage.source import Tree
from ckpt_tool.systems.paddle.stored_names import KINDS, kind_of
from ckpt_tool.weight_schemes import paddle_states as quant

# -- keys --------------------------------------------------------------------------------------------------------------

NO_TYPE = "E1350"
_QUANTISED = {
    quant.FIRST8: "moment1_0",
    quant.SECOND8: "moment2_0",
    quant.PACKED: "moment2_0",
    quant.FIRST_SCALES: "moment1_0" + quant.SYMMETRIC,
    quant.SECOND_LOW: "moment2_0" + quant.LOW,
    quant.SECOND_HIGH: "moment2_0" + quant.HIGH,
}


def optimizer_key(key: str, dtype: DType, *, path: str) -> TensorKey:
    """Name and state of an optimizer file's key. Raises CorruptFile E1350 for a key without a type."""
    name, found, kind = key.rpartition("/")
    if not found or not name or not kind:
        raise CorruptFile(
            "an optimizer key without a type: want NAME/TYPE",
            code=NO_TYPE,
            path=path,
            key=key[:200],
            hint="the file holds something else than a Paddle optimizer: was a model file renamed?",
        )
    # Scales of a quantised moment have a suffix with @.
    if "@" in kind:
        for suffix in quant.SUFFIXES:
            if kind.endswith(suffix):
                base = kind.removesuffix(suffix)
                return TensorKey(name, KINDS.get(base, base.removesuffix("_0")) + suffix)
    state = KINDS.get(kind, kind.removesuffix("_0"))
    # A moment of 8 bits has Paddle's quantisation, which needs its scales to be read.
    if state == "exp_avg" and dtype.name == "I8":
        return TensorKey(name, quant.FIRST8)
    if state == "exp_avg_sq" and dtype.name in ("U8", "I8"):
        return TensorKey(name, quant.SECOND8 if dtype.name == "U8" else quant.PACKED)
    return TensorKey(name, state)


def file_key(key: TensorKey) -> str:
    """The key of a tensor in its file. Raises UsageError E1271 for a state whose name Paddle uses for another, E1606
    for one of a tensor without a name."""
    if key.state in (MODEL, MASTER, EMA):
        return key.name
    return f"{key.name}/{kind_of(key, _QUANTISED, '/')}"


# -- indexes -----------------------------------------------------------------------------------------------------------


class PaddleIndex(NamedTuple):
    """An index of a unified checkpoint."""

    path: str
    # tensor -> file, in the index's order; None where the optimizer was not merged
    weight_map: Mapping[str, str] | None
    total_size: int | None
    stated: Mapping[str, Any]  # the other members

    def files(self) -> dict[str, list[str]]:
        """File -> its tensors, in order of first mention."""
        out: dict[str, list[str]] = {}
        for name, file in (self.weight_map or {}).items():
            out.setdefault(file, []).append(name)
        return out

    @property
    def stage(self) -> str:
        """`O1` or `O2` for a quantised optimizer, else ""."""
        stated = self.stated.get("ckpt_quant_stage")
        return stated if stated in ("O1", "O2") else ""


AGAIN = "index and files come from two saves: fetch both again"


def two_saves(code: str, what: str, path: str, key: str, others: Iterable[str]) -> InconsistentCheckpoint:
    """The error about tensors `key` and `others`, of which an index and files contradict each other."""
    faults = [each[:200] for each in others]
    return InconsistentCheckpoint(what, code=code, path=path, key=key[:200], faults=faults, hint=AGAIN)


def read_index(tree: Tree, path: str, *, merged: bool = True) -> PaddleIndex:
    """The index at `path`. merged: must it have a `weight_map`?

    Raises CorruptFile (E0336 form, E0337 size, E0338 a value that is no text, and what JSON raises), UnsafeInput
    (E0410) for a file name that leaves the folder, InconsistentCheckpoint (E0387) for names that differ by case alone.
    """
    value = read_value(tree, path, lacking=not merged)
    stated = {key: item for key, item in value.items() if key not in ("weight_map", "metadata")}
    return PaddleIndex(path, value.get("weight_map"), _stated_total(value.get("metadata")), stated)


def _stated_total(metadata: Any) -> int | None:
    stated = metadata.get("total_size") if isinstance(metadata, dict) else None
    if isinstance(stated, bool) or not isinstance(stated, int | float) or abs(stated) >= 1 << 62:
        return None
    return int(stated)


def write_index(weight_map: Mapping[str, str], total_size: int, stated: Mapping[str, Any] | None = None) -> bytes:
    """The index as Paddle writes it. total_size: bytes. stated: the members after `weight_map`."""
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(weight_map), **(stated or {})}
    return json.dumps(index, indent=4).encode("ascii")


# -- which files -------------------------------------------------------------------------------------------------------

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
MODEL_STEM = "model"
PEFT_STEM = "peft_model"
OPTIMIZER_STEM = "optimizer"
MASTER_STEM = "master_weights"
EMA_STEM = "ckpt_ema"  # ours: Paddle's unified checkpoints have no place for averages
STEMS = (MODEL_STEM, PEFT_STEM, OPTIMIZER_STEM, MASTER_STEM, EMA_STEM)
MODEL_TYPE = "ckpt_model_type"  # in a header of ours, where no config.json says it
UNFINISHED = "E1351"
LOST_INDEX = "E1352"

_NUMBERED = re.compile(rf"({'|'.join(STEMS)})-\d{{1,7}}-of-\d{{1,7}}\.safetensors")
_RANK = re.compile(
    r"(optimizer|master_weights)(?:\.((?:(?:tp|pp|shard|moe)\d{2,4})(?:_(?:tp|pp|shard|moe)\d{2,4})*))?"
    r"\.safetensors(?:_shard_(\d{4}))?"
)
_MARKER = re.compile(r"\.(model|master|optimizer)_weight\.done\.(-?\d{1,6})")
_COORDINATE = re.compile(r"(tp|pp|shard|moe)(\d+)")
_HEAD = 4 << 10  # bytes
_NP = re.compile(
    rb'\{\s*"__metadata__"\s*:\s*\{[^}]*(?:"format"\s*:\s*"(?:np|pd)"|"' + MODEL_TYPE.encode() + rb'"\s*:)'
)
_JOB = re.compile(
    r"training_args\.bin|trainer_state\.(bin|json)|rng_state(_\d+)?\.pth|\.saving_info|async_save_info\.json"
)
_PLAIN = re.compile(r"(scheduler|scaler)\.pdparams")
SIGNALS = r"saved_signal_\d+|\.model_done|\.(model|master|optimizer)_weight\.done\.-?\d+"
_SIGNAL = re.compile(SIGNALS)


class UnifiedRankFile(NamedTuple):
    """A rank's own file."""

    path: str
    at: tuple[tuple[str, int], ...]  # (dim, coordinate) as the name has them
    part: int  # number behind the extension, 0 without


class UnifiedFiles(NamedTuple):
    """indexes, numbered: by stem. ranks: by stem, sorted."""

    indexes: Mapping[str, str]
    numbered: Mapping[str, list[str]]
    ranks: Mapping[str, list[UnifiedRankFile]]

    @property
    def stem(self) -> str:
        """`model`, or `peft_model` in a folder of LoRA weights."""
        return PEFT_STEM if PEFT_STEM in self.indexes or PEFT_STEM in self.numbered else MODEL_STEM


def rank_in(path: str) -> dict[str, int] | None:
    """Whose file it is; None for one of no rank."""
    found = _RANK.fullmatch(path)
    return {part[1]: int(part[2]) for part in _COORDINATE.finditer(found[2] or "")} if found else None


def classify(names: Iterable[str]) -> UnifiedFiles:
    """The files by what their names say."""
    indexes: dict[str, str] = {}
    numbered: dict[str, list[str]] = {}
    ranks: dict[str, list[UnifiedRankFile]] = {}
    for name in sorted(names):
        if name.endswith(INDEX_SUFFIX) and name.removesuffix(INDEX_SUFFIX) in STEMS:
            indexes[name.removesuffix(INDEX_SUFFIX)] = name
        elif found := _NUMBERED.fullmatch(name):
            numbered.setdefault(found[1], []).append(name)
        elif found := _RANK.fullmatch(name):
            at = tuple((part[1], int(part[2])) for part in _COORDINATE.finditer(found[2] or ""))
            ranks.setdefault(found[1], []).append(UnifiedRankFile(name, at, int(found[3] or 0)))
    return UnifiedFiles(indexes, numbered, ranks)


def why(tree: Tree) -> str | None:
    """Why the folder is a unified checkpoint, None where it is none."""
    names = tree.names()
    if tree.single is not None:
        return None
    files = classify(names)
    for stem in (OPTIMIZER_STEM, MASTER_STEM, PEFT_STEM):
        first = files.indexes.get(stem) or next(iter(files.numbered.get(stem, ())), None)
        if first is not None:
            return f"{first}, as Paddle's unified checkpoints have it"
        if files.ranks.get(stem):
            return f"{files.ranks[stem][0].path}, a rank's file of Paddle's (ignore_merge_optimizer)"
    whole = next((name for name in names if name.endswith(SUFFIX) and name.startswith(MODEL_STEM)), None)
    if whole is not None and says_paddle_layout(tree, whole):
        return f"{whole} says that it is in Paddle's layout, or of which model type"
    return None


def claimed(names: Iterable[str]) -> frozenset[str]:
    """The files of the checkpoint, by names: of a model and its LoRA the LoRA, of a whole file and numbered ones the
    latter."""
    names = set(names)
    found = classify(names)
    files = {file.path for ranks in found.ranks.values() for file in ranks}
    for stem in STEMS:
        if stem == MODEL_STEM and found.stem != MODEL_STEM:
            continue
        parts = {*found.numbered.get(stem, ()), *filter(None, (found.indexes.get(stem),))}
        files |= parts or {stem + SUFFIX} & names
    return frozenset(files)


def says_paddle_layout(tree: Tree, path: str) -> bool:
    """Does the file's header begin with metadata that says `np`, or a model type, as ours do? False for links and
    whatever is no safetensors file."""
    if tree.listing().get(path, -1) < 10:
        return False
    return _NP.match(tree.head(path, _HEAD)[8:]) is not None


def check_markers(tree: Tree, files: UnifiedFiles) -> None:
    """Raise Incomplete E1351 where `async_save` left marks of some ranks' or some parts' end, but not of all."""
    done: dict[str, set[int]] = {}
    for name in tree.names():
        if found := _MARKER.fullmatch(name):
            done.setdefault(found[1], set()).add(int(found[2]))

    if not done:
        return

    ranks: set[int] = set().union(*done.values())
    # Ranks are numbered from 0, so the highest implies all others. A lone -1 is no rank.
    if max(ranks) >= 0:
        ranks = set(range(max(ranks) + 1))
    parts = [
        part
        for part, stem in (("model", MODEL_STEM), ("optimizer", OPTIMIZER_STEM), ("master", MASTER_STEM))
        if stem in files.indexes or stem in files.ranks or (part == "model" and PEFT_STEM in files.indexes)
    ]
    missing = [f".{part}_weight.done.{rank}" for part in parts for rank in sorted(ranks - done.get(part, set()))]
    if missing:
        fault = Incomplete(
            f"an asynchronous save that did not finish: {len(missing)} marks are missing, the first {missing[0]}",
            code=UNFINISHED,
            path=tree.display(missing[0]),
            faults=missing[1:50],
            hint="wait until the job's writers are done, or take the checkpoint before; if its marks were only lost,"
            " remove the others (.*.done.*) too",
        )
        report_missing(fault, files=missing)


def check_indexes(tree: Tree, files: UnifiedFiles) -> None:
    """Raise Incomplete E1352 for numbered files whose index is gone."""
    for stem, paths in files.numbered.items():
        if stem not in files.indexes:
            raise Incomplete(
                f"{paths[0]} without {stem}{INDEX_SUFFIX}: the index says what belongs to the checkpoint",
                code=LOST_INDEX,
                path=tree.display(stem + INDEX_SUFFIX),
                hint="fetch the index from the source again",
            )


def notes_of(tree: Tree, taken: Iterable[str], sidefiles: Iterable[str]) -> list[Note]:
    """Notes on files that are not read: those of the job, those that no index names, and any others."""
    known = {*taken, *sidefiles}
    job = list[str]()
    stray = list[str]()
    other = list[str]()
    for name in tree.seen(tree.names()):
        if name in known or _SIGNAL.fullmatch(name) or _PLAIN.fullmatch(name):
            continue
        if _JOB.fullmatch(name):
            job.append(name)
        elif _NUMBERED.fullmatch(name) or _RANK.fullmatch(name):
            stray.append(name)
        elif not name.startswith("."):
            other.append(name)
    notes = []
    if job:
        notes.append(Note("W-job-files", f"pickles and records of the job, not opened, not copied: {_some(job)}"))
    if stray:
        notes.append(Note("W-stray", f"no index names these files, not read: {_some(stray)}"))
    if other:
        notes.append(Note("W-ignored", f"not part of the checkpoint, not read: {_some(other)}"))
    return notes


def _some(names: list[str]) -> str:
    return ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")


# -- files compared with their index -----------------------------------------------------------------------------------

MISSING_FILES = "E0380"
NOT_IN_FILE = "E0381"
NOT_IN_INDEX = "E0382"
TWICE = "E0383"


class IndexedFiles(NamedTuple):
    """What one index names."""

    listed: PaddleIndex
    headers: list[SafetensorsHeader]
    # tensor -> (header, row), in the index's order, scales of a quantised optimizer last
    rows: dict[str, tuple[SafetensorsHeader, int]]
    # the same tensors in other files: slices of sharding v2, else a fault
    again: dict[str, list[tuple[SafetensorsHeader, int]]]
    notes: list[Note]


def read_part(tree: Tree, index: PaddleIndex, *, lenient: bool) -> IndexedFiles:
    """Read the headers of every file that `index` names, and compare them with it.

    Raises Incomplete (E0380 files, E0381 tensors), InconsistentCheckpoint (E0383 a tensor in two files, E0382 one that
    the index does not name).
    """
    named = index.files()
    _refuse_missing(tree, index, named)
    there = [file for file in named if file in tree.listing()]
    headers = read_each(there, lambda file: read_header(tree, file, lenient=lenient))
    rows: dict[str, tuple[SafetensorsHeader, int]] = {}
    more: dict[str, tuple[SafetensorsHeader, int]] = {}
    again: dict[str, list[tuple[SafetensorsHeader, int]]] = {}
    strangers: dict[str, list[str]] = {}
    absent = list[tuple[str, str]]()
    notes = list[Note]()

    for header in headers:
        where = {name: row for row, name in enumerate(header.names)}
        for name in named[header.path]:
            if name in where:
                rows[name] = (header, where.pop(name))
            else:
                absent.append((name, header.path))
        scales = {name: row for name, row in where.items() if name.endswith(quant.SUFFIXES)}
        more |= {name: (header, row) for name, row in scales.items()}
        for name, row in where.items():
            if name in (index.weight_map or {}):
                again.setdefault(name, []).append((header, row))
        strangers[header.path] = [name for name in where if name not in scales and name not in again]

    _refuse_absent(tree, index, absent, rows, more)
    for file, unknown in strangers.items():
        notes += _strangers(tree, file, unknown, lenient=lenient)
    order = index.weight_map or {}
    rows = {name: rows[name] for name in order if name in rows} | more
    notes += _total(index, rows, again)
    notes += [Note(warning_code(warning), warning, header.path) for header in headers for warning in header.warnings]
    return IndexedFiles(index, headers, rows, again, notes)


def _refuse_missing(tree: Tree, index: PaddleIndex, named: Mapping[str, Sequence[str]]) -> None:
    listing = tree.listing()
    missing = [file for file in named if file not in listing]
    if missing:
        lost = sum(len(named[file]) for file in missing)
        fault = Incomplete(
            f"{len(missing)} of {len(named)} files are missing: {', '.join(missing[:20])}; they hold {lost} of"
            f" {len(index.weight_map or ())} tensors",
            code=MISSING_FILES,
            path=tree.display(index.path),
            faults=(f"missing: {file}" for file in missing[1:100]),
            hint="fetch the missing files into this folder; of a job on several machines, from all of them",
        )
        report_missing(
            fault,
            files={file: len(named[file]) for file in missing},
            tensors={TensorKey(name): None for file in missing for name in named[file]},
        )


def _strangers(tree: Tree, path: str, names: Sequence[str], *, lenient: bool) -> list[Note]:
    """Tensors of a file that its index does not know: an error, or a note with --lenient."""
    if not names:
        return []
    message = f"{len(names)} tensors are in the index's files, but not in the index; the first: {names[0][:200]}"
    if lenient:
        return [Note("W-extra-tensors", f"{message}; not read", path, names[0])]
    raise two_saves(NOT_IN_INDEX, message, tree.display(path), names[0], names[1:50])


def refuse_twice(tree: Tree, part: IndexedFiles) -> None:
    """Raise InconsistentCheckpoint E0383 for a tensor that is stored in two files."""
    for name, found in part.again.items():
        other = found[0][0].path
        what = f"tensor {name[:200]} is in {part.rows[name][0].path} and in {other}"
        raise two_saves(TWICE, what, tree.display(other), name, list(part.again)[1:50])


def _refuse_absent(
    tree: Tree,
    index: PaddleIndex,
    absent: list[tuple[str, str]],
    rows: Mapping[str, object],
    more: Mapping[str, object],
) -> None:
    """Tensors that the index names and no file holds, but for the first moments that O2 packs into the second."""
    lost = [
        (name, path)
        for name, path in absent
        if not (
            index.stage == "O2"
            and name.endswith("/moment1_0")
            and (name + quant.SYMMETRIC in more or name + quant.SYMMETRIC in rows)
            and name.removesuffix("1_0") + "2_0" in rows
        )
    ]
    if lost:
        name, path = lost[0]
        fault = Incomplete(
            f"{len(lost)} of {len(index.weight_map or ())} tensors of the index are not in their files; the first:"
            f" {name[:200]} not in {path}",
            code=NOT_IN_FILE,
            path=tree.display(path),
            key=name[:200],
            faults=(f"{name[:200]} not in {path}" for name, path in lost[1:100]),
            hint=AGAIN,
        )
        report_missing(fault, tensors={TensorKey(name): None for name, _ in lost})


def _total(
    index: PaddleIndex,
    rows: Mapping[str, tuple[SafetensorsHeader, int]],
    again: Mapping[str, Sequence[tuple[SafetensorsHeader, int]]],
) -> list[Note]:
    """A note if the index states another size than its tensors have.

    For a quantised optimizer it is the size before quantisation, so it is not compared.
    """
    if index.total_size is None or index.stage:
        return []
    actual = sum(header.kinds[row].nbytes for header, row in rows.values())
    actual += sum(header.kinds[row].nbytes for found in again.values() for header, row in found)
    bools = sum(prod(h.kinds[r].shape) for h, r in rows.values() if h.kinds[r].dtype.name == "BOOL")
    if index.total_size in (actual, actual - bools + bools // 8):
        return []
    message = f"the index states total_size {index.total_size}, the tensors have {actual} bytes"
    return [Note("W-total-size", message, index.path)]
