"""Quantised weights: which tensors of a checkpoint belong together, by names, dtypes and shapes.

The one idea: a quantised weight is a `Quantised`: the tensor that holds its codes (`lead`), the other tensors it needs,
each under a role, and how many codes share a scale along each dim (`block`). This is all that is needed to move it (a
cut has to fall on `block`), to count it, and to make floats of it.

    m.weight F8_E4M3 [256, 512], m.weight_scale_inv F32 [2, 4]
      -> Quantised("m.weight", BYTES, "m.weight", {"scale": "m.weight_scale_inv"}, shape=(256, 512), block=(128, 128),
          ...)

What is recognised (the arithmetic is in `quantised.codecs.codec`):

    codes            other tensors              who writes it
    X    F8_*, I8    X_scale_inv                        fine-grained FP8: DeepSeek V3, Qwen3-FP8, transformers
    X    I8, F4      X_scale_inv, grid of [1, 32]       FP4 experts of DeepSeek V4: two codes a byte, low half first
    m.weight         m.scale or m.qscale_weight         the same: DeepSeek's own names, Mistral's
    X    F8_*, I8    X_scale [, X_zero_point]           compressed-tensors float-, int-, naive-, mxfp8-quantized; FBGEMM
    X_blocks U8      X_scales U8                        MXFP4 of gpt-oss: [..., rows, n / 32, 16], transposed floats
    X_packed I32     X_scale, X_shape [, X_zero_point]  compressed-tensors pack-quantized: codes of 1 to 8 bits
    X_packed U8      X_scale F8_E4M3, X_global_scale    compressed-tensors nvfp4-pack-quantized, groups of 16
    X_packed U8      X_scale U8                         compressed-tensors mxfp4-pack-quantized, groups of 32
    X    U8          X_scale F8_E4M3, X_scale_2         NVFP4 of NVIDIA's ModelOpt, groups of 16
    X [n / 2, 1]     X.absmax, X.quant_map,             bitsandbytes, 4 bits, the shape in a value; absmax U8 with
                     X.quant_state.bitsandbytes__nf4    X.nested_absmax and X.nested_quant_map
    m.weight I8      m.SCB [, m.weight_format]          bitsandbytes, 8 bits
    m.weight U8      m.weight_scale, one number         BitNet [out / 4, in], where the config says so
    X._data I8, F8   X._scale                           quanto, 8 bits
    m.weight U32     m.scales, m.biases                 MLX [out, in * bits / 32], as the config says
    m.weight U32     m.scales U8                        MLX's modes mxfp4, mxfp8 and nvfp4, which the config names
    m.qweight I32    m.scales, m.qzeros [, m.g_idx]     GPTQ [in * bits / 32, out], AWQ [in, out / 8]: (in, out)
    m._w_qdata F8_*  m._w_scale                         torchao's Float8Tensor; MXTensor of scales of 32 codes
    m._w_qdata I8    m._w_scale [, m._w_zero_point]     torchao's Int8Tensor and IntxUnpackedToInt8Tensor
    m._w_qdata U8    m._w_scale [, _per_tensor_scale]   torchao's MXTensor of 4 bits and NVFP4Tensor

Scales are over the last two dims: one number, one a row ([rows] or [rows, 1]), or a grid whose last blocks may be short
([ceil(rows / a), ceil(cols / b)]); leading dims (experts) are the codes' own. F8_E8M0 and U8 scales are powers of two,
2^(byte - 127), and byte 255 is NaN. Scales of torchao's MXTensor and NVFP4Tensor may be stored in tiles (`tiled`).
Sources: transformers 5.23 (`integrations/finegrained_fp8.py`, `integrations/mxfp4.py`), compressed-tensors 0.20
(`compressors/`), DeepSeek-V3 `inference/fp8_cast_bf16.py`, torchao 0.18 (`prototype/safetensors/`).
Cost: some us a name. What it does not do: read a value, a file or a config (that is `weight_schemes.declared_scheme`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from math import prod
from types import MappingProxyType
from typing import NamedTuple

from ckpt_tool.core.dtype import DType
from ckpt_tool.core.integers import ceil_div

Shape = tuple[int, ...]
# How the codes of a weight are stored in its `lead` (`Quantised.codes`).
BYTES = "bytes"
NIBBLES = "nibbles"
WORDS = "words"
TURNED = "turned nibbles"
MATRIX = "words of a transposed matrix"
# bitsandbytes: TABLED has 4 bits a code (numbers of the table that is stored with the weight), OF_127 has 8
TABLED = "numbers of a table"
OF_127 = "bytes of which 127 is the largest"
STREAM = "a stream of bits"  # MLX
# The keys under which configs keep their section; the second is compressed-tensors' old name, the third MLX's.
CONFIG_KEYS = ("quantization_config", "compression_config", "quantization")
# Files in which quantisation tools repeat or replace the config's section: ModelOpt, GPTQ, AWQ.
QUANTISER_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
TRITS = "four codes of two bits a byte"  # BitNet: the four codes of a byte are a quarter of all rows apart

# Values of `Quantised.order`: what dtypes and shapes alone do not say about the order of codes or scales.
ORDERS = ("gptq", "gptq_v2", "awq")  # for a MATRIX, read from the config by `declared_scheme`
TILED = "scales in tiles"  # the scales are stored tile by tile, see `tiled`
TRIT_SCALES = ("divided", "multiplied")  # for TRITS: is the weight code / scale or code * scale?
AFFINE = "affine"
MODES = {AFFINE: None, "mxfp4": (32, 4), "mxfp8": (32, 8), "nvfp4": (16, 4)}  # of a STREAM: its only (columns, bits)
# Dtypes that usually are the codes of a quantised weight.
CODES = frozenset({"F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I8", "F4"})
DTYPES = CODES | {"U8", "I32", "U32"}  # a checkpoint without any of these has nothing quantised
WIDTH = 128  # codes of a block if neither config nor shapes say another number; DeepSeek's releases have it
SCALE_INV = "_scale_inv"
SCALE = "_scale"
SCALES = "_scales"
PACKED = "_packed"
BLOCKS = "_blocks"
_SCALES = (SCALE_INV, SCALE)
_OF_MODULE = (".scale", ".qscale_weight")
_SCB = ".SCB"
_FORMAT = ".weight_format"
_ABSMAX = ".absmax"
_OF_TABLE = {  # role -> ending, of a TABLED weight's parts
    "quant_map": ".quant_map",
    "nested_absmax": ".nested_absmax",
    "nested_quant_map": ".nested_quant_map",
}
_STATES = (".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4")
_ROLES = {
    "_zero_point": "zero_point",
    "_shape": "shape",
    "_global_scale": "global_scale",
    "_scale_2": "scale_2",
    "_g_idx": "g_idx",
}
ENDINGS = {role: ending for ending, role in _ROLES.items()}
# What the names of codes end in: torchao, quanto, GPTQ and AWQ.
QDATA = "_qdata"
DATA = "._data"
QWEIGHT = ".qweight"
_OF_SUBCLASS = ("scale", "zero_point", "per_tensor_scale")  # roles of a torchao weight's parts; the names end in them
_PRE_SCALE = "act_pre_scale"
SUBCLASS_ROLES = (  # roles in torchao's names; a longer one precedes its own ending, as the first match counts
    *("qdata", "act_quant_scale", "act_quant_zero_point", "act_per_tensor_scale", _PRE_SCALE),
    *("per_tensor_scale", "zero_point", "scale"),
)
TILE = (128, 4)  # rows and columns of scales in a tile, stored as (32, 4, 4): row mod 32, row div 32, column
_OF_QUANTO = (DATA, "._scale", "._shift")
_PART = (*_OF_QUANTO, *_SCALES, *_OF_MODULE, *_ROLES, SCALES, BLOCKS, PACKED, _SCB, _FORMAT)
TABLES = (_ABSMAX, *_OF_TABLE.values(), *_STATES)
# Scales of activations and of the KV cache, which quantised models store too: no weight is computed from them.
_ACTIVATIONS = tuple(
    """
    input_scale output_scale activation_scale input_zero_point output_zero_point input_global_scale
    output_global_scale k_scale v_scale q_scale k_zero_point v_zero_point q_zero_point
    _act_quant_scale _act_quant_zero_point _act_per_tensor_scale
    """.split()
)


class TensorKind(NamedTuple):
    """Dtype and shape of a tensor, which is all that a file's header says of it."""

    dtype: DType
    shape: Shape


