"""Which codec each quantised weight has: its recipe, by how its codes are stored.

    recipe = make_recipe(weight, TensorKey("m.weight"), inputs_by_name, read_numbers)

`quantised_weights` says what is stored where, `codec` has the table of all layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ckpt_tool.core.box import contiguous_strides, whole
from ckpt_tool.core.tensor import Chunk, LogicalTensor, TensorKey
from ckpt_tool.quantised.codecs.bitnet import make_bitnet
from ckpt_tool.quantised.codecs.bitsandbytes import make_4bit, make_int8
from ckpt_tool.quantised.codecs.codec import Dequantized
from ckpt_tool.quantised.codecs.fp4 import make_fp4
from ckpt_tool.quantised.codecs.fp8 import make_fp8
from ckpt_tool.quantised.codecs.gptq import make_gptq
from ckpt_tool.quantised.codecs.int4 import make_int4
from ckpt_tool.quantised.codecs.mlx_groups import make_mlx
from ckpt_tool.run.computed import Input
from ckpt_tool.weight_schemes.quantised_weights import (
    BYTES,
    MATRIX,
    NIBBLES,
    OF_127,
    STREAM,
    TABLED,
    TRITS,
    TURNED,
    WORDS,
    Quantised,
)

_MAKERS = {
    BYTES: make_fp8,
    NIBBLES: make_fp4,
    TURNED: make_fp4,
    MATRIX: make_gptq,
    STREAM: make_mlx,
    TRITS: make_bitnet,
}


def make_recipe(
    weight: Quantised,
    key: TensorKey,
    inputs_by_name: Mapping[str, Input],
    read_numbers: Callable[[Input], Sequence[int]],
) -> Dequantized:
    """How the floats of a weight are computed, of shape `weight.shape`.

    Args:
        key: of the floats.
        inputs_by_name: the tensor of every name of the weight.
        read_numbers: reads a small tensor of integers (`weight_shape`, bitsandbytes' states).

    Raises InconsistentCheckpoint E1462 for parts whose shapes or dtypes do not belong together, UsageError E1464 for
    codes in an order of a GPU's own.
    """
    if weight.codes == WORDS:
        return make_int4(weight, key, inputs_by_name, read_numbers(inputs_by_name[weight.parts["shape"]]))
    if weight.codes == TABLED:
        return make_4bit(weight, key, inputs_by_name, read_numbers)
    if weight.codes == OF_127:
        return make_int8(weight, key, inputs_by_name, read_numbers)
    return _MAKERS[weight.codes](weight, key, inputs_by_name)


def transpose_view(made: LogicalTensor) -> LogicalTensor:
    """Floats of shape (..., rows, columns), one array, seen as (..., columns, rows)."""
    array = made.chunks[0].array
    steps = contiguous_strides(made.shape)
    shape = (*made.shape[:-2], made.shape[-1], made.shape[-2])
    array = array._replace(shape=shape, strides=(*steps[:-2], steps[-1], steps[-2]))
    return made._replace(shape=shape, chunks=(Chunk(whole(shape), array, whole(shape)),))
