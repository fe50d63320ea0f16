"""Which parameters a rank holds, and which part of each is its own to update (ZeRO).

    ZeRO 0     every data rank has all of the optimizer's state
    ZeRO 1, 2  the rank's parameters end to end on one line, padded, cut into equal parts: one may be on several ranks
    ZeRO 3     each parameter's line by itself, padded, cut into equal parts; the model's values are cut too

Matrices that Muon steps are whole on one rank each, as Megatron's layer-wise optimizer has them
(`layer_wise_optimizer.py` `_shard_params_ping_pong`): sorted by size, dealt to and fro. The rest is on the line.

Dense parameters are cut over all data ranks, experts over those that hold the same ones, each kind on its own line. A
part is (start, stop) on the row-major line of the parameter's TP-local box.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from ckpt_tool.harness.layout import HarnessLayout
from ckpt_tool.harness.pieces import Coordinates
from ckpt_tool.harness.shape import ModelShape, ParameterShape


class RankParameter(NamedTuple):
    """A parameter on a rank: its TP-local box, and which copy of it this is (0: the one that counts)."""

    param: ParameterShape
    offset: tuple[int, ...]
    box: tuple[int, ...]
    copies: int  # over TP and roles; data replicas come on top

    @property
    def numel(self) -> int:
        """The number of elements of the rank's part."""
        return math.prod(self.box)


def list_rank_parameters(shape: ModelShape, layout: HarnessLayout, at: Coordinates) -> list[RankParameter]:
    """The parameters of a rank in the order of the model, its virtual stages one after the other."""
    rooms = {str(layer) for chunk in at.chunks for layer in chunk}
    is_first = at.pp == 0
    is_last = at.pp == layout.pp - 1
    rooms |= {"embed"} if is_first else set()
    rooms |= {"head"} if is_last else set()
    per = max(1, shape.experts // layout.ep)
    listed = []
    for param in shape.parameters():
        second = shape.tied and is_last and not is_first and param.room == "embed"
        if param.room not in rooms and not second:
            continue
        if param.expert is not None and param.expert // per != at.ep:
            continue
        offset, box = local_box(param, layout.tp, at.tp)
        listed.append(RankParameter(param, offset, box, (at.tp if param.cut is None else 0) + second * layout.tp))
    return listed


def local_box(param: ParameterShape, tp: int, index: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offset and shape of what TP rank `index` holds of a parameter."""
    offset = [0] * len(param.shape)
    box = list(param.shape)
    if param.cut is not None:
        box[param.cut] //= tp
        offset[param.cut] = index * box[param.cut]
    return tuple(offset), tuple(box)


def parts(
    params: Sequence[RankParameter], zero: int, size: int, index: int, *, muon: bool = False
) -> dict[str, tuple[int, int]]:
    """(start, stop) of what member `index` of `size` updates, for parameters of one kind. muon: does it step the
    matrices?"""
    if zero == 0:
        return {item.param.name: (0, item.numel) for item in params}
    if zero == 3:
        return {item.param.name: _band(item.numel, math.ceil(item.numel / size), index) for item in params}
    dealt = sorted((item for item in params if muon and item.param.is_matrix), key=lambda item: item.numel)
    part_of = {}
    for number, item in enumerate(dealt):
        turn = number % (2 * size)
        is_own = index == min(turn, 2 * size - 1 - turn)
        part_of[item.param.name] = (0, item.numel if is_own else 0)
    line = [item for item in params if item.param.name not in part_of]
    share = math.ceil(sum(item.numel for item in line) / size)
    low = index * share
    start = 0
    for item in line:
        cut = [min(max(edge - start, 0), item.numel) for edge in (low, low + share)]
        part_of[item.param.name] = (cut[0], cut[1])
        start += item.numel
    return part_of


def _band(numel: int, share: int, index: int) -> tuple[int, int]:
    return min(numel, index * share), min(numel, (index + 1) * share)
