"""Optimizer states that torchao keeps as codes, as the floats that they encode: a table look-up times a scale.

    w [exp_avg@codes] U8 (128, 64), w [exp_avg@scale] F32 (32,), w [exp_avg@qmap] F32 (256,)  ->  w [exp_avg] F32

    8 bits    qmap[code] * scale               4 bits    qmap[half] * scale, the high half of a byte first
    FP8       float(code) * scale              blocks of equally many elements of the row-major line share a scale

One product in fp32, rounded to nearest: torchao's `dequantize()`, bit for bit.
Source: torchao 0.18.0 `optim/quant_utils.py` (`dequant_with_qmap`), `optim/subclass_*.py`. Cost: 2 ns an element.
What it does not do: quantise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

import numpy as np

from ckpt_tool.core.tensor import LogicalTensor, TensorKey
from ckpt_tool.errors import Incomplete, InconsistentCheckpoint, UsageError
from ckpt_tool.formats.state_dict.coded import part_of, shape_of_codes
from ckpt_tool.quantised.codecs.codec import Bytes, Codec, Dequantized, Halves, Step, Table, byte_table
from ckpt_tool.quantised.codecs.paddle_moments import LACKING, SCALES, States
from ckpt_tool.quantised.codecs.scale_grid import RowBlocks, ScaleGrid
from ckpt_tool.run.computed import Input
from ckpt_tool.storage.pickles.coded_states import CODES, QMAP, SCALE
from ckpt_tool.storage.source import Tree

KEPT = "E1469"


def find_torchao_states(tensors: Iterable[LogicalTensor], source: Tree) -> States:
    """The states among `tensors`, of `source`, that are kept as codes.

    Raises Incomplete E1363 for codes without their scales, InconsistentCheckpoint E1362 for parts that do not fit.
    """
    states: dict[TensorKey, dict[str, LogicalTensor]] = {}
    for tensor in tensors:
        part = part_of(tensor.key.state)
        if part is not None:
            states.setdefault(TensorKey(tensor.key.name, part[0]), {})[part[1]] = tensor
    recipes = tuple(_make_recipe(key, parts, source) for key, parts in states.items())
    used = frozenset(tensor.key for parts in states.values() for tensor in parts.values())
    paths = {key: parts[CODES].path for key, parts in states.items()}
    source_paths = {key: (*path[:-1], str(path[-1]).removesuffix(f"@{CODES}")) for key, path in paths.items() if path}
    return States(recipes, used, source_paths)


def _make_recipe(key: TensorKey, parts: dict[str, LogicalTensor], source: Tree) -> Dequantized:
    codes, scale, qmap = (parts.get(name) for name in (CODES, SCALE, QMAP))
    if codes is None or scale is None or (qmap is None) != codes.dtype.name.startswith("F8"):
        raise Incomplete(
            f"of a state that torchao keeps as codes there is only {', '.join(sorted(parts))}",
            code=LACKING,
            key=str(key),
            hint="fetch the whole checkpoint, or take all states of the optimizer along",
        )

    shape = shape_of_codes(codes.shape, qmap.shape if qmap is not None else None)
    blocks = prod(scale.shape)
    numel = prod(shape)
    bits = 4 if shape != codes.shape else 8
    if not blocks or numel % blocks or (qmap is not None and qmap.shape != (1 << bits,)):
        raise InconsistentCheckpoint(
            f"scales of shape {list(scale.shape)} for a state of shape {list(shape)}",
            code=SCALES,
            key=str(scale.key),
            hint="the files come from two saves: fetch all files of one",
        )

    # The line is seen as a matrix with a block in each row.
    columns = numel // blocks
    inputs = tuple(Input(part, source) for part in (codes, scale, qmap) if part is not None)
    table = _read_table(bits) if qmap is not None else byte_table(codes.dtype)
    reader = Bytes(columns, table) if bits == 8 else Halves(columns, table, high_first=True)
    step = Step(np.multiply, ScaleGrid(1, scale.dtype, 1, columns, str(scale.key)))
    codec = Codec(columns, reader, RowBlocks(blocks, blocks), (step,))
    return Dequantized(key, shape, inputs, f"dequantised torchao {codes.dtype.name} {bits} {blocks}", codec)


def _read_table(bits: int) -> Table:
    """The floats that codes of so many bits encode, read from input 2."""
    return lambda read: read(2, 0, 1 << bits)


def refuse_codes(tensors: Sequence[LogicalTensor]) -> None:
    """Raise UsageError E1469 for states that are kept as codes: no format writes them as torchao's optimizers do."""
    states = [tensor for tensor in tensors if (part_of(tensor.key.state) or ("", ""))[1] == CODES]
    if states:
        raise UsageError(
            f"{len(states)} optimizer states are codes of torchao's low-bit optimizers, which no format here writes",
            code=KEPT,
            key=str(states[0].key),
            hint="--dequantize writes them as F32, which torchao loads; --drop optimizer leaves them out",
        )