class Quantised(NamedTuple):
    """A quantised weight: the tensors it is stored in, and how its values follow from them."""

    made: str  # name of the weight once it is dequantised
    codes: str  # how its values are stored in `lead`: BYTES, NIBBLES, WORDS, ...
    lead: str  # name of the tensor that holds the codes
    parts: Mapping[str, str]  # role -> name of another tensor of the weight
    # Of the values as stored, in elements. Codes TURNED and MATRIX are transposed: the floats are (..., cols, rows).
    shape: Shape
    # Codes that share a scale along each of the last two dims of `shape`, (rows, cols).
    block: tuple[int, int]
    bits: int  # of a code
    order: str = ""  # for a MATRIX one of ORDERS, a STREAM one of MODES, TRITS one of TRIT_SCALES; else TILED or ""

    @property
    def turns(self) -> bool:
        """Is the weight the transpose of the stored values?"""
        return self.codes in (TURNED, MATRIX)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all tensors of the weight, codes first."""
        return (self.lead, *self.parts.values())

    @property
    def floats(self) -> Shape:
        """The shape of the weight once it is dequantised."""
        return (*self.shape[:-2], self.shape[-1], self.shape[-2]) if self.turns else self.shape


class Units(NamedTuple):
    """How a tensor of a quantised weight may be cut into shards."""

    lead: str  # the tensor that holds the weight's codes
    made: str  # name of the weight
    # Number of equal pieces along each dim of `lead` that may not be cut any further; 1 if the dim can't be cut at all.
    whole: Shape
    mine: Shape  # the same for this tensor; 1 along dims that all pieces share


class WeightFault(NamedTuple):
    """A tensor that does not fit its weight: a scale that is missing or has another shape, say."""

    name: str
    what: str  # the reason, for the user
    lacking: bool  # is something missing (or else wrong)?


class FoundWeights(NamedTuple):
    """The quantised weights among some tensors, and what looks like one but does not fit."""

    weights: Mapping[str, Quantised]  # by the name of the tensor that holds the codes
    beside: tuple[str, ...]  # scales of activations and caches, which belong to no weight
    faults: tuple[WeightFault, ...]

    @property
    def names(self) -> frozenset[str]:
        """Every tensor that belongs to the quantisation of a weight."""
        return frozenset(name for weight in self.weights.values() for name in weight.names)


Check = Callable[
    [Mapping[str, Quantised], Mapping[str, TensorKind], frozenset[str]], tuple[dict[str, Quantised], list[WeightFault]]
]


def find(
    tensors: Mapping[str, TensorKind],
    *,
    block: Sequence[int] = (),
    bits: Sequence[int] = (),
    order: str = "",
    apart: Mapping[str, tuple[int, int, str]] = MappingProxyType({}),
    own: Callable[[str], int] | None = None,
    check: Check | None = None,
    trits: str = "",
) -> FoundWeights:
    """Find the quantised weights among `tensors`.

    Args:
        block: (rows, cols) that share a scale according to the config.
        bits: of packed codes, according to the config.
        order: of the codes of matrices (ORDERS) or streams (MODES), if the config says that weights are stored so.
        apart: for MLX: module -> (columns that share a scale, bits, mode), where a module differs from the others.
        own: for GPTQ: module -> bits, if modules differ.
        check: compares the weights with their scheme (`weight_layouts.Declared.check`).
        trits: for BitNet: one of `TRIT_SCALES`, if the config says that weights are stored so.

    >>> from ckpt_tool.core.dtype import DTYPES
    >>> found = find({"w": TensorKind(DTYPES["F8_E4M3"], (300, 256)), "w_scale_inv": TensorKind(DTYPES["F32"], (3, 2))})
    >>> found.weights["w"].block
    (128, 128)
    """
    weights: dict[str, Quantised] = {}
    wrong: list[WeightFault] = []
    taken: set[str] = set()
    stated = tuple(block)
    roles = _list_roles(tensors)
    tables = {name.removesuffix(_ABSMAX) for name in tensors if name.endswith(_ABSMAX)}

    for name, kind in tensors.items():
        if name not in tables and kind.dtype.name not in DTYPES:
            continue
        found = _find_packed(name, kind, tensors, bits) if name.endswith((BLOCKS, PACKED)) else None
        if name in tables:
            found = _find_tabled(name, kind, tensors)
        elif order in MODES and kind.dtype.name == "U32" and name.endswith(".weight"):
            found = _find_stream(
                name, kind, tensors, apart.get(name.removesuffix(".weight"), (block[1], bits[0], order))
            )
        elif order and name.endswith(QWEIGHT):
            width = bits[0] if own is None else own(name.removesuffix(QWEIGHT))
            found = _find_matrix(name, kind, tensors, width, order)
        elif name.endswith(QDATA) and (weight := subclass_of(name)):
            found = _find_subclass(name, weight, kind, tensors)
        elif name.endswith(DATA):
            found = _find_quanto(name, kind, tensors)
        elif trits and kind.dtype.name == "U8" and name.endswith(".weight"):
            found = _find_trits(name, kind, tensors, trits)
        found = found or _find_plain(name, kind, tensors, stated, roles)
        if isinstance(found, Quantised):
            weights[name] = found
            taken.update(found.names)
        elif found is not None:
            wrong.append(found)

    faults = [fault for fault in wrong if fault.name not in taken]  # FP8 scales of a weight look like codes themselves
    beside = tuple(name for name in tensors if name.endswith(_ACTIVATIONS) and name not in taken)
    faults += _list_lone_scales(tensors, {*taken, *beside, *(fault.name for fault in faults)})

    if check is not None:
        known = frozenset((*taken, *beside, *(fault.name for fault in faults)))
        weights, misfits = check(weights, tensors, known)
        faults += misfits

    return FoundWeights(weights, beside, tuple(faults))


def has_codes(dtypes: Iterable[DType]) -> bool:
    """May tensors of these dtypes be quantised? False is certain, True is not."""
    return any(dtype.name in DTYPES for dtype in dtypes)


def has_integers(kinds: Iterable[TensorKind]) -> bool:
    """May some of these tensors be codes that only their names reveal? FP8 and FP4 reveal themselves by the dtype."""
    return any(kind.dtype.name in DTYPES and kind.dtype.name[0] != "F" for kind in kinds)


def units(weight: Quantised, tensors: Mapping[str, TensorKind]) -> dict[str, Units]:
    """How each tensor of a weight may be cut: a block is never cut, and scales are stored with their codes.

    >>> from ckpt_tool.core.dtype import DTYPES
    >>> tensors = {"w": TensorKind(DTYPES["F8_E4M3"], (256, 640)), "w_scale_inv": TensorKind(DTYPES["F32"], (2, 5))}
    >>> [unit.mine for unit in units(find(tensors).weights["w"], tensors).values()]
    [(2, 5), (2, 5)]
    """
    # These can't be cut: groups may follow the order of activations (g_idx), scales be tiled, the shape be a value.
    if weight.codes in (MATRIX, TABLED, STREAM, TRITS) or weight.order == TILED:
        pieces = {name: (1,) * len(tensors[name].shape) for name in weight.names}
        return {name: Units(weight.lead, weight.made, pieces[weight.lead], mine) for name, mine in pieces.items()}
    rows, columns = weight.shape[-2:] if len(weight.shape) > 1 else (1, prod(weight.shape))
    height, width = weight.block
    down = rows // height if rows % height == 0 else 1
    across = columns // width if columns % width == 0 else 1
    if weight.codes == WORDS:
        filled = width * weight.bits % 32 == 0 and tensors[weight.lead].shape[-1] * 32 == columns * weight.bits
        across = across if filled else 1
        zeros = tensors.get(weight.parts.get("zero_point", ""))
        if zeros is not None and zeros.dtype.name == "I32":  # packed along the rows
            down = zeros.shape[-2] if zeros.shape[-2] * 32 == rows * weight.bits and 32 % weight.bits == 0 else 1
    whole = (*weight.shape[:-2], down, across)[-len(weight.shape) :] if weight.shape else ()
    if weight.codes == TURNED:
        whole = (*whole, 1)  # the stored last dim: the 16 bytes of a block
    whole = tuple(max(n, 1) for n in whole)
    out = {weight.lead: Units(weight.lead, weight.made, whole, whole)}
    for role, name in weight.parts.items():
        shape = tensors[name].shape if role in ("scale", "zero_point") else ()
        mine = tuple(n if size > 1 and size % n == 0 else 1 for n, size in zip(whole, shape, strict=False))
        out[name] = Units(weight.lead, weight.made, whole, (*mine, *(1,) * (len(tensors[name].shape) - len(mine))))
    return out


def _list_roles(tensors: Iterable[str]) -> Mapping[str, str]:
    """Ending -> role, for the endings that some name has at all: most checkpoints have none but scales."""
    words = {name.rpartition("_")[2] for name in tensors}
    return {ending: role for ending, role in _ROLES.items() if ending.rpartition("_")[2] in words}


def part_of(name: str) -> str | None:
    """The weight that a name looks like a part of, None for other names.

    >>> part_of("m.weight_scale_inv"), part_of("m.weight_packed"), part_of("m.qscale_weight"), part_of("m.weight")
    ('m.weight', 'm.weight', 'm.weight', None)
    >>> part_of("m._weight_zero_point")
    'm.weight'
    """
    weight = subclass_of(name) if "._" in name else None
    if weight:
        return weight
    ending = next((ending for ending in (*_PART, *TABLES) if name.endswith(ending)), None)
    if ending is None:
        return None
    stem = name.removesuffix(ending)
    return f"{stem}.weight" if ending in (*_OF_MODULE, _SCB, _FORMAT) else stem


def _find_plain(
    name: str, kind: TensorKind, tensors: Mapping[str, TensorKind], block: tuple[int, ...], roles: Mapping[str, str]
) -> Quantised | WeightFault | None:
    """The weight whose codes are stored under its own name; a fault if they do not fit; None if these are no codes."""
    if kind.dtype.name == "U8" and f"{name}_scale_2" in tensors and f"{name}_scale" in tensors:
        return _find_nibbles(name, name, kind, f"{name}_scale", tensors)
    if kind.dtype.name not in CODES:
        return None

    scale = f"{name}{_SCALES[0]}"
    if scale not in tensors:
        names = [f"{name}{_SCALES[1]}"]
        if name.endswith(".weight"):
            module = name.removesuffix(".weight")
            if kind.dtype.name == "I8" and f"{module}{_SCB}" in tensors:
                return _find_int8(name, module, kind, tensors)
            names += [f"{module}{ending}" for ending in _OF_MODULE]
        there = next((each for each in names if each in tensors), None)
        # Without a scale nothing shows that these are codes; they may be ordinary integers.
        if there is None and kind.dtype.name in ("I8", "F4"):
            return None
        if there is None:
            return WeightFault(name, f"{kind.dtype.name} codes without a scale ({scale})", lacking=True)
        scale = there

    if kind.dtype.name == "F4" or (
        kind.dtype.name == "I8" and scale != f"{name}_scale" and _is_halved(kind, tensors[scale])
    ):
        return _find_nibbles(name, name, kind, scale, tensors)

    shape = _make_matrix_shape(kind.shape)
    width = block_of(shape, tensors[scale].shape, block)
    if width is None:
        return _make_misfit(scale, tensors, shape)
    return Quantised(name, BYTES, name, _list_parts(name, scale, tensors, roles), kind.shape, width, 8)


def _find_packed(
    name: str, kind: TensorKind, tensors: Mapping[str, TensorKind], bits: Sequence[int]
) -> Quantised | WeightFault | None:
    """The weight whose codes are stored as `X_blocks` or `X_packed`; a fault if they do not fit; None if no codes."""
    if name.endswith(BLOCKS) and kind.dtype.name == "U8":
        made = name.removesuffix(BLOCKS)
        scales = f"{name.removesuffix(BLOCKS)}{SCALES}"
        if scales not in tensors:
            return WeightFault(name, f"MXFP4 blocks without {scales}", lacking=True) if len(kind.shape) > 3 else None
        if made in tensors:
            return WeightFault(name, f"MXFP4 blocks next to {made} itself", lacking=False)
        if len(kind.shape) < 3 or kind.shape[-1] != 16 or tensors[scales].shape != kind.shape[:-1]:
            return WeightFault(
                scales,
                f"scales {list(tensors[scales].shape)} for blocks {list(kind.shape)}, want {list(kind.shape[:-1])}",
                lacking=False,
            )
        shape = (*kind.shape[:-2], kind.shape[-2] * 32)
        return Quantised(made, TURNED, name, {"scale": scales}, shape, (1, 32), 4)

    if not name.endswith(PACKED) or kind.dtype.name not in ("I32", "U8"):
        return None

    made = name.removesuffix(PACKED)
    scale = f"{made}{SCALE}"
    if scale not in tensors:
        return WeightFault(name, f"packed codes without {scale}", lacking=True)
    if made in tensors:
        return WeightFault(name, f"packed codes next to {made} itself", lacking=False)
    if kind.dtype.name == "U8":
        return _find_nibbles(made, name, kind, scale, tensors)
    return _find_words(made, name, kind, scale, tensors, bits)


def _find_tabled(name: str, kind: TensorKind, tensors: Mapping[str, TensorKind]) -> Quantised | WeightFault:
    """A weight of bitsandbytes' 4 bits: flattened, two codes a byte, whatever dtype these bytes are declared as."""
    parts = {"scale": f"{name}{_ABSMAX}"}
    state = next((f"{name}{ending}" for ending in _STATES if f"{name}{ending}" in tensors), f"{name}{_STATES[0]}")
    scales = tensors[parts["scale"]]
    nested = tensors[parts["scale"]].dtype.name == "U8"
    parts |= {role: f"{name}{ending}" for role, ending in _OF_TABLE.items() if nested or role == "quant_map"}
    parts["state"] = state
    lacking = next((part for part in parts.values() if part not in tensors), None)
    if lacking is not None:
        return WeightFault(name, f"codes of a table without {lacking}", lacking=True)
    sizes = {"quant_map": (16,), "nested_quant_map": (256,)}
    for role, part in parts.items():
        told = tensors[part]
        dtype = "U8" if role == "state" or (nested and role == "scale") else "F32"
        if (told.dtype.name, len(told.shape)) != (dtype, 1) or told.shape != sizes.get(role, told.shape):
            return WeightFault(part, f"{told.dtype.name} {list(told.shape)} next to codes of a table", lacking=False)
    numel = prod(kind.shape) * kind.dtype.bits // 4
    if not numel or not scales.shape[0] or kind.dtype.bits % 8:
        return _make_misfit(parts["scale"], tensors, kind.shape)
    return Quantised(name, TABLED, name, parts, (numel,), (1, ceil_div(numel, scales.shape[0])), 4)


