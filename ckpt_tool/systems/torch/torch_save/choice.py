"""Which files of a path are one torch checkpoint: by names and first bytes, never by extension alone.

    training.pt                                     one file, whatever it is called: a zip, or the stream before 1.6
    pytorch_model.bin.index.json + its .bin files   Hugging Face, sharded
    pytorch_model-0000i-of-0000n.bin                the same without its index
    pytorch_model.bin, or the only torch file of a folder
    model_world_size_4_rank_{0..3}.pt, optim_..., extra_state_...   a file a rank (`systems.torch.torch_save.ranks`)
    model_final.rank_{0..3}.pth                     the same, a rank's whole state in one file

A file that is recognised by its content alone counts only if no other file of the folder may hold tensors: no
safetensors, no `.distcp`, no name of a shard. What accelerate and the Trainer put next to a model (`training_args.bin`,
`optimizer.pt`, `scheduler.bin`, ...) is not the model; a note reports it. Cost: the listing and a few bytes of at most
`LOOKED_AT` files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ckpt_tool.core.catalog import Note
from ckpt_tool.core.missing import report_missing
from ckpt_tool.errors import CkptError, Incomplete, InconsistentCheckpoint, StorageError
from ckpt_tool.formats.adapters.lone import CONFIG
from ckpt_tool.formats.base import Evidence, Specificity
from ckpt_tool.storage.magic import NPZ, what_is
from ckpt_tool.storage.safetensors_files.safetensors_file import looks_like_header
from ckpt_tool.storage.source import Tree
from ckpt_tool.storage.torch_files.torch_stream import is_stream, is_tar

INDEX_SUFFIX = ".bin.index.json"
WHOLE = "pytorch_model.bin"
ONLY = "the only torch file"
WITHOUT_INDEX = "files"  # of `--prefer`
MISSING = "E0380"
MIXED = "E0384"
LOOKED_AT = 200  # files
HEAD = 512  # bytes
_END = 4096  # bytes of a file's end
_TORCH_NAMES = (".pt", ".pth", ".bin", ".ckpt", ".pt2", ".tar")
_NUMBERED = re.compile(r"(.+)-(\d{1,7})-of-(\d{1,7})\.(?:bin|pt|pth)")
# Files of accelerate and the Trainer: torch files too, but not the model.
_BESIDE = re.compile(
    r"(training_args\.bin|optimizer(_\d+)?\.(pt|bin)|scheduler(_\d+)?\.(pt|bin)|scaler\.pt|sampler(_\d+)?\.bin|"
    r"rng_state.*\.pth|random_states_\d+\.pkl|custom_checkpoint_\d+\.pkl)"
)
_OF_META = re.compile(r"consolidated\.\d+\.pth")
_OTHERS = (".safetensors", ".distcp", ".metadata", ".safetensors.index.json")
# Shards of other formats that are also torch files (Meta, Megatron, DeepSpeed): one alone is not a model.
_PART = re.compile(
    r"consolidated\.\d+\.pth|mp_rank_\d|zero_pp_rank_|.*_rank_\d+.*\.pt|.*_optim_states\.pt|layer_\d+-model"
)


# verl's names, and the same without the number of ranks
_OF_RANK = re.compile(
    r"(model|optim|optimizer|extra_state|ema)_(?:world_size_(\d{1,6})_)?rank_(\d{1,6})\.(?:pt|pth|bin)"
)


_OF_WHOLE_RANK = re.compile(r"(.+)\.rank_(\d{1,6})\.(?:pt|pth|bin)")  # a rank's whole state: fvcore, DINOv2


class TorchRankFile(NamedTuple):
    """A file that one rank wrote."""

    name: str
    kind: str  # `model`, `optim`, ...: the level of the state that it holds, "" for the complete state
    world: int | None  # number of ranks, None if the name does not give it
    rank: int | None  # the rank that wrote it, None if unknown


def rank_named(path: str) -> int | None:
    """The rank in the name of a per-rank file (`optim_world_size_4_rank_2.pt`), None for any other file."""
    match = _OF_RANK.fullmatch(path.rpartition("/")[2])
    return int(match[3]) if match is not None else None


@dataclass(frozen=True, slots=True)
class ChosenFiles:
    """The files of a folder that are the checkpoint."""

    why: str  # in words, for messages
    files: tuple[str, ...] = ()  # in order; empty if the index lists them
    index: str | None = None  # its path
    notes: tuple[Note, ...] = ()
    ranks: tuple[TorchRankFile, ...] = ()  # a file a rank


def rank_files(names: Sequence[str]) -> tuple[TorchRankFile, ...]:
    """Those of `names` that are per-rank files, sorted by kind and rank."""
    ranked: list[TorchRankFile] = []
    for name, match in _matching_files(names, _OF_RANK):
        world = int(match[2]) if match[2] else None
        ranked.append(TorchRankFile(name, match[1], world, int(match[3])))
    if not ranked:  # several stems would be several checkpoints (`model_0001.rank_0.pth`, `model_final.rank_0.pth`)
        wholes = _matching_files(names, _OF_WHOLE_RANK)
        if len({match[1] for _, match in wholes}) == 1:
            ranked = [TorchRankFile(name, "", None, int(match[2])) for name, match in wholes]

    kinds = {kind: number for number, kind in enumerate(("", "model", "ema", "optim", "optimizer", "extra_state"))}
    return tuple(sorted(ranked, key=lambda file: (kinds[file.kind], file.world or 0, file.rank)))


def _matching_files(names: Iterable[str], pattern: re.Pattern[str]) -> list[tuple[str, re.Match[str]]]:
    """The paths whose last part matches `pattern`, each with its match."""
    matches = ((name, pattern.fullmatch(name.rpartition("/")[2])) for name in names)
    return [(name, match) for name, match in matches if match]


def choose(tree: Tree, prefer: str | None = None) -> ChosenFiles | None:
    """The files that make up the torch checkpoint, None if there is none. Never raises for another format's tree.

    Args:
        tree: A folder or a single file.
        prefer: The value of `--prefer`: the one file to take if there is an index too, or `files` to ignore the index.
    """
    if tree.single is not None:
        return _one(tree, tree.single)

    names = tree.names()
    if CONFIG in names:  # weights that were trained with an adapter are read with it
        from ckpt_tool.formats.adapters.beside import is_of_trained

        names = [name for name in names if not is_of_trained(name)]

    # Per-rank files come first: each is a valid torch file, but holds only a part of every tensor.
    ranked = rank_files(names)
    wholes = [file for file in ranked if not file.kind]
    alone = not any(name.endswith(_OTHERS) for name in names)
    is_whole = alone and len(wholes) > 1 and _looks(tree, wholes[0].name)
    if is_whole or any(file.kind == "model" for file in ranked):
        return ChosenFiles(f"{len(ranked)} files of single ranks", ranks=ranked)

    indexes = [name for name in names if name.endswith(INDEX_SUFFIX)]
    usual = [name for name in indexes if name == "pytorch_model" + INDEX_SUFFIX]
    numbered = [name for name in names if _NUMBERED.fullmatch(name)]
    stems = {match[1] for match in map(_NUMBERED.fullmatch, numbered) if match}
    wholes_beside = {name_without_number(name) for name in numbered}
    if indexes:
        wholes_beside.add(WHOLE)
    if prefer in wholes_beside and prefer in names:
        return ChosenFiles(f"{prefer}, as asked for", (str(prefer),))

    if indexes and prefer != WITHOUT_INDEX:
        index = (usual or indexes)[0]
        return ChosenFiles(f"an index, {index}", index=index)

    # From here on there is no index, and other formats' files speak against torch.
    weights = [name for name in names if not _BESIDE.fullmatch(name)]
    whole = "pytorch_model" in stems or not any(name.endswith(_OTHERS) or _PART.match(name) for name in names)
    if len(stems) == 1 and whole and _looks(tree, numbered[0]):
        return ChosenFiles(f"{len(numbered)} numbered files without an index", tuple(numbered))
    if WHOLE in weights:
        return ChosenFiles(WHOLE, (WHOLE,))
    if not whole or len(weights) > LOOKED_AT:
        return None

    looking = [name for name in weights if _looks(tree, name)]
    if len(looking) != 1:
        return None
    return ChosenFiles(f"{ONLY}, {looking[0]}", (looking[0],))


def find_one_beside_numbered(chosen: ChosenFiles) -> str | None:
    """The single file that may hold the same model as these numbered files; None unless they have no index."""
    is_numbered = chosen.index is None and len(chosen.files) > 0 and _NUMBERED.fullmatch(chosen.files[0])
    return name_without_number(chosen.files[0]) if is_numbered else None


def name_without_number(numbered: str) -> str:
    """What a numbered file would be called if it were the only one.

    >>> name_without_number("pytorch_model.fp16-00001-of-00002.bin")
    'pytorch_model.fp16.bin'
    """
    stem = numbered.rpartition("-of-")[0].rpartition("-")[0]
    return stem + numbered[numbered.rindex(".") :]


def names_of_index(index: str) -> tuple[str, str]:
    """The values of `--prefer` that select this index."""
    return index, index.removesuffix(INDEX_SUFFIX)


def evidence(tree: Tree) -> Evidence | None:
    """The claim on the files that `choose` returns, None if there are none.

    transformers loads `pytorch_model*.bin` if a folder has no model in safetensors, so its names rank behind those.
    """
    chosen = choose(tree)
    if chosen is None:
        return None
    files = {*chosen.files, *(file.name for file in chosen.ranks)}
    stem = ""
    if chosen.index is not None:
        stem = chosen.index.removesuffix(INDEX_SUFFIX)
        numbered = filter(None, map(_NUMBERED.fullmatch, tree.names()))
        files |= {chosen.index, *(match[0] for match in numbered if match[1] == stem)}
    elif chosen.files:
        first = _NUMBERED.fullmatch(chosen.files[0])
        stem = first[1] if first else ""
    of_hub = tree.single is None and (stem == "pytorch_model" or chosen.files == (WHOLE,))
    loose = chosen.why.startswith(ONLY)
    return Evidence(
        chosen.why,
        Specificity.CONTAINER if loose else Specificity.NAMES,
        frozenset(files),
        loader="transformers" if of_hub else "",
        turn=1,
    )


def _one(tree: Tree, name: str) -> ChosenFiles | None:
    """The choice for a single file: by its first bytes, or by its end if the start is damaged."""
    head = tree.head(name, HEAD)
    if name.endswith(INDEX_SUFFIX) and head.lstrip()[:1] == b"{":
        return ChosenFiles("an index of .bin files", index=name)
    size = tree.size(name)
    if looks_like_header(head, size):
        return None
    if what_is(head) == NPZ:  # a zip too, of NumPy
        return None
    if head[:4] in (b"PK\x03\x04", b"PK\x05\x06") or is_stream(head):
        return ChosenFiles(
            "a zip archive" if head[:2] == b"PK" else "torch's stream before 1.6", (name,), notes=_shard(name)
        )
    if is_tar(head) and name.endswith(_TORCH_NAMES):
        return ChosenFiles("a tar archive", (name,))

    # A zip's directory is at its end: it is found even if something else was written before the archive.
    end = tree.read(name, max(0, size - _END), min(size, _END))
    if b"PK\x05\x06" in end and b"data.pkl" in end:
        return ChosenFiles("a zip's end after something else", (name,))
    return None


def _shard(name: str) -> tuple[Note, ...]:
    """A note if the file has the name of one of Meta's shards."""
    if not _OF_META.fullmatch(name):
        return ()
    message = "one shard of Meta's, by its name: pass the folder to read the whole model"
    return (Note("W-one-of-many", message, name),)


