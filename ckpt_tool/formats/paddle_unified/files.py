"""Which files of a folder are a Paddle unified checkpoint, by their names (and the first bytes of one of them).

    model-00001-of-00002.safetensors     model.safetensors.index.json             peft_model-... for LoRA
    master_weights-...                   master_weights.safetensors.index.json
    optimizer-...                        optimizer.safetensors.index.json
    optimizer.tp00_pp00_shard01.safetensors, optimizer.tp00.safetensors_shard_0001     a rank's own (ignore_merge_optimizer)
    .model_weight.done.3                 rank 3 finished writing its model (async_save)

The one idea: a folder is ours if it has Paddle's optimizer or master weights, a LoRA of Paddle's, or model files whose
header says `"format": "np"`: Paddle's layout (one `model.safetensors` needs no index). A model alone that says `"pt"`, or nothing, is in the Hugging Face layout and
is a Hugging Face model. What claims a folder here is more specific than a claim on its safetensors files alone.

Source: PaddleFormers 1.2.0 `utils/env.py` (names), `trainer/training_args.py` (`optimizer_name_suffix`: parts of degree 1
are left out), `trainer/unified_checkpoint/async_handler.py` (markers). Reads 4 KiB of one file at most.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ckpt_tool.core.catalog import Note
from ckpt_tool.errors import Incomplete
from ckpt_tool.storage.source import Tree

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
MODEL_STEM, PEFT_STEM, OPTIMIZER_STEM, MASTER_STEM = "model", "peft_model", "optimizer", "master_weights"
EMA_STEM = "ckpt_ema"  # ours: Paddle's unified checkpoints have no place for averages
STEMS = (MODEL_STEM, PEFT_STEM, OPTIMIZER_STEM, MASTER_STEM, EMA_STEM)
MODEL_TYPE = "ckpt_model_type"  # in a header of ours, where no config.json says it
UNFINISHED, LOST_INDEX = "E1351", "E1352"

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
_SIGNAL = re.compile(r"saved_signal_\d+|\.model_done|\.(model|master|optimizer)_weight\.done\.-?\d+")


class RankFile(NamedTuple):
    """A rank's own file. at: (dim, coordinate) as the name has them; part: number behind the extension, 0 without."""

    path: str
    at: tuple[tuple[str, int], ...]
    part: int


class UnifiedFiles(NamedTuple):
    """indexes, numbered: by stem. ranks: by stem, sorted."""

    indexes: Mapping[str, str]
    numbered: Mapping[str, list[str]]
    ranks: Mapping[str, list[RankFile]]

    @property
    def stem(self) -> str:
        """`model`, or `peft_model` in a folder of LoRA weights."""
        return PEFT_STEM if PEFT_STEM in self.indexes or PEFT_STEM in self.numbered else MODEL_STEM


def classify(names: Iterable[str]) -> UnifiedFiles:
    """The files by what their names say."""
    indexes: dict[str, str] = {}
    numbered: dict[str, list[str]] = {}
    ranks: dict[str, list[RankFile]] = {}
    for name in sorted(names):
        if name.endswith(INDEX_SUFFIX) and name.removesuffix(INDEX_SUFFIX) in STEMS:
            indexes[name.removesuffix(INDEX_SUFFIX)] = name
        elif found := _NUMBERED.fullmatch(name):
            numbered.setdefault(found[1], []).append(name)
        elif found := _RANK.fullmatch(name):
            at = tuple((part[1], int(part[2])) for part in _COORDINATE.finditer(found[2] or ""))
            ranks.setdefault(found[1], []).append(RankFile(name, at, int(found[3] or 0)))
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
    """The files of the checkpoint, by names: of a model and its LoRA the LoRA, of a whole file and numbered ones the latter."""
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
    """Does the file's header begin with metadata that says `np`, or a model type, as ours do? False for links and whatever
    is no safetensors file."""
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
    if max(ranks) >= 0:
        ranks = set(range(max(ranks) + 1))
    parts = [part for part, stem in (("model", MODEL_STEM), ("optimizer", OPTIMIZER_STEM), ("master", MASTER_STEM))
             if stem in files.indexes or stem in files.ranks or part == "model" and PEFT_STEM in files.indexes]  # fmt: skip
    missing = [f".{part}_weight.done.{rank}" for part in parts for rank in sorted(ranks - done.get(part, set()))]
    if missing:
        raise Incomplete(
            f"an asynchronous save that did not finish: {len(missing)} marks are missing, the first {missing[0]}",
            code=UNFINISHED, path=tree.display(missing[0]), faults=missing[1:50],
            hint="wait until the job's writers are done, or take the checkpoint before; if its marks were only lost,"
            " remove the others (.*.done.*) too",
        )  # fmt: skip


def check_indexes(tree: Tree, files: UnifiedFiles) -> None:
    """Raise Incomplete E1352 for numbered files whose index is gone."""
    for stem, paths in files.numbered.items():
        if stem not in files.indexes:
            raise Incomplete(
                f"{paths[0]} without {stem}{INDEX_SUFFIX}: the index says what belongs to the checkpoint", code=LOST_INDEX,
                path=tree.display(stem + INDEX_SUFFIX), hint="fetch the index from the source again",
            )  # fmt: skip


def notes_of(tree: Tree, taken: Iterable[str], sidefiles: Iterable[str]) -> list[Note]:
    """What lies beside and is not read: files of the job, files that no index names, anything else."""
    known = {*taken, *sidefiles}
    job, stray, other = list[str](), list[str](), list[str]()
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
