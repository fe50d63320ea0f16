"""Schemes that `--quantize` writes: how each stores a weight, and what the model's config then declares.

    name         codes                    scales, one for                        config
    fp8-block    X F8_E4M3                X_scale_inv F32, 128 rows x 128        quant_method fp8
    fp8-channel  X F8_E4M3                X_scale, a row                         compressed-tensors float-quantized
    int8         X I8                     X_scale, a row                         compressed-tensors int-quantized
    int4-g128    X_packed I32, X_shape    X_scale, 128 of a row                  compressed-tensors pack-quantized
    mxfp8        X F8_E4M3                X_scale U8, 32 of a row                compressed-tensors mxfp8-quantized
    mxfp4        X_packed U8              X_scale U8, 32 of a row                compressed-tensors mxfp4-pack-quantized
      gpt-oss    X_blocks U8, transposed  X_scales U8, 32 of a row               quant_method mxfp4
    nvfp4        X_packed U8              X_scale F8_E4M3, 16 of a row,          compressed-tensors nvfp4-pack-quantized
                                          X_global_scale F32, all
    fp8-channel:torchao, int8:torchao     m._w_qdata, m._w_scale F32, a row      quant_method torchao

Names, codes and shapes are those that `quantised_weights.find` recognises; `tests/core/test_schemes.py` compares the
two. Scales without a dtype have that of the weights. Blocks of fp8-block may be short at the ends of both dims; groups
of the others divide a row. torchao's weights are tensor subclasses, whose class and attributes are stored in the header
of every file (`stated_of`). Sources: the configs of deepseek-ai/DeepSeek-V3 and
Qwen/Qwen3-8B-FP8, transformers 5.23 (`quantizers/quantizer_finegrained_fp8.py`); compressed-tensors 0.20
(`quantization/quant_scheme.py`, its presets); torchao 0.18 (`quantization/quant_api.py`,
`quantization/quantize_/workflows/`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from ckpt_tool.core.dtype import DTYPES, DType
from ckpt_tool.core.integers import ceil_div
from ckpt_tool.weight_schemes.quantised_weights import (
    BLOCKS,
    BYTES,
    CONFIG_KEYS,
    ENDINGS,
    NIBBLES,
    PACKED,
    SCALE,
    SCALE_INV,
    SCALES,
    TURNED,
    WORDS,
    Shape,
    TensorKind,
    subclass_part,
)


class Scheme(NamedTuple):
    """A scheme that weights are quantised to: the layout of tensors, and what the config declares."""

    name: str
    codes: str  # one of `quantised_weights`' kinds: BYTES, NIBBLES, ...
    dtype: str  # of the tensor that holds the codes
    bits: int
    # Codes that share a scale, (rows, columns), 0 for an entire row. For TURNED codes: after transposing.
    block: tuple[int, int]
    scale: str  # what the name of the scales ends in
    scales: str  # dtype of the scales, "" for that of the weights
    method: str  # `quant_method` in a config
    # compressed-tensors: its format, and its settings for weights and activations.
    # torchao: its config class, and the values of that.
    form: str = ""
    weights: Mapping[str, Any] = {}
    activations: Mapping[str, Any] | None = None
    # torchao: the class of a weight's tensor, and the attributes that all weights share.
    subclass: str = ""
    attributes: Mapping[str, Any] = {}
    multiple: int = 1  # rows and columns have to be multiples of it, or the library's matrix product refuses them

    @property
    def codes_of(self) -> str:
        """The name of the scheme with the same codes and blocks: `int8` for `int8:torchao`; mostly its own name."""
        return self.name.partition(":")[0]

    def matrix(self, shape: Shape) -> Shape:
        """The shape of a weight's values as they are coded, (..., rows, columns)."""
        return (*shape[:-2], shape[-1], shape[-2]) if self.codes == TURNED else shape

    def group(self, columns: int) -> int:
        """Number of codes in a row that share a scale."""
        return self.block[1] or columns

    def fits(self, shape: Shape) -> bool:
        """Do groups divide the rows of a matrix of this shape? Blocks of several rows may be short and always fit."""
        columns = self.matrix(shape)[-1]
        return bool(prod(shape)) and (self.block[0] > 1 or not columns % self.group(columns))

    def is_short(self, shape: Shape) -> bool:
        """Does a matrix of this shape end in a block that is shorter than the others?"""
        return self.block[0] > 1 and any(size > n and size % n for n, size in zip(self.block, shape[-2:], strict=True))


