"""Renames the scales and other tensors of a quantised weight together with it, if the weight is only renamed.

    model.layers.0.self_attn.o_proj.weight  ->  decoder.layers.0.self_attention.linear_proj.weight   (whole, as stored)
    model.layers.0.self_attn.o_proj.weight_scale_inv  ->  ...linear_proj.weight_scale_inv

Scales have the layout of their weight, block by block. So if a weight is transposed, merged or split, its scales would
have to be too, at the granularity of blocks, and few systems with such names could read the result. That is a fault,
whose hint is to dequantise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod

from ckpt_tool.algebra.mapped import Made
from ckpt_tool.algebra.piece import Piece, Side
from ckpt_tool.core.box import contiguous_strides
from ckpt_tool.families.base import Shape
from ckpt_tool.families.table import Table
from ckpt_tool.weight_schemes.quantised_weights import part_of


def followers(
    unknown: Iterable[str], here: Table, made: Sequence[Made], shapes: Mapping[str, Shape]
) -> tuple[list[Made], list[str]]:
    """(parts of quantised weights under the names of their weights, parts that can't follow) among the names that no
    rule of the dialect `here` knows."""
    renamed = list[Made]()
    lost = list[str]()
    places: dict[str, list[Made]] | None = None
    for name in unknown:
        stem = part_of(name)
        if stem is None or not here.knows(stem):
            continue
        if places is None:
            places = {}
            for each in made:
                for source in {piece.src.name for piece in each.pieces}:
                    places.setdefault(source, []).append(each)
        targets = places.get(stem, [])
        if len(targets) != 1 or not _is_renamed(targets[0], shapes.get(stem)):
            lost.append(name)
            continue
        shape = tuple(shapes[name])
        new = _replace_module(name, stem, targets[0].name)
        steps = contiguous_strides(shape)
        renamed.append(Made(new, shape, (Piece(shape, Side(name, 0, steps), Side(new, 0, steps)),)))
    return renamed, lost


def is_halved(name: str, wanted: Shape, shapes: Mapping[str, Shape]) -> bool:
    """Does a tensor store two codes per byte, by its shape and by a scale next to it?

    >>> is_halved("m.weight", (8, 64), {"m.weight": (8, 32), "m.weight_scale": (8, 4)})
    True
    """
    shape = tuple(shapes[name])
    scales = any(part_of(beside) == name for beside in (f"{name}_scale", f"{name}_scale_inv") if beside in shapes)
    scales |= f"{name.removesuffix('.weight')}.scale" in shapes
    return scales and shape[:-1] == wanted[:-1] and 2 * shape[-1] == wanted[-1]


def _is_renamed(made: Made, shape: Shape | None) -> bool:
    """Is it its one source, every element in its place?"""
    if shape is None or tuple(shape) != made.shape or len(made.pieces) != 1:
        return False
    flat = made.pieces[0].merged()
    whole = flat.numel == prod(shape) and flat.src.offset == flat.dst.offset == 0 and not flat.maps
    return whole and flat.src.strides == flat.dst.strides in ((), (1,))


def _replace_module(name: str, stem: str, new: str) -> str:
    if name.startswith(stem):
        return new + name.removeprefix(stem)
    module = stem.removesuffix(".weight")
    return new.removesuffix(".weight") + name.removeprefix(module)
