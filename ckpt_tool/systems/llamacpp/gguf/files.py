"""Which files of a folder are one GGUF model: a file, or all files of a split.

    choose(tree)    ("big-00001-of-00003.gguf", "big-00002-of-00003.gguf", "big-00003-of-00003.gguf")

Source: llama.cpp of October 2026 `src/llama.cpp` (`llama_split_path`), `tools/gguf-split`. Reads four bytes a file.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from ckpt_tool.core.missing import report_missing
from ckpt_tool.errors import Incomplete, InconsistentCheckpoint, InputError, UnknownFormat
from ckpt_tool.storage.source import Tree
from ckpt_tool.systems.llamacpp.gguf.header import MAGIC, Header

SUFFIX = ".gguf"
LACKING = "E1703"
SEVERAL = "E1704"
MIXED = "E1705"
SPLIT_KEYS = ("split.no", "split.count", "split.tensors.count")
_SPLIT = re.compile(r"(?P<stem>.+)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


class GgufFiles(NamedTuple):
    """The files of one model."""

    files: tuple[str, ...]  # in order; of a split every file that its names count, present or not


def split_name(stem: str, number: int, count: int) -> str:
    """The name of one file of a split. number: from 0; names count from 1.

    >>> split_name("model", 0, 3)
    'model-00001-of-00003.gguf'
    """
    return f"{stem}-{number + 1:05d}-of-{count:05d}{SUFFIX}"


def models(tree: Tree) -> list[GgufFiles]:
    """Every GGUF model at the top level of the tree, recognised by names and the first four bytes."""
    if tree.single is not None:
        return [_model_of(tree.single)] if _is_gguf(tree, tree.single) else []
    names = [name for name in tree.seen(tree.names()) if name.endswith(SUFFIX) and tree.listing()[name] >= 0]
    found = [_model_of(name) for name in names if _is_gguf(tree, name)]
    return list(dict.fromkeys(found))  # every file of a split gives the same list of names


def _is_gguf(tree: Tree, name: str) -> bool:
    try:
        return tree.head(name, 4) == MAGIC
    except InputError:
        return False


def _model_of(name: str) -> GgufFiles:
    found = _SPLIT.fullmatch(name)
    count = int(found["count"]) if found else 0
    if found is None or not 0 < int(found["no"]) <= count or count > 9999:
        return GgufFiles((name,))
    return GgufFiles(tuple(split_name(found["stem"], number, count) for number in range(count)))


def chosen_model(tree: Tree) -> GgufFiles:
    """The only GGUF model of the tree.

    Raises UnknownFormat E0393 if there is none, E1704 if there are several; Incomplete E1703 if files of a split are
    missing.
    """
    found = models(tree)
    if not found:
        raise UnknownFormat(
            "no file here begins as GGUF does", code="E0393", path=tree.display(), hint="pass the .gguf file"
        )

    if len(found) > 1:
        names = [model.files[0] for model in found]
        raise UnknownFormat(
            f"{len(found)} GGUF models are here: {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}",
            code=SEVERAL,
            path=tree.display(),
            faults=names[4:50],
            hint="pass the file of the one that is meant, the first of a split",
        )

    missing = []
    for name in found[0].files:
        try:
            tree.size(name)
        except Incomplete:
            missing.append(name)

    if missing:
        fault = Incomplete(
            f"{len(missing)} of {len(found[0].files)} files of the split are missing: {missing[0]}",
            code=LACKING,
            path=tree.display(missing[0]),
            faults=[f"missing: {name}" for name in missing[1:50]],
            hint="fetch the missing files into the same folder",
        )
        report_missing(fault, files=missing)
        return GgufFiles(tuple(name for name in found[0].files if name not in missing))

    return found[0]


def check_split(tree: Tree, headers: list[Header]) -> None:
    """Raise InconsistentCheckpoint E1705 if the split that the headers record differs from the one that the names give,
    or if the files differ in byte order."""
    total = sum(len(header.tensors) for header in headers)
    count = len(headers)
    for number, header in enumerate(headers):
        wanted = dict(zip(SPLIT_KEYS, (number, count, total), strict=True))
        stated = {key: header.value(key) for key in SPLIT_KEYS if key in header.entries}
        # A single file need not record a split at all.
        if count == 1 and stated.get("split.count") in (None, 0, 1):
            continue
        wrong = next((key for key, value in stated.items() if value != wanted[key]), None)
        if wrong is not None or header.big != headers[0].big:
            what = "its byte order is another"
            if wrong:
                what = f"{wrong} is {str(stated[wrong])[:40]}, want {wanted[wrong]}"
            raise InconsistentCheckpoint(
                what,
                code=MIXED,
                path=tree.display(header.path),
                hint="the files come from two splits, or were renamed: fetch all of one",
            )
