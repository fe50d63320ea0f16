"""Quantised weights whose parts have any shapes and dtypes: floats, the same in any range, or an error of ours; nothing
else."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from ckpt_tool.core.box import whole
from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.core.integers import ceil_div
from ckpt_tool.core.tensor import Chunk, LogicalTensor, StoredArray, TensorKey
from ckpt_tool.errors import CkptError
from ckpt_tool.quantised.codecs.choose_codec import make_recipe
from ckpt_tool.run.computed import ComputedTree, Input
from ckpt_tool.storage.source import Tree
from ckpt_tool.weight_schemes.quantised_weights import TensorKind, find

DIMS = (0, 1, 2, 3, 4, 8, 16, 32, 64)


class Odd:
    """Draws the parts of one weight, most of them as they should be."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.rows = draw.choice(DIMS)
        self.columns = draw.choice(DIMS) * draw.choice((1, 1, 16))
        self.lead = () if draw.random() < 0.7 else (draw.choice((1, 2, 3)),)
        self.groups = draw.choice((1, 2, 4, 8))
        self.bits = draw.choice((2, 3, 4, 8))

    def shape(self, *dims: int) -> tuple[int, ...]:
        found = [*self.lead, *dims]
        if found and self.draw.random() < 0.1:
            found[self.draw.randrange(len(found))] = self.draw.choice(DIMS)
        return tuple(found[:-1] if self.draw.random() < 0.05 else found)

    def parts(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        rows = self.rows
        columns = self.columns
        words = -(-self.columns * self.bits // 32)
        kind = self.draw.choice(("F32", "BF16", "F16", "F8_E8M0", "U8", "F8_E4M3"))
        row = self.shape(rows, 1)
        grid = self.shape(rows, self.groups)
        blocks = self.shape(ceil_div(rows, 16), ceil_div(columns, 16))
        which = self.draw.choice(("bytes", "words", "nibbles", "blocks"))
        if which == "bytes":
            ending = self.draw.choice(("_scale", "_scale_inv"))
            found = {
                "w.weight": (self.draw.choice(("F8_E4M3", "I8")), self.shape(rows, columns)),
                f"w.weight{ending}": (kind, self.draw.choice((row, grid, blocks, (), (1,)))),
            }
        elif which == "words":
            found = {
                "w.weight_packed": ("I32", self.shape(rows, words)),
                "w.weight_shape": ("I64", (len(self.lead) + 2,)),
                "w.weight_scale": (kind, self.draw.choice((row, grid))),
            }
        elif which == "nibbles":
            found = {
                "w.weight_packed": ("U8", self.shape(rows, columns)),
                "w.weight_scale": (kind, grid),
                "w.weight_global_scale": ("F32", self.draw.choice(((1,), (), (2,)))),
            }
        else:
            return {
                "w_blocks": ("U8", self.shape(rows, self.groups, 16)),
                "w_scales": ("U8", self.shape(rows, self.groups)),
            }
        if self.draw.random() < 0.4:
            down = -(-rows * self.bits // 32)
            shapes = (row, grid, self.shape(down, self.groups), self.shape(down, 1), ())
            found["w.weight_zero_point"] = (self.draw.choice(("I8", "I32", "I32", "F32")), self.draw.choice(shapes))
        return found


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("seed", range(4))
def test_floats_or_an_error_of_ours(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    seen = Counter[str]()
    (tmp_path / "f").write_bytes(random.Random(9).randbytes(1 << 19))
    tree = Tree(tmp_path)
    for _ in range(500):
        odd = Odd(draw)
        tensors = {}
        for name, (dtype, shape) in odd.parts().items():
            array = StoredArray("f", 8 * draw.randrange(1 << 10), DTYPES[dtype], shape)
            tensors[name] = LogicalTensor(
                TensorKey(name), shape, array.dtype, (Chunk(whole(shape), array, whole(shape)),)
            )
        if any(tensor.nbytes > 1 << 18 for tensor in tensors.values()):
            continue
        found = find(
            {name: TensorKind(each.dtype, each.shape) for name, each in tensors.items()},
            bits=draw.choice(((), (4,), (8,))),
        )
        stated = (
            (*odd.lead, odd.rows, odd.columns) if draw.random() < 0.9 else (draw.randrange(-2, 70),) * draw.randrange(4)
        )
        for weight in found.weights.values():
            inputs = {name: Input(tensors[name], tree) for name in weight.names}
            try:
                recipe = make_recipe(weight, TensorKey("w"), inputs, lambda _, stated=stated: stated)
                made = ComputedTree("odd", [recipe])
                numel = made.tensors[0].numel
                line = made.read("model/w", 0, 4 * numel)
                for start in (draw.randrange(numel) for _ in range(3 if numel else 0)):
                    stop = draw.randrange(start, numel) + 1
                    assert made.read("model/w", 4 * start, 4 * (stop - start)) == line[4 * start : 4 * stop]
                seen[f"{weight.codes}{' - zeros' if 'zero_point' in weight.parts else ''}"] += 1
            except CkptError as e:
                seen[e.code] += 1
    assert (
        seen["bytes"] > 20 and seen["words"] > 5 and seen["words - zeros"] and seen["E1462"] > 20 and seen["E1463"] > 5
    ), seen
