"""The sources of the benchmark: a Llama-shaped model of a given size, as Hugging Face files and as training state.

Real names and proportions, random bytes that are all finite numbers; nothing compresses, nothing is a special case.

    python tests/bench/synthetic.py hf 200MB OUT            config.json and safetensors files, bf16
    python tests/bench/synthetic.py training 200MB OUT      `sharded`, one rank: model bf16, exp_avg, exp_avg_sq, step

A random bf16 is finite when one bit of its exponent is 0; so every 16-bit word is ANDed with 0xBFFF (|x| < 2), every
32-bit word with 0xBFFFFFFF. Values are drawn in blocks of 16 MiB from a seeded generator: the same call makes the same
bytes. `training` takes the file heads from this project's own writer and fills in the values itself.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from ckpt_tool.core.dtype import DTYPES  # noqa: E402
from ckpt_tool.core.integers import ceil_div  # noqa: E402
from ckpt_tool.core.layout import Layout, Placement  # noqa: E402
from ckpt_tool.core.mesh import Mesh  # noqa: E402
from ckpt_tool.core.target import TargetFile, Wanted, WantedTensor  # noqa: E402
from ckpt_tool.core.tensor import TensorKey  # noqa: E402

BLOCK = 16 << 20  # bytes drawn at a time
HEAD_DIM = 64


class Shape(NamedTuple):
    """A model. Every dim that tensor parallelism cuts divides by 8."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    vocab: int
    layers: int

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        h = self.hidden
        f = self.inner
        kv = self.kv_heads * HEAD_DIM
        yield "model.embed_tokens.weight", (self.vocab, h)
        for i in range(self.layers):
            at = f"model.layers.{i}"
            yield f"{at}.self_attn.q_proj.weight", (self.heads * HEAD_DIM, h)
            yield f"{at}.self_attn.k_proj.weight", (kv, h)
            yield f"{at}.self_attn.v_proj.weight", (kv, h)
            yield f"{at}.self_attn.o_proj.weight", (h, self.heads * HEAD_DIM)
            yield f"{at}.mlp.gate_proj.weight", (f, h)
            yield f"{at}.mlp.up_proj.weight", (f, h)
            yield f"{at}.mlp.down_proj.weight", (h, f)
            yield f"{at}.input_layernorm.weight", (h,)
            yield f"{at}.post_attention_layernorm.weight", (h,)
        yield "model.norm.weight", (h,)
        yield "lm_head.weight", (self.vocab, h)

    @property
    def numel(self) -> int:
        return sum(prod(shape) for _, shape in self.tensors())

    def config(self) -> dict[str, object]:
        """config.json of transformers."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": HEAD_DIM,
            "vocab_size": self.vocab,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "rms_norm_eps": 1e-5,
        }


# (hidden, inner, heads, kv heads, vocab): TinyLlama's proportions, and smaller and larger ones
_WIDTHS = (
    (256, 704, 4, 4, 1024),
    (512, 1408, 8, 4, 4096),
    (1024, 2816, 16, 4, 16384),
    (2048, 5632, 32, 4, 32000),
    (4096, 11008, 64, 8, 32000),
)


def shape_of(nbytes: int, *, bytes_per_parameter: int = 2) -> Shape:
    """The model nearest to `nbytes`, with between 4 and about 40 layers where that can be."""
    found = []
    for hidden, inner, heads, kv_heads, vocab in _WIDTHS:
        bare = Shape(hidden, inner, heads, kv_heads, vocab, 0)
        layer = Shape(hidden, inner, heads, kv_heads, vocab, 1).numel - bare.numel
        layers = max(1, round((nbytes / bytes_per_parameter - bare.numel) / layer))
        found.append(Shape(hidden, inner, heads, kv_heads, vocab, layers))
    return min(found, key=lambda s: (abs(s.numel * bytes_per_parameter - nbytes) > nbytes / 5, abs(s.layers - 22)))


def size_of(text: str) -> int:
    """`2GB`, `200MB`, `64MiB`."""
    number, unit = re.fullmatch(r"([0-9.]+)\s*([kMG]i?B)", text).groups()  # type: ignore[union-attr]
    power = "kMG".index(unit[0]) + 1
    return int(float(number) * (1024 if "i" in unit else 1000) ** power)


def values(generator: np.random.Generator, nbytes: int, item: int) -> Iterator[bytes]:
    """`nbytes` random bytes that are finite numbers of `item` bytes (2: bf16, 4: fp32), in blocks."""
    while nbytes:
        take = min(nbytes, BLOCK)
        words = np.frombuffer(generator.bytes(ceil_div(take, 8) * 8), "u8") & np.uint64(
            0xBFFFBFFFBFFFBFFF if item == 2 else 0xBFFFFFFFBFFFFFFF
        )
        yield words.tobytes()[:take]
        nbytes -= take


def write_hf(out: Path, shape: Shape, *, limit: int = 1 << 30) -> None:
    """A folder as `save_pretrained` leaves it: files of at most `limit` bytes, an index, config.json."""
    out.mkdir(parents=True)
    files: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    filled = 0
    for name, dims in shape.tensors():
        nbytes = prod(dims) * 2
        if files[-1] and filled + nbytes > limit:
            files.append([])
            filled = 0
        files[-1].append((name, dims))
        filled += nbytes
    generator = np.random.default_rng(7)
    weight_map = {}
    for number, entries in enumerate(files, 1):
        path = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        _write_safetensors(out / path, sorted(entries), generator)
        weight_map |= {name: path for name, _ in entries}
    index = {"metadata": {"total_size": shape.numel * 2}, "weight_map": dict(sorted(weight_map.items()))}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    (out / "config.json").write_text(json.dumps(shape.config(), indent=2))


def _write_safetensors(path: Path, entries: list[tuple[str, tuple[int, ...]]], generator: np.random.Generator) -> None:
    head: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, dims in entries:
        end = at + prod(dims) * 2
        head[name] = {"dtype": "BF16", "shape": dims, "data_offsets": [at, end]}
        at = end
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for block in values(generator, at, 2):
            f.write(block)


def write_training(out: Path, shape: Shape) -> None:
    """A `sharded` checkpoint of one rank: the model in bf16, AdamW's two moments in fp32 and a step a parameter."""
    from ckpt_tool.systems.ckpt.sharded.format import FORMAT

    states = (("model", "BF16"), ("exp_avg", "F32"), ("exp_avg_sq", "F32"))
    wanted = [
        WantedTensor(TensorKey(name, state), dims, DTYPES[dtype])
        for state, dtype in states
        for name, dims in shape.tensors()
    ]
    wanted += [WantedTensor(TensorKey(name, "step"), (), DTYPES["F32"]) for name, _ in shape.tensors()]
    layout = Layout(Mesh(), (Placement(),) * len(wanted), "one rank")
    target = FORMAT.target(Wanted(tuple(wanted)), layout)
    out.mkdir(parents=True)
    generator = np.random.default_rng(11)
    for file in target.files:
        _fill(out / file.path, file, wanted, generator)


def _fill(path: Path, file: TargetFile, wanted: list[WantedTensor], generator: np.random.Generator) -> None:
    with path.open("wb") as f:
        f.truncate(file.size)
        for offset, data in file.literals:
            f.seek(offset)
            f.write(data)
        for array in sorted(file.arrays, key=lambda array: array.offset):
            item = wanted[array.tensor]
            f.seek(array.offset)
            if item.key.state == "step":
                f.write(np.float32(1000).tobytes())
                continue
            for block in values(generator, item.nbytes, item.dtype.bits // 8):
                f.write(block)


def main(kind: str, size: str, out: str) -> None:
    if kind == "hf":
        write_hf(Path(out), shape_of(size_of(size)))
    elif kind == "training":
        write_training(Path(out), shape_of(size_of(size), bytes_per_parameter=10))
    else:
        raise SystemExit(f"hf or training, not {kind}")


if __name__ == "__main__":
    main(*sys.argv[1:])
