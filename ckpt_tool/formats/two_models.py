"""A file of a whole model next to other files of the same stem, with an index or without: two models in one folder.

model.safetensors          transformers loads this one
model.safetensors.index.json -> model-00001-of-00002.safetensors, ...     other tools take these
model.fp16.safetensors     beside model.fp16-00001-of-00002.safetensors: the index of a variant has another name
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from ckpt_tool.errors import InconsistentCheckpoint

if TYPE_CHECKING:
    from ckpt_tool.storage.source import Tree

TWO_MODELS = "E2874"


def refuse_file_next_to_index(tree: Tree, file: str, index: str, shards: Collection[str], *, most: int) -> None:
    """Raise InconsistentCheckpoint E2874 unless the file is one of the index's.

    Args:
        file: of the index's stem, and in the folder. shards: the files that the index lists. most: how many are named.
    """
    if file in shards:
        return
    raise InconsistentCheckpoint(
        f"{file} and {index} are two models in one folder: the index names {len(shards)} other files",
        code=TWO_MODELS,
        path=tree.display(),
        faults=[f"of the index: {shard}" for shard in sorted(shards)[:most]],
        hint=f"say which is meant: --prefer {file}, which transformers loads, or --prefer {index}; "
        "and remove the other",
    )


def refuse_file_next_to_numbered(
    tree: Tree, file: str, numbered: Sequence[str], without_index: str, *, most: int
) -> None:
    """Raise InconsistentCheckpoint E2874 where the file of the stem of numbered files is in their folder.

    Args:
        numbered: the files, which are read without an index.
        without_index: what `--prefer` calls them.
        most: how many of them are named.
    """
    if file not in tree.names():
        return
    raise InconsistentCheckpoint(
        f"{file} and {len(numbered)} numbered files of its name are two models in one folder, and no index that is read"
        " here names one of them",
        code=TWO_MODELS,
        path=tree.display(),
        faults=[f"numbered: {name}" for name in sorted(numbered)[:most]],
        hint=f"say which is meant: --prefer {file}, or --prefer {without_index} for the numbered files; "
        "and remove the other",
    )
