"""Chooses the files of a folder that make up one Hugging Face model, by their names.

The one idea: the choice is made once, from the listing, as a value that `detect` explains and `read` follows. In
order: an index; DCP shards (`shard-00001-model-00001-of-00002.safetensors`) if no files of full tensors are next to
them;
numbered files (`model-00001-of-00002.safetensors`); `model.safetensors`; all safetensors files there are.

    choose(["model.safetensors", "extra.safetensors", "config.json"]).files == ("model.safetensors",)

A name that carries a rank's coordinates (`model.tp00.safetensors`) is a part, not a whole model, and an adapter is
none: both are left out. Reads nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import islice
from typing import ClassVar

from ckpt_tool.core.catalog import Note
from ckpt_tool.core.hints import Hint
from ckpt_tool.core.missing import report_missing
from ckpt_tool.errors import Incomplete, InconsistentCheckpoint
from ckpt_tool.storage.source import Tree
from ckpt_tool.weight_schemes.quantised_weights import QUANTISER_FILES

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
DCP_FOLDER = "sharded/"  # torch 2.13 _hf_utils.SHARDED_DIR_NAME
DCP_NOTE = "W-sharded-folder"
MISSING = "E0380"
MIXED = "E0384"
WITHOUT_INDEX = "files"  # of `--prefer`
SHOWN = 20  # names that one message lists

# Code that a model brings along: text for us
CODE = ("modeling_*.py", "configuration_*.py", "tokenization_*.py", "processing_*.py", "image_processing_*.py")
SIDEFILES = (
    *CODE,
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "*.model",
    "*.tiktoken",
    "vocab.*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "*preprocessor_config.json",
    "processor_config.json",
    "params.json",
    *QUANTISER_FILES,
    "README.md",
    "LICENSE*",
)
# What a lone index file's folder is asked for: it is not listed.
SIDEFILES_BY_NAME = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    *QUANTISER_FILES,
)

NESTED = "huggingface/"  # where verl keeps what belongs to the model
TOKENIZER = "tokenizer/"  # where Megatron-Bridge stores the tokenizer's files, next to the weights of a step
_NUMBERED = re.compile(r"(.+)-(\d{1,7})-of-(\d{1,7})\.safetensors")
_DCP_SHARD = re.compile(r"shard-(\d{1,7})-model-(\d{1,7})-of-(\d{1,7})\.safetensors")
_OF_A_RANK = re.compile(
    r"[\w%-]+(?:[._](?:tp|pp|ep|etp|dp|cp|vpp)\d{2,})+\.safetensors"
)  # a rank's, its index lost or not


@dataclass(frozen=True, slots=True)
class Stem(Hint):
    """How the files are called whose library looks for no others: diffusers' components, which are no `model`."""

    KEY: ClassVar[str] = "stem"
    name: str


STEM = "model"
STEMS = (STEM, "diffusion_pytorch_model")


@dataclass(frozen=True, slots=True)
class FileSet:
    """The files that count."""

    kind: str  # `index`, `numbered`, `one`, `union` or `ranks`
    why: str  # in words for a person
    files: tuple[str, ...] = ()  # weights, sorted; () if the index lists them
    index: str | None = None
    notes: tuple[Note, ...] = ()  # about files next to them that are not used


ADAPTER = "adapter_model.safetensors"  # PEFT's, and a checkpoint of this format only where its config is lost


def choose(listing: Iterable[str], *, prefer: str | None = None) -> FileSet | None:
    """The files that count, None where the folder holds no model of this format.

    listing: paths relative to the folder, sub-folders' too. prefer: the index to take where several are there, one file
    to take in place of an index, or `files`: no index at all.
    Never raises: `check` reports what is wrong with the set.
    """
    paths = sorted(listing)
    names = [path for path in paths if "/" not in path]
    weights = [
        name
        for name in names
        if name.endswith(SUFFIX)
        and not name.startswith(("adapter_model", "ckpt_extras."))
        and not _OF_A_RANK.fullmatch(name)
    ]
    indexes = [name for name in names if name.endswith(INDEX_SUFFIX) and not name.startswith("adapter_model")]
    dcp = [name for name in weights if _DCP_SHARD.fullmatch(name)]
    whole = [name for name in weights if name not in set(dcp)]
    below = [path for path in paths if path.startswith(DCP_FOLDER) and _DCP_SHARD.fullmatch(path[len(DCP_FOLDER) :])]
    if prefer in whole and (indexes or not _NUMBERED.fullmatch(prefer)):
        return FileSet("one", f"{prefer}, as asked for", (str(prefer),))
    if prefer == WITHOUT_INDEX and whole:
        indexes = []
    if not prefer and "model" + SUFFIX in whole and "model" + INDEX_SUFFIX not in indexes:
        indexes = []  # transformers opens it, whatever else has an index

    if indexes or whole:
        chosen = _indexed(indexes, prefer) if indexes else _whole_files(whole, prefer)
        message = f"{DCP_FOLDER} holds the per-rank shards that the whole files were made of: not read"
        return replace(chosen, notes=(*chosen.notes, Note(DCP_NOTE, message, DCP_FOLDER))) if below else chosen

    if dcp:
        return FileSet("ranks", f"{len(dcp)} per-rank files shard-*-model-*{SUFFIX}", tuple(dcp))

    if below:
        note = Note(DCP_NOTE, f"read from {DCP_FOLDER}: the whole files were never written", DCP_FOLDER)
        return FileSet("ranks", f"{len(below)} per-rank files in {DCP_FOLDER}", tuple(below), notes=(note,))

    if ADAPTER in names and not {"adapter_config.json", "lora_config.json"} & set(names):
        return FileSet("one", f"{ADAPTER} without its config", (ADAPTER,))
    return None