def _find_quanto(name: str, kind: TensorKind, tensors: Mapping[str, TensorKind]) -> Quantised | WeightFault | None:
    """A weight of quanto's 8 bits: a tensor of codes and one of scales, below the weight's name."""
    made = name.removesuffix(DATA)
    scale = f"{made}._scale"
    if kind.dtype.name not in CODES - {"F4"}:
        return None  # codes of 2 and 4 bits, which have a `_shift` too; `declared_scheme` refuses them
    if scale not in tensors:
        return WeightFault(name, f"codes without {scale}", lacking=True)
    if made in tensors:
        return WeightFault(name, f"codes next to {made} itself", lacking=False)
    shape = _make_matrix_shape(kind.shape)
    block = block_of(shape, tensors[scale].shape)
    if block is None:
        return _make_misfit(scale, tensors, shape)
    return Quantised(made, BYTES, name, {"scale": scale}, kind.shape, block, 8)


def _find_trits(name: str, kind: TensorKind, tensors: Mapping[str, TensorKind], scales: str) -> Quantised | WeightFault:
    """A weight of BitNet: codes for -1, 0 and 1, four a byte, and one number that divides or multiplies all."""
    scale = f"{name}{SCALE}"
    if scale not in tensors:
        return WeightFault(name, f"codes without {scale}", lacking=True)
    if len(kind.shape) != 2 or not all(kind.shape) or prod(tensors[scale].shape) != 1:
        return _make_misfit(scale, tensors, kind.shape)
    shape = (4 * kind.shape[0], kind.shape[1])
    return Quantised(name, TRITS, name, {"scale": scale}, shape, shape, 2, scales)