def _state_values(bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    """compressed-tensors' settings of weights or activations, as far as they differ from its defaults."""
    return {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False} | more


def _make_plain(kind: str, data: Any) -> dict[str, Any]:
    """A value of a class of torchao's or torch's, as torchao writes it in JSON."""
    return {"_type": kind, "_data": data}


_CT = "compressed-tensors"
_TORCHAO = "torchao"
_AO_E4M3 = _make_plain("torch.dtype", "float8_e4m3fn")
_AO_AUTO = _make_plain("KernelPreference", "AUTO")
_AO_ROW = _make_plain("PerRow", {"dim": -1})
_AO_SYMMETRIC = _make_plain("MappingType", "SYMMETRIC")
_AO_PRODUCT = _make_plain("Float8MMConfig", {"emulate": False, "use_fast_accum": True, "pad_inner_dim": False})
_AO_BOUNDS = dict.fromkeys(("hp_value_lb", "hp_value_ub"))
_OF_TOKENS = {"dynamic": True}
_E4M3 = "torch.float8_e4m3fn"
_ROWS = (
    Scheme("fp8-block", BYTES, "F8_E4M3", 8, (128, 128), SCALE_INV, "F32", "fp8"),
    Scheme(
        *("fp8-channel", BYTES, "F8_E4M3", 8, (1, 0), SCALE, "", _CT, "float-quantized"),
        _state_values(8, "float", "channel"),
        _state_values(8, "float", "token", **_OF_TOKENS),
    ),
    Scheme(
        *("int8", BYTES, "I8", 8, (1, 0), SCALE, "", _CT, "int-quantized"),
        _state_values(8, "int", "channel"),
        _state_values(8, "int", "token", **_OF_TOKENS),
    ),
    Scheme(
        *("int4-g128", WORDS, "I32", 4, (1, 128), SCALE, "", _CT, "pack-quantized"),
        _state_values(4, "int", "group", group_size=128),
    ),
    Scheme(
        *("mxfp8", BYTES, "F8_E4M3", 8, (1, 32), SCALE, "U8", _CT, "mxfp8-quantized"),
        _state_values(8, "float", "group", group_size=32, scale_dtype="torch.uint8", zp_dtype="torch.uint8"),
    ),
    Scheme(
        *("mxfp4", NIBBLES, "U8", 4, (1, 32), SCALE, "U8", _CT, "mxfp4-pack-quantized"),
        _state_values(4, "float", "group", group_size=32, scale_dtype="torch.uint8", zp_dtype="torch.uint8"),
    ),
    Scheme(
        *("nvfp4", NIBBLES, "U8", 4, (1, 16), SCALE, "F8_E4M3", _CT, "nvfp4-pack-quantized"),
        _state_values(4, "float", "tensor_group", group_size=16, scale_dtype=_E4M3, zp_dtype=_E4M3),
    ),
    Scheme(
        *("fp8-channel:torchao", BYTES, "F8_E4M3", 8, (1, 0), SCALE, "F32", _TORCHAO),
        "Float8DynamicActivationFloat8WeightConfig",
        {"granularity": [_AO_ROW | {"_version": 1}] * 2, "mm_config": _AO_PRODUCT | {"_version": 1}},
        subclass="Float8Tensor",
        attributes={
            "mm_config": _AO_PRODUCT,
            "act_quant_kwargs": _make_plain(
                "QuantizeTensorToFloat8Kwargs",
                {
                    "float8_dtype": _AO_E4M3,
                    "granularity": _AO_ROW,
                    "mm_config": None,
                    **_AO_BOUNDS,
                    "kernel_preference": _AO_AUTO,
                },
            ),
            "kernel_preference": _AO_AUTO,
        },
        multiple=16,
    ),
    Scheme(
        *("int8:torchao", BYTES, "I8", 8, (1, 0), SCALE, "F32", _TORCHAO),
        "Int8DynamicActivationInt8WeightConfig",
        {"granularity": _AO_ROW | {"_version": 1}, "act_mapping_type": _AO_SYMMETRIC, "reduce_range": False},
        subclass="Int8Tensor",
        attributes={
            "act_quant_kwargs": _make_plain(
                "QuantizeTensorToInt8Kwargs",
                {"granularity": _AO_ROW, "mapping_type": _AO_SYMMETRIC, "reduce_range": False},
            ),
            "reduce_range": False,
        },
    ),
)
SCHEMES: Mapping[str, Scheme] = {row.name: row for row in _ROWS}
# (scheme, model type) -> as the model's own releases are stored: stacked experts are quantised, nothing else.
_OWN = {("mxfp4", "gpt_oss"): Scheme("mxfp4", TURNED, "U8", 4, (1, 32), SCALES, "U8", "mxfp4")}


def scheme_of(name: str, config: Mapping[str, Any] | None) -> Scheme:
    """The scheme `name`, in the variant for the model that `config` describes."""
    return _OWN.get((name, str((config or {}).get("model_type"))), SCHEMES[name])


def laid_out(scheme: Scheme, name: str, shape: Shape, floats: DType) -> dict[str, tuple[str, TensorKind]]:
    """The tensors that a weight of `shape` is stored as: role -> (name, kind), codes first. floats: the weight's dtype.

    >>> laid_out(SCHEMES["fp8-block"], "m.weight", (300, 256), DTYPES["BF16"])["scale"][1].shape
    (3, 2)
    """
    *before, rows, columns = scheme.matrix(shape)
    group = scheme.group(columns)
    scales = TensorKind(
        DTYPES[scheme.scales] if scheme.scales else floats,
        (*before, ceil_div(rows, scheme.block[0]), ceil_div(columns, group)),
    )
    stored = columns * scheme.bits // DTYPES[scheme.dtype].bits
    if scheme.subclass:
        codes = TensorKind(DTYPES[scheme.dtype], (*shape[:-1], stored))
        return {"codes": (subclass_part(name, "qdata"), codes), "scale": (subclass_part(name, "scale"), scales)}
    if scheme.codes == TURNED:
        pairs = TensorKind(DTYPES[scheme.dtype], (*before, rows, columns // group, group // 2))
        return {"codes": (f"{name}{BLOCKS}", pairs), "scale": (f"{name}{scheme.scale}", scales)}
    lead = name if scheme.codes == BYTES else f"{name}{PACKED}"
    found = {
        "codes": (lead, TensorKind(DTYPES[scheme.dtype], (*shape[:-1], stored))),
        "scale": (f"{name}{scheme.scale}", scales),
    }
    if scheme.codes == WORDS:
        found["shape"] = (f"{name}{ENDINGS['shape']}", TensorKind(DTYPES["I64"], (len(shape),)))
    if scheme.codes == NIBBLES and scheme.scales == "F8_E4M3":
        found["global_scale"] = (f"{name}{ENDINGS['global_scale']}", TensorKind(DTYPES["F32"], (1,)))
    return found


def stated_of(scheme: Scheme, shape: Shape, floats: DType) -> str:
    """torchao's entry for a weight in the header of a file. floats: the dtype that torchao dequantises it to.

    >>> json.loads(stated_of(SCHEMES["int8:torchao"], (64, 32), DTYPES["BF16"]))["_data"]["block_size"]
    [1, 32]
    """
    own = {"block_size": [1] * (len(shape) - 1) + [shape[-1]], "dtype": _make_plain("torch.dtype", floats.torch)}
    return json.dumps(
        {**_make_plain(scheme.subclass, {**scheme.attributes, **own}), "_tensor_data_names": ["qdata", "scale"]}
    )


def config_of(scheme: Scheme, kept: Sequence[str]) -> dict[str, Any]:
    """The section of a config that declares the scheme, under its key (`declared_scheme.CONFIG_KEYS`). kept: modules
    that are not quantised."""
    if scheme.method == "mxfp4":
        return {CONFIG_KEYS[0]: {"modules_to_not_convert": list(kept), "quant_method": scheme.method}}
    if scheme.method == "fp8":
        return {
            CONFIG_KEYS[0]: {
                "activation_scheme": "dynamic",
                "fmt": "e4m3",
                "modules_to_not_convert": list(kept),
                "quant_method": scheme.method,
                "weight_block_size": list(scheme.block),
            }
        }
    if scheme.method == _TORCHAO:
        default = {**_make_plain(scheme.form, dict(scheme.weights)), "_version": 2}
        stays = {"modules_to_not_convert": list(kept), "include_input_output_embeddings": False}
        return {CONFIG_KEYS[0]: {**stays, "quant_method": _TORCHAO, "quant_type": {"default": default}}}
    return _make_compressed_config(
        scheme.form, {("Linear",): (scheme.weights, dict(scheme.activations) if scheme.activations else None)}, kept
    )


def _make_compressed_config(
    form: str, groups: Mapping[tuple[str, ...], tuple[Mapping[str, Any], Mapping[str, Any] | None]], kept: Sequence[str]
) -> dict[str, Any]:
    """compressed-tensors' section of a config. groups: modules -> settings of their (weights, activations)."""
    return {
        CONFIG_KEYS[0]: {
            "config_groups": {
                f"group_{number}": {
                    "targets": list(targets),
                    "weights": dict(weights),
                    "input_activations": activations,
                    "output_activations": None,
                    "format": form,
                }
                for number, (targets, (weights, activations)) in enumerate(groups.items())
            },
            "format": form,
            "ignore": list(kept),
            "kv_cache_scheme": None,
            "quant_method": _CT,
            "quantization_status": "compressed",
        }
    }


# -- integers that another library made --------------------------------------------------------------------------------


class Packing(NamedTuple):
    """How compressed-tensors stores packed integers (`pack-quantized`)."""

    bits: int
    group: int  # codes of a row that share a scale
    symmetric: bool  # is the zero point the middle? It is not stored then
    channel: bool  # do all codes of a row share a scale?


def packed_parts(
    packing: Packing, name: str, shape: tuple[int, ...], scales: DType
) -> dict[str, tuple[str, TensorKind]]:
    """The tensors that a weight of `shape` is stored as, as `laid_out` gives them. scales: their dtype.

    >>> packed_parts(Packing(4, 32, False, False), "m.weight", (64, 96), DTYPES["F16"])["zero_point"]
    ('m.weight_zero_point', TensorKind(dtype=DType('I32'), shape=(8, 3)))
    """
    (rows, columns), bits = shape, packing.bits
    groups = columns // packing.group
    found = {
        "codes": (f"{name}{PACKED}", TensorKind(DTYPES["I32"], (rows, columns * bits // 32))),
        "scale": (f"{name}{SCALE}", TensorKind(scales, (rows, groups))),
        "zero_point": (f"{name}{ENDINGS['zero_point']}", TensorKind(DTYPES["I32"], (rows * bits // 32, groups))),
        "shape": (f"{name}{ENDINGS['shape']}", TensorKind(DTYPES["I64"], (2,))),
    }
    if packing.symmetric:
        del found["zero_point"]
    return found


def packed_config(weights: Mapping[str, Packing], kept: Sequence[str]) -> dict[str, Any]:
    """The section of a config that declares packed weights: one group for all linear modules, or modules by name if
    they differ. kept: modules that are not quantised."""
    alike: dict[tuple[tuple[str, Any], ...], list[str]] = {}
    for name, each in weights.items():
        group = {} if each.channel else {"group_size": each.group}
        stated = _state_values(
            each.bits, "int", "channel" if each.channel else "group", symmetric=each.symmetric, **group
        )
        alike.setdefault(tuple(stated.items()), []).append(name.removesuffix(".weight"))
    targets = {row: ("Linear",) if len(alike) == 1 else tuple(names) for row, names in alike.items()}
    return _make_compressed_config("pack-quantized", {targets[row]: (dict(row), None) for row in alike}, kept)