def find_one_beside_numbered(chosen: FileSet) -> str | None:
    """The name of the file that would be the same model in one, None unless numbered files are read without an index.

    >>> find_one_beside_numbered(FileSet("numbered", "", ("model.fp16-00001-of-00002.safetensors",)))
    'model.fp16.safetensors'
    """
    match = _NUMBERED.fullmatch(chosen.files[0]) if chosen.kind == "numbered" else None
    return match[1] + SUFFIX if match else None


def names_of_index(index: str) -> tuple[str, str]:
    """What `--prefer` may call it."""
    return index, index.removesuffix(INDEX_SUFFIX)


def claimed(chosen: FileSet, listing: Iterable[str]) -> frozenset[str]:
    """The files that belong to the set by their names; for an index, the files with its stem. DCP shards next to it are
    included: they are another model, or the same model again."""
    listing = list(listing)
    shards = [name for name in listing if _DCP_SHARD.fullmatch(name)]
    if chosen.index is None:
        return frozenset((*chosen.files, *shards))
    stem = chosen.index.removesuffix(INDEX_SUFFIX)
    parts = (n for n in listing if n == stem + SUFFIX or (n.startswith(stem + "-") and _NUMBERED.fullmatch(n)))
    return frozenset((chosen.index, *parts, *shards))


def one_file(name: str, why: str) -> FileSet:
    """The set of a single file that the user named."""
    found = _NUMBERED.fullmatch(name)
    notes: tuple[Note, ...] = ()
    if found and int(found[3]) > 1:
        message = f"one of {int(found[3])} files, by its name: pass the folder to read the whole model"
        notes = (Note("W-one-of-many", message, name),)
    return FileSet("one", why, (name,), notes=notes)


def _indexed(indexes: list[str], prefer: str | None) -> FileSet:
    wanted = [name for name in indexes if prefer in names_of_index(name)]
    usual = [name for name in indexes if name == "model" + INDEX_SUFFIX]
    index = (wanted or usual or indexes)[0]
    others = [name for name in indexes if name != index]
    notes = []
    if others:
        notes.append(Note("W-other-index", f"not read: {', '.join(others)}; pass an index itself to read by it", index))
    return FileSet("index", f"an index, {index}", index=index, notes=tuple(notes))


def _whole_files(weights: list[str], prefer: str | None) -> FileSet:
    """Files that hold whole tensors, without an index."""
    stems: dict[str, list[str]] = {}
    for name in weights:
        found = _NUMBERED.fullmatch(name)
        if found:
            stems.setdefault(found[1], []).append(name)

    # transformers opens model.safetensors, whatever is next to it: a variant's shards, another library's model.
    hub_file_first = STEM + SUFFIX in weights and STEM not in stems
    if stems and not hub_file_first and (STEM in stems or len(stems) == 1):
        stem = STEM if STEM in stems else next(iter(stems))
        files = stems[stem]
        kind = "numbered"
        why = f"{len(files)} numbered files {stem}-*-of-*{SUFFIX} without an index"
    elif "model" + SUFFIX in weights:
        files = ["model" + SUFFIX]
        kind = "one"
        why = "model" + SUFFIX
    elif len(weights) == 1:
        files = weights
        kind = "one"
        why = weights[0]
    elif chosen := _variant(weights, prefer):
        return chosen
    else:
        files = weights
        kind = "union"
        why = f"{len(weights)} safetensors files without an index"

    return FileSet(kind, why, tuple(files))


def _variant(weights: list[str], prefer: str | None) -> FileSet | None:
    """The file that diffusers takes of one model in several precisions: `STEM.safetensors`, or with `prefer` `fp16`
    `STEM.fp16.safetensors` (diffusers 0.36 `utils/hub_utils.py`, `_add_variant`). None where they are no variants."""
    plain = min(weights, key=len)
    stem = plain.removesuffix(SUFFIX)
    others = [name for name in weights if name != plain]
    if not all(re.fullmatch(re.escape(stem) + r"\.\w+\.safetensors", name) for name in others):
        return None
    wanted = f"{stem}.{prefer}{SUFFIX}" if prefer else plain
    file = wanted if wanted in weights else plain
    named = ", ".join(name.removeprefix(f"{stem}.").removesuffix(SUFFIX) for name in others)
    note = Note("W-variants", f"{plain} is one of several variants: --prefer takes another ({named})", file)
    return FileSet("one", file, (file,), notes=(note,) if file == plain else ())


