"""verl's files of an adapter that was trained in Megatron, by their names. Whoever opens a checkpoint asks for them, so
nothing heavy is imported here."""

from __future__ import annotations

import re

from ckpt_tool.storage.source import Tree

# verl's, in the folder of a model
ADAPTERS = "adapter_checkpoint/"
STATES = "dist_ckpt/"
_ADAPTER = re.compile(rf"(?:{ADAPTERS})?mp_rank_(\d{{2,4}})(?:_(\d{{3,4}}))?(?:_(\d{{3,4}}))?_adapter\.pt", re.ASCII)
_OF_STATES = re.compile(rf"{STATES}(?:\.metadata|common\.pt|metadata\.json|__\d{{1,6}}_\d{{1,6}}\.distcp)", re.ASCII)


def adapter_files(tree: Tree) -> dict[str, tuple[int, ...]]:
    """Every rank's file of an adapter, as verl calls them -> the numbers of its name, in the order of names; {} where
    there is none."""
    if tree.single is not None:
        return {}

    numbers: dict[str, tuple[int, ...]] = {}
    for path in sorted(tree.listing()):
        match = _ADAPTER.fullmatch(path)
        if match:
            numbers[path] = tuple(int(number) for number in match.groups() if number is not None)
    return numbers


def states_beside(tree: Tree) -> frozenset[str]:
    """What the job saved of the adapter's optimizer next to its files."""
    return frozenset(path for path in tree.listing() if _OF_STATES.fullmatch(path))