def _find_stream(
    name: str, kind: TensorKind, tensors: Mapping[str, TensorKind], stated: tuple[int, int, str]
) -> Quantised | WeightFault | None:
    """A weight of MLX: each row is a stream of codes in 32-bit words; groups have scales, affine ones biases too."""
    module, (group, bits, mode) = name.removesuffix(".weight"), stated
    parts = {"scale": f"{module}.scales"} | ({"bias": f"{module}.biases"} if mode == AFFINE else {})
    lacking = [part for part in parts.values() if part not in tensors]
    if lacking:  # without scales and biases, U32 tensors are ordinary integers in an affine model
        beside = mode != AFFINE or len(lacking) < len(parts)
        return WeightFault(name, f"codes without {lacking[0]}", lacking=True) if beside else None
    if mode != AFFINE and f"{module}.biases" in tensors:
        return WeightFault(name, f"codes of {mode} next to {module}.biases", lacking=False)
    if f"{module}.global_scale" in tensors:
        return WeightFault(name, f"a scale of the whole tensor, {module}.global_scale", lacking=False)
    scales = tensors[parts["scale"]]
    columns = 32 * kind.shape[-1] // bits if kind.shape else 0
    if (
        len(kind.shape) < 2
        or not all(kind.shape)
        or any(tensors[part] != scales for part in parts.values())
        or (mode != AFFINE and scales.dtype.name != "U8")
        or columns * bits != 32 * kind.shape[-1]
        or scales.shape[:-1] != kind.shape[:-1]
        or scales.shape[-1] * group != columns
    ):
        return _make_misfit(parts["scale"], tensors, (*kind.shape[:-1], columns))
    return Quantised(name, STREAM, name, parts, (*kind.shape[:-1], columns), (1, group), bits, mode)


