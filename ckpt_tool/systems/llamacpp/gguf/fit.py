"""The ggml type of each tensor of a GGUF output, by the rule of llama.cpp's converter.

    --gguf-type q8_0    blk.0.attn_q.weight Q8_0, blk.0.attn_norm.weight F32, blk.0.ffn_gate_inp.weight F32
    --gguf-type mxfp4 --gguf-only '*_exps.weight'    blk.0.ffn_up_exps.weight MXFP4, blk.0.attn_q.weight BF16

Tensors of one dim, norms, routers and everything that is not called `.weight` are F32: most of ggml takes these in no
other type. The others have the requested type, or that of the source. Rows whose length is not a multiple of the block
size fall back to F16. With the two ternary types the embedding and the head are F16. Source: llama.cpp of October 2026
`conversion/base.py`, `prepare_tensors`; gguf 0.19.0 `tensor_mapping.py` for the names.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ckpt_tool.core.dtype import DTYPES, DType
from ckpt_tool.core.patterns import Names, refuse_misses
from ckpt_tool.core.target import LayoutWish
from ckpt_tool.core.tensor import LogicalTensor, TensorKey
from ckpt_tool.errors import UsageError
from ckpt_tool.formats.base import Fitted
from ckpt_tool.systems.llamacpp.options import GgufOptions
from ckpt_tool.weight_schemes.ggml_types import of_name

REQUANTISED = "E1708"
_ALWAYS = re.compile(r"blk\.\d+\.(ffn_gate_inp|ffn_gate_inp_shexp|ssm_conv1d|shortconv\.conv|indexer\.proj)\.weight")
_ENDS = ("token_embd.weight", "output.weight")
_HELD = ("F32", "F16", "BF16")  # float types in which a matrix of another format stays


def fit_types(tensors: Sequence[LogicalTensor], wish: LayoutWish, *, renamed: bool) -> Fitted:
    """The tensors, with the new type of each one that changes its type.

    Args:
        tensors: The tensors of the output.
        wish: Options of the user, among them `--gguf-type` and `--gguf-only`.
        renamed: The names were converted to llama.cpp's in this run: then its rule holds without `--gguf-type` too.

    Raises:
        UsageError: E1708, blocks that would be quantised again; E0255, patterns that match nothing; E2724, patterns
            without a type.
    """
    options = wish.of(GgufOptions)
    only = _names_asked_for(tensors, options)
    rows = tuple(enumerate(tensors))
    if options.gguf_type is None and not renamed:  # GGUF to GGUF: nothing changes
        return Fitted(rows)

    asked = of_name(options.gguf_type.upper()) if options.gguf_type else None
    wanted = [tensor for tensor in tensors if only is None or tensor.key.name in only]
    coded = [tensor for tensor in wanted if tensor.dtype.coded and tensor.dtype != asked]
    if asked is not None and coded:
        raise UsageError(
            f"--gguf-type {options.gguf_type}: {len(coded)} tensors are quantised already, {coded[0].key.name} as "
            f"{coded[0].dtype.name}",
            code=REQUANTISED,
            key=coded[0].key.name,
            hint="--dequantize converts them to floats first; without the option they stay as they are",
        )

    casts: dict[TensorKey, DType] = {}
    for tensor in tensors:
        if tensor.dtype.is_float:
            kind = _kind(tensor, asked if only is None or tensor.key.name in only else None, cast=wish.cast)
            if kind is not None:
                casts[tensor.key] = kind
    return Fitted(rows, casts)


def _names_asked_for(tensors: Sequence[LogicalTensor], options: GgufOptions) -> frozenset[str] | None:
    """The names of the tensors that `--gguf-only` matches, None (meaning all) without that option."""
    if not options.gguf_only:
        return None
    if options.gguf_type is None:
        raise UsageError(
            "--gguf-only says which matrices get another type, and nothing says which",
            code="E2724",
            hint="add --gguf-type TYPE, or leave it off",
        )
    known = Names(tensor.key.name for tensor in tensors)
    names, misses = known.matched(options.gguf_only)
    refuse_misses(misses, known.names)
    return frozenset(names)


def _kind(tensor: LogicalTensor, asked: DType | None, *, cast: bool) -> DType | None:
    """The type in which a float tensor is written; None if it keeps its type, or has the one of `--dtype`."""
    name = tensor.key.name
    if (
        len(tensor.shape) <= 1
        or name.endswith("_norm.weight")
        or not name.endswith(".weight")
        or _ALWAYS.fullmatch(name)
    ):
        return DTYPES["F32"]
    if asked is None:
        return None if cast or tensor.dtype.name in _HELD else DTYPES["F32"]
    if asked.coded and (tensor.shape[-1] % asked.block or (asked.name.startswith("TQ") and name in _ENDS)):
        return DTYPES["F16"]
    return asked
