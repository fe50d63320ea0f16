"""Weights that torchao keeps as codes: tensor subclasses in a pickle, read as the plain tensors they wrap.

    Opaque("torchao.quantization.Int8Tensor", ...)  ->  {"qdata": I8 (64, 32), "scale": F32 (64, 1)}

    class                                                   its tensors
    Float8Tensor, Int8Tensor, IntxUnpackedToInt8Tensor,     its own attributes, under these names
      MXTensor, NVFP4Tensor
    AffineQuantizedTensor (until 0.14)                      those of its `tensor_impl`
      PlainAQTTensorImpl, QDQTensorImpl                     int_data, scale, zero_point
      Float8AQTTensorImpl, not transposed                   float8_data, scale
    LinearActivationQuantizedTensor                         those of its `original_weight_tensor`

The names are those under which torchao stores weights in safetensors files, and by which
`weight_schemes.quantised_weights` finds them. A pickle holds `_rebuild_from_type_v2(_rebuild_wrapper_subclass, class,
(class, dtype, size, ...), state)`; the tensors are in the state, and no code of the class is needed to read them.

Source: torchao 0.18.0 `quantization/quantize_/workflows/` and `prototype/mx_formats/`, `tensor_data_names` of each
class; 0.12.0 `dtypes/affine_quantized_tensor.py`, `dtypes/uintx/`, `dtypes/floatx/float8_layout.py`.
What it does not do: read a value, or layouts of tensors that only a kernel reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt_tool.core.extras import Symbol
from ckpt_tool.storage.pickles.coded_states import wrapper
from ckpt_tool.storage.pickles.pickle_globals import CODED_WEIGHTS
from ckpt_tool.storage.pickles.pickle_values import TensorRef
from ckpt_tool.weight_schemes.quantised_weights import SUBCLASS_ROLES

_INSIDE = ("tensor_impl", "original_weight_tensor")  # of a class that wraps another
_CALLED = {"int_data": "qdata", "float8_data": "qdata"}
_FLOATS = 2  # ZeroPointDomain.FLOAT: its zero points are no integers


def coded_weight(value: Any) -> Mapping[str, TensorRef] | None:
    """Role -> plain tensor of a weight that is kept as codes, None for whatever is none, or has other parts too."""
    state = _state(value)
    inner = next((key for key in _INSIDE if key in state), None)
    if inner is not None:
        domain = state.get("zero_point_domain")
        floats = type(domain) is Symbol and domain.args == (_FLOATS,)
        others = any(type(each) is TensorRef for each in state.values())
        return None if floats or others else coded_weight(state[inner])
    tensors = {_CALLED.get(key, key): each for key, each in state.items() if type(each) is TensorRef}
    known = "qdata" in tensors and tensors.keys() <= set(SUBCLASS_ROLES) and not state.get("transposed")
    return tensors if known else None


def _state(value: Any) -> Mapping[str, Any]:
    """What an object of one of the classes holds, {} of every other value."""
    return {} if wrapper(value, CODED_WEIGHTS) is None else value.state