def _looks(tree: Tree, name: str) -> bool:
    if tree.listing()[name] < 16:
        return False
    try:
        head = tree.head(name, 320)  # a local header and the longest name; 200 files of it are 64 KB
    except StorageError:
        raise
    except CkptError:  # not readable: the reader of the folder will report it
        return False
    return is_stream(head) or (head[:4] == b"PK\x03\x04" and b"/data.pkl" in head)


def beside_notes(tree: Tree, taken: Iterable[str]) -> tuple[Note, ...]:
    """A note on a trainer's files next to the model that are not among `taken`."""
    found = sorted({name for name in tree.names() if _BESIDE.fullmatch(name)}.difference(taken))
    return (Note("N-beside", f"next to the model, not read and not carried: {', '.join(found[:20])}"),) if found else ()


def check_numbers(files: tuple[str, ...], shown: str) -> None:
    """Raise Incomplete (E0380) or InconsistentCheckpoint (E0384) if numbered files are not one complete set."""
    parts = [match for match in map(_NUMBERED.fullmatch, files) if match]
    if not parts:
        return
    totals = {int(part[3]) for part in parts}
    numbers = {int(part[2]) for part in parts}
    total = max(totals)
    if len(totals) > 1 or len(numbers) < len(parts):
        raise InconsistentCheckpoint(
            "files of two saves are mixed: their counts differ",
            code=MIXED,
            path=shown,
            hint="remove the files of the older save",
        )
    first = 0 if 0 in numbers else 1  # transformers counts from 1; sets that count from 0 are accepted too
    absent = [n for n in range(first, first + total) if n not in numbers] if total < 1_000_000 else [total]
    if absent:
        fault = Incomplete(
            f"{len(absent)} of {total} files are missing: numbers {', '.join(map(str, absent[:20]))}",
            code=MISSING,
            path=shown,
            hint="fetch the missing files; their names count them",
        )
        report_missing(fault, files=[f"{parts[0][1]}-{number:05d}-of-{total:05d}.bin" for number in absent[:100]])
