"""The degrees of the job that wrote a flex checkpoint, as its boxes and files show them.

No file states them. Ranks are the data files (every rank writes one, an empty one too). Tensor ranks are the blocks of a
parameter; stages are groups of files that share no layer; expert ranks are files that hold runs of experts; what is left of
the ranks are data ranks. A flattened range says that sharding v2 was on; v1 looks like plain data parallelism in the files.

    2 files; up_gate_proj in 2 blocks      tp 2
    4 files; layers 0-1 in {0, 1}, 2-3 in {2, 3}; q_proj in 2 blocks      pp 2, tp 2

What does not multiply out is left unsaid: the degrees are a default for writing, never a claim about values. Cost: a pass
over the shards.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from math import prod

from ckpt_tool.formats.paddle_flex.metadata import Entry, Listing

_LAYER = re.compile(r"(?:^|\.)layers\.(\d{1,9})\.")
_EXPERT = re.compile(r"(.*\.experts)\.(\d{1,9})\.")


def degrees_of(listings: Iterable[Listing], ranks: int) -> tuple[dict[str, int], str]:
    """(degrees, sharding version). degrees: tp, pp, ep, and dp (all data ranks) where they account for all `ranks`."""
    every = list(listings)
    model = [entry for listing in every for entry in listing.entries.values()]
    tp = max([_blocks(entry) for entry in model], default=1)
    version = "v2" if any(shard.span for entry in model for shard in entry.shards) else ""
    degrees = {"tp": tp} if tp > 1 else {}
    pp = _stages(model) if ranks > 1 else 1
    if ranks % (tp * pp):
        pp = 1
    if pp > 1:
        degrees["pp"] = pp
    if ranks % (tp * pp) == 0:
        dp = ranks // (tp * pp)
        if dp > 1:
            degrees["dp"] = dp
        ep = _experts(model) if dp > 1 else 1  # with dp 1 they may lie on the tensor ranks (`moe_group` mp)
        if ep > 1 and ep % tp == 0 and tp * dp % ep == 0:
            degrees["ep"] = ep
        version = version or ("v1" if dp > 1 else "")
    return degrees, version


def _blocks(entry: Entry) -> int:
    """Into how many blocks an entry is cut along one axis."""
    if len(entry.shards) < 2 or not entry.shape:
        return 1
    boxes = {(shard.offset, shard.shape) for shard in entry.shards if prod(shard.shape)}
    cuts = [len({offset[axis] for offset, _ in boxes}) for axis in range(len(entry.shape))]
    return max(cuts) if boxes and prod(cuts) == len(boxes) else 1


def _rank_of(file: str) -> str:
    """The rank of a data file, as its name has it."""
    return file.rpartition("/")[2].partition("_")[0]


def _stages(entries: Sequence[Entry]) -> int:
    """Groups of ranks that share no layer, where each group has layers of its own."""
    layers: dict[int, set[str]] = {}
    for entry in entries:
        found = _LAYER.search(entry.key)
        if found:
            layers.setdefault(int(found[1]), set()).update(_rank_of(shard.file) for shard in entry.shards)
    parent: dict[str, str] = {}

    def root(rank: str) -> str:
        while parent.setdefault(rank, rank) != rank:
            parent[rank] = parent[parent[rank]]
            rank = parent[rank]
        return rank

    for ranks in layers.values():
        first, *others = ranks or {""}
        for other in others:
            parent[root(other)] = root(first)
        root(first)
    sizes: dict[str, int] = {}
    for rank in [*parent]:
        sizes[root(rank)] = sizes.get(root(rank), 0) + 1
    return len(sizes) if len(set(sizes.values())) == 1 else 1


def _experts(entries: Sequence[Entry]) -> int:
    """Runs of experts that lie in files of their own, each as long as the others."""
    homes: dict[str, dict[int, set[str]]] = {}
    for entry in entries:
        found = _EXPERT.match(entry.key)
        if found:
            ranks = homes.setdefault(found[1], {}).setdefault(int(found[2]), set())
            ranks.update(_rank_of(shard.file) for shard in entry.shards)
    return max([_runs(experts) for experts in homes.values()], default=1)


def _runs(experts: Mapping[int, set[str]]) -> int:
    files: list[set[str]] = []
    lengths: list[int] = []
    for number in sorted(experts):
        if files and files[-1] & experts[number]:
            files[-1] |= experts[number]
            lengths[-1] += 1
        else:
            files.append(set(experts[number]))
            lengths.append(1)
    homes = [file for run in files for file in run]
    return len(files) if len(homes) == len(set(homes)) and len(set(lengths)) == 1 else 1
