"""Quantised models and their configs, and what GGUF's metadata is made of: values of other types, parts that do not
belong together, through `convert --dequantize` and `convert --to gguf`.

`CASES`: `(row, make(folder) -> path, exit code or {verb: code}, words of the message, options of convert)`. A fixture
is copied, and one place of one of its documents, or one tensor, is another.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

FIXTURES = Path(__file__).parents[2] / "fixtures"
DEQUANTIZE = ("--to", "safetensors", "--dequantize")
GGUF = ("--to", "gguf")
WHOLE = {"*": 0}
CASES: list[tuple[str, Callable[[Path], Path], Any, str, tuple[str, ...]]] = []


def row(
    name: str,
    fixture: str,
    want: int,
    words: str,
    options: tuple[str, ...],
    *edits: Callable[[Path], None],
    **others: int,
) -> None:
    """want: of `convert`; the other verbs move what is there."""

    def make(folder: Path) -> Path:
        source = folder / "model"
        shutil.copytree(FIXTURES / fixture, source)
        for edit in edits:
            edit(source)
        return source

    CASES.append((name, make, {**WHOLE, "convert": want, **others}, words, options))


def stated(file: str, *trail: Any, value: Any) -> Callable[[Path], None]:
    """One place of a JSON document."""

    def edit(folder: Path) -> None:
        document = at = json.loads((folder / file).read_text())
        for key in trail[:-1]:
            at = at[key]
        at[trail[-1]] = value
        (folder / file).write_text(json.dumps(document))

    return edit


def tensor(
    ending: str, change: Callable[[str, list[int], bytes], tuple[str, list[int], bytes]]
) -> Callable[[Path], None]:
    """The first tensor whose name ends so: (dtype, shape, bytes) -> others."""

    def edit(folder: Path) -> None:
        path = folder / "model.safetensors"
        raw = path.read_bytes()
        size = int.from_bytes(raw[:8], "little")
        head = json.loads(raw[8 : 8 + size])
        body = raw[8 + size :]
        out = b""
        first = next(name for name in head if name.endswith(ending))
        for name in sorted(name for name in head if name != "__metadata__"):
            found, (begin, end) = head[name], head[name]["data_offsets"]
            data = body[begin:end]
            if name == first:
                found["dtype"], found["shape"], data = change(found["dtype"], found["shape"], data)
            found["data_offsets"] = [len(out), len(out) + len(data)]
            out += data
        text = json.dumps(head).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + out)

    return edit


def named(ending: str, other: str) -> Callable[[Path], None]:
    """The first tensor whose name ends so has another name."""

    def edit(folder: Path) -> None:
        path = folder / "model.safetensors"
        raw = path.read_bytes()
        size = int.from_bytes(raw[:8], "little")
        head = json.loads(raw[8 : 8 + size])
        first = next(name for name in head if name.endswith(ending))
        head[first.removesuffix(ending) + other] = head.pop(first)
        text = json.dumps(head).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + size :])

    return edit


def replaced(file: str, raw: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / file).write_bytes(raw) and None


def bits(value: Any) -> Callable[[Path], None]:
    return stated("config.json", "quantization_config", "bits", value=value)


def text(raw: bytes) -> Callable[[str, list[int], bytes], tuple[str, list[int], bytes]]:
    """A tensor of bytes that is this text."""
    return lambda dtype, shape, data: ("U8", [len(raw)], raw)


# -- quantised ---------------------------------------------------------------------------------------------------------

GPTQ = "quantized-inputs/gptq_int4"
AWQ = "quantized-inputs/awq_gemm"
MLX = "quantized/mlx_4bit"
NF4 = "quantized/bnb_nf4"
PACKED = "quantized/int4_group"
NF4_STATE = ".quant_state.bitsandbytes__nf4"
row("Q1 GPTQ of 4.0 bits", GPTQ, 2, "4.0 bits", DEQUANTIZE, bits(4.0))
row("Q2 AWQ of 4.0 bits", AWQ, 2, "4.0 bits", DEQUANTIZE, bits(4.0))
row("Q3 GPTQ of 5 bits", GPTQ, 2, "5 bits", DEQUANTIZE, bits(5))
row("Q4 GPTQ of bits in a list", GPTQ, 2, "[4] bits", DEQUANTIZE, bits([4]))
row("Q5 GPTQ of other bits than its words", GPTQ, 3, "zero points", DEQUANTIZE, bits(8), verify=1)
row("Q6 MLX of 4.0 bits", MLX, 2, "4.0 bits", DEQUANTIZE, bits(4.0))
row(
    "Q7 MLX in groups of true",
    MLX,
    2,
    "groups of true",
    DEQUANTIZE,
    stated("config.json", "quantization_config", "group_size", value=True),
)
row("Q8 a state that is no JSON", NF4, 3, "bitsandbytes__nf4", DEQUANTIZE, tensor(NF4_STATE, text(b"{")), verify=1)
row(
    "Q9 a state as deep as can be",
    NF4,
    3,
    "bitsandbytes__nf4",
    DEQUANTIZE,
    tensor(NF4_STATE, text(b"[" * 4000)),
    verify=1,
)
row(
    "Q10 a state longer than any",
    NF4,
    3,
    "a shape is stated by",
    DEQUANTIZE,
    tensor(NF4_STATE, text(b"[" * 100_000)),
    verify=1,
)
row(
    "Q11 blocks of 0",
    NF4,
    3,
    "no sizes",
    DEQUANTIZE,
    tensor(NF4_STATE, text(b'{"shape": [64, 96], "blocksize": 0}')),
    verify=1,
)
row("Q12 scales that are no numbers", PACKED, 3, "a scale is NaN", DEQUANTIZE,
    tensor(".weight_scale", lambda dtype, shape, data: (dtype, shape, b"\xc0\x7f" * (len(data) // 2))))  # fmt: skip
row("Q13 scales of another shape", PACKED, 3, "scales of shape", DEQUANTIZE,
    tensor(".weight_scale", lambda dtype, shape, data: (dtype, shape[::-1], data)), verify=1)  # fmt: skip
row("Q14 a shape of others", PACKED, 3, "weight_shape", DEQUANTIZE,
    tensor(".weight_shape", lambda dtype, shape, data: (dtype, shape, bytes(len(data)))), verify=1)  # fmt: skip

INT4_ASYM = "quantized/int4_group_asym"
FP8 = "quantized/fp8_block"
row("Q15 one scale where blocks are declared", FP8, 3, "by the config [", DEQUANTIZE,
    tensor(".weight_scale_inv", lambda dtype, shape, data: (dtype, [1], data[:4])), verify=1)  # fmt: skip
row("Q16 no zero points of an asymmetric scheme", INT4_ASYM, 3, "without zero_point", DEQUANTIZE,
    named("weight_zero_point", "weight_other"), verify=1)  # fmt: skip
row("Q17 codes without any of their parts", "quantized/bnb_int8", 3, "without", DEQUANTIZE,
    named("SCB", "SCC"), verify=1)  # fmt: skip
row("Q18 experts without their bias", "quantized/mxfp4_gpt_oss", 3, "_bias", DEQUANTIZE,
    named("down_proj_bias", "down_proj_was"), verify=1)  # fmt: skip
row("Q19 int8 on its way to GGUF", "quantized/int8_channel", 3, "no place for scales", GGUF)

# -- what GGUF's metadata is made of -----------------------------------------------------------------------------------

QWEN = "gguf-made/qwen3_moe"
row("T1 added tokens that are no list", QWEN, 0, "", GGUF, stated("tokenizer.json", "added_tokens", value=5))
row(
    "T2 an added token that is no text",
    QWEN,
    0,
    "",
    GGUF,
    stated("tokenizer.json", "added_tokens", value=[{"id": 1, "content": []}]),
)
row("T3 merges of no tokens", QWEN, 2, "no merge", GGUF, stated("tokenizer.json", "model", "merges", value=[5]))
row(
    "T4 a number in other digits",
    QWEN,
    0,
    "",
    GGUF,
    stated("tokenizer_config.json", "added_tokens_decoder", value={"\u00b2": {"content": "a"}}),
)
row(
    "T5 settings as deep as can be",
    QWEN,
    3,
    "nested more than",
    GGUF,
    replaced("tokenizer_config.json", b"[" * 100_000),
    audit=1,
)
row(
    "T6 a rope with nothing for a factor",
    "gguf-made/llama3",
    0,
    "",
    GGUF,
    stated("config.json", "rope_parameters", "factor", value=None),
)
row(
    "T7 a rope by 0",
    "gguf-made/llama3",
    3,
    "contradicts itself",
    GGUF,
    stated("config.json", "rope_parameters", "factor", value=0),
)