def check(chosen: FileSet, *, path: str) -> None:
    """Raise where the names alone show that the set is not whole. path: the folder, for messages.

    Incomplete (E0380) for numbers that are missing; InconsistentCheckpoint (E0384) for two saves mixed in one folder.
    """
    if chosen.kind in ("numbered", "union"):
        stems: dict[str, list[tuple[int, int]]] = {}
        for match in _matches(chosen.files, _NUMBERED):
            stems.setdefault(match[1], []).append((int(match[2]), int(match[3])))
        for stem, found in stems.items():
            _check_numbers(f"{stem}-", found, path)
    if chosen.kind == "ranks":
        shards = _matches(chosen.files, _DCP_SHARD)
        last = max(int(match[1]) for match in shards)
        _check_numbers("shard-*-model-", [(int(match[2]), int(match[3])) for match in shards], path)
        _check_numbers("shard-", [(int(match[1]), last) for match in shards], path)


def ignored(listing: Iterable[str], taken: Iterable[str]) -> tuple[Note, ...]:
    """A note on the files next to the checkpoint that are not read (those in `sharded/` have a note of their own)."""
    known = set(taken)
    left = [
        path
        for path in listing
        if path not in known and not path.startswith(DCP_FOLDER) and not path.rpartition("/")[2].startswith(".")
    ]
    if not left:
        return ()
    some = ", ".join(left[:SHOWN]) + (f" and {len(left) - SHOWN} more" if len(left) > SHOWN else "")
    return (Note("W-ignored", f"not part of the model, not read: {some}"),)


def of_a_job(tree: Tree) -> tuple[str, ...]:
    """The model's config and tokenizer next to a job's files, or in verl's `huggingface/`."""
    if tree.single is not None:
        return ()
    beside = [path for path in tree.listing() if path.count("/") == path.startswith(NESTED)]
    return tuple(path for path in beside if is_sidefile(path.rpartition("/")[2]))


def tokenizer_files(tree: Tree) -> tuple[str, ...]:
    """The files of the folder in which a job keeps its tokenizer, of the names that side files have."""
    if tree.single is not None:
        return ()
    below = [path for path in tree.listing() if path.startswith(TOKENIZER) and path.count("/") == 1]
    return tuple(sorted(path for path in below if is_sidefile(path.removeprefix(TOKENIZER))))


def side_files(tree: Tree) -> tuple[str, ...]:
    """The side files directly in the folder of a tree: what belongs to the model and is copied as it is.

    A link that leads nowhere, or out of the folder, has a negative size in the listing and is left out; the notes on
    links name it.
    """
    return tuple(name for name in tree.names() if is_sidefile(name) and tree.listing()[name] >= 0)


def is_model_code(path: str) -> bool:
    """Whether a file is code that a model brings along, by its name."""
    return any(fnmatchcase(path, pattern) for pattern in CODE)


def is_sidefile(name: str) -> bool:
    """Is it the name of a small file next to the weights that a conversion copies unchanged?"""
    return any(fnmatchcase(name, pattern) for pattern in SIDEFILES)


def _matches(files: Iterable[str], pattern: re.Pattern[str]) -> list[re.Match[str]]:
    matches = (pattern.fullmatch(name.rpartition("/")[2]) for name in files)
    return [match for match in matches if match]


def _check_numbers(label: str, found: list[tuple[int, int]], path: str) -> None:
    """found: (number, of how many) as the file names state them. Each number must be there, from 1 (or from 0)."""
    totals = sorted({total for _, total in found})
    have = {number for number, _ in found}
    first = 0 if 0 in have else 1
    total = totals[0]
    if len(totals) > 1 or max(have) >= first + total:
        raise InconsistentCheckpoint(
            f"files of two saves are mixed: {label}*-of-{' and -of-'.join(f'{n:05d}' for n in totals)}"
            if len(totals) > 1
            else f"{label}{max(have):05d} of {total} files",
            code=MIXED,
            path=path,
            hint="remove the files of the older save",
        )

    absent = total - len(have)
    if absent:
        shown = islice((n for n in range(first, first + total) if n not in have), SHOWN)
        names = [f"{label}{number:05d}" for number in shown]
        fault = Incomplete(
            f"{absent} of {total} numbers are missing: {', '.join(names)}{', ...' if absent > SHOWN else ''}",
            code=MISSING,
            path=path,
            faults=(f"missing: {name}" for name in names[1:]),
            hint="fetch the missing files; their names count them",
        )
        report_missing(fault, files=[f"{name}-of-{total:05d}{SUFFIX}" for name in names])
