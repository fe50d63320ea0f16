"""Checks a plan that was read from a file: it has to have the properties that `build_moves` gives by construction.

    every move  its source regions of replica 0 tile its line, inside their files; its output regions hold the line,
                each box of it once or in replicas that are equal
    every file  no byte is written twice, none outside; every array is filled by the move that it names, and every
                region of a move fills an array; patches and literals are inside the file
    all         numbers agree: shapes, dtypes, sizes of elements; names are unique; paths stay inside

A region is known to be a box of its tensor by its extents and steps alone (`box_of`), so tiling is a question about
boxes. Verdicts are kept by shape and boxes, for layers repeat. What is read is not judged: which bytes are a tensor's
only the source's format knows. Cost: some 10 us a region, nothing for plans that are made and run at once.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from math import prod

from ckpt_tool.core.box import Box, contiguous_strides, first_overlap
from ckpt_tool.core.inner_path import STORES, check_outputs, leaves
from ckpt_tool.core.target import PATCH_BYTES, TargetFile
from ckpt_tool.plan.copy import Region
from ckpt_tool.plan.plan import Extent, Move, Plan
from ckpt_tool.plan.spans import Span, comb_of, first_clash, meets_itself

SHOWN = 20  # faults
Tile = tuple[int, tuple[int, ...], tuple[int, ...]]  # at, extents, steps of a region


def check(plan: Plan, path: str) -> list[str]:
    """The faults of the plan in file `path`, in words; [] for a valid one. Raises UnsafeInput E1600 for output paths
    that lead elsewhere."""
    check_outputs(
        (file.path for file in plan.outputs),
        named_by=lambda _: None,
        path=path,
        hint="only plain names below the output's own folder are written: make the plan again with --plan",
    )
    found: list[str] = []
    for faults in (_whole(plan), _records(plan), _moves(plan), _files(plan)):
        found += [fault for fault, _ in zip(faults, range(SHOWN), strict=False)]
        if found:
            break
    return found


_IN_STORE = re.compile(rf"(?:{'|'.join(STORES)})://[^/\s]+/[^\x00-\x1f]+")


def _whole(plan: Plan) -> Iterator[str]:
    """Faults of paths and names, before any move is looked at."""
    name = os.path.basename(plan.destination)
    local = os.path.isabs(plan.destination) and name not in ("", ".", "..")
    if not (local or _IN_STORE.fullmatch(plan.destination)):
        yield f"the destination {plan.destination[:200]!r} is no absolute path of a file or folder"
    for file in plan.sources:
        if leaves(file.path):
            yield f"the source file {file.path[:200]!r} leaves {file.root[:200]!r}"
    if plan.single is not None and [file.path for file in plan.outputs] != [plan.single]:
        yield f"the output is one file {plan.single[:200]!r}, and the plan has {len(plan.outputs)} files"
    keys = Counter(move.key for move in plan.moves)
    yield from (f"{key} has {count} moves" for key, count in keys.items() if count > 1)
    unknown = [key for key in plan.options.get("unlisted", ()) if tuple(key) not in keys]
    yield from (f"{key[0]!r:.200} is an option's tensor, and no move's" for key in unknown)


def _records(plan: Plan) -> Iterator[str]:
    """Faults of checksummed records."""
    for record in plan.records:
        if record.file >= len(plan.sources) or record.offset + record.nbytes > plan.sources[record.file].identity[2]:
            yield f"the checksummed record {tuple(record)} is in no source file"
        elif record.crc >> 32:
            yield f"the checksum of a record is {record.crc}, more than 32 bits"


# -- moves -------------------------------------------------------------------------------------------------------------


def _moves(plan: Plan) -> Iterator[str]:
    """The first fault of each move that has one."""
    read = [file.identity[2] for file in plan.sources]
    written = [file.size for file in plan.outputs]
    known = _Verdicts()
    for move in plan.moves:
        why = _sizes(move)
        why = why or _regions(move.sources, read, move.item) or _regions(move.outputs, written, move.item_out)
        why = why or _tiles(move, known)
        if why:
            yield f"{move.key}: {why}"


def _sizes(move: Move) -> str:
    """The first contradiction between a move's dtypes, shape, numel and items, in words; "" if there is none."""
    dtype = move.dtype
    out = move.dtype_out
    bits = prod(move.shape) * dtype.bits
    item = max(1, dtype.bits // 8)
    item_out = max(1, out.bits // 8)
    if bits % 8 or move.numel * item * 8 != bits:
        return f"{move.numel} elements are not those of shape {list(move.shape)} in {dtype.name}"
    if move.order and (sorted(move.order) != list(range(len(move.shape))) or dtype.bits < 8):
        return f"the dims of {len(move.shape)} in the order {list(move.order)}"
    if (move.item, move.item_out) != (item, item_out):
        return (
            f"elements of {move.item} and {move.item_out} bytes, but {dtype.name} has {item} and {out.name} {item_out}"
        )
    odd = min(dtype.bits, out.bits) < 8 or "C" in dtype.name[0] + out.name[0]
    return f"{dtype.name} can't become {out.name}" if odd and dtype != out else ""


def _regions(regions: Sequence[Region], sizes: Sequence[int], item: int) -> str:
    """The fault of the first region that is not inside its file or steps by parts of elements; "" if all are fine."""
    for region in regions:
        if region.file >= len(sizes):
            return f"a region is in file {region.file} of {len(sizes)}"
        if region.offset + region.reach(item) > sizes[region.file]:
            return "a region leaves its file"
        if any(stride % item for stride in region.strides):
            return f"a region steps by less than elements of {item} bytes"
    return ""


class _Verdicts:
    """A cache of boxes and verdicts. The keys are what they depend on."""

    def __init__(self) -> None:
        self.boxes: dict[tuple[tuple[int, ...], Tile], Box | None] = {}
        self.tiled: set[tuple[tuple[int, ...], tuple[Tile, ...]]] = set()


def _tiles(move: Move, known: _Verdicts) -> str:
    """Do the sources tile the line once, and the distinct boxes of the outputs too?"""
    shape = _line_shape(move)
    for region in move.sources:
        if region.replica and _box(shape, _tile(region), known) is None:
            return "a source region is no box of the tensor"
    sides = (
        ("source", [_tile(region) for region in move.sources if not region.replica]),
        ("output", list(dict.fromkeys(map(_tile, move.outputs)))),
    )
    for side, tiles in sides:
        if (shape, tuple(tiles)) in known.tiled:
            continue
        boxes = [_box(shape, tile, known) for tile in tiles]
        whole = [box for box in boxes if box is not None]
        if len(whole) < len(boxes):
            return (
                f"an {side} region is no box of the tensor" if side == "output" else "a source region is no box of it"
            )
        if sum(box.numel for box in whole) != move.numel or first_overlap(whole) is not None:
            return f"its {side} regions do not hold each of {move.numel} elements once"
        known.tiled.add((shape, tuple(tiles)))
    return ""


def _tile(region: Region) -> Tile:
    return region.at, region.extents, region.steps


def _line_shape(move: Move) -> tuple[int, ...]:
    """The shape that boxes of the line are boxes of: bytes in the last dim for elements of less (`copy.byte_view`)."""
    if move.dtype.bits >= 8:
        return move.line_shape
    if move.shape and move.shape[-1] * move.dtype.bits % 8 == 0:
        return (*move.shape[:-1], move.shape[-1] * move.dtype.bits // 8)
    return (move.numel,)


def _box(shape: tuple[int, ...], tile: Tile, known: _Verdicts) -> Box | None:
    key = (shape, tile)
    if key not in known.boxes:
        known.boxes[key] = box_of(shape, *tile)
    return known.boxes[key]


def box_of(shape: Sequence[int], at: int, extents: Sequence[int], steps: Sequence[int]) -> Box | None:
    """The box of a tensor of `shape` whose elements a region names, None where they are no box.

    A region's dim runs along one dim of the tensor, or along several of which all but the first are whole.
    >>> box_of((4, 6), 7, (2, 3), (6, 1))
    Box(offset=(1, 1), shape=(2, 3))
    """
    if 0 in shape:
        return None
    dims = contiguous_strides(shape)
    offset = [at // step % n for n, step in zip(shape, dims, strict=True)]
    if at != sum(o * step for o, step in zip(offset, dims, strict=True)):
        return None
    size = [1] * len(shape)
    dim = len(shape)
    for extent, step in reversed(list(zip(extents, steps, strict=True))):
        if extent < 2:  # runs along nothing: `collapse` leaves none
            return None
        dim -= 1
        while dim >= 0 and (dims[dim] != step or shape[dim] == 1):
            dim -= 1
        while dim >= 0 and extent > shape[dim] and extent % shape[dim] == 0:
            size[dim], extent = shape[dim], extent // shape[dim]
            dim -= 1
        if dim < 0 or extent > shape[dim]:
            return None
        size[dim] = extent
    box = Box(tuple(offset), tuple(size))
    return box if box.inside(shape) else None


# -- files -------------------------------------------------------------------------------------------------------------


def _files(plan: Plan) -> Iterator[str]:
    spans: list[list[Span]] = [[] for _ in plan.outputs]
    filled: list[set[tuple[int, int]]] = [set() for _ in plan.outputs]
    for number, move in enumerate(plan.moves):
        for region in move.outputs:
            shape = (region.extents, region.strides, move.item_out)
            if meets_itself(*shape) or (region.offset, number) in filled[region.file]:
                yield f"{move.key}: an output region writes bytes of {plan.outputs[region.file].path} twice"
                continue
            end = region.offset + region.reach(move.item_out)
            spans[region.file].append(Span(region.offset, end, comb_of(region.offset, *shape)))
            filled[region.file].add((region.offset, number))
    sizes = {source.path: source.identity[2] for source in reversed(plan.sources)}
    hashed = {number for number, file in enumerate(plan.outputs) if any(p.kind == "sha256" for p in file.patches)}
    for number, file in enumerate(plan.outputs):
        why = _copied(file, plan.arrays[number], spans[number], sizes) if file.copy_of is not None else ""
        why = why or _arrays(file, plan.arrays[number], filled[number], spans[number])
        why = why or _patches(plan, number, hashed) or _bytes(file, spans[number])
        if why:
            yield f"{file.path}: {why}"


def _copied(file: TargetFile, arrays: Sequence[Extent], spans: Sequence[Span], sizes: dict[str, int]) -> str:
    if file.literals or file.patches or arrays or spans:
        return "a copy of a source file is written by something else too"
    have = sizes.get(file.copy_of or "")
    if have is None:
        return f"it is a copy of {file.copy_of!r:.200}, which is no source"
    return f"a copy of {have} bytes is given {file.size}" if have != file.size else ""


def _arrays(file: TargetFile, arrays: Sequence[Extent], filled: set[tuple[int, int]], spans: Sequence[Span]) -> str:
    """Is every array filled by its move, and does every region fill an array?"""
    listed = {(offset, move): nbytes for offset, nbytes, move in arrays if move >= 0}
    if any(offset + nbytes > file.size for offset, nbytes, _ in arrays):
        return "an array leaves the file"
    if set(listed) != filled or len(listed) != sum(move >= 0 for _, _, move in arrays):
        return "arrays without a move that fills them, or moves that fill no array"
    ends = {offset: offset + nbytes for (offset, _), nbytes in listed.items()}
    return "a region leaves its array" if any(span.stop > ends[span.start] for span in spans) else ""


def _patches(plan: Plan, number: int, hashed: set[int]) -> str:
    """Does every patch have its hole in the file and something that it is taken of?"""
    file = plan.outputs[number]
    arrays = plan.arrays[number]
    for offset, kind, of, span in file.patches:
        if offset + PATCH_BYTES[kind] > file.size or (span is not None and sum(span) > file.size):
            return "a patch leaves the file"
        known = {"digest": len(plan.moves), "sha256": len(plan.outputs), "crc32": len(arrays)}[kind]
        if (span is None and not 0 <= of < known) or (span is not None and kind != "crc32"):
            return f"a patch of kind {kind} is taken of number {of}, and there are {known}"
        if kind == "digest" and plan.moves[of].order:
            return "the digest of a tensor whose dims are moved in another order than their own"
        if kind == "sha256" and of in hashed:
            return "the hash of a file that holds hashes itself"
    return ""


def _bytes(file: TargetFile, spans: list[Span]) -> str:
    """The fault of bytes of the file that are written twice, "" if none are. Patches may be inside literals, which
    leave room for them."""
    literals = sorted(Span(at, at + len(data)) for at, data in file.literals if data)
    holes = sorted(Span(patch.offset, patch.offset + PATCH_BYTES[patch.kind]) for patch in file.patches)
    starts = [span.start for span in literals]
    for hole in holes:
        before = bisect_right(starts, hole.start) - 1
        if before < 0 or hole.stop > literals[before].stop:
            spans.append(hole)
    clash = first_clash(holes) or first_clash([*spans, *literals])
    if clash is None and literals and literals[-1].stop > file.size:
        clash = literals[-1]
    return f"bytes {clash.start}..{clash.stop} are written twice or are outside {file.size}" if clash else ""
