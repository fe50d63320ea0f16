"""Build a DeepSeek-V3-shaped checkpoint of sparse files and time how fast it opens.

The idea: headers and index are real, tensor bytes are holes, so 689 GB of apparent weights cost 21 MB of disk. Shapes,
names and count (91,991 tensors: 61 layers plus the MTP layer, the first 3 dense, 256 routed experts + 1 shared, MLA,
FP8 weights with `weight_scale_inv` per 128 x 128 block) follow the published config of DeepSeek-V3.

    python tests/bench/deepseek_shape.py build /tmp/deepseek
    python tests/bench/deepseek_shape.py time /tmp/deepseek

`time` starts fresh interpreters, so that peak RSS is a whole process's. It does not read tensor bytes: they are zeros.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from math import prod
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HIDDEN = 7168
LAYERS = 61
DENSE = 3
EXPERTS = 256
VOCAB = 129280
HEADS = 128
DENSE_WIDTH = 18432
EXPERT_WIDTH = 2048
Q_RANK = 1536
KV_RANK = 512
NOPE = 128
ROPE = 64
V_HEAD = 128
# bytes; packs into 163 files
FILES = 163
SHARD = 4_244_000_000
BITS = {"F8_E4M3": 8, "BF16": 16, "F32": 32}
RANK = {"F32": 0, "BF16": 1, "F8_E4M3": 2}  # the library's writer puts wide types first

Entry = tuple[str, str, tuple[int, ...]]  # name, dtype, shape


def quantised(name: str, rows: int, columns: int) -> Iterator[Entry]:
    yield f"{name}.weight", "F8_E4M3", (rows, columns)
    yield f"{name}.weight_scale_inv", "F32", (-(-rows // 128), -(-columns // 128))


def mlp(name: str, width: int) -> Iterator[Entry]:
    for proj in ("gate_proj", "up_proj"):
        yield from quantised(f"{name}.{proj}", width, HIDDEN)
    yield from quantised(f"{name}.down_proj", HIDDEN, width)


def layer(i: int) -> Iterator[Entry]:
    at = f"model.layers.{i}.self_attn"
    mp = f"model.layers.{i}.mlp"
    yield from quantised(f"{at}.q_a_proj", Q_RANK, HIDDEN)
    yield f"{at}.q_a_layernorm.weight", "BF16", (Q_RANK,)
    yield from quantised(f"{at}.q_b_proj", HEADS * (NOPE + ROPE), Q_RANK)
    yield from quantised(f"{at}.kv_a_proj_with_mqa", KV_RANK + ROPE, HIDDEN)
    yield f"{at}.kv_a_layernorm.weight", "BF16", (KV_RANK,)
    yield from quantised(f"{at}.kv_b_proj", HEADS * (NOPE + V_HEAD), KV_RANK)
    yield from quantised(f"{at}.o_proj", HIDDEN, HEADS * V_HEAD)
    yield f"model.layers.{i}.input_layernorm.weight", "BF16", (HIDDEN,)
    yield f"model.layers.{i}.post_attention_layernorm.weight", "BF16", (HIDDEN,)
    if i < DENSE:
        yield from mlp(mp, DENSE_WIDTH)
        return
    yield f"{mp}.gate.weight", "BF16", (EXPERTS, HIDDEN)
    yield f"{mp}.gate.e_score_correction_bias", "F32", (EXPERTS,)
    for expert in range(EXPERTS):
        yield from mlp(f"{mp}.experts.{expert}", EXPERT_WIDTH)
    yield from mlp(f"{mp}.shared_experts", EXPERT_WIDTH)


def tensors() -> Iterator[Entry]:
    yield "model.embed_tokens.weight", "BF16", (VOCAB, HIDDEN)
    for i in range(LAYERS):
        yield from layer(i)
    yield "model.norm.weight", "BF16", (HIDDEN,)
    yield "lm_head.weight", "BF16", (VOCAB, HIDDEN)
    mtp = f"model.layers.{LAYERS}"
    yield f"{mtp}.embed_tokens.weight", "BF16", (VOCAB, HIDDEN)
    yield f"{mtp}.enorm.weight", "BF16", (HIDDEN,)
    yield f"{mtp}.hnorm.weight", "BF16", (HIDDEN,)
    yield f"{mtp}.eh_proj.weight", "BF16", (HIDDEN, 2 * HIDDEN)
    yield from layer(LAYERS)
    yield f"{mtp}.shared_head.norm.weight", "BF16", (HIDDEN,)
    yield f"{mtp}.shared_head.head.weight", "BF16", (VOCAB, HIDDEN)


def nbytes(entry: Entry) -> int:
    return prod(entry[2]) * BITS[entry[1]] // 8


def packed() -> list[list[Entry]]:
    """Greedy files of at most SHARD bytes, in model order."""
    files: list[list[Entry]] = [[]]
    filled = 0
    for entry in tensors():
        if filled + nbytes(entry) > SHARD:
            files.append([])
            filled = 0
        files[-1].append(entry)
        filled += nbytes(entry)
    return files


def write_sparse(path: Path, entries: list[Entry]) -> None:
    head: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, dtype, shape in sorted(entries, key=lambda e: (RANK[e[1]], e[0])):
        size = nbytes((name, dtype, shape))
        head[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    raw = json.dumps(head, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as f:
        f.write(len(raw).to_bytes(8, "little") + raw)
        f.truncate(8 + len(raw) + at)


def build(folder: Path) -> None:
    folder.mkdir(parents=True)
    files = packed()
    weight_map = {}
    total = 0
    for i, entries in enumerate(files, 1):
        name = f"model-{i:05d}-of-{len(files):06d}.safetensors"  # six digits, as the published files have
        write_sparse(folder / name, entries)
        weight_map.update({entry[0]: name for entry in entries})
        total += sum(map(nbytes, entries))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    (folder / "config.json").write_text(json.dumps({"model_type": "deepseek_v3"}))
    print(f"{len(files)} files, {len(weight_map)} tensors, {total} bytes", file=sys.stderr)


CHILD = """
import resource, time
start = time.perf_counter()
from ckpt_tool.systems.hub.safetensors.format import FORMAT
from ckpt_tool.storage.source import Tree
tree = Tree({folder!r})
loaded = time.perf_counter()
assert FORMAT.detect(tree)
catalog = FORMAT.read(tree)
read = time.perf_counter()
by_dtype = {{}}
for row in catalog.rows():
    count, size = by_dtype.get(row.dtype.name, (0, 0))
    by_dtype[row.dtype.name] = (count + 1, size + row.nbytes)
done = time.perf_counter()
import sys
assert "numpy" not in sys.modules
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(f"imports {{(loaded - start) * 1e3:.0f}} ms, detect + read {{(read - loaded) * 1e3:.0f}} ms, "
      f"rows {{(done - read) * 1e3:.0f}} ms, peak RSS {{peak:.1f}} MiB, read {{tree.bytes_read / 1e6:.1f}} MB")
print(by_dtype)
"""


def time_it(folder: Path, rounds: int = 5) -> None:
    for _ in range(rounds):
        subprocess.run(
            [sys.executable, "-c", CHILD.format(folder=str(folder))],
            check=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )


if __name__ == "__main__":
    {"build": build, "time": time_it}[sys.argv[1]](Path(sys.argv[2]))
