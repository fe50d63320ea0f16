"""A file of a whole model next to an index of the same stem that does not list it: two models in one folder.

model.safetensors          transformers loads this one
model.safetensors.index.json -> model-00001-of-00002.safetensors, ...     other tools take these
"""

from __future__ import annotations

from collections.abc import Collection
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