def _find_int8(name: str, module: str, kind: TensorKind, tensors: Mapping[str, TensorKind]) -> Quantised | WeightFault:
    """A weight of bitsandbytes' 8 bits: bytes, and `SCB`, the largest magnitude of each row."""
    parts = {"scale": f"{module}{_SCB}"}
    if f"{module}{_FORMAT}" in tensors:
        parts["weight_format"] = f"{module}{_FORMAT}"
    if len(kind.shape) != 2 or not all(kind.shape) or tensors[parts["scale"]].shape != kind.shape[:1]:
        return _make_misfit(parts["scale"], tensors, kind.shape)
    return Quantised(name, OF_127, name, parts, kind.shape, (1, kind.shape[1]), 8)


def subclass_part(weight: str, role: str) -> str:
    """The name of a part of a weight in torchao's safetensors files.

    >>> subclass_part("m.weight", "qdata")
    'm._weight_qdata'
    """
    module, dot, parameter = weight.rpartition(".")
    return f"{module}{dot}_{parameter}_{role}"


def subclass_of(part: str) -> str | None:
    """The weight that a tensor is a part of by torchao's naming, None for other names.

    >>> subclass_of("m._weight_zero_point"), subclass_of("m._weight_act_quant_scale"), subclass_of("m.weight_scale")
    ('m.weight', 'm.weight', None)
    """
    module, _, last = part.rpartition(".")
    role = next((role for role in SUBCLASS_ROLES if last.endswith(f"_{role}")), None)
    parameter = last[1:].removesuffix(f"_{role}") if role and last[0] == "_" else ""
    return f"{module}.{parameter}" if module and parameter else None


