"""Optimizer states that torchao keeps as codes: tensor subclasses in a pickle, read as the plain tensors they wrap.

    Opaque("torchao.optim.subclass_8bit.OptimState8bit", ...)  ->  {"codes": U8 (128, 64), "scale": F32 (32,),
                                                                    "qmap": F32 (256,)}

    class            codes                                   value of a code        blocks
    OptimState8bit   U8, of the state's shape                qmap[code]             codes / scales, along the
    OptimState4bit   U8, two a byte, the high half first     qmap[half]             row-major line of the state
    OptimStateFp8    F8_E4M3, of the state's shape           the code itself

Every value is that times its block's scale, in fp32 (`quantised.codecs.torchao_states`). A pickle holds
`_rebuild_from_type_v2( _rebuild_wrapper_subclass, class, (class, dtype, size, ...), state)`; the tensors are in the
state, and no code of the class is needed to read them. The dtype is the one that the subclass claims to have; values
are always fp32.

Source: torchao 0.18.0 `optim/subclass_8bit.py`, `subclass_4bit.py`, `subclass_fp8.py`, `quant_utils.py`
(`dequant_with_qmap`); until 0.9 the modules were `torchao.prototype.low_bit_optim.subclass_*`.
What it does not do: read a value, other classes of torchao.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import prod
from typing import Any

from ckpt_tool.core.box import contiguous_strides
from ckpt_tool.core.extras import Opaque
from ckpt_tool.storage.pickles.pickle_globals import CODED_STATES
from ckpt_tool.storage.pickles.pickle_values import TensorRef

CODES = "codes"
SCALE = "scale"
QMAP = "qmap"
PARTS = (CODES, SCALE, QMAP)
_QMAPS = {"OptimState8bit": (256,), "OptimState4bit": (16,), "OptimStateFp8": None}  # shape of the table
_WRAPPER = "torch._utils._rebuild_wrapper_subclass"


def coded(value: Any) -> Mapping[str, TensorRef] | None:
    """The plain tensors of a state that is kept as codes, None for whatever is none, or not as torchao makes it.

    Codes have the state's shape; those of four bits half as many along its last dim.
    """
    made = wrapper(value, CODED_STATES)
    if made is None:
        return None

    shape = made.args[2]
    table = _QMAPS[value.name.rpartition(".")[2]]
    codes, scale, qmap = (value.state.get(part) for part in PARTS)
    if type(codes) is not TensorRef or type(scale) is not TensorRef or type(shape) is not tuple:
        return None

    if table is None:
        fits = qmap is None and codes.dtype.name == "F8_E4M3" and codes.shape == shape
    else:
        fits = type(qmap) is TensorRef and qmap.shape == table and qmap.dtype.name == "F32"
        fits = fits and codes.dtype.name == "U8"

    if fits and table == (16,):
        fits = codes.contiguous and codes.shape == (prod(shape) // 2,) and bool(shape) and shape[-1] % 2 == 0
        if fits:
            half = (*shape[:-1], shape[-1] // 2)
            codes = codes._replace(shape=half, stride=contiguous_strides(half))
    elif fits:
        fits = codes.shape == shape

    blocks = scale.shape[0] if len(scale.shape) == 1 else 0
    if not fits or not blocks or not scale.dtype.is_float or prod(shape) % blocks:
        return None

    found = {CODES: codes, SCALE: scale}
    return {**found, QMAP: qmap} if type(qmap) is TensorRef else found


def wrapper(value: Any, classes: Collection[str]) -> Opaque | None:
    """`value` if it is the record of a tensor subclass of one of these classes, with arguments (class, dtype, size,
    ...) and its tensors in `value.state`; None for any other value."""
    if type(value) is not Opaque or value.name not in classes or not isinstance(value.state, dict):
        return None
    made = value.args[0] if len(value.args) == 1 else None
    return made if type(made) is Opaque and made.name == _WRAPPER and len(made.args) == 8 else None
