"""verl's files of an adapter that was trained in Megatron, recognised by their names.

Every opening of a checkpoint looks for them, so nothing heavy is imported here.
"""

from __future__ import annotations

import re

from ckpt_tool.storage.source import Tree

# verl's subfolders in the folder of a model
ADAPTERS = "adapter_checkpoint/"
STATES = "dist_ckpt/"
_ADAPTER = re.compile(rf"(?:{ADAPTERS})?mp_rank_(\d{{2,4}})(?:_(\d{{3,4}}))?(?:_(\d{{3,4}}))?_adapter\.pt", re.ASCII)
_OF_STATES = re.compile(rf"{STATES}(?:\.metadata|common\.pt|metadata\.json|__\d{{1,6}}_\d{{1,6}}\.distcp)", re.ASCII)


def adapter_files(tree: Tree) -> dict[str, tuple[int, ...]]:
    """Return {file: numbers in its name} of all ranks' adapter files, in the order of names; {} if there is none."""
    if tree.single is not None:
        return {}

    numbers: dict[str, tuple[int, ...]] = {}
    for path in sorted(tree.listing()):
        match = _ADAPTER.fullmatch(path)
        if match:
            numbers[path] = tuple(int(number) for number in match.groups() if number is not None)
    return numbers


def states_beside(tree: Tree) -> frozenset[str]:
    """Return the files of the adapter's optimizer, which the job saved next to the adapter's files."""
    return frozenset(path for path in tree.listing() if _OF_STATES.fullmatch(path))
