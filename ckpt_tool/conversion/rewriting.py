"""What a plan does to who holds what, for a report: the tensors, their parts before and after, the fallbacks taken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import PurePath

from ckpt_tool.core.box import flat_boxes
from ckpt_tool.core.layout import Layout
from ckpt_tool.core.target import Target, Wanted
from ckpt_tool.formats import registry
from ckpt_tool.formats.base import Format, ranks_of
from ckpt_tool.plan.copy import Region, hull
from ckpt_tool.plan.moves import Stored, box_of
from ckpt_tool.plan.plan import Move, Plan
from ckpt_tool.report.holdings import (
    Given,
    Parts,
    RankOf,
    Rewriting,
    Tensor,
    holdings,
    list_target_holdings,
    nobody,
    whose,
)
from ckpt_tool.report.writing import cut_text, fallback_text
from ckpt_tool.sources.chosen import Chosen
from ckpt_tool.sources.opening import Opened


def rewriting_of(chosen: Chosen, wanted: Wanted, target: Target, layout: Layout, fmt: Format) -> Rewriting:
    """The tensors of an output with their holders on both sides. Of several sources a file is called by its source."""
    tensors = [Tensor(item.key.name, item.key.state, item.dtype, item.shape) for item in wanted.tensors]
    used = {row.source for row in chosen.stored}
    only = chosen.sources[min(used)] if len(used) == 1 else None
    if only is not None and _in_files(only):
        mesh = only.catalog.mesh.to_json()
        prefix = {min(used): ""}
        rank_of: RankOf = whose(only.catalog, ranks_of(only.format, mesh))
    else:
        mesh = {}
        prefix = _names({number: chosen.sources[number] for number in used})
        rank_of = nobody

    def rows() -> Iterator[Given]:
        for row in chosen.stored:
            parts = partial(_parts, row, prefix[row.source], _in_files(chosen.sources[row.source]))
            yield Given(row.tensor.key.state, row.tensor.dtype, row.tensor.shape, parts)

    after_mesh = layout.mesh.to_json()
    after = list_target_holdings(wanted.tensors, target, after_mesh, ranks_of(fmt, after_mesh))
    return Rewriting(tensors, holdings(rows(), mesh, rank_of), after, _fallbacks(layout))


def _in_files(opened: Opened) -> bool:
    """Is the source stored in files? A computed source has an empty catalog (`sources.chosen.with_computed`)."""
    return bool(opened.catalog.tensors)


def rewriting_of_plan(plan: Plan) -> Rewriting:
    """The same of a plan that was saved: of the source's mesh and of who took which fallback it says less."""
    said = plan.report
    files = [file.path for file in plan.outputs]
    roots = {file.root for file in plan.sources}
    named = [file.path if len(roots) < 2 else f"{PurePath(file.root).name}/{file.path}" for file in plan.sources]
    formats = (said.get("source", {}).get("format"), plan.format)
    meshes: tuple[dict[str, int], dict[str, int]] = ({}, dict(said.get("target", {}).get("mesh", {})))
    ranks = [
        ranks_of(registry.by_name(name), mesh) if name in registry.NAMES else nobody
        for name, mesh in zip(formats, meshes, strict=True)
    ]
    sides: list[list[Given]] = [[], []]
    for move in plan.moves:
        tiling = [region for region in move.sources if region.replica == 0]
        for side, regions, names in zip(sides, (tiling, move.outputs), (named, files), strict=True):
            dtype = move.dtype_out if side is sides[1] else move.dtype
            side.append(Given(move.key.state, dtype, move.shape, partial(_boxes, move, regions, names)))
    tensors = [Tensor(move.key.name, move.key.state, move.dtype_out, move.shape) for move in plan.moves]
    before = holdings(sides[0], meshes[0], ranks[0] if len(roots) < 2 else nobody)
    examples = {str(entry.get("example")): fallback_text(entry) for entry in said.get("fallbacks", ())}
    fallbacks = {n: examples[str(move.key)] for n, move in enumerate(plan.moves) if str(move.key) in examples}
    return Rewriting(tensors, before, holdings(sides[1], meshes[1], ranks[1]), fallbacks)


def _boxes(move: Move, regions: Sequence[Region], names: Sequence[str]) -> Parts:
    """(file name, box) of each region in the tensor; a region that is no box becomes several flat boxes."""
    found = []
    for region in regions:
        box = box_of(region, move)
        boxes = flat_boxes(move.shape, *hull(region)) if box is None else [box]
        found += [(names[region.file], each) for each in boxes]
    return found


def _names(sources: Mapping[int, Opened]) -> dict[int, str]:
    """What sources are called where there are several: by their last word, by their path where two have the same; a
    computed one, which has no files, in the words of its messages."""
    last = {number: PurePath(opened.path).name for number, opened in sources.items()}
    alike = Counter(last.values())
    short = {number for number, opened in sources.items() if _in_files(opened) and alike[last[number]] == 1}
    return {number: last[number] if number in short else opened.path for number, opened in sources.items()}


def _parts(row: Stored, source: str, in_files: bool) -> Parts:
    """The parts that are moved: a replica is compared with them, and moves nothing."""
    chunks = [chunk for chunk in row.tensor.chunks if chunk.replica == 0]
    if not source:
        return [(chunk.array.file, chunk.box) for chunk in chunks]
    return [(f"{source}/{chunk.array.file}" if in_files else source, chunk.box) for chunk in chunks]


def _fallbacks(layout: Layout) -> dict[int, str]:
    """Tensor -> where it is not cut as was asked for."""
    found = {}
    for number, placement in enumerate(layout.placements):
        taken = [choice for choice in placement.choices if choice.reason != "even"]
        if taken:
            found[number] = "; ".join(
                f"requested {' x '.join(choice.requested)}, {cut_text(choice.reason, ' x '.join(choice.used))}"
                for choice in taken
            )
    return found