def subclasses_in(names: Iterable[str]) -> list[str]:
    """The weights whose codes are among `names` by torchao's naming.

    >>> subclasses_in(["m.bias", "m._weight_qdata", "m._weight_scale"])
    ['m.weight']
    """
    weights = (subclass_of(name) for name in names if name.endswith(QDATA))
    return [weight for weight in weights if weight]


def tiled(rows: int, columns: int) -> Shape:
    """The shape in which torchao stores scales of shape (rows, columns) in tiles, as cuBLAS reads them: each tile is a
    contiguous run of 512 bytes. Scales stored in rows never have this shape.

    >>> tiled(200, 12)
    (64, 48)
    """
    return 32 * ceil_div(rows, TILE[0]), 16 * ceil_div(columns, TILE[1])


def _find_subclass(
    name: str, weight: str, kind: TensorKind, tensors: Mapping[str, TensorKind]
) -> Quantised | WeightFault:
    """A weight that torchao stored as a tensor subclass: codes, scales and perhaps zero points."""
    named = {role: subclass_part(weight, role) for role in _OF_SUBCLASS}
    parts = {role: part for role, part in named.items() if part in tensors}
    if "scale" not in parts:
        return WeightFault(name, f"codes without {named['scale']}", lacking=True)
    if weight in tensors:
        return WeightFault(name, f"codes next to {weight} itself", lacking=False)

    if subclass_part(weight, _PRE_SCALE) in tensors:
        what = (
            f"{subclass_part(weight, _PRE_SCALE)} scales what it is multiplied with, so floats of it are another weight"
        )
        return WeightFault(name, what, lacking=False)

    scales = tensors[parts["scale"]]
    halved = kind.dtype.name == "U8"
    shape = (*kind.shape[:-1], 2 * kind.shape[-1]) if halved and kind.shape else kind.shape
    if kind.dtype.name not in CODES | {"U8"} or (halved and scales.dtype.bits > 8) or len(shape) < 2 or not prod(shape):
        return WeightFault(
            name, f"{kind.dtype.name} codes {list(kind.shape)} with {scales.dtype.name} scales", lacking=False
        )

    # Codes that share a scale, by the scale's dtype: 32 in an MXTensor, 16 in an NVFP4Tensor.
    group = {"F8_E8M0": 32, "U8": 32, "F8_E4M3": 16}.get(scales.dtype.name)
    order = ""
    block: tuple[int, int] | None

    if group and len(shape) == 2 and not shape[1] % group and scales.shape == tiled(shape[0], shape[1] // group):
        block = (1, group)
        order = TILED
    elif group:
        fits = scales.shape == (*shape[:-1], shape[-1] // group) and not shape[-1] % group
        block = (1, group) if fits else None
    else:
        block = block_of(shape, scales.shape)

    zeros = tensors.get(parts.get("zero_point", ""), scales)
    if block is None or zeros.shape != scales.shape:
        return _make_misfit(parts["scale"], tensors, shape)
    return Quantised(weight, NIBBLES if halved else BYTES, name, parts, shape, block, 4 if halved else 8, order)


def _find_matrix(
    name: str, kind: TensorKind, tensors: Mapping[str, TensorKind], bits: int, order: str
) -> Quantised | WeightFault:
    """A weight of GPTQ or AWQ: a matrix (inputs, outputs), packed along its inputs (GPTQ) or its outputs (AWQ)."""
    module = name.removesuffix(QWEIGHT)
    parts = {"scale": f"{module}.scales", "zero_point": f"{module}.qzeros"}
    lacking = next((part for part in parts.values() if part not in tensors), None)
    if lacking is not None:
        return WeightFault(name, f"packed codes without {lacking}", lacking=True)
    if order != "awq" and f"{module}.g_idx" in tensors:
        parts["g_idx"] = f"{module}.g_idx"
    grid = tensors[parts["scale"]].shape
    zeros = tensors[parts["zero_point"]].shape
    if len(kind.shape) != 2 or len(grid) != 2 or not all((*kind.shape, *grid)):
        return _make_misfit(parts["scale"], tensors, kind.shape)
    inputs = kind.shape[0] if order == "awq" else kind.shape[0] * 32 // bits
    outputs = grid[1]
    stored = (inputs, outputs * bits // 32) if order == "awq" else (inputs * bits // 32, outputs)
    given = tensors[parts["g_idx"]].shape if "g_idx" in parts else (inputs,)
    if kind.shape != stored or outputs * bits % 32 or (inputs * bits % 32 and order != "awq") or grid[0] > inputs:
        return _make_misfit(parts["scale"], tensors, kind.shape)
    if zeros != (grid[0], outputs * bits // 32) or given != (inputs,):
        return WeightFault(
            name, f"zero points {list(zeros)} and groups of {list(given)} for {list(grid)} scales", lacking=False
        )
    block = ceil_div(inputs, grid[0])
    return Quantised(f"{module}.weight", MATRIX, name, parts, (inputs, outputs), (block, 1), bits, order)


def _find_words(
    made: str, name: str, kind: TensorKind, scale: str, tensors: Mapping[str, TensorKind], bits: Sequence[int]
) -> Quantised | WeightFault:
    """A weight of compressed-tensors' packed integers: 32-bit words full of codes.

    The number of codes is in `X_shape`, a value, which is not read here. Scales and the config's bits determine it too,
    except for the last word of a row, which may be partly filled.
    """
    if f"{made}_shape" not in tensors:
        return WeightFault(name, f"packed codes without {made}_shape", lacking=True)
    grid = tensors[scale].shape
    if len(kind.shape) < 2 or len(grid) < 2 or grid[:-1] != kind.shape[:-1] or not 0 < grid[-1] <= 32 * kind.shape[-1]:
        return _make_misfit(scale, tensors, (*kind.shape[:-1], -1))
    width = bits[0] if len(set(bits)) == 1 else _guess_bits(32 * kind.shape[-1], grid[-1])
    columns = 32 * kind.shape[-1] // width
    group = max(columns // grid[-1], 1)
    columns = group * grid[-1]
    return Quantised(
        made, WORDS, name, _list_parts(made, scale, tensors), (*kind.shape[:-1], columns), (1, group), width
    )


def _guess_bits(stored: int, groups: int) -> int:
    """Bits of a code if no config states them: 4 or 8, whichever gives groups of a usual size."""
    usual = [width for width in (4, 8) if groups > 1 and stored // width // groups in (32, 64, 128, 256, 16, 512, 1024)]
    return usual[0] if usual else 4


def _find_nibbles(
    made: str, name: str, kind: TensorKind, scale: str, tensors: Mapping[str, TensorKind]
) -> Quantised | WeightFault:
    """A weight of 4-bit codes, two a byte; a tensor of dtype F4 counts codes, not bytes."""
    double = 1 if kind.dtype.name == "F4" else 2
    shape = (*kind.shape[:-1], kind.shape[-1] * double) if kind.shape else ()
    grid = tensors[scale].shape
    if (
        len(shape) < 2
        or len(grid) != len(shape)
        or grid[:-1] != shape[:-1]
        or not grid[-1]
        or shape[-1] % (2 * grid[-1])
    ):
        return _make_misfit(scale, tensors, shape)
    return Quantised(
        made, NIBBLES, name, _list_parts(made, scale, tensors), shape, (1, max(shape[-1] // grid[-1], 1)), 4
    )


def _is_halved(kind: TensorKind, scale: TensorKind) -> bool:
    """Does each byte hold two codes? It does if a row has a scale for every 32 of them (DeepSeek V4)."""
    return (
        len(kind.shape) > 1
        and len(scale.shape) == len(kind.shape)
        and (scale.shape[:-1] == kind.shape[:-1] and scale.shape[-1] > 1 and 2 * kind.shape[-1] == 32 * scale.shape[-1])
    )


def _list_parts(
    made: str, scale: str, tensors: Mapping[str, TensorKind], roles: Mapping[str, str] = _ROLES
) -> dict[str, str]:
    """Role -> name, for the scale and all other parts that are there under the weight's name."""
    parts = {"scale": scale}
    for ending, role in roles.items():
        if f"{made}{ending}" in tensors:
            parts[role] = f"{made}{ending}"
    return parts


def _make_matrix_shape(shape: Shape) -> Shape:
    """The shape as a matrix: a vector is one row."""
    return shape if len(shape) > 1 else (1, prod(shape))


@lru_cache(maxsize=4096)
def block_of(shape: Shape, grid: Shape, stated: tuple[int, ...] = ()) -> tuple[int, int] | None:
    """(rows, cols) that share a scale, for codes of `shape` (two dims or more) and scales of shape `grid`; None if the
    shapes do not fit. stated: the block that the config names, which is used if it fits.

    >>> block_of((300, 256), (3, 2)), block_of((64, 8), (64, 1)), block_of((64, 8), ()), block_of((64, 8), (5, 1))
    ((128, 128), (1, 8), (64, 8), None)
    """
    rows, columns = shape[-2:]
    if prod(grid) == 1 or (len(shape) > 2 and grid in (shape[:-2], (*shape[:-2], 1), (*shape[:-2], 1, 1))):
        return max(rows, 1), max(columns, 1)
    if grid == shape[:-1]:
        return 1, max(columns, 1)
    if len(grid) < 2 or len(grid) > len(shape) or grid[:-2] not in ((), shape[:-2]):
        return None
    if len(grid) == 2 < len(shape):
        return None
    wanted = (*stated, 0, 0)[:2]
    found = [_find_width(n, count, each) for n, count, each in zip((rows, columns), grid[-2:], wanted, strict=True)]
    return (found[0], found[1]) if all(found) else None


def is_block_assumed(weight: Quantised) -> bool:
    """Would blocks of another size have as many scales for these codes? That is so for most sizes: 32 scales for 4,096
    codes may be of blocks of 128, as published, but of 129 to 132 as well.

    >>> weight = Quantised("w", BYTES, "w", {}, (256, 96), (256, 48), 8)
    >>> is_block_assumed(weight), is_block_assumed(weight._replace(block=(1, 96)))
    (True, False)
    """
    for size, width in zip(weight.shape[-2:], weight.block, strict=True):
        count = ceil_div(size, width)
        if 1 < count < size and any(ceil_div(size, other) == count for other in (width - 1, width + 1)):
            return True
    return False


def _find_width(n: int, count: int, stated: int) -> int:
    """Elements in a block, if `count` blocks cover a dim of `n`; 0 if no size fits."""
    if count == 1 and not (stated and ceil_div(n, stated) == 1):
        return max(n, 1)
    for width in (stated, WIDTH):
        if width and ceil_div(n, width) == count:
            return width
    return n // count if count and n % count == 0 else 0


def _make_misfit(scale: str, tensors: Mapping[str, TensorKind], shape: Shape) -> WeightFault:
    """The fault of scales whose shape does not fit the codes."""
    return WeightFault(
        scale, f"scales of shape {list(tensors[scale].shape)} for codes of shape {list(shape)}", lacking=False
    )


def _list_lone_scales(tensors: Mapping[str, TensorKind], taken: set[str]) -> Iterator[WeightFault]:
    """Faults for scales whose codes are missing."""
    for name in tensors:
        if name not in taken and name.endswith(("_scale_inv", ".weight_scale", "._weight_scale")):
            yield WeightFault(name, "a scale without its codes", lacking=True)
